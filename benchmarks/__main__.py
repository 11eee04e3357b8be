"""Runs benchmarks and prints one table for each: ``python -m benchmarks [--quick] [--json FILE] [NAME ...]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure, machine

NAMES = (
    "import_cost",
    "order_cost",
    "resume_cost",
    "data_audit",
    "data_rivals",
    "control_gate",
    "checked_collectives",
    "mark_cost",
    "readiness_cost",
    "strategy_cost",
    "one_line_cost",
    "divergence_overhead",
    "checkpoint_cost",
)
"""Each is a module with a docstring, whose first line is the title, and ``run(quick) -> list[Figure]``."""

BY_NAME_ONLY = ("first_resume", "hangs", "restarts", "watchdog_scale")
"""Minutes long, in need of an index of packages, or more threads than a small machine bears."""

_WIDTH_IN_A_FILE = 170
_VERDICTS = {"": "", "yes": "[green]yes", "no": "[red]no", "within noise": "[yellow]within noise"}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints figures; a target that is missed is shown and does not change the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.names) - {*NAMES, *BY_NAME_ONLY}):
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES + BY_NAME_ONLY)}")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_IN_A_FILE)
    described = machine()
    console.print(described, highlight=False)
    found: dict[str, list[Figure]] = {}
    for name in arguments.names or NAMES:
        module = import_module(f"benchmarks.{name}")
        found[name] = module.run(arguments.quick)
        console.print(_table(f"{name}: {(module.__doc__ or '').splitlines()[0]}", found[name]))
    if arguments.json is not None:
        document = {"machine": described, "quick": arguments.quick, "figures": _plain(found)}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures what the package costs.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: these); {', '.join(BY_NAME_ONLY)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: shows that it runs, proves nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also writes the figures as JSON")
    return parser


def _table(title: str, figures: Sequence[Figure]) -> Table:
    table = Table("figure", "value", "95 % interval", "target", "met", "note", title=title, title_justify="left")
    for figure in figures:
        interval = "" if figure.ci95 is None else f"{figure.ci95[0]:,.4g} .. {figure.ci95[1]:,.4g}"
        target = "" if figure.target is None else f"<= {figure.target:,.4g} {figure.unit}"
        table.add_row(
            figure.name, f"{figure.value:,.4g} {figure.unit}", interval, target, _VERDICTS[figure.verdict], figure.note
        )
    return table


def _plain(found: dict[str, list[Figure]]) -> dict[str, list[dict[str, object]]]:
    return {
        name: [{**asdict(figure), "verdict": figure.verdict} for figure in figures] for name, figures in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
