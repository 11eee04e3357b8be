"""Who is to blame, by rule; and what the verdict looks like."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from lightning_distplus.checkpoint.formats import refuse_foreign
from lightning_distplus.control import ControlPlane
from lightning_distplus.control.first_error import FirstError
from lightning_distplus.control.plane import Peer
from lightning_distplus.errors import CheckpointMismatch, DatasetMismatch, PeerLost
from lightning_distplus.process import running_time
from lightning_distplus.watchdog import stacks
from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.flight_recorder import Collective
from lightning_distplus.watchdog.heartbeat import Sighting
from lightning_distplus.watchdog.progress import Mark, Marks
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts, judge, judge_failure, name_incident
from lightning_distplus.watchdog.watchdog import Watchdog, WatchedRun
from lightning_distplus.world import World


def evidence(rank: int, **changes: Any) -> Evidence:
    """A rank that waits for its peers in a collective."""
    known = {
        "rank": rank,
        "host": "node0",
        "pid": 100 + rank,
        "state": "running",
        "answers": True,
        "phase": "step",
        "operation": "the step gate",
        "global_step": 7,
        "silence_s": 5.0,
        "waits": True,
        "stack": "File a.py, line 1",
    }
    return Evidence(**{**known, **changes})


def judged(*ranks: Evidence) -> Verdict:
    return judge({one.rank: one for one in ranks}, "hang-1")


def test_a_rank_that_does_not_wait_is_to_blame_and_its_place_is_shown() -> None:
    verdict = judged(
        evidence(0), evidence(1), evidence(2, waits=False, location="train.py:12", operation="on_train_batch_end")
    )
    assert (verdict.kind, verdict.culprits, verdict.waiting) == ("hang", [2], [0, 1])
    assert (verdict.location, verdict.operation, verdict.global_step) == ("train.py:12", "on_train_batch_end", 7)
    assert "train.py:12" in verdict.render()
    lost = replace(verdict, kind="peer_lost", operation="start").render()
    assert lost.startswith("RANK 2 IS GONE (host node0, pid 102) at train.py:12\n")


def test_a_stopped_process_is_to_blame_before_one_that_only_works() -> None:
    verdict = judged(evidence(0, waits=False), evidence(1, state="stopped", answers=False))
    assert verdict.culprits == [1]
    assert "kill -CONT 101" in verdict.remedy


def test_a_process_that_is_gone_is_a_lost_peer() -> None:
    verdict = judged(evidence(0), evidence(1, state="gone", answers=False))
    assert (verdict.kind, verdict.culprits) == ("peer_lost", [1])


def test_a_process_that_runs_and_does_not_answer_holds_the_lock() -> None:
    assert "lock" in judged(evidence(0), evidence(1, answers=False, waits=False)).cause


def test_where_all_wait_those_that_wait_elsewhere_are_to_blame() -> None:
    odd = evidence(1, operation="save x.ckpt", location="train.py:9")
    verdict = judged(evidence(0), odd, evidence(2))
    assert verdict.culprits == [1]
    assert "if rank == 0" in verdict.remedy
    assert judged(evidence(0), odd).culprits == [0, 1]  # nobody knows which of the two is right


def test_late_data_is_called_late_data() -> None:
    verdict = judged(evidence(0), evidence(1, waits=False, operation="[_TrainingEpochLoop].train_dataloader_next"))
    assert "data" in verdict.cause


def test_the_lock_of_a_killed_compilation_is_recognised() -> None:
    verdict = judged(evidence(0, waits=False, stack='File "torch/utils/file_baton.py", line 30, in wait'))
    assert "TORCH_EXTENSIONS_DIR" in verdict.remedy


def test_the_printed_verdict_has_at_most_thirty_lines_and_the_file_everything(tmp_path: Path) -> None:
    ranks = [evidence(rank) for rank in range(64)]
    ranks[5] = evidence(5, waits=False, stack="\n".join(f"line {number}" for number in range(200)))
    verdict = judged(*ranks)
    assert len(verdict.render().splitlines()) <= 30
    path = verdict.write(tmp_path, "node0")
    assert path.name == "verdict-hang-1-node0.json"
    written = json.loads(path.read_text())
    assert written["version"] == 1
    assert set(written["stacks"]) == {str(rank) for rank in range(64)}
    assert Verdict.from_json(path.read_text()) == verdict
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def call(op: str, seq: int = 5, **changes: Any) -> dict[str, Any]:
    return vars(Collective(**{"group": "0", "seq": seq, "op": op, "inputs": [[4]], "dtypes": ["Float"], **changes}))


def test_a_host_that_does_not_answer_is_a_lost_peer_and_all_its_ranks_are_named() -> None:
    far = {"host": "node1", "answers": False, "is_unreachable": True, "state": "unknown"}
    verdict = judged(evidence(0), evidence(1), evidence(2, **far), evidence(3, **far))
    assert (verdict.kind, verdict.culprits) == ("peer_lost", [2, 3])
    assert "no packet comes back from host node1 to node0" in verdict.cause


def test_ranks_of_which_no_word_comes_because_the_store_is_silent_are_not_blamed() -> None:
    quiet = {"answers": False, "is_unheard": True}
    verdict = judged(evidence(0, state="stopped", **quiet), evidence(1), evidence(2, **quiet))
    assert verdict.culprits == [0]
    assert "the store does not answer" in verdict.lines[2]


def test_the_call_that_differs_is_shown_and_its_rank_blamed() -> None:
    ranks = [
        evidence(rank, stands_in=one, recording={"calls": [list(one.values())], "groups": {"0": [0, 1, 2]}})
        for rank, one in enumerate([call("all_reduce"), call("all_reduce"), call("barrier")])
    ]
    verdict = judged(*ranks)
    assert (verdict.culprits, verdict.is_decided, verdict.mismatch and verdict.mismatch["kind"]) == ([2], True, "order")
    assert "rank 2: barrier #5 on group 0" in verdict.render()
    assert judged(*(ranks[rank] for rank in (0, 2))).culprits == [0, 2]
    assert "nothing tells which of them is to blame" in judged(*(ranks[rank] for rank in (0, 2))).render()


def test_a_process_that_cpp_ends_blames_the_rank_whose_call_differs_and_else_itself() -> None:
    assert judged(evidence(0, was_ended_by="std::bad_alloc"), evidence(1)).culprits == [0]
    odd = call("all_reduce", inputs=[[8]])
    groups = {"0": [0, 1, 2]}
    ranks = [
        evidence(rank, stands_in=one, recording={"calls": [list(one.values())], "groups": groups}, **ended)
        for rank, (one, ended) in enumerate(
            [(call("all_reduce"), {"was_ended_by": "gloo::EnforceNotMet"}), (call("all_reduce"), {}), (odd, {})]
        )
    ]
    assert (judged(*ranks).kind, judged(*ranks).culprits) == ("exception", [2])


def test_a_cycle_is_drawn_with_a_line_per_rank() -> None:
    ring = [evidence(rank, location=f"ring.py:{rank}", stands_in=call("send", peer=1 - rank)) for rank in range(2)]
    verdict = judged(*ring, evidence(2))
    assert (verdict.culprits, verdict.waiting, verdict.cycles) == ([0, 1], [2], [[0, 1]])
    assert verdict.findings == ["rank 0 (send at ring.py:0) -> rank 1 (send at ring.py:1) -> rank 0"]


def test_the_load_of_the_culprits_host_is_printed() -> None:
    verdict = judged(evidence(0, load={"load_1m": 9.0, "num_cores": 2}), evidence(1, waits=False, host="node1"))
    assert verdict.load_of_culprit == ""
    verdict = judged(evidence(0, load={"load_1m": 9.0, "num_cores": 2}), evidence(1, waits=False))
    assert "load:  load 9.0 on 2 cores" in verdict.render()


AT_A_CALL = {
    "operation": "barrier 'x'",
    "stack": 'File "/lightning_distplus/control/collective_check.py", line 9, in meet',
}


@pytest.mark.parametrize(
    ("inside", "culprits"),
    [([0], [0]), ([0, 1], [0, 1]), ([0, 1, 2], [3])],
)
def test_a_call_that_only_some_ranks_make_is_named_and_the_fewer_are_to_blame(
    inside: list[int], culprits: list[int]
) -> None:
    ranks = [evidence(rank, operation="backward batch 4") for rank in range(4)]
    for rank in inside:
        ranks[rank] = evidence(rank, location="x.py:14", **AT_A_CALL)
    verdict = judged(*ranks)
    assert verdict.culprits == culprits
    assert "in barrier 'x' at x.py:14; rank" in verdict.cause
    assert "in backward batch 4" in verdict.cause


def test_a_rank_that_computes_is_to_blame_before_those_that_wait_for_it_in_a_call() -> None:
    verdict = judged(evidence(0, **AT_A_CALL), evidence(1, waits=False))
    assert verdict.culprits == [1]


def test_runs_that_share_a_folder_and_a_second_write_their_own_verdicts(tmp_path: Path) -> None:
    for run_id in ("a", "b/c"):
        judge({0: evidence(0)}, name_incident("hang", run_id, 1000), run_id).write(tmp_path, "node0")
    assert [one["run_id"] for one in find_verdicts(tmp_path, run_id="b/c")] == ["b/c"]
    assert len(find_verdicts(tmp_path)) == 2


def test_a_rank_that_is_late_with_its_word_and_seen_to_wait_is_not_the_one_that_holds_the_lock() -> None:
    late, holding = evidence(1, answers=False), evidence(2, answers=False, waits=False)
    verdict = judged(evidence(0), late, holding)
    assert (verdict.culprits, verdict.silent) == ([2], [1, 2])
    assert "global lock" in verdict.cause
    assert "has not answered in time" in late.describe()
    assert judged(evidence(0), late, evidence(2, waits=False)).culprits == [2]


def frames_of(file: str, count: int) -> str:
    return "".join(f'  File "{file}{number}.py", line 1, in f\n    call()\n' for number in range(count))


SITE = "/venv/lib/python3.11/site-packages"


def test_the_printed_stack_keeps_the_users_frames_and_the_innermost_and_counts_the_others() -> None:
    user = f'  File "{SITE}/their_package/model.py", line 7, in training_step\n    loss = step()\n'
    own = frames_of(f"{stacks._PACKAGE}/x", 20)
    verdict = judged(evidence(0), evidence(1, waits=False, stack=own + user + own + frames_of(f"{SITE}/torch/x", 8)))
    text = verdict.render()
    assert f'File "{SITE}/their_package/model.py", line 7' in text
    assert stacks._PACKAGE not in text
    assert "    ... 20 frames of lightning_distplus\n" in text
    assert "    ... 27 frames of lightning_distplus and torch\n" in text
    assert text.index("model.py") < text.index(f'File "{SITE}/torch/x7.py"')
    assert "torch/x6.py" not in text
    assert len(text.splitlines()) < 30


def test_a_folded_traceback_keeps_chained_errors_and_long_messages() -> None:
    first = f"Traceback (most recent call last):\n{frames_of(f'{SITE}/torch/a', 3)}KeyError: 'x'\n"
    chain = "\nThe above exception was the direct cause of the following exception:\n\n"
    second = f"Traceback (most recent call last):\n{frames_of('/home/me/train', 1)}ValueError: one\n  two\n    three\n"
    folded = stacks.fold_traceback(first + chain + second)
    assert folded.startswith("Traceback (most recent call last):\n    ... 2 frames of torch\n")
    assert folded.endswith(chain + second.rstrip())


@pytest.mark.parametrize(
    ("file", "is_library"),
    [
        ("/venv/lib/python3.11/site-packages/torch/nn/functional.py", True),
        ("/venv/lib/python3.11/site-packages/their_package/model.py", False),
        ("/usr/lib/python3/dist-packages/lightning/pytorch/trainer.py", True),
        (json.__file__, True),
        (stacks.__file__, True),
        ("<frozen importlib._bootstrap>", True),
        ("/home/me/train.py", False),
        ("/venv/bin/distplus", True),
    ],
)
def test_a_library_is_known_by_its_name_and_an_installed_package_may_be_the_users(file: str, is_library: bool) -> None:
    assert stacks.is_library(file) is is_library


def test_what_all_ranks_refuse_is_answered_with_the_command_and_names_them_all(tmp_path: Path) -> None:
    torch.save({"model": {}, "optimizer": {}, "iter_num": 3, "step_count": 1}, tmp_path / "iter-3.pth")
    with pytest.raises(CheckpointMismatch) as refused:
        refuse_foreign(tmp_path / "iter-3.pth")
    world = World(rank=1, size=3)
    first = FirstError.of(refused.value, world, {"location": "/home/me/train.py:41"})
    verdict = judge_failure(first, world, "a", peers={}, last_seen=lambda rank: None)
    assert verdict is not None
    assert verdict.remedy.startswith("Make one of it that it can: distplus import --from litgpt ")
    assert verdict.cause.endswith("which Lightning cannot resume from.")
    assert verdict.location == "/home/me/train.py:41"
    assert verdict.culprits == [0, 1, 2]
    assert verdict.render().startswith("RANKS 0-2 FAILED at train.py:41\n")
    assert "stack of rank 1, innermost last" in verdict.render()


def test_the_step_of_a_rank_that_is_gone_is_what_the_others_know() -> None:
    gone = evidence(1, state="gone", answers=False, global_step=33, phase="setup", operation="x", beat_s=0.8)
    verdict = judged(evidence(0, global_step=79, phase="step"), replace(gone, is_last_seen=True))
    assert (verdict.global_step, verdict.phase) == (79, "step")
    assert "last seen in 'x', 0.8 s before" in verdict.lines[0]
    assert verdict.render().partition("\n")[0].endswith(", last seen in x, 0.8 s before")


def test_the_last_line_of_a_refusal_that_lists_what_differs_is_what_to_do() -> None:
    verdict = failed(DatasetMismatch("This run cannot go on:\n  num_samples: 8 there, 9 here\nResume with the data."))
    assert verdict is not None
    assert verdict.remedy == "Resume with the data."
    assert verdict.cause.endswith("\n  num_samples: 8 there, 9 here")


def failed(error: BaseException, *, ends_others: bool = True) -> Verdict | None:
    world = World(rank=1, size=2, host="node0")
    peers: dict[int, Any] = {}
    return judge_failure(FirstError.of(error, world), world, "a", peers, lambda rank: None, ends_others=ends_others)


def test_a_rank_that_exits_in_order_is_an_incident_where_the_others_do_not() -> None:
    assert failed(SystemExit(0), ends_others=False) is None
    assert failed(KeyboardInterrupt()) is None
    verdict = failed(SystemExit(0))
    assert verdict is not None
    assert (verdict.culprits, verdict.cause) == ([1], "SystemExit: 0")
    assert "trainer.should_stop" in verdict.remedy
    refused = failed(SystemExit("no data in /x"))
    assert refused is not None
    assert "should_stop" not in refused.remedy, "that rank did not mean to end the run in order"


@pytest.mark.parametrize(
    ("told", "remedy"),
    [
        ("DataLoader worker (pid 23870) is killed by signal: Killed. ", "look at dmesg"),
        ("DataLoader worker (pid(s) 12, 13) exited unexpectedly", "look at dmesg"),
        ("produce a loss. You can enable unused parameter detection by passing", "find_unused_parameters=True"),
    ],
)
def test_an_error_that_tells_more_than_its_line_is_answered(told: str, remedy: str) -> None:
    verdict = failed(RuntimeError(told))
    assert verdict is not None
    assert remedy in verdict.remedy


def test_the_place_of_a_rank_that_is_gone_is_called_where_it_was_last_seen() -> None:
    gone = evidence(1, state="gone", answers=False, operation="backward batch 4", location="a/train.py:41", beat_s=0.34)
    verdict = judged(evidence(0), replace(gone, is_last_seen=True))
    headline = "RANK 1 IS GONE (host node0, pid 101), last seen in backward, train.py:41, 0.3 s before"
    assert verdict.render().splitlines()[0] == headline
    world = World(rank=0, size=2)
    mark = Mark(number=9, phase="step", operation="backward batch 4", global_step=7, silence_s=0.1)
    seen = Sighting(mark=mark, beat=2, changed_at=running_time() - 0.34, place="a/train.py:41")
    first = FirstError.of(PeerLost("rank 1 is gone", [1]), world, {"operation": "the gate", "location": "train.py:9"})
    lost = judge_failure(first, world, "a", {1: Peer(host="node0", pid=101)}, lambda rank: seen)
    assert lost is not None
    assert lost.render().splitlines()[0] == headline


class Endless(WatchedRun):
    deadline: timedelta | None = None
    last_deadline: timedelta | None = None


def watchdog_of(rank: int, folder: Path) -> Watchdog:
    plane, marks = ControlPlane(HashStore(), World(rank=rank, size=2, host="node0")), Marks(phase=lambda: "step")
    return Watchdog(plane, marks, Endless(), report_after=None, ends_run=False, folder=folder, has_process=False)


def test_a_verdict_after_which_the_run_went_on_hides_no_later_one(tmp_path: Path) -> None:
    first, other = watchdog_of(0, tmp_path), watchdog_of(1, tmp_path)
    first._give(judged(evidence(0), evidence(1, waits=False)))
    error = FirstError.of(ValueError("later"), World(rank=0, size=2, host="node0"))
    first.tell_failure(error)
    for one in (first, other):  # who has written it, and who has not
        found = one._telling.find_verdict()
        assert found is not None
        assert found[0].kind == "exception"
    assert [one["kind"] for one in find_verdicts(tmp_path)] == ["hang", "exception"]
    assert [one["kind"] for one in find_verdicts(tmp_path, of_end=True)] == ["exception"]


def test_a_verdict_for_which_no_file_can_be_made_is_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").touch()
    telling = watchdog_of(0, tmp_path / "full" / "distplus")._telling
    telling.tell(judged(evidence(0), evidence(1, waits=False)))
    assert telling.show_block(waits=False)
    text = capsys.readouterr().err
    assert text.startswith("\nRANK 1 HANGS (host node0, pid 101)")
    assert f"  file:  none; {tmp_path / 'full' / 'distplus'} takes no file" in text


def test_only_a_verdict_of_this_host_and_attempt_is_that_of_another_rank_on_the_same_end(
    tmp_path: Path,
) -> None:
    telling, verdict = watchdog_of(1, tmp_path)._telling, judged(evidence(0), evidence(1, waits=False))
    verdict.write(tmp_path, "node1")
    assert not telling.is_written(0.0)
    path = verdict.write(tmp_path, "node0")
    assert telling.is_written(0.0)
    os.utime(path, (1, 1))
    assert not telling.is_written(0.0)
