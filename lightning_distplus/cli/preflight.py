"""``distplus doctor`` checks this host, ``distplus preflight`` all hosts of a run together.

The doctor works where torch is missing or broken: only ``preflight`` imports it, when it is called.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_distplus import env
from lightning_distplus.cli import count, duration, import_from_here, print_json, stdout
from lightning_distplus.errors import ExitCode
from lightning_distplus.preflight import LAUNCH_CHECKS, Check, Facts, Finding, Status, run_checks
from lightning_distplus.preflight.host import DOCTOR_CHECKS

if TYPE_CHECKING:
    from lightning_distplus.control import ControlPlane

__all__ = ["add_wishes", "exit_code_of", "print_findings", "run_doctor", "run_preflight", "wishes"]

# -- distplus doctor ---------------------------------------------------------------------------------------------------

CHECKS: Mapping[str, Check] = {**LAUNCH_CHECKS, **DOCTOR_CHECKS}
AGREEMENT = ("versions", "revision", "seed", "variables")
"""The names of what ``distplus preflight`` compares over the ranks."""
BETWEEN_HOSTS = ("network", "clock")
"""The names of what it finds between hosts."""
_COLOURS = {Status.ERROR: "red", Status.WARNING: "yellow", Status.NOTE: "green"}


def run_doctor(argv: Sequence[str]) -> int:
    """Exit code 0 where nothing is wrong, 173 where a check found an error, 2 for an unknown check."""
    parser = argparse.ArgumentParser(
        prog="distplus doctor",
        description="Looks for what would go wrong on this host: launch, torch and its versions, shared memory, disk.",
        epilog=f"checks: {', '.join(CHECKS)}. Exit code 0: nothing is wrong; 173: something is.",
    )
    parser.add_argument("--check", action="append", default=[], metavar="MODULE:FUNCTION", help="a check of your own")
    _add_settings(parser)
    arguments = parser.parse_args(argv)
    checks = dict(CHECKS)
    for place in arguments.check:
        try:
            checks[place.rpartition(":")[2]] = _load(place)
        except (ImportError, AttributeError, ValueError) as error:
            parser.error(f"--check {place}: {error}")
    settings = wishes(parser, arguments, (*checks, *AGREEMENT, *BETWEEN_HOSTS))
    facts = _facts(arguments)
    begin = time.monotonic()
    findings = run_checks(checks, facts, settings)
    names = [name for name in checks if settings.get(name) != "off"]
    _tell(findings, facts, names, begin, {"host": facts.host} if arguments.json else None)
    return exit_code_of(findings)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=Path(), help="where the run will write (default: here)")
    add("--devices", type=int, help="processes per node of the run, to check the launch against")
    add("--nodes", type=int, help="nodes of the run, to check the launch against")
    add_wishes(parser)


def add_wishes(parser: argparse.ArgumentParser) -> None:
    """The options of a command that makes checks."""
    add = parser.add_argument
    add("--off", action="append", default=[], metavar="NAME", help="leave out this check")
    add("--warn", action="append", default=[], metavar="NAME", help="its errors are warnings")
    add("--json", action="store_true", help="print JSON")


def wishes(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, known: Collection[str]
) -> dict[str, Literal["off", "warn"]]:
    """What ``--off`` and ``--warn`` say, by the names of checks; ends the process where there is no such check."""
    found: dict[str, Literal["off", "warn"]] = dict.fromkeys(arguments.warn, "warn")
    found |= dict.fromkeys(arguments.off, "off")
    for name in found.keys() - known:
        parser.error(f"there is no check {name!r}; there are: {', '.join(known)}")
    return found


def _load(place: str) -> Check:
    module, _, function = place.rpartition(":")
    if not module:
        raise ValueError("it is MODULE:FUNCTION")
    import_from_here()
    check: Check = getattr(import_module(module), function)
    return check


def _facts(arguments: argparse.Namespace) -> Facts:
    """What Lightning would make of this environment: its order of detection, without Lightning."""
    devices, nodes = arguments.devices, arguments.nodes
    facts = Facts(folder=arguments.folder, devices=devices, num_nodes=nodes, command=("train.py",))
    if devices is None and nodes is None:
        return facts  # nothing to hold the launch against
    seen, nodes = facts.as_lightning_sees_it(), nodes or 1
    return replace(facts, devices=devices or 1, num_nodes=nodes, spans_hosts=nodes > 1, **seen)


def _tell(
    findings: Sequence[Finding], facts: Facts, names: Sequence[str], begin: float, as_json: Mapping[str, Any] | None
) -> None:
    elapsed_s = time.monotonic() - begin
    if as_json is None:
        print_findings(findings, facts, names, elapsed_s)
        return
    told = {"version": 1, **as_json, "launcher": facts.launcher, "elapsed_s": round(elapsed_s, 3)}
    print_json({**told, "findings": [finding.to_dict() for finding in findings]})


def exit_code_of(findings: Sequence[Finding]) -> int:
    """0, or 173 where one of them is an error."""
    has_errors = any(finding.status is Status.ERROR for finding in findings)
    return int(ExitCode.PREFLIGHT if has_errors else ExitCode.DONE)


def print_findings(findings: Sequence[Finding], facts: Facts, names: Sequence[str], elapsed_s: float) -> None:
    """In colours on a terminal, and plain where the installation is too broken for rich."""
    print(f"{facts.host}: started by {facts.launcher}; {len(names)} checks in {elapsed_s:.1f} s")
    try:
        from rich.text import Text
    except ImportError:
        for finding in findings:
            print(f"{finding.status.value} ({finding.check}): {finding}")
    else:
        for finding in findings:
            status = (finding.status.value, f"bold {_COLOURS[finding.status]}")
            stdout().print(Text.assemble(status, f" ({finding.check}): {finding}"), soft_wrap=True)
    found = {finding.check for finding in findings}
    print(f"nothing to say: {', '.join(name for name in names if name not in found) or '-'}")
    print(_summary(findings))


def _summary(findings: Sequence[Finding]) -> str:
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    told = ", ".join(count(number, status.value) for status, number in counts.items() if number)
    if not counts[Status.ERROR]:
        return f"ready: {told or 'nothing was found'}"
    errors = sorted({finding.check for finding in findings if finding.status is Status.ERROR})
    return f"not ready: {told}; a run would end with 173 until {', '.join(errors)} is mended"


# -- distplus preflight ------------------------------------------------------------------------------------------------

_SKEW_S = 5.0


def run_preflight(argv: Sequence[str]) -> int:
    """Exit code 0 on all ranks, or 173 on all of them; rank 0 prints what every host has found."""
    from lightning.pytorch import Trainer

    from lightning_distplus.control import connect, disconnect
    from lightning_distplus.preflight.agreement import as_message, disagreements, merged, spans_hosts, state_of_process
    from lightning_distplus.strategies import ResilientDDP
    from lightning_distplus.strategies.start import address_of, facts_of
    from lightning_distplus.world import World

    parser = _parser()
    arguments = parser.parse_args(argv)
    here = Facts()
    devices = arguments.devices or here.number(env.LOCAL_WORLD_SIZE) or _tasks_per_node(here) or 1
    nodes = arguments.nodes or here.number(env.GROUP_WORLD_SIZE) or here.number(env.SLURM_STEP_NUM_NODES) or 1
    settings = wishes(parser, arguments, (*CHECKS, *AGREEMENT, *BETWEEN_HOSTS))
    # A Trainer finds launcher, rank and address as that of the run will; it refuses a wrong launch at once.
    of_launch: dict[str, Any] = {name: wish for name, wish in settings.items() if name in LAUNCH_CHECKS}
    strategy: Any = ResilientDDP(preflight=of_launch)
    Trainer(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy, logger=False)
    if devices * nodes > 1 and not strategy.cluster_environment.creates_processes_externally:
        parser.error(f"start it by the launcher of the run, for example: {facts_of(strategy).torchrun()}")
    facts, deadline = replace(facts_of(strategy), folder=arguments.folder), arguments.deadline
    begin = time.monotonic()
    plane = connect(World.of(strategy), address_of(strategy), deadline, arguments.folder)
    try:
        facts = replace(facts, spans_hosts=spans_hosts(plane))
        of_host = run_checks(DOCTOR_CHECKS, facts, settings) if strategy.local_rank == 0 else []
        plane.barrier("clock", deadline)
        place = {"clock": time.time(), "local_rank": strategy.local_rank}
        ranks = plane.gather_json("preflight", {**as_message(facts.host, of_host), **place}, deadline)
        findings = merged(ranks) + disagreements(plane, state_of_process(facts), deadline, settings)
        findings += run_checks(_between_hosts(plane, ranks, deadline), facts, settings)
        plane.farewell(deadline)
    finally:
        disconnect()
    if strategy.global_rank == 0:
        names = [name for name in (*CHECKS, *AGREEMENT, *BETWEEN_HOSTS) if settings.get(name) != "off"]
        _tell(findings, facts, names, begin, {"ranks": len(ranks)} if arguments.json else None)
    return exit_code_of(findings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus preflight",
        description="Meets all ranks as the run would, makes the checks of distplus doctor on each host, and compares.",
    )
    parser.add_argument(
        "--deadline", type=duration, default="2m", help="how long to wait for the last rank (default: %(default)s)"
    )
    _add_settings(parser)
    return parser


def _tasks_per_node(facts: Facts) -> int | None:
    tasks, nodes = facts.number(env.SLURM_STEP_NUM_TASKS), facts.number(env.SLURM_STEP_NUM_NODES)
    return None if tasks is None or nodes is None else tasks // nodes


def _between_hosts(plane: ControlPlane, ranks: Sequence[dict[str, Any]], deadline: timedelta) -> dict[str, Check]:
    """What only several hosts together can find; made by all ranks, with the same result."""
    from lightning_distplus.preflight.network import try_pairs

    leaders = [rank for rank, message in enumerate(ranks) if message["local_rank"] == 0]
    hosts = [str(ranks[rank]["host"]) for rank in leaders]

    def network(facts: Facts) -> Iterable[Finding]:
        places = {rank: place for place, rank in enumerate(leaders)}
        return try_pairs(plane, places, hosts, deadline) if len(hosts) > 1 else ()

    def clock(facts: Facts) -> Iterable[Finding]:
        clock_of = itemgetter("clock")  # all were read right after a barrier
        first, last = min(ranks, key=clock_of), max(ranks, key=clock_of)
        skew_s = last["clock"] - first["clock"]
        subject = f"The clocks of two hosts are {skew_s:.1f} s apart; logs and file times mislead."
        if skew_s > _SKEW_S:
            detail = f"{last['host']} is ahead of {first['host']}"
            yield Finding.warning(subject, detail=detail, remedy="Start chrony or ntpd on both")

    return {"network": network, "clock": clock}
