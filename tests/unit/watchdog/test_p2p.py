"""The wait-for graph of sends and receives."""

from __future__ import annotations

from lightning_distplus.watchdog.flight_recorder import cycles, p2p_call, waits_for_work


def test_cycles_are_found_each_once_from_its_lowest_rank_on() -> None:
    assert cycles({0: 1, 1: 2, 2: 0}) == [[0, 1, 2]]
    assert cycles({3: 1, 1: 3, 0: 2, 2: 0, 4: 0}) == [[0, 2], [1, 3]]
    assert cycles({0: 0}) == [[0]]


def test_a_chain_that_ends_in_a_rank_which_waits_for_nobody_is_no_cycle() -> None:
    assert cycles({0: 1, 1: 2, 3: 2}) == []
    assert cycles({}) == []


def test_a_thread_outside_torch_stands_in_no_send() -> None:
    import sys

    frame = sys._getframe()
    assert p2p_call(frame) is None
    assert p2p_call(None) is None
    assert not waits_for_work(frame)
