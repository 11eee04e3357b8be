"""A checkpoint is replaced, rotated away, or killed amid that: the old or the new one is there, whole, and found.

Rows C5 and C9.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus import newest_valid, verify
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.testing import spawn
from tests.distributed import jobs

MOVES = ("os.rename", "distplus.exchange")


def strike(folder: Path, *, when: str, step: int, can_exchange: bool) -> None:
    """Kills this process at the move that brings ``last.ckpt`` of a step, before it or before the next move."""
    target, moved = str(folder / "last.ckpt"), False

    def hook(event: str, arguments: Any) -> None:
        nonlocal moved
        if event not in MOVES:
            return
        if event == "distplus.exchange" and not can_exchange:
            raise OSError(errno.EINVAL, "this file system does not exchange")
        is_due = newest_step(folder) == step
        if (is_due and when == "before" and str(arguments[1]) == target) or (moved and when == "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        moved |= is_due and str(arguments[1]) == target

    sys.addaudithook(hook)


def newest_step(folder: Path) -> int:
    path = folder / "newest.ckpt"
    return read_manifest(path).global_step if path.exists() else 0


def train(rank: int, name: str, folder: str, when: str, can_exchange: bool) -> None:
    """Replaces newest.ckpt and last.ckpt at each second step, until rank 0 is killed at step 4."""
    saver = ModelCheckpoint(folder, filename="newest", every_n_train_steps=2, save_last=True)
    trainer = jobs.trainer(name, 2, folder, max_steps=8, callbacks=[saver])
    if rank == 0:
        strike(Path(folder), when=when, step=4, can_exchange=can_exchange)
    trainer.fit(jobs.Model(), jobs.loader())


def resume(rank: int, name: str, folder: str) -> list[int]:
    """The step from which each choice goes on."""
    found = []
    for choice in ("last", f"{folder}/last.ckpt", "auto"):
        saver = ModelCheckpoint(folder, filename="other", every_n_train_steps=100)
        trainer = jobs.fit(name, 2, folder, (model := jobs.Model()), ckpt_path=choice, max_steps=6, callbacks=[saver])
        found.append(trainer.global_step - len(model.losses))
    return found


@pytest.mark.parametrize(
    ("name", "when", "can_exchange"),
    [("ResilientDDP", "after", True), ("ResilientFSDP", "before", True), ("ResilientFSDP", "before", False)],
    ids=["a file", "a folder", "a folder where names cannot be exchanged"],
)
def test_killed_while_it_is_replaced_the_last_checkpoint_is_found_by_each_choice(
    name: str, when: str, can_exchange: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    run = spawn(train, 2, args=(name, str(folder), when, can_exchange), deadline="60s")
    assert run.exit_codes[0] == -signal.SIGKILL, run.logs[0]
    assert verify(folder / "last.ckpt").ok == can_exchange
    found = newest_valid(folder)
    assert found is not None
    assert read_manifest(found).global_step == 4
    run = spawn(resume, 2, args=(name, str(folder)), deadline="60s").check()
    for steps in run.results.values():
        assert set(steps) <= {2, 4}, run.logs[0]


def rotate_below_a_link(rank: int, folder: str, is_behind: bool) -> tuple[int, int, list[str]]:
    """How often rank 0 looked at last.ckpt, how often it led nowhere, and what is left."""
    looks, absences = 0, 0
    last = Path(folder) / "last.ckpt"

    def hook(event: str, _: Any) -> None:
        nonlocal looks, absences
        if event in (*MOVES, "os.remove", "shutil.rmtree") and looks + absences + os.path.lexists(last):
            looks += 1
            absences += not last.exists()

    if rank == 0:
        sys.addaudithook(hook)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    strategy = jobs.strategy("ResilientFSDP", async_save=is_behind)
    jobs.fit(strategy, 2, folder, max_steps=4, callbacks=[saver])
    return looks, absences, sorted(path.name for path in Path(folder).glob("*.ckpt"))


@pytest.mark.parametrize("is_behind", [False, True], ids=["at once", "behind"])
def test_link_to_the_last_checkpoint_leads_to_one_while_the_one_before_is_rotated_away(
    is_behind: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    run = spawn(rotate_below_a_link, 2, args=(str(folder), is_behind), deadline="60s").check()
    looks, absences, left = run.results[0]
    assert looks > 10
    assert absences == 0
    assert left == ["last.ckpt", "step=4.ckpt"]
    assert read_manifest(folder / "last.ckpt").global_step == 4
