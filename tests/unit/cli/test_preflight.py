from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from lightning_distplus.cli.preflight import _between_hosts
from lightning_distplus.preflight import Facts


def test_hosts_whose_clocks_are_apart_are_named() -> None:
    clocks = {"a": 100.0, "b": 106.5, "c": 101.0}
    ranks = [{"host": host, "local_rank": 0, "clock": clock} for host, clock in clocks.items()]
    check = _between_hosts(cast(Any, None), ranks, timedelta(minutes=1))["clock"]
    (finding,) = check(Facts(variables={}))
    assert "6.5 s apart" in finding.subject
    assert finding.detail == "b is ahead of a"
    ranks[1]["clock"] = 104.0
    assert list(check(Facts(variables={}))) == []
