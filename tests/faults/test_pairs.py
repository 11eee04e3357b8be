"""``distplus preflight`` on four hosts of which one, or one link, is bad: namespaces at one switch (row S6)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus import env
from lightning_distplus.errors import ExitCode
from lightning_distplus.preflight import Finding, Status
from lightning_distplus.preflight.network import Pair, judge, pair_hosts, second_round
from lightning_distplus.testing import spawn
from tests.faults.hosts import Hosts, run_on, several_hosts

NODES = 4
BOUND_S = 30.0  # 10 s are planned; four hosts share two busy cores here


def preflight(rank: int, hosts: Hosts, folder: str) -> None:
    run_on(hosts.names[rank], lambda: preflight_of(rank, hosts, folder))


def preflight_of(rank: int, hosts: Hosts, folder: str) -> None:
    from lightning_distplus.cli.preflight import run_preflight as main

    variables: dict[str, Any] = {
        "RANK": None, "LOCAL_RANK": 0, "WORLD_SIZE": NODES, "NODE_RANK": rank, "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": 29400, "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    begin = time.monotonic()
    with env.changed(**variables):
        options = ["--json", "--off", "torch", "--off", "disk", "--devices", "1", "--nodes", str(NODES)]
        code = main([*options, "--folder", folder, "--deadline", "30s"])
    Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - begin} {code}")


@pytest.mark.parametrize(
    ("fault", "check", "words", "is_error"),
    [
        pytest.param("none", "", "", False, marks=pytest.mark.soak),
        ("link", "network", "Hosts {2} and {3} do not reach each other.", True),
        pytest.param("host", "network", "Host {2} is slow with the others.", False, marks=pytest.mark.soak),
    ],
)
def test_a_bad_host_is_told_from_a_bad_link(fault: str, check: str, words: str, is_error: bool, tmp_path: Path) -> None:
    with several_hosts(NODES) as hosts:
        if fault == "link":
            hosts.cut_off(2, 3)
        elif fault == "host":
            hosts.slow_down(2, "20mbit")
        run = spawn(preflight, NODES, args=(hosts, str(tmp_path)), deadline="90s")

    assert set(run.exit_codes.values()) == {0}, run.logs
    codes = [float(word) for rank in range(NODES) for word in (tmp_path / f"rank{rank}").read_text().split()]
    assert max(codes[::2]) < BOUND_S
    assert set(codes[1::2]) == {float(ExitCode.PREFLIGHT if is_error else 0)}, run.logs[0]
    report = json.loads(run.logs[0][run.logs[0].index("{\n") : run.logs[0].rindex("}") + 1])
    found = [one for one in report["findings"] if one["status"] != "note" and one["check"] == "network"]
    assert [one for one in report["findings"] if "4 hosts were paired" in one["subject"]]
    if fault == "none":
        assert [one for one in found if one["status"] == "error"] == []
    else:
        assert words.format(*hosts.names) in [one["subject"] for one in found if one["check"] == check], [
            one["detail"] for one in found
        ]


def told(first: list[Pair], second: list[Pair], count: int) -> list[tuple[Status, str]]:
    found: list[Finding] = list(judge(first, second, [f"h{place}" for place in range(count)]))
    return [(one.status, one.subject) for one in found if one.status is not Status.NOTE]


def well(low: int, high: int) -> Pair:
    return Pair(low=low, high=high, round_trip_ms=0.1, mb_per_s=1000.0)


def slow(low: int, high: int) -> Pair:
    return Pair(low=low, high=high, round_trip_ms=0.1, mb_per_s=10.0)


def cut(low: int, high: int) -> Pair:
    return Pair(low=low, high=high, error="RuntimeError: timed out")


def test_the_second_round_pairs_suspects_with_hosts_that_were_well() -> None:
    assert pair_hosts(5) == [(0, 1), (2, 3)]
    assert second_round([well(0, 1), cut(2, 3)], 4) == [(0, 2), (1, 3)]
    assert second_round([well(0, 1), well(2, 3)], 5) == [(0, 4)]
    assert second_round([cut(0, 1)], 2) == []
    assert second_round([well(0, 1), slow(2, 3)], 4) == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("first", "second", "count", "words"),
    [
        ([well(0, 1), well(2, 3)], [], 4, []),
        ([well(0, 1), cut(2, 3)], [well(0, 2), well(1, 3)], 4, ["Hosts h2 and h3 do not reach each other."]),
        ([well(0, 1), cut(2, 3)], [cut(0, 2), well(1, 3)], 4, ["Host h2 cannot be reached by the others."]),
        ([well(0, 1), cut(2, 3)], [slow(0, 2), well(1, 3)], 4, ["Hosts h2 and h3 do not reach each other."]),
        ([cut(0, 1)], [], 2, ["Hosts h0 and h1 do not reach each other."]),
        ([well(0, 1)], [cut(0, 2)], 3, ["Hosts h0 and h2 do not reach each other."]),
    ],
)
def test_who_fails_twice_is_the_bad_one(first: list[Pair], second: list[Pair], count: int, words: list[str]) -> None:
    assert told(first, second, count) == [(Status.ERROR, text) for text in words]
