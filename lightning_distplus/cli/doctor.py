"""``distplus doctor``: what would go wrong on this host, before a run does. Works where torch is missing or broken."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Literal

from lightning_distplus.errors import ExitCode
from lightning_distplus.preflight import LAUNCH_CHECKS, Check, Facts, Finding, Status, run_checks
from lightning_distplus.preflight.host import GPU_CHECKS, HOST_CHECKS, SOFTWARE_CHECKS

__all__ = ["AGREEMENT", "BETWEEN_HOSTS", "CHECKS_OF_HOST", "add_settings", "main", "print_findings", "settings_from"]

CHECKS_OF_HOST: Mapping[str, Check] = {**SOFTWARE_CHECKS, **HOST_CHECKS, **GPU_CHECKS}
CHECKS: Mapping[str, Check] = {**LAUNCH_CHECKS, **CHECKS_OF_HOST}
AGREEMENT = ("versions", "revision", "seed", "variables")
"""The names of what ``distplus preflight`` compares over the ranks."""
BETWEEN_HOSTS = ("network", "mtu", "clock")
"""The names of what it finds between hosts."""

_COLOURS = {Status.ERROR: "red", Status.WARNING: "yellow", Status.NOTE: "green"}


def main(argv: Sequence[str]) -> int:
    """Exit code 0 where nothing is wrong, 173 where a check found an error, 2 for an unknown check."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    checks = dict(CHECKS)
    for place in arguments.check:
        try:
            checks[place.rpartition(":")[2]] = _load(place)
        except (ImportError, AttributeError, ValueError) as error:
            parser.error(f"--check {place}: {error}")
    settings = settings_from(arguments, parser, checks)
    facts = _facts(arguments)
    begin = time.monotonic()
    findings = run_checks(checks, facts, settings)
    has_errors = any(finding.status is Status.ERROR for finding in findings)
    elapsed_s = time.monotonic() - begin
    if arguments.json:
        report = {"version": 1, "host": facts.host, "launcher": str(facts.launcher), "elapsed_s": round(elapsed_s, 3)}
        print(json.dumps({**report, "findings": [finding.to_dict() for finding in findings]}, indent=2))
    else:
        print_findings(findings, facts, [name for name in checks if settings.get(name) != "off"], elapsed_s)
    return int(ExitCode.PREFLIGHT if has_errors else ExitCode.DONE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus doctor",
        description="Looks for what would go wrong on this host: launch, torch and its versions, shared memory, disk.",
        epilog=f"checks: {', '.join(CHECKS)}. Exit code 0: nothing is wrong; 173: something is.",
    )
    parser.add_argument("--check", action="append", default=[], metavar="MODULE:FUNCTION", help="a check of your own")
    add_settings(parser)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the options that ``doctor`` and ``preflight`` share."""
    parser.add_argument("--folder", type=Path, default=Path(), help="where the run will write (default: here)")
    parser.add_argument("--devices", type=int, help="processes per node of the run, to check the launch against")
    parser.add_argument("--nodes", type=int, help="nodes of the run, to check the launch against")
    parser.add_argument("--off", action="append", default=[], metavar="NAME", help="do not run this check")
    parser.add_argument("--warn", action="append", default=[], metavar="NAME", help="its errors are warnings")
    parser.add_argument("--json", action="store_true", help="print JSON")


def settings_from(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, checks: Mapping[str, Check]
) -> dict[str, Literal["off", "warn"]]:
    """What ``--off`` and ``--warn`` say; ends the process where there is no such check."""
    for name in (*arguments.off, *arguments.warn):
        known = (*checks, *AGREEMENT, *BETWEEN_HOSTS)
        if name not in known:
            parser.error(f"there is no check {name!r}; there are: {', '.join(known)}")
    settings: dict[str, Literal["off", "warn"]] = dict.fromkeys(arguments.warn, "warn")
    settings.update(dict.fromkeys(arguments.off, "off"))
    return settings


def _load(place: str) -> Check:
    module, _, function = place.rpartition(":")
    if not module:
        raise ValueError("it is MODULE:FUNCTION")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # the console script cannot import what lies beside the caller
    check: Check = getattr(import_module(module), function)
    return check


def _facts(arguments: argparse.Namespace) -> Facts:
    """What Lightning would make of this environment: its order of detection, without Lightning."""
    facts = Facts(folder=arguments.folder, devices=arguments.devices, num_nodes=arguments.nodes, command=("train.py",))
    if arguments.devices is None and arguments.nodes is None:
        return facts  # nothing to hold the launch against
    return Facts(
        folder=arguments.folder,
        devices=arguments.devices or 1,
        num_nodes=arguments.nodes or 1,
        spans_hosts=(arguments.nodes or 1) > 1,
        command=("train.py",),
        **facts.as_lightning_sees_it(),
    )


def print_findings(findings: Sequence[Finding], facts: Facts, names: Sequence[str], elapsed_s: float) -> None:
    """A table where rich is there; the same lines where the installation is too broken for it."""
    print(f"{facts.host}: started by {facts.launcher}; {len(names)} checks in {elapsed_s:.1f} s")
    found = {finding.check for finding in findings}
    quiet = [name for name in names if name not in found]
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        for finding in findings:
            print(f"{finding.status.value} ({finding.check}): {finding}")
    else:
        table = Table("check", "", "what", show_lines=True)
        for finding in findings:
            status = f"[{_COLOURS[finding.status]}]{finding.status.value}"
            table.add_row(finding.check, status, escape(str(finding)))
        Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160).print(table)
    print(f"nothing to say: {', '.join(quiet) or '-'}")
