"""Row S13: ranks that multiprocessing starts, fits of Lightning's strategies and ours in one process, many fits."""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.processes import start


class Model(jobs.Model):
    """With its data, so that no tensor is pickled: not every machine lets processes share its memory."""

    def train_dataloader(self) -> Any:
        return jobs.loader()

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            print("losses", *self.losses, flush=True)


def main(start_method: str, folder: str) -> None:
    """A fit of three steps and its continuation, whose ranks this process starts."""
    for steps, load in ((3, None), (6, "last")):
        saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=3)
        options = {"start_method": start_method, "timeout": "60s", "max_steps": steps, "callbacks": [saver]}
        jobs.trainer("ResilientDDP", 2, folder, **options).fit(Model(), ckpt_path=load)


@pytest.mark.deadline(300)
@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])  # ten imports
def test_ranks_that_multiprocessing_starts_train_and_resume(start_method: str, tmp_path: Path) -> None:
    run = start("-m", "tests.faults.test_s13_lifecycle", start_method, tmp_path)
    shown, _ = run.communicate(timeout=280)
    assert run.returncode == 0, shown
    first, second = (line.split()[1:] for line in shown.splitlines() if line.startswith("losses"))
    assert (len(first), len(second)) == (3, 3)
    assert not set(first) & set(second)


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_strategy_of_ours_can_be_pickled_before_its_run(name: str) -> None:
    strategy = pickle.loads(pickle.dumps(jobs.strategy(name, timeout="auto", copy_to="file:///x")))
    strategy.marks.set("here")
    assert strategy.marks.read().phase == strategy.phases.current.value


def fits(names: list[str], folder: str) -> list[list[str]]:
    """The losses of fits after each other in this process."""
    seen = []
    for name in names:
        model = jobs.Model()
        jobs.fit(name, 2, folder, model, max_steps=2)
        seen.append(model.losses)
    return seen


def test_fits_of_lightnings_strategy_and_of_ours_follow_each_other(tmp_path: Path) -> None:
    names = ["DDPStrategy", "ResilientDDP", "ResilientDDP", "DDPStrategy", "ResilientDDP"]
    for seen in spawn(fits, 2, args=(names, str(tmp_path)), deadline="60s").check().results.values():
        assert len(seen) == len(names)
        assert all(losses == seen[0] for losses in seen), seen


def fit_twice(folder: str) -> None:
    options = {"logger": CSVLogger(folder), "callbacks": [ModelCheckpoint()], "max_epochs": 1}
    trainer, model = jobs.trainer("ResilientDDP", 1, folder, **options), jobs.Model()
    trainer.fit(model, jobs.loader(8))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, jobs.loader(8))


def test_the_ledger_says_where_auto_looks_also_of_a_second_fit_whose_folder_lightning_has_named(tmp_path: Path) -> None:
    spawn(fit_twice, 1, args=(str(tmp_path),), deadline="60s").check()
    events = read_events(tmp_path / "distplus")
    looks = [event["auto_folder"] for event in events if event["kind"] == "start"]
    assert looks == [str(tmp_path / "checkpoints")] * 2
    saved = {Path(event["path"]).parent for event in events if event["kind"] == "saved"}
    assert saved == {tmp_path / "lightning_logs" / "version_0" / "checkpoints"}


def held() -> Counter[str]:
    """The files and threads of this process."""
    gc.collect()
    found = Counter(thread.name for thread in threading.enumerate())
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[re.sub(r"\d+", "#", str(link.readlink()))] += 1
    return found


def kept(num_fits: int, folder: str) -> Counter[str]:
    """What this process holds after the last fit beyond what it held after the third."""
    fits(["ResilientDDP"] * 3, folder)
    early = held()
    fits(["ResilientDDP"] * (num_fits - 3), folder)
    until = time.monotonic() + 10
    while (late := held() - early) and time.monotonic() < until:
        time.sleep(0.1)  # the server of a store closes a connection a moment after its client
    return late


@pytest.mark.parametrize("num_fits", [12, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.deadline(1500)])])
def test_fits_leave_no_descriptor_and_no_thread(num_fits: int, tmp_path: Path) -> None:
    run = spawn(kept, 2, args=(num_fits, str(tmp_path)), deadline=60 + num_fits)
    assert run.check().results == {0: Counter(), 1: Counter()}


if __name__ == "__main__":
    main(*sys.argv[1:])
