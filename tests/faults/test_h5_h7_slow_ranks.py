"""Rows H5 and H7: what is slow or debugged is reported where that is wanted, and never ended."""

from __future__ import annotations

import json
import os
import pdb
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_distplus import RankDivergenceMonitor, StragglerMonitor, _compat
from lightning_distplus.events import read_events
from lightning_distplus.testing import FaultCallback, FaultPlan, spawn
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, side_by_side

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

DEADLINE_S = 1.5
LONG_S = 3 * DEADLINE_S


def fit(folder: str, *callbacks: Callback, data: Any = None, report_after: float | None = 30.0, **named: Any) -> int:
    timeout = {"step": DEADLINE_S, "setup": "60s", "report_after": report_after}
    arguments = {"max_steps": 8, "callbacks": [*callbacks], "num_sanity_val_steps": 0, **named}
    return jobs.fit("ResilientDDP", 2, folder, data=data, timeout=timeout, **arguments).global_step


def slow_somewhere(folder: str) -> int:
    saves = ModelCheckpoint(dirpath=f"{folder}/saved", every_n_train_steps=6)
    named = {"limit_val_batches": 1, "val_check_interval": 4, "report_after": None}
    return fit(folder, FaultCallback(), saves, data=(jobs.loader(), jobs.loader(8)), **named)


SLOW: dict[str, FaultPlan] = {
    "first_step": FaultPlan().slow(rank=1, step=0, duration_s=LONG_S),
    "validation": FaultPlan().slow(rank=1, step=4, duration_s=LONG_S, where="validation"),
    "save": FaultPlan().slow(rank=1, step=6, duration_s=LONG_S, where="save"),
}


def check_slow(what: str, folder: Path) -> None:
    """Something takes three times the step's deadline."""
    run = spawn(slow_somewhere, 2, args=(str(folder),), faults=SLOW[what]).check()
    assert run.results == {0: 8, 1: 8}
    assert not list(folder.glob("distplus/verdict-*"))
    assert not any("no progress" in log for log in run.logs.values())  # report_after=None


class SlowData(Dataset[torch.Tensor]):
    """A sample takes its time on rank 1; a batch has four."""

    def __init__(self, num_samples: int, seconds: float) -> None:
        self.num_samples, self.seconds = num_samples, seconds

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds if os.environ["RANK"] == "1" else 0.0)
        return torch.full((jobs.NUM_FEATURES,), index / 100)


def slow_data(folder: str) -> int:
    """No batch takes as long as the deadline."""
    return fit(folder, data=DataLoader(SlowData(20, DEADLINE_S / 8), batch_size=4), max_epochs=1)


def check_slow_data(folder: Path) -> None:
    assert spawn(slow_data, 2, args=(str(folder),)).check().results == {0: 5, 1: 5}


def only_reported(folder: str) -> int:
    return fit(folder, FaultCallback(), on_hang="report", on_verdict=f"cat > {folder}/told.json")


def check_only_reported(folder: Path) -> None:
    faults = FaultPlan().slow(rank=1, step=4, duration_s=LONG_S)
    run = spawn(only_reported, 2, args=(str(folder),), faults=faults).check()
    assert run.results == {0: 8, 1: 8}
    (path,) = folder.glob("distplus/verdict-*.json")
    assert json.loads(path.read_text())["culprits"] == [1]
    told = json.loads((folder / "told.json").read_text())
    assert (told["kind"], told["culprits"], told["path"]) == ("hang", [1], str(path))
    assert "RANK 1 " in run.logs[0]


BATCH_S = 0.5


def _seconds(text: str) -> int:
    hours, minutes, seconds = map(int, text.split(":"))
    return 3600 * hours + 60 * minutes + seconds


def slow_validation(folder: str) -> int:
    """Rank 1 needs its time for every batch of a validation."""
    slow = jobs.At("on_validation_batch_end", lambda *_: time.sleep(BATCH_S), rank=1)
    named = {"limit_val_batches": 16, "val_check_interval": 4, "limit_train_batches": 4, "max_epochs": 1}
    return fit(folder, slow, data=(jobs.loader(), jobs.loader(64)), report_after=5.0, **named)


def check_slow_validation(folder: Path) -> None:
    run = spawn(slow_validation, 2, args=(str(folder),)).check()
    assert run.results == {0: 4, 1: 4}
    told = r"(\d+) of 16 batches of the validation, (\S+) batches/s, (\S+) left"
    ((done, batches, left),) = re.findall(rf"rank 1: in '.*, and moves \({told}\)", run.logs[0])
    assert 0 < float(batches) < 2 / BATCH_S
    assert 0 < int(done) < 16
    assert _seconds(left) >= (16 - int(done)) * BATCH_S / 2 - 1


class SlowDisk(TorchCheckpointIO):
    """Takes 0.2 s for a megabyte, of which it writes 20."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("wb", buffering=0) as file:
            for _ in range(20):
                file.write(bytes(1_000_000))
                time.sleep(0.2)


def slow_disk(folder: str) -> int:
    saves = ModelCheckpoint(dirpath=f"{folder}/saved", every_n_train_steps=4, save_top_k=-1)
    return fit(folder, saves, report_after=2.5, checkpoint_io=SlowDisk())


def check_slow_disk(folder: Path) -> None:
    run = spawn(slow_disk, 2, args=(str(folder),)).check()
    assert run.results == {0: 8, 1: 8}
    assert not list(folder.glob("distplus/verdict-*"))
    (first,) = re.findall(r"rank 0: in 'save .*, and moves \((\d+) MB of the save, \S+ MB/s\)", run.logs[0])
    ((second, left),) = re.findall(
        r"rank 0: in 'save .*, and moves \((\d+) of 20 MB of the save, \S+ MB/s, (\S+) left\)", run.logs[0]
    )
    assert 0 < int(first) < 20
    assert 0 < int(second) < 20
    assert 0 < _seconds(left) < 60


def debugged(rank: int, folder: str) -> tuple[int, timedelta | None]:
    """Rank 1 stops in pdb; somebody types "c" after a while."""
    terminal, end = os.openpty()
    if rank == 1:
        os.dup2(end, 0)
        sys.stdin = os.fdopen(0)
    group_timeout: list[timedelta | None] = []

    def stop(*_: Any) -> None:
        group_timeout.append(_compat.read_group_timeout(_compat.process_groups()[0]))
        if rank == 1:
            person = threading.Timer(LONG_S, os.write, (terminal, b"c\n"))
            person.start()
            pdb.Pdb(nosigint=True).set_trace()
            person.join()

    return fit(folder, jobs.At("on_train_batch_end", stop, step=4), report_after=1.0), group_timeout[0]


def check_debugged(folder: Path) -> None:
    run = spawn(debugged, 2, args=(str(folder),)).check()
    assert run.results == {0: (8, timedelta(days=1)), 1: (8, timedelta(days=1))}
    assert "no progress for" in run.logs[0]
    assert "a rank stands in a debugger; nothing is ended" in run.logs[0]
    assert not list(folder.glob("distplus/verdict-*"))


# -- the tests ---------------------------------------------------------------------------------------------------------

# The names are those of folders too, of which a shell is told.
CHECKS: dict[str, Callable[[Path], None]] = {
    **{f"slow_{what}_ends_nothing": partial(check_slow, what) for what in SLOW},
    "slow_save_is_reported_with_its_bytes_and_the_next_one_with_the_time_left": check_slow_disk,
    "slow_data_that_comes_ends_nothing": check_slow_data,
    "rank_that_waits_says_how_fast_the_slow_one_moves_and_when_it_is_there": check_slow_validation,
    "rank_in_a_debugger_is_reported_and_goes_on_when_its_user_does": check_debugged,
    "with_on_hang_report_there_is_a_verdict_and_the_run_goes_on": check_only_reported,
}


ended = side_by_side(CHECKS)


@pytest.mark.parametrize("what", CHECKS)
def test_nobody_is_ended(what: str, ended: Runs) -> None:
    ended(what)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(10))
def test_eight_kinds_of_slowness_end_nothing(number: int, tmp_path: Path) -> None:
    for name, check in CHECKS.items():
        (tmp_path / name).mkdir()
        check(tmp_path / name)


# -- a rank that is slow in every step is named, on any strategy, with the part of the step in which it is slow --------

SLOW_S = 0.2
NUM_STEPS, STEPS = 4, 16
LITTLE_S, LITTLE_STEPS = 0.05, 52  # of which the first 50 have to do


def train(name: str, slow: int, is_early: bool, folder: str, monitors: str) -> list[float]:
    """One rank takes longer in each step, before its backward or in a callback behind the step."""

    def sleep(module: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(SLOW_S if is_early and module.global_rank == slow else 0)
        return loss

    callbacks: list[Callback] = []
    if not is_early:
        callbacks.append(jobs.At("on_train_batch_end", lambda *_: time.sleep(SLOW_S), rank=slow))
    if "both" in monitors:
        callbacks.append(RankDivergenceMonitor(on_straggler="ignore"))
    if "twice" in monitors:
        callbacks.append(StragglerMonitor())
    callbacks.append(StragglerMonitor(num_steps=NUM_STEPS))
    trainer = jobs.trainer(name, 2, folder, max_steps=STEPS, callbacks=callbacks, use_distributed_sampler=True)
    trainer.fit(jobs.Model(change=sleep), jobs.loader(num_samples=2 * 4 * STEPS))
    return [one.metrics().get("distplus/stragglers", 0.0) for one in callbacks if hasattr(one, "metrics")]


def train_a_little_slower(folder: str) -> None:
    """With what one line brings: 50 ms more in the data of rank 1."""
    data = DataLoader(SlowData(2 * 4 * LITTLE_STEPS, LITTLE_S / 4), batch_size=4)
    options = {"monitor": True, "max_steps": LITTLE_STEPS, "use_distributed_sampler": True}
    jobs.fit("ResilientDDP", 2, folder, data=data, **options)


def train_all(folder: str) -> dict[str, list[float]]:
    """Each place and each kind of strategy once, in the same processes."""
    train_a_little_slower(f"{folder}/little")
    runs = {
        "before": ("ResilientDDP", 1, True, "alone"),
        "after": ("ResilientFSDP", 0, False, "alone"),
        "beside": ("ResilientDDP", 1, True, "both"),
        "on stock": ("DDPStrategy", 1, False, "twice"),  # the last one: its store stays with the process
    }
    return {
        of: train(name, slow, is_early, f"{folder}/{of}", monitors)
        for of, (name, slow, is_early, monitors) in runs.items()
    }


def test_a_rank_for_which_its_peers_wait_in_every_step_is_named_with_the_part_of_the_step(tmp_path: Path) -> None:
    run = spawn(train_all, 2, args=(str(tmp_path),), deadline="120s").check()
    named = {"before": [1.0], "after": [1.0], "on stock": [1.0, 1.0], "beside": [1.0, 1.0]}
    assert run.results == {0: named, 1: named}
    for of, rank, is_early in (("before", 1, True), ("after", 0, False), ("on stock", 1, False)):
        events = [event for event in read_events(tmp_path / of / "distplus") if event["kind"] == "straggler"]
        assert {event["rank"] for event in events} == {0, 1}
        for event in events:
            assert event["ranks"] == [rank]
            assert event["wait_s"] > SLOW_S / 2
            assert (event["lead_s"] > event["wait_s"] / 2) == is_early
    little = [event for event in read_events(tmp_path / "little" / "distplus") if event["kind"] == "straggler"]
    assert {event["rank"] for event in little} == {0, 1}
    for event in little:
        assert (event["ranks"], event["part"]) == ([1], "data")
        assert event["global_step"] <= 50
        assert event["host"]
    assert "rank 1 is slow in every step: its peers wait " in run.logs[0]
    part = r": forward (\d+.\dx|\d+ ms above) the median on rank 1 \(host .+\), since step \d"
    assert re.search("in training_step, before the backward" + part, run.logs[0])
    assert "the optimizer, callbacks, logging" in run.logs[0]
    assert "Look there, and at its host: load " in run.logs[1]
    assert "data fetch" not in run.logs[0]  # the quiet form, which tells the ledger and the report only
