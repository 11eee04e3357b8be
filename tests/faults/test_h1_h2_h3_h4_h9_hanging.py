"""Rows H1 to H4 and H9: who hangs or fails is named, on all ranks, soon after the deadline, and nothing stays."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_distplus.cli.__main__ import main
from lightning_distplus.errors import ExitCode, PeerError
from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, side_by_side
from tests.pairs import kept
from tests.processes import is_there

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

DEADLINE_S = 3.0
KILLED = ("ResilientDDP", "ResilientDeepSpeed")
KILL = FaultPlan().kill(rank=1, step=4, where="after_backward")
Ended = tuple[SpawnResult, float, Path]


def train(name: str, world_size: int, folder: str, saves_on_exception: bool = False) -> None:
    savers = [ModelCheckpoint(dirpath=folder, save_on_exception=True)] if saves_on_exception else []
    named = {"timeout": {"step": DEADLINE_S, "setup": "60s"}, "max_steps": 30, "callbacks": [FaultCallback(), *savers]}
    jobs.fit(name, world_size, folder, data=jobs.loader(200), **named)


def run(name: str, faults: FaultPlan, folder: Path, world_size: int = 2) -> tuple[SpawnResult, float]:
    """The result, and the seconds from the fault to the end of the last process."""
    result = spawn(train, world_size, args=(name, world_size, str(folder)), faults=faults, deadline="50s")
    ended = time.time()
    assert result.faults_fired == 1, result.logs
    assert result.alive == {}
    return result, ended - result.faults[0].unix_s


def ending(name: str, faults: FaultPlan, folder: Path) -> Ended:
    return (*run(name, faults, folder), folder)


def hanging_worker(context: str, folder: Path) -> Ended:
    # Of rank 0: its workers hold copies of the connections to the store that it serves.
    result = spawn(train_with_workers, 2, args=(str(folder), 0, 40, False, DEADLINE_S, context), deadline="100s")
    return result, 0.0, folder


HANG = FaultPlan().hang(rank=1, step=4, where="batch_end")
CALLS: dict[str, Callable[[Path], Ended]] = {
    **{f"hang-{name}": partial(ending, name, HANG) for name in jobs.STRATEGIES},
    **{f"stop-{rank}": partial(ending, "ResilientDDP", FaultPlan().stop(rank=rank, step=4)) for rank in range(2)},
    "gil": partial(ending, "ResilientDDP", FaultPlan().hang_gil(rank=1, step=4)),
    **{f"worker-{context}": partial(hanging_worker, context) for context in ("fork", "forkserver")},
    **{f"kill-{name}": partial(ending, name, KILL) for name in jobs.STRATEGIES},
}
OFTEN = [what for what in CALLS if what != "worker-forkserver" and (what[:5] != "kill-" or what[5:] in KILLED)]
ended = side_by_side(CALLS, OFTEN)


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_rank_that_hangs_in_python_is_named_with_its_line(name: str, ended: Runs) -> None:
    result, seconds, folder = ended(f"hang-{name}")
    verdict = jobs.verdict_in(folder, "hang", [1], [0])
    assert verdict["phase"] == "step"
    assert "FaultCallback" in verdict["operation"]
    assert "faults.py" in verdict["stacks"]["1"]
    (load,) = verdict["load"].values()
    assert load["num_cores"] > 0
    assert load["memory_bytes"] > load["memory_used_bytes"] > 0
    assert load["num_files"] > 0
    assert "load:" in result.logs[0]
    assert len(result.logs[0][result.logs[0].index("RANK 1 HANGS") :].splitlines()) <= 30
    assert set(result.exit_codes.values()) == {int(ExitCode.HANG)}
    assert "RANK 1 HANGS" in result.logs[0]
    assert "HANG" not in result.logs[1]
    assert DEADLINE_S <= seconds < DEADLINE_S + 6


@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_process_is_named_and_does_not_outlive_the_run(rank: int, ended: Runs) -> None:
    result, seconds, folder = ended(f"stop-{rank}")
    verdict = jobs.verdict_in(folder, "hang", [rank])
    assert "stopped" in verdict["cause"]
    # Also of rank 0, which serves the store: its peer has its last beat from the memory of its process.
    assert f"last seen in {verdict['operation']!r} at {verdict['location']}" in verdict["lines"][0]
    assert verdict["location"].startswith(jobs.__file__)
    assert verdict["last_seen_s"] > 0
    assert verdict["phase"] in ("setup", "step")  # as of that beat
    assert result.exit_codes == {rank: -signal.SIGKILL, 1 - rank: int(ExitCode.HANG)}
    assert seconds < DEADLINE_S + 6


def test_a_call_that_holds_the_global_lock_is_named(ended: Runs) -> None:
    result, _, folder = ended("gil")
    verdict = jobs.verdict_in(folder, "hang", [1])
    assert "lock" in verdict["cause"]
    assert "faults.py" in verdict["stacks"]["1"]  # it was asked from outside, while it held the lock
    assert "in _hold_gil" in verdict["stacks"]["1"]
    assert result.exit_codes == {0: int(ExitCode.HANG), 1: -signal.SIGKILL}


@pytest.mark.parametrize("where", ["batch_start", "after_backward", "batch_end"])
def test_an_exception_on_one_rank_ends_all_and_each_shows_it(where: Any, tmp_path: Path) -> None:
    faults = FaultPlan().raise_(rank=1, step=4, where=where, exc=RuntimeError("the planted error"))
    result, seconds = run("ResilientDDP", faults, tmp_path)
    assert seconds < 6
    assert result.exit_codes == {0: int(ExitCode.PEER_LOST), 1: 1}
    for log in result.logs.values():
        assert "the planted error" in log
    assert "Rank 1" in result.logs[0]
    verdict = jobs.verdict_in(tmp_path, "exception", [1], [0])
    assert (verdict["phase"], verdict["global_step"]) == ("step", 3 if where == "batch_start" else 4)  # as of the gate
    hook = {"batch_start": "on_train_batch_start", "after_backward": "on_after_backward"}.get(
        where, "on_train_batch_end"
    )
    assert verdict["operation"] == f"[Callback]FaultCallback.{hook}"
    assert verdict["location"].startswith(jobs.__file__)
    assert verdict["cause"] == "RuntimeError: the planted error"
    assert "faults.py" in verdict["stacks"]["1"]
    assert verdict["pids"].keys() == verdict["hosts"].keys() == {"0", "1"}
    assert f"pid {verdict['pids']['1']}): raised RuntimeError" in verdict["lines"][0]
    (printed,) = [log for log in result.logs.values() if "RANK 1 FAILED (host" in log]
    assert len(printed[printed.index("RANK 1 FAILED") :].partition("  file:")[0].splitlines()) < 30


def test_ctrl_c_on_one_rank_ends_all_and_the_others_say_whose_it_was(tmp_path: Path) -> None:
    result, seconds = run("ResilientDDP", FaultPlan().raise_(rank=1, step=4, exc=KeyboardInterrupt), tmp_path)
    assert seconds < 6
    assert result.exit_codes[0] == int(ExitCode.PEER_LOST)
    assert result.exit_codes[1] not in (0, None)
    assert "KeyboardInterrupt" in result.logs[0]
    assert "Rank 1" in result.logs[0]
    assert not list(tmp_path.glob("distplus/verdict-*"))  # somebody wanted that


@pytest.mark.parametrize("name", kept(["ResilientDDP", "ResilientFSDP"], ["ResilientFSDP"]))
def test_an_out_of_memory_error_is_not_hidden_by_a_save_on_exception(name: str, tmp_path: Path) -> None:
    faults = FaultPlan().oom(rank=1, step=4)
    result = spawn(train, 2, args=(name, 2, str(tmp_path), True), faults=faults, deadline="50s")
    seconds = time.time() - result.faults[0].unix_s
    assert result.exit_codes == {0: int(ExitCode.PEER_LOST), 1: 1}
    for log in result.logs.values():
        assert "OutOfMemoryError" in log
    assert "is not saved: rank 1 has failed" in result.logs[1]
    assert seconds < 6
    verdict = jobs.verdict_in(tmp_path, "exception", [1])
    assert "smaller batch" in verdict["remedy"]


@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, KILLED))
def test_a_killed_rank_is_lost_within_seconds(name: str, ended: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    result, seconds, folder = ended(f"kill-{name}")
    assert result.exit_codes == {0: int(ExitCode.PEER_LOST), 1: -signal.SIGKILL}
    assert "rank 1" in result.logs[0]
    assert seconds < 6
    require_lost(folder, 1)
    assert main(["report", str(folder)]) == 0
    assert re.search(r"RANK 1 IS GONE \(host .*\), last seen .*, \d\.\d s before\n", capsys.readouterr().out)


def require_lost(folder: Path, rank: int) -> None:
    """The verdict of two ranks on one that was killed."""
    verdict = jobs.verdict_in(folder, "peer_lost", [rank], [1 - rank])
    assert verdict["pids"].keys() == verdict["hosts"].keys() == {"0", "1"}
    assert verdict["location"].startswith(jobs.__file__)  # as of its last beat
    gone = f"pid {verdict['pids'][str(rank)]}): its process is gone, last seen in {verdict['operation']!r}"
    assert gone in verdict["lines"][0]
    assert "log" in verdict["remedy"]


def train_with_workers(
    folder: str, rank: int, number: int, raises: bool, deadline_s: float, context: str = "fork"
) -> None:
    data = jobs.BadSample(rank, number, f"{folder}/fired", raises=raises)
    num_workers = 2 if context == "fork" else 1  # each of the others loads torch
    loader = DataLoader(data, batch_size=4, num_workers=num_workers, multiprocessing_context=context)
    named = {"timeout": {"step": deadline_s, "setup": "60s"}, "max_steps": 30, "callbacks": [FaultCallback()]}
    jobs.fit("ResilientDDP", 2, folder, data=loader, **named)


def test_an_exception_in_a_data_worker_of_one_rank_ends_all_and_each_shows_it(tmp_path: Path) -> None:
    result = spawn(train_with_workers, 2, args=(str(tmp_path), 1, 40, True, DEADLINE_S), deadline="50s")
    seconds = time.time() - float((tmp_path / "fired").read_text().split()[0])
    assert result.exit_codes == {0: int(ExitCode.PEER_LOST), 1: 1}
    assert result.alive == {}
    for log in result.logs.values():
        assert "the planted sample" in log
        assert jobs.__file__ in log  # the worker's own traceback
    assert seconds < 6
    verdict = jobs.verdict_in(tmp_path, "exception", [1])
    assert verdict["location"] == jobs.line_of(jobs.__file__, "raised")
    assert "dataloader" in verdict["operation"]
    assert verdict["cause"].endswith("ValueError: the planted sample")


@pytest.mark.parametrize("context", kept(["fork", "forkserver"], ["fork"]))
def test_a_data_worker_that_hangs_is_shown_at_its_line_and_ends_with_its_rank(context: str, ended: Runs) -> None:
    result, _, folder = ended(f"worker-{context}")
    verdict = jobs.verdict_in(folder, "hang", [0], [1])
    assert verdict["location"] == jobs.line_of(jobs.__file__, "the sample")
    assert "dataloader" in verdict["operation"]
    assert "the data worker, pid" in verdict["stacks"]["0"]
    assert set(result.exit_codes.values()) == {int(ExitCode.HANG)}
    assert result.alive == {}
    assert not is_there(int((folder / "fired").read_text().split()[1]))


def test_the_death_of_rank_0_which_serves_the_store_is_named_although_its_data_worker_is_in_a_sample(
    tmp_path: Path,
) -> None:
    # The worker has a copy of each connection of its rank; the deadline is far away.
    faults = FaultPlan().kill(rank=0, step=4, where="after_backward")
    arguments = (str(tmp_path), 0, 20, False, 40.0)
    result = spawn(train_with_workers, 2, args=arguments, faults=faults, deadline="50s")
    seconds = time.time() - result.faults[0].unix_s
    assert result.exit_codes == {0: -signal.SIGKILL, 1: int(ExitCode.PEER_LOST)}
    assert "rank 0" in result.logs[1]
    require_lost(tmp_path, 0)
    assert not is_there(int((tmp_path / "fired").read_text().split()[1]))
    assert seconds < 20  # a second or two; without the tie, the deadline


# -- an error of which not even the text can be had --------------------------------------------------------------------


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


def raise_mute(module: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
    if (module.global_rank, batch_idx) == (1, 3):
        raise Mute
    return loss


def train_until_it_ends(folder: str, change: Any = None) -> tuple[str, str, list[int], float]:
    """Which error has ended the run of this rank, its text, the ranks that it names, and when."""
    try:
        jobs.fit("ResilientDDP", 2, folder, jobs.Model(change=change), max_steps=20, callbacks=[FaultCallback()])
    except PeerError as error:
        return type(error).__name__, str(error), error.ranks, time.time()
    except Mute:
        return "Mute", "", [], time.time()
    return "finished", "", [], 0.0


def test_an_exception_whose_str_raises_is_named_on_every_rank(tmp_path: Path) -> None:
    run = spawn(train_until_it_ends, 2, args=(str(tmp_path), raise_mute), deadline="60s").check()
    assert run.results[1][0] == "Mute"
    kind, text, ranks, _ = run.results[0]
    assert (kind, ranks) == ("PeerFailed", [1])
    assert "Mute: (no message: its __str__ raises RuntimeError)" in text
    assert "raise Mute" in text
    jobs.verdict_in(tmp_path, "exception", [1])


# -- who waits at the gate names the rank within two seconds, without a time-out ---------------------------------------


@pytest.mark.parametrize("mode", ["forkserver", "torchrun"])
def test_a_rank_killed_before_the_gate_is_named_by_the_one_who_waits_there(mode: str, tmp_path: Path) -> None:
    # Under torchrun the store outlives rank 0, so that nothing but its absence tells.
    faults = FaultPlan().kill(rank=1 if mode == "forkserver" else 0, step=4, where="batch_end")
    run = spawn(train_until_it_ends, 2, args=(str(tmp_path),), faults=faults, mode=mode, deadline="50s")
    (fault,) = run.faults
    survivor = 1 - fault.fault.rank
    kind, _, ranks, at = run.results[survivor]
    assert (kind, ranks) == ("PeerLost", [fault.fault.rank])
    assert at - fault.unix_s < 4.0
    if mode == "forkserver":
        assert run.exit_codes[fault.fault.rank] == -signal.SIGKILL
    verdict = jobs.verdict_in(tmp_path, "peer_lost", [fault.fault.rank])
    # Its last beat came in the first second of the run; who has passed the gate of a step with it knows more.
    assert (verdict["phase"], verdict["global_step"]) == ("step", 4)
    assert re.search(r"its process is gone, last seen in '.*, \d\.\d s before$", verdict["lines"][0])
