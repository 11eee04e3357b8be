"""``distplus preflight``: the checks of all hosts together, started by the launcher of the run itself."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer

from lightning_distplus import env
from lightning_distplus.cli.doctor import (
    AGREEMENT,
    BETWEEN_HOSTS,
    CHECKS_OF_HOST,
    add_settings,
    print_findings,
    settings_from,
)
from lightning_distplus.control import ControlPlane, connect, disconnect
from lightning_distplus.errors import ExitCode
from lightning_distplus.preflight import LAUNCH_CHECKS, Check, Facts, Finding, Status, run_checks
from lightning_distplus.preflight.agreement import disagreements, state_of_process
from lightning_distplus.preflight.host import Interface, interface_towards
from lightning_distplus.preflight.network import mtu_findings, try_pairs
from lightning_distplus.preflight.together import as_message, merged, spans_hosts
from lightning_distplus.strategies import ResilientDDP
from lightning_distplus.strategies.start import address_of, facts_of, world_of
from lightning_distplus.timeouts import parse_duration

__all__ = ["main"]

_SKEW_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Exit code 0 on all ranks, or 173 on all of them; rank 0 prints what every host has found."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    here = Facts()
    devices = arguments.devices or here.number(env.LOCAL_WORLD_SIZE) or _tasks_per_node(here) or 1
    nodes = arguments.nodes or here.number(env.GROUP_WORLD_SIZE) or here.number(env.SLURM_STEP_NUM_NODES) or 1
    checks = {**LAUNCH_CHECKS, **CHECKS_OF_HOST}
    settings = settings_from(arguments, parser, checks)
    # A Trainer finds launcher, rank and address as that of the run will; it refuses a wrong launch at once.
    of_launch: dict[str, Any] = {name: wish for name, wish in settings.items() if name in LAUNCH_CHECKS}
    strategy: Any = ResilientDDP(preflight=of_launch)
    Trainer(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy, logger=False)
    if devices * nodes > 1 and not strategy.cluster_environment.creates_processes_externally:
        parser.error(f"start it by the launcher of the run, for example: {facts_of(strategy).torchrun()}")
    facts = replace(facts_of(strategy), folder=arguments.folder)
    deadline = parse_duration(arguments.deadline, field="deadline")
    begin = time.monotonic()
    plane = connect(world_of(strategy), address_of(strategy), deadline, arguments.folder)
    try:
        facts = replace(facts, spans_hosts=spans_hosts(plane))
        of_host = run_checks(CHECKS_OF_HOST, facts, settings) if strategy.local_rank == 0 else []
        plane.barrier("clock", deadline)
        place = {"clock": time.time(), "local_rank": strategy.local_rank, "interface": asdict(_interface(strategy))}
        ranks = plane.gather_json("preflight", {**as_message(facts.host, of_host), **place}, deadline)
        findings = merged(ranks) + disagreements(plane, state_of_process(facts), deadline, settings)
        findings += run_checks(_between_hosts(plane, ranks, deadline), facts, settings)
        plane.farewell(deadline)
    finally:
        disconnect()
    if strategy.global_rank == 0:
        names = [name for name in (*checks, *AGREEMENT, *BETWEEN_HOSTS) if settings.get(name) != "off"]
        _tell(findings, facts, names, time.monotonic() - begin, as_json=arguments.json, num_ranks=len(ranks))
    has_errors = any(finding.status is Status.ERROR for finding in findings)
    return int(ExitCode.PREFLIGHT if has_errors else ExitCode.DONE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus preflight",
        description="Meets all ranks as the run would, makes the checks of distplus doctor on each host, and compares.",
        epilog="torchrun ... -m lightning_distplus.cli preflight; srun ... distplus preflight",
    )
    parser.add_argument("--deadline", default="2m", help="how long to wait for the last rank (default: %(default)s)")
    add_settings(parser)
    return parser


def _tasks_per_node(facts: Facts) -> int | None:
    tasks, nodes = facts.number(env.SLURM_STEP_NUM_TASKS), facts.number(env.SLURM_STEP_NUM_NODES)
    return None if tasks is None or nodes is None else tasks // nodes


def _interface(strategy: Any) -> Interface:
    return interface_towards(strategy.cluster_environment.main_address)


def _between_hosts(plane: ControlPlane, ranks: Sequence[dict[str, Any]], deadline: timedelta) -> dict[str, Check]:
    """What only several hosts together can find; made by all ranks, with the same result."""
    leaders = [rank for rank, message in enumerate(ranks) if message["local_rank"] == 0]
    hosts = [str(ranks[rank]["host"]) for rank in leaders]

    def network(facts: Facts) -> Iterable[Finding]:
        places = {rank: place for place, rank in enumerate(leaders)}
        return try_pairs(plane, places, hosts, deadline) if len(hosts) > 1 else ()

    def mtu(facts: Facts) -> Iterable[Finding]:
        return mtu_findings([Interface(**ranks[rank]["interface"]) for rank in leaders], hosts)

    def clock(facts: Facts) -> Iterable[Finding]:
        return _skew(ranks)

    return {"network": network, "mtu": mtu, "clock": clock}


def _skew(ranks: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """How far the clocks of the hosts are apart; all were read right after a barrier."""
    first, last = min(ranks, key=lambda rank: rank["clock"]), max(ranks, key=lambda rank: rank["clock"])
    skew_s = last["clock"] - first["clock"]
    if skew_s > _SKEW_S:
        yield Finding(
            status=Status.WARNING,
            subject=f"The clocks of two hosts are {skew_s:.1f} s apart; logs and file times mislead.",
            detail=f"{last['host']} is ahead of {first['host']}",
            remedy="Start chrony or ntpd on both",
        )


def _tell(
    findings: list[Finding], facts: Facts, names: list[str], elapsed_s: float, *, as_json: bool, num_ranks: int
) -> None:
    if as_json:
        report = {"version": 1, "ranks": num_ranks, "launcher": str(facts.launcher), "elapsed_s": round(elapsed_s, 3)}
        print(json.dumps({**report, "findings": [finding.to_dict() for finding in findings]}, indent=2))
    else:
        print_findings(findings, facts, names, elapsed_s)
