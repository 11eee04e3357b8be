"""The findings of all ranks as one list that is the same on each of them, and checks that may not take for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from lightning_distplus.control import ControlPlane
from lightning_distplus.preflight.check import Check, Facts, Finding, Settings, Status, run_checks
from lightning_distplus.world import name_ranks

__all__ = ["as_message", "gathered", "merged", "run_in_time", "spans_hosts"]


def run_in_time(
    checks: Mapping[str, Check], facts: Facts, settings: Settings | None, deadline: timedelta
) -> list[Finding]:
    """``run_checks`` with a deadline for all of them together: a folder that hangs must not hold the run up unheard.

    A check that has not ended is a warning, and its thread is left alone.
    """
    end = time.monotonic() + deadline.total_seconds()
    findings: list[Finding] = []
    for name, check in checks.items():
        found: list[Finding] = []

        def make(name: str = name, check: Check = check, found: list[Finding] = found) -> None:
            found += run_checks({name: check}, facts, settings)

        thread = threading.Thread(target=make, name=f"distplus-check-{name}", daemon=True)
        thread.start()
        thread.join(max(0.0, end - time.monotonic()))
        findings += list(found) if not thread.is_alive() else [_unended(name, deadline)]
    return findings


def _unended(name: str, deadline: timedelta) -> Finding:
    return Finding(
        check=name,
        status=Status.WARNING,
        subject=f"The check {name!r} had not ended at its deadline.",
        detail=f"{deadline.total_seconds():g} s for all checks of the host",
        remedy=f'Look at what it looks at; a file system that hangs? Or switch it off: preflight={{"{name}": "off"}}',
    )


def gathered(plane: ControlPlane, mine: Iterable[Finding], deadline: timedelta) -> list[Finding]:
    """What all ranks have found; all of them call it, and all get the same list."""
    return merged(plane.gather_json("findings", as_message(plane.world.host, mine), deadline))


def spans_hosts(plane: ControlPlane) -> bool:
    """Whether ranks run on other hosts than this one; one rank of another node is asked for."""
    world = plane.world
    other = 0 if world.node_rank > 0 else world.size - 1
    return world.num_nodes > 1 and plane.peers_of([other])[other].host != world.host


def as_message(host: str, findings: Iterable[Finding]) -> dict[str, Any]:
    """What one rank tells the others."""
    return {"host": host, "findings": [finding.to_dict() for finding in findings]}


def merged(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """One finding for what several ranks say alike, with the host of the lowest one and the other ranks."""
    found: dict[tuple[str, str], Finding] = {}
    others: dict[tuple[str, str], list[int]] = {}
    for rank, message in enumerate(ranks):
        for item in message["findings"]:
            finding = Finding(**{**item, "status": Status(item["status"])})
            key = (finding.check, finding.subject)
            if key in found:
                others[key].append(rank)
            else:
                detail = f"host {message['host']}, rank {rank}: {finding.detail}"
                found[key], others[key] = replace(finding, detail=detail), []
    return [
        replace(one, detail=f"{one.detail} (and {name_ranks(others[key])})") if others[key] else one
        for key, one in found.items()
    ]
