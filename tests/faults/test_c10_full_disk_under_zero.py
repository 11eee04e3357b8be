"""A disk that is full at any write of a save under ZeRO: all hear of it, the old checkpoint stays, training goes on.

Row C10.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_distplus import Timeouts, newest_valid
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.folders import disk

MAX_SAVES = 40
PAGE_BYTES = 4096


class Saves(Callback):
    """Saves once while all is well, and then in every step, on a disk that fails one write later each time."""

    def __init__(self, folder: str, disk: Any) -> None:
        self.folder, self.disk = Path(folder), disk
        self.failed: list[bool] = []
        self.newest = self.folder / "1.ckpt"

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy, number = trainer.strategy, trainer.global_step
        if number > 1:
            self.disk.fill(number - 1)
            strategy.barrier()
        before = strategy.num_failed_saves
        trainer.save_checkpoint(self.folder / f"{number}.ckpt")
        strategy.saves.settle()
        self.disk.empty()
        strategy.barrier()
        if number == 1:
            return
        self.failed.append(strategy.num_failed_saves > before)
        if not self.failed[-1]:
            self.newest = self.folder / f"{number}.ckpt"
        assert newest_valid(self.folder) == self.newest
        if not self.failed[-1] and self.disk.is_large_enough(strategy):
            trainer.should_stop = True


class NoRoomForOneFile:
    """A disk of one rank that has no room for the n-th file or folder which is made in a folder, and for all others."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.rank, self.left, self.has_fired = folder, rank, 0, False
        self.refused: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "os.mkdir" or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if self.left and writes and str(arguments[0]).startswith(self.folder):
            self.left -= 1
            if self.left == 0:
                self.has_fired = True
                self.refused.append(Path(arguments[0]).name)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))

    def fill(self, number: int) -> None:
        self.left, self.has_fired = (number if self.is_of_this_rank() else 0), False

    def is_of_this_rank(self) -> bool:
        return int(os.environ["RANK"]) == self.rank

    def empty(self) -> None:
        self.left = 0

    def is_large_enough(self, strategy: Any) -> bool:
        """Whether nothing was refused; a folder that is there already is no failure of the save."""
        return not strategy.broadcast(self.has_fired, src=self.rank)


class NoRoomForPages:
    """A disk that has room for n - 1 pages, filled by rank 0."""

    def __init__(self, folder: str, rank: int) -> None:
        self.ballast = Path(folder) / "somebody's.log"

    def fill(self, number: int) -> None:
        if int(os.environ["RANK"]) == 0:
            with self.ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(PAGE_BYTES)) == PAGE_BYTES:
                        pass
                except OSError:
                    os.ftruncate(file.fileno(), max(0, file.tell() - (number - 1) * PAGE_BYTES))

    def empty(self) -> None:
        self.ballast.unlink(missing_ok=True)

    def is_large_enough(self, strategy: Any) -> bool:
        return True


def save_on_a_failing_disk(
    kind: type[NoRoomForOneFile | NoRoomForPages], folder: str, root: str, rank: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    disk = kind(folder, rank)
    saves = Saves(folder, disk)
    strategy = jobs.strategy("ResilientDeepSpeed", timeout=Timeouts(checkpoint="100s"), **arguments)
    trainer = jobs.trainer(strategy, 2, root, max_steps=MAX_SAVES, callbacks=[saves])
    trainer.fit(jobs.Model(), jobs.loader(num_samples=4 * MAX_SAVES))
    return {"failed": saves.failed, "refused": getattr(disk, "refused", []), "step": trainer.global_step}


@pytest.mark.parametrize(
    ("rank", "arguments", "files"),
    [
        (
            0,
            {"stage": 2},
            {"mp_rank_00_model_states.pt", "zero_to_fp32.py", "zero_to_torch.py", "latest"},
        ),
        (1, {"stage": 3}, {"zero_pp_rank_1_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"}),
        (0, {"stage": 1, "async_save": True}, {"mp_rank_00_model_states.pt", "zero_to_fp32.py", "latest"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_any_file_of_a_save_may_fail(rank: int, arguments: dict[str, Any], files: set[str], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    call = (NoRoomForOneFile, str(folder), str(tmp_path), rank, arguments)
    result = spawn(save_on_a_failing_disk, 2, args=call, deadline="150s").check()
    assert files <= set(result.results[rank]["refused"])
    for outcome in result.results.values():
        assert outcome["failed"] == result.results[0]["failed"]
        assert sum(outcome["failed"]) >= len(files)
        assert outcome["step"] < MAX_SAVES
    assert newest_valid(folder) == folder / f"{result.results[0]['step']}.ckpt"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk(tmp_path / "disk", "size=2m") as folder:
        yield folder


def test_a_disk_may_be_full_at_any_page_of_a_save(small_disk: Path, tmp_path: Path) -> None:
    call = (NoRoomForPages, str(small_disk), str(tmp_path), 0, {"stage": 2})
    result = spawn(save_on_a_failing_disk, 2, args=call, deadline="150s").check()
    for outcome in result.results.values():
        assert outcome["failed"] == [True] * (len(outcome["failed"]) - 1) + [False]
        assert len(outcome["failed"]) > 10, "more than one page of the recovery scripts has failed"
    assert "No space left on device" in result.logs[0]
    assert newest_valid(small_disk) == small_disk / f"{result.results[0]['step']}.ckpt"
