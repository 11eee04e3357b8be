"""Whether the hosts of a job reach each other beside the store, and how fast: pairs of them, in two rounds.

In the first round each host is paired with its neighbour. Whoever is in a pair that fails, or is far slower than the
others, is paired in a second round with a host whose pair was well. Who fails twice is a bad host; who is well then had
a bad link. Both rounds take the same time on two hosts and on a thousand. (After DLRover's network check.)
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_distplus.control import ControlPlane
from lightning_distplus.preflight.check import Finding, Status

_PAIR_DEADLINE = timedelta(seconds=4)
_PINGS = 20
_BLOCK_BYTES = 512 << 10
_MAX_BLOCKS = 64
_TRANSFER_S = 0.5
_SLOW_SHARE = 0.125  # of the best pair; half of a link is common, an eighth is not
_SLOW_MS = 20.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What two hosts measured; ``low`` and ``high`` are places in the list of hosts."""

    low: int
    high: int
    error: str = ""
    round_trip_ms: float = 0.0
    mb_per_s: float = 0.0

    def __str__(self) -> str:
        return self.error or f"{self.mb_per_s:.0f} MB/s, round trip {self.round_trip_ms:.2f} ms"


def pair_hosts(count: int) -> list[tuple[int, int]]:
    """Neighbours; the last of an odd number has none, and is tried in the second round."""
    return [(low, low + 1) for low in range(0, count - 1, 2)]


def second_round(first: Sequence[Pair], count: int) -> list[tuple[int, int]]:
    """Each suspect with a host that was well, while there are any."""
    bad = _suspicious(first)
    suspects = sorted({host for pair in bad for host in (pair.low, pair.high)})
    if count % 2:
        suspects.append(count - 1)
    well = [host for pair in first if pair not in bad for host in (pair.low, pair.high)]
    return [(min(pair), max(pair)) for pair in zip(suspects, well, strict=False)]


def judge(first: Sequence[Pair], second: Sequence[Pair], hosts: Sequence[str]) -> Iterator[Finding]:
    """What both rounds say, by the names of the hosts."""
    if first:
        best = max(first, key=lambda pair: pair.mb_per_s)
        detail = f"best pair: {hosts[best.low]} and {hosts[best.high]}, {best}; {len(first) + len(second)} pairs"
        yield Finding.note(f"{len(hosts)} hosts were paired over TCP (gloo).", detail=detail)
    bad = _suspicious([*first, *second])
    suspects = {host for pair in _suspicious(first) for host in (pair.low, pair.high)}
    for pair in bad:
        if pair in second:
            if not suspects & {pair.low, pair.high}:  # the odd one out, tried once
                yield _of_link(pair, hosts, "")
            continue
        again = {host: one for host in (pair.low, pair.high) for one in second if host in (one.low, one.high)}
        # A pair that is only slow does not convict a host of being out of reach: a busy host is slow for a moment.
        culprits = [host for host, other in again.items() if other in bad and (other.error or not pair.error)]
        for host in culprits:
            yield _of_host(host, pair, again[host], hosts)
        if not culprits:
            well = f"well with another host: {' and '.join(hosts[host] for host in again)}"
            yield _of_link(pair, hosts, well if again else "no third host was free to tell which side it is")


def _suspicious(pairs: Sequence[Pair]) -> list[Pair]:
    speeds = [pair.mb_per_s for pair in pairs if not pair.error]
    floor = max(speeds, default=0.0) * _SLOW_SHARE
    return [pair for pair in pairs if pair.error or pair.mb_per_s < floor or pair.round_trip_ms > _SLOW_MS]


_REMEDY = (
    "Let every port between the hosts of a job through (ranks connect to each other on ports of their own), and name "
    "the interface that leads there: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)


def _of_host(host: int, pair: Pair, again: Pair, hosts: Sequence[str]) -> Finding:
    fails = bool(pair.error or again.error)
    partner = [one for one in (pair.low, pair.high, again.low, again.high) if one != host]
    return Finding(
        status=Status.ERROR if fails else Status.WARNING,
        subject=f"Host {hosts[host]} {'cannot be reached by' if fails else 'is slow with'} the others.",
        detail=f"with {hosts[partner[0]]}: {pair}; with {hosts[partner[1]]}: {again}",
        remedy=_REMEDY if fails else "Look at its cable, its interface's speed (ethtool) and who else uses it",
    )


def _of_link(pair: Pair, hosts: Sequence[str], more: str) -> Finding:
    verb = "do not reach each other" if pair.error else "are slow with each other"
    return Finding(
        status=Status.ERROR if pair.error else Status.WARNING,
        subject=f"Hosts {hosts[pair.low]} and {hosts[pair.high]} {verb}.",
        detail=f"{pair}{'; ' if more else ''}{more}",
        remedy=_REMEDY if pair.error else "Look at the switches between them, and who else uses them",
    )


def try_pairs(
    plane: ControlPlane, leaders: Mapping[int, int], hosts: Sequence[str], deadline: timedelta
) -> list[Finding]:
    """Makes both rounds; all ranks call it, and all get the same findings.

    Args:
        plane: The control plane.
        leaders: The rank that speaks for a host, to the place of the host.
        hosts: Their names.
        deadline: For the slowest rank to arrive.
    """
    here = leaders.get(plane.world.rank)
    rounds: list[list[Pair]] = []
    pairs = pair_hosts(len(hosts))
    for number in (1, 2):
        mine = next((pair for pair in pairs if here in pair), None)
        result = {} if mine is None else asdict(_measure(plane, number, mine, mine.index(here)))
        told = plane.gather_json(f"pairs {number}", result if mine and here == mine[0] else {}, deadline)
        rounds.append([Pair(**one) for one in told if one])
        pairs = second_round(rounds[0], len(hosts)) if rounds[0] else []
    return list(judge(rounds[0], rounds[1], hosts))


def _measure(plane: ControlPlane, number: int, pair: tuple[int, int], rank: int) -> Pair:
    """One pair in a group of its own. Gloo knocks five times at a closed door, so a thread of its own waits there."""
    low, high = pair
    store = plane.store_for(f"pair/{number}/{low}/{high}")
    told: list[Pair] = []

    def measure() -> None:
        try:
            # Not the default group: what a failed attempt leaves there would spoil the names of the next one.
            group = dist.ProcessGroupGloo(store, rank, 2, _PAIR_DEADLINE)
            round_trip_ms, mb_per_s = _speeds(group)
        except (RuntimeError, OSError) as error:
            text = next(iter(str(error).splitlines()), "")
            told.append(Pair(low=low, high=high, error=f"{type(error).__name__}: {text[:200]}"))
        else:
            told.append(Pair(low=low, high=high, round_trip_ms=round_trip_ms, mb_per_s=mb_per_s))

    thread = threading.Thread(target=measure, name="distplus-pair", daemon=True)
    thread.start()
    thread.join(_PAIR_DEADLINE.total_seconds())
    silence = f"no connection within {_PAIR_DEADLINE.total_seconds():g} s"
    return next(iter(told), Pair(low=low, high=high, error=silence))


def _speeds(group: Any) -> tuple[float, float]:
    """Milliseconds for the sum of one number over the pair, and MB/s of blocks that both send and receive at once."""
    number, block = torch.zeros(1), torch.zeros(_BLOCK_BYTES // 4)
    trips = []
    for _ in range(_PINGS):
        begin = time.monotonic()
        group.allreduce([number]).wait()
        trips.append(time.monotonic() - begin)
    begin, blocks = time.monotonic(), 0
    while not block[0] and blocks < _MAX_BLOCKS:
        block[0] = time.monotonic() - begin > _TRANSFER_S  # the sum tells both that the time of one of them is over
        group.allreduce([block]).wait()
        blocks += 1
    return statistics.median(trips) * 1e3, blocks * _BLOCK_BYTES / 1e6 / (time.monotonic() - begin)
