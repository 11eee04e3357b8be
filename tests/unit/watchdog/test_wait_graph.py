"""Who waits for whom, across groups: ranks at the ends, those behind others, and cases in which nothing tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_distplus.watchdog.flight_recorder import Collective, Ends, Recording, follow
from lightning_distplus.watchdog.verdict import judge_dumps
from tests.unit.watchdog.mesh_simulation import FAULTS, HABITS, Mesh

TP = {"tp0": [0, 1], "tp1": [2, 3]}
DP = {"dp0": [0, 2], "dp1": [1, 3]}
WITH_A_DUMP = tuple(kind for kind in FAULTS if kind != "dies without a dump")


def call(group: str, seq: int, *, done: bool = False, op: str = "all_reduce", peer: int | None = None) -> Collective:
    return Collective(group=group, seq=seq, op=op, is_done=done, peer=peer)


def followed(**calls: list[Collective]) -> Ends | None:
    """Ranks 0 to 3 of a mesh of two by two, named ``r0`` to ``r3``; one that is left out has left no dump."""
    return follow(
        {
            int(name[1:]): Recording(
                calls=made, groups={group: ranks for group, ranks in (TP | DP).items() if int(name[1:]) in ranks}
            )
            for name, made in calls.items()
        }
    )


def test_a_rank_whose_peers_wait_is_not_to_blame_where_it_waits_itself() -> None:
    found = followed(r0=[call("tp0", 1)], r1=[call("dp1", 1)], r2=[call("dp0", 1)], r3=[])
    assert found is not None
    assert (found.culprits, found.is_decided) == ([3], True)
    assert "empty record" in found.reasons[3]


def test_all_ends_are_named() -> None:
    found = followed(r0=[call("tp0", 1)], r1=[], r2=[call("tp1", 1)], r3=[call("dp1", 1, done=True)])
    assert found is not None
    assert (found.culprits, found.is_decided) == ([1, 3], True)
    assert found.reasons[3].endswith("it has nothing in flight")


def test_a_rank_without_a_dump_is_to_blame_and_where_many_dumps_lack_nothing_is_certain() -> None:
    first, third = [call("tp0", 1)], [call("dp1", 1)]
    found = followed(r0=first, r1=third, r2=[call("dp0", 1, done=True), call("tp1", 1)])
    assert found is not None
    assert (found.culprits, found.is_decided) == ([3], True)
    found = followed(r0=first, r2=[call("tp1", 1)])
    assert found is not None
    assert (found.culprits, found.is_decided) == ([1, 3], False)


def test_a_call_that_others_have_ended_says_that_the_rank_itself_stands() -> None:
    stuck = [call("tp0", 1), call("tp0", 2)]
    went_on = [call("tp0", 1, done=True), call("tp0", 2, done=True), call("dp1", 1)]
    found = followed(r0=stuck, r1=went_on, r2=[call("dp0", 1)], r3=[call("dp1", 1)])
    assert found is not None
    assert (found.culprits, found.is_decided) == ([0], True)
    assert "which rank 1 ended" in found.reasons[0]


def test_gloo_may_end_a_call_on_one_rank_while_another_one_is_still_in_it() -> None:
    late = replace(call("tp0", 1), is_gloo=True)
    went_on = [replace(late, is_done=True), call("dp1", 1)]
    found = followed(r0=[late], r1=went_on, r2=[call("dp0", 1)], r3=[call("dp1", 1)])
    assert found is not None
    assert (0 in found.culprits, found.is_decided) == (False, False)


def test_a_call_in_flight_that_the_ring_has_overwritten_on_another_rank_was_not_ended_there() -> None:
    ran_ahead = [call("tp0", 3), call("dp1", 1)]
    found = followed(r0=[call("tp0", 1)], r1=ran_ahead, r2=[], r3=[call("dp1", 1)])
    assert found is not None
    assert 0 not in found.reasons or not found.is_decided


def stage(*stand: int, earlier: int = 0, between_ns: int = 1000, once_ns: int = 0) -> Ends | None:
    """Four ranks of one stage: some stand behind a call after which their like went on; rank 4 has an empty record.

    Args:
        stand: The ranks that stand.
        earlier: How often they have gone on from such a call before.
        between_ns: How long it took then, and from any call to the next.
        once_ns: How much longer it took in one of the last rounds.
    """
    groups = {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 3]}
    rounds = [
        replace(
            call(group, seq, done=True),
            created_ns=between_ns * (2 * seq + (group == "b")) + once_ns * ((seq, group) > (earlier - 2, "a")),
        )
        for seq in range(1, earlier + 1)
        for group in "ab"
    ]
    before = [*rounds, replace(call("a", earlier + 1), created_ns=10**12)]
    after = [*before, replace(call("b", earlier + 1), created_ns=10**12 + 1000)]
    records = {
        rank: Recording(calls=before if rank in stand else after, groups=groups, roles={"a": "a", "b": "b"})
        for rank in range(4)
    }
    return follow({**records, 4: Recording(groups={"a": groups["a"]})})


@pytest.mark.parametrize(("rank", "earlier"), [(1, 0), (0, 3), (3, 3)])
def test_a_rank_that_stands_where_its_like_went_on_with_the_same_calls_in_flight_is_to_blame(
    rank: int, earlier: int
) -> None:
    found = stage(rank, earlier=earlier)
    assert found is not None
    assert (found.culprits, found.is_decided) == ([rank, 4], True)


def test_what_stands_side_by_side_where_only_active_calls_are_left_did_not_follow_on_each_other() -> None:
    groups, records = {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 3]}, {4: Recording(groups={"a": [0, 1, 2, 3, 4]})}
    for rank in range(4):
        calls = [
            replace(one, created_ns=10**9 * seq + 1000 * number)
            for seq in (1, 2)  # a second in between, in which calls were made that have ended
            for number, one in enumerate([call("c", seq, op="send", peer=rank + 10, done=True), call("a", seq)])
        ]
        last = [] if rank == 1 else [replace(call("b", 1), created_ns=2 * 10**9 + 2000)]
        records[rank] = Recording(calls=[*calls, *last], groups=groups)
    found = follow(records)
    assert found is not None
    assert (found.culprits, found.is_decided) == ([1, 4], True)


def test_a_rank_that_once_took_long_to_go_on_from_there_may_do_so_now_and_then() -> None:
    found = stage(1, earlier=9, once_ns=10**9)
    assert found is not None
    assert (found.culprits, found.is_decided) == ([1, 4], False)


def test_two_ranks_of_a_stage_that_stand_in_the_same_place_may_be_meant_to_wait_there() -> None:
    found = stage(1, 2)
    assert found is not None
    assert (found.culprits, found.is_decided) == ([1, 2, 4], False)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    ("earlier", "between_ns"), [(0, 1000), (3, 10**6)], ids=["no earlier round", "a slow processor"]
)
def test_the_first_or_last_rank_may_wait_alone_unless_earlier_rounds_show_that_it_does_not(
    earlier: int, between_ns: int, rank: int
) -> None:
    found = stage(rank, earlier=earlier, between_ns=between_ns)
    assert found is not None
    assert (found.culprits, found.is_decided) == ([rank, 4], False)


def test_a_short_message_that_was_sent_before_its_receiver_came_to_it_makes_nobody_wait() -> None:
    sent = call("dp0", 1, op="send", peer=2, done=True)
    not_yet_begun = call("dp0", 1, op="recv", peer=0)
    found = followed(r0=[sent], r1=[call("dp1", 1)], r2=[call("tp1", 1), not_yet_begun], r3=[])
    assert found is not None
    assert (found.culprits, found.is_decided) == ([0, 3], False)
    assert found.reasons[0].endswith("nobody is seen to wait for it")


def test_ranks_that_stand_together_in_a_call_to_which_all_have_come_are_told_to_be_undecided() -> None:
    found = followed(r0=[call("tp0", 1)], r1=[call("tp0", 1)], r2=[call("dp0", 1)], r3=[call("dp1", 1)])
    assert found is not None
    assert (found.culprits, found.is_decided) == ([0, 1], False)


def test_a_rank_that_waits_where_no_recorder_sees_it_is_not_at_an_end() -> None:
    groups = {"tp0": [0, 1]}
    ranks = {0: Recording(calls=[call("tp0", 1)], groups=groups), 1: Recording(groups=groups)}
    assert follow(ranks).culprits == [1]  # type: ignore[union-attr]
    assert follow(ranks, elsewhere=[1]).is_decided is False  # type: ignore[union-attr]


def test_nothing_in_flight_tells_nothing() -> None:
    assert followed(r0=[], r1=[call("tp0", 1, done=True)]) is None


def outcome(mesh: Mesh, folder: Path) -> str:
    mesh.break_down()
    verdict = judge_dumps(mesh.write(folder / str(mesh.seed)))
    if not verdict.is_decided:
        return "undecided"
    return "right" if set(verdict.culprits) == mesh.guilty else f"wrong: {verdict.culprits} for {sorted(mesh.guilty)}"


@pytest.mark.parametrize(
    ("first", "last", "kinds"),
    [
        (0, 16, FAULTS),
        # Two halves: 500 jobs take 75 s of a processor, of which a busy machine gives a test a half or less.
        pytest.param(1500, 1750, WITH_A_DUMP, marks=pytest.mark.soak, id="of the three with a dump, first half"),
        pytest.param(1750, 2000, WITH_A_DUMP, marks=pytest.mark.soak, id="of the three with a dump, second half"),
    ],
)
def test_of_meshes_that_run_ahead_until_they_block_exactly_the_guilty_ranks_are_named(
    first: int, last: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    found = {seed: outcome(Mesh(seed, kinds=kinds), tmp_path) for seed in range(first, last)}
    odd = {seed: text for seed, text in found.items() if text != "right"}
    assert not {seed: text for seed, text in odd.items() if text != "undecided"}
    assert len(odd) <= 0.02 * len(found) + (len(found) < 50), odd


@pytest.mark.parametrize("seeds", [[65], pytest.param(range(200), marks=pytest.mark.soak, id="200 jobs")])
def test_where_the_dumps_hold_active_calls_only_no_innocent_rank_is_named(seeds: Sequence[int], tmp_path: Path) -> None:
    left_out = {}
    for mesh in map(Mesh, seeds):
        mesh.only_active = True
        verdict = judge_dumps(mesh.break_down().write(tmp_path / str(mesh.seed)))
        if verdict.is_decided:
            assert set(verdict.culprits) <= mesh.guilty, mesh.seed
            left_out[mesh.seed] = mesh.guilty - set(verdict.culprits)
    assert sum(map(bool, left_out.values())) <= len(seeds) // 200, left_out  # of which no call in flight tells anything


@pytest.mark.parametrize(
    "seeds",
    # Of the two, one has three guilty ranks in one place, the other one a guilty rank where innocent ones stand too.
    [
        (1539, 1813),
        *(pytest.param(range(at, at + 250), marks=pytest.mark.soak, id=f"from {at}") for at in (1500, 1750)),
    ],
)
def test_where_ranks_die_without_a_dump_no_innocent_rank_is_named(seeds: Sequence[int], tmp_path: Path) -> None:
    found = {seed: outcome(Mesh(seed), tmp_path) for seed in seeds}
    assert not {seed: text for seed, text in found.items() if text not in ("right", "undecided")}


@pytest.mark.parametrize(("first", "last"), [(0, 1), pytest.param(1, 60, marks=pytest.mark.soak)])
@pytest.mark.parametrize("habit", HABITS)
def test_of_programs_with_other_habits_no_innocent_rank_is_named(
    habit: str, first: int, last: int, tmp_path: Path
) -> None:
    found = {seed: outcome(Mesh(seed, habit=habit), tmp_path) for seed in range(first, last)}
    assert not {seed: text for seed, text in found.items() if text not in ("right", "undecided")}
