"""The first error of a job reaches every rank, wakes those that wait, and stays the first."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from lightning_distplus.errors import CheckpointCorrupt, DivergenceError, PeerFailed, PeerMissing
from lightning_distplus.process import until


@pytest.fixture
def listening(make_ranks):
    ranks = make_ranks(4)
    for plane in ranks.planes:
        plane.listen()
    return ranks


def _fail(plane, text: str):
    try:
        raise LookupError(text)
    except LookupError as error:
        return plane.report_failure(error)


def test_an_error_wakes_the_ranks_that_wait_and_they_show_its_traceback(listening, later) -> None:
    waiting = listening.start(lambda plane: plane.barrier("x", later), ranks=[0, 1, 3])
    time.sleep(0.1)
    begin = time.monotonic()
    _fail(listening.planes[2], "the disk is gone")

    errors = [future.exception(5) for future in waiting]

    assert time.monotonic() - begin < 1
    assert [type(error) for error in errors] == [PeerFailed] * 3
    assert [error.ranks for error in errors] == [[2]] * 3
    assert "Rank 2 (host host0, pid 1002) failed first: LookupError: the disk is gone" in str(errors[0])
    assert "in _fail" in str(errors[0])


def test_the_first_error_wins_and_reaches_all(listening) -> None:
    assert _fail(listening.planes[1], "first").message == "first"
    assert _fail(listening.planes[3], "second").message == "first"
    assert until(lambda: all(plane.first_error for plane in listening.planes), 5.0)
    assert {plane.first_error.rank for plane in listening.planes} == {1}
    listening.planes[1].raise_if_peer_failed()  # its own
    with pytest.raises(PeerFailed, match="first"):
        listening.planes[3].raise_if_peer_failed()


def test_ranks_that_fail_at_the_same_moment_agree_on_one_error(listening) -> None:
    told = listening.run(lambda plane: plane.report_failure(ValueError(f"of rank {plane.world.rank}")))
    assert len({error.rank for error in told}) == 1


def test_who_hears_that_a_rank_is_missing_names_that_rank(listening, soon, later) -> None:
    """Rank 0 serves the store and ends first; the others must not blame it."""

    def first(plane) -> None:
        try:
            plane.barrier("x", soon)
        except PeerMissing as error:
            plane.report_failure(error)
            raise

    late = listening.start(lambda plane: plane.barrier("x", later), ranks=[1, 3])
    begin = time.monotonic()
    errors = [*listening.run(first, ranks=[0]), *(future.exception(5) for future in late)]

    assert time.monotonic() - begin < soon.total_seconds() + 1
    assert [type(error) for error in errors] == [PeerMissing] * 3
    assert [error.ranks for error in errors] == [[2]] * 3
    assert "Rank 0 waited 0.2 s" in str(errors[2])
    assert "Told by rank 0" in str(errors[2])


def test_the_host_of_the_store_stays_until_all_have_heard(listening) -> None:
    listening.run(lambda plane: plane.report_failure(ValueError("x")), ranks=[0])
    assert all(plane.first_error for plane in listening.planes)


def test_the_host_of_the_store_stays_two_seconds_at_most(make_ranks) -> None:
    ranks = make_ranks(3)  # nobody listens
    begin = time.monotonic()
    ranks.planes[0].report_failure(ValueError("x"))
    assert 1.5 < time.monotonic() - begin < 3


def test_the_host_of_the_store_does_not_stay_for_a_rank_that_is_gone(make_ranks) -> None:
    ranks = make_ranks(2)  # rank 1 does not listen
    begin = time.monotonic()
    ranks.planes[0].report_failure(PeerMissing("gone", [1]))
    assert time.monotonic() - begin < 1


def test_listening_starts_and_stops_any_number_of_times_and_leaves_no_key(listening) -> None:
    for _ in range(3):
        for plane in listening.planes:
            plane.listen()
            plane.listen()
        for plane in listening.planes:
            plane.stop_listening()
            plane.stop_listening()
    assert listening.num_keys() == 0


def test_who_starts_to_listen_late_hears_it_too(make_ranks) -> None:
    ranks = make_ranks(3)
    ranks.planes[1].listen()
    ranks.planes[1].report_failure(ValueError("early"))
    ranks.planes[2].listen()
    assert until(lambda: ranks.planes[2].first_error is not None, 5.0)


def test_a_rank_that_is_in_the_next_run_already_hears_it_too(make_ranks) -> None:
    ranks = make_ranks(3)
    for plane in ranks.planes:
        plane.listen()
    ranks.planes[2].stop_listening()
    ranks.planes[2].listen()
    ranks.planes[1].report_failure(ValueError("at the end of the first run"))
    assert until(lambda: ranks.planes[2].first_error is not None, 5.0)


def test_rank_0_hears_of_an_error_while_it_waits_for_the_end_of_the_run(listening, later) -> None:
    waiting = listening.start(lambda plane: plane.farewell(later), ranks=[0, 1])
    time.sleep(0.05)
    _fail(listening.planes[2], "at the very end")
    assert isinstance(waiting[0].exception(1), PeerFailed)
    assert waiting[1].exception(1) is None


def test_an_error_with_a_long_text_is_cut(listening) -> None:
    told = listening.planes[1].report_failure(ValueError("x" * 10_000_000))
    assert len(told.message) == len(told.traceback) == 64 << 10


def test_rank_0_takes_leave_last(make_ranks, later) -> None:
    ranks = make_ranks(2)
    (host,) = ranks.start(lambda plane: plane.farewell(later), ranks=[0])
    time.sleep(0.05)
    assert not host.done()
    ranks.planes[1].farewell(timedelta(0))  # it does not wait
    assert host.exception(5) is None


def test_ranks_that_differ_are_told_to_all_with_field_and_values(listening) -> None:
    values = {0: 1.5, 1: (2,)}
    listening.planes[0].report_failure(DivergenceError("they differ", ranks=[1], field="shape", values=values))
    assert until(lambda: listening.planes[3].first_error is not None, 5.0)
    heard = listening.planes[3].first_error.as_heard()
    assert isinstance(heard, DivergenceError)
    assert (heard.ranks, heard.field, heard.values) == ([1], "shape", {0: 1.5, 1: "(2,)"})
    assert "they differ (Told by rank 0, host host0" in str(heard)


def test_a_checkpoint_that_one_rank_refuses_is_refused_by_all(listening) -> None:
    listening.planes[1].report_failure(CheckpointCorrupt("step=10.ckpt/__0_0.distcp: another digest"))
    assert until(lambda: listening.planes[3].first_error is not None, 5.0)
    heard = listening.planes[3].first_error.as_heard()
    assert isinstance(heard, CheckpointCorrupt)
    assert "__0_0.distcp: another digest (Told by rank 1" in str(heard)


def test_a_stranger_rings_and_writes_an_error_and_only_a_rank_is_heard(make_ranks) -> None:
    ranks = make_ranks(2, secret="only we know")
    for plane in ranks.planes:
        plane.listen()
    forged = ranks.planes[0].secret.seal("hello/0", b'{"rank": 1}')  # signed, for another key
    for value in (b'{"rank": 1}', forged):
        ranks.store.set("distplus/job/0/first-error", value)
        for rank in range(2):
            ranks.store.set(f"distplus/job/0/bell/{rank}/1", b"error")
        time.sleep(0.3)
        assert [plane.first_error for plane in ranks.planes] == [None, None]
    assert ranks.planes[1].secret.num_ignored == 2
    _fail(ranks.planes[0], "a true one")
    assert until(lambda: ranks.planes[1].first_error is not None, 5.0)
    assert ranks.planes[1].first_error.message == "a true one"


def test_listening_ends_at_once_while_a_stranger_rings(make_ranks) -> None:
    ranks = make_ranks(1, secret="only we know")
    ranks.planes[0].listen()
    ranks.store.set("distplus/job/0/bell/0/1", b"error")
    time.sleep(0.05)  # it has woken, and pauses
    begin = time.monotonic()
    ranks.planes[0].stop_listening()
    assert time.monotonic() - begin < 1
