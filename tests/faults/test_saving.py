"""Saving and loading when something is wrong: all ranks hear of it, and the previous checkpoint stays the newest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_distplus import newest_valid
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch, PeerFailed
from lightning_distplus.testing import spawn
from tests.distributed import jobs


def arguments_of(name: str) -> dict[str, Any]:
    return {"stage": 2} if "DeepSpeed" in name else {}


class FailsToPickle:
    """State that only one rank cannot write."""

    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


class BadSave(Callback):
    """Puts something that cannot be written into the checkpoint of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step == 4 and trainer.global_rank == self.rank:
            checkpoint["bad"] = FailsToPickle()


def save_twice(name: str, folder: str) -> tuple[str, list[int]]:
    trainer = jobs.trainer(
        jobs.strategy(name, **arguments_of(name)), 2, folder, max_steps=2, callbacks=[BadSave(rank=0)]
    )
    model, path = jobs.Model(), str(Path(folder) / "last.ckpt")
    trainer.fit(model, jobs.loader())
    trainer.save_checkpoint(path)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model, jobs.loader())
    try:
        trainer.save_checkpoint(path)
    except PeerFailed as error:
        return str(error), error.ranks
    return "saved", []


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_previous_one(name: str, tmp_path: Path) -> None:
    run = spawn(save_twice, 2, args=(name, str(tmp_path)), deadline="60s").check()
    for message, ranks in run.results.values():
        assert ranks == [0]
        assert "No space left on device" in message
    assert newest_valid(tmp_path) == tmp_path / "last.ckpt"
    report = spawn(load, 2, args=(name, name, str(tmp_path / "last.ckpt"), str(tmp_path))).check()
    assert set(report.results.values()) == {("resumed", 2)}


def save(name: str, path: str, folder: str) -> None:
    trainer = jobs.trainer(jobs.strategy(name, **arguments_of(name)), 2, folder, max_steps=2)
    trainer.fit(jobs.Model(), jobs.loader())
    trainer.save_checkpoint(path)


class Wider(jobs.Model):
    """Another model: one layer more."""

    def configure_model(self) -> None:
        is_new = self.net is None
        super().configure_model()
        if is_new:
            self.extra = torch.nn.Linear(3, 3)


def load(name: str, saved_by: str, path: str, folder: str, wider: bool = False) -> tuple[str, Any]:
    trainer = jobs.trainer(jobs.strategy(name, **arguments_of(name)), 2, folder, max_steps=2)
    try:
        trainer.fit(Wider() if wider else jobs.Model(), jobs.loader(), ckpt_path=path)
    except (CheckpointCorrupt, CheckpointMismatch) as error:
        return type(error).__name__, str(error)
    return "resumed", trainer.global_step


def saved(name: str, tmp_path: Path) -> Path:
    path = tmp_path / "two.ckpt"
    spawn(save, 2, args=(name, str(path), str(tmp_path)), deadline="60s").check()
    return path


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_changed_byte_is_refused_on_all_ranks_by_file(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    payload = path if path.is_file() else max((file for file in path.rglob("*") if file.is_file()), key=size_of)
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)
    run = spawn(load, 2, args=(name, name, str(path), str(tmp_path))).check()
    for kind, message in run.results.values():
        assert kind == "CheckpointCorrupt"
        assert payload.name in message
    assert payload.read_bytes() == data


def size_of(file: Path) -> int:
    return file.stat().st_size


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("ResilientFSDP", "ResilientDeepSpeed"), ("ResilientDeepSpeed", "ResilientModelParallel")],
)
def test_a_checkpoint_of_another_strategy_is_refused_by_name(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    path = saved(saved_by, tmp_path)
    run = spawn(load, 2, args=(loaded_by, saved_by, str(path), str(tmp_path))).check()
    for kind, message in run.results.values():
        assert kind == "CheckpointMismatch"
        assert saved_by in message
        assert loaded_by in message


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    run = spawn(load, 2, args=(name, name, str(path), str(tmp_path), True)).check()
    for kind, message in run.results.values():
        assert kind == "CheckpointMismatch", message
        assert "extra" in message


def test_a_missing_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    run = spawn(load, 2, args=("ResilientFSDP", "", str(tmp_path / "none.ckpt"), str(tmp_path))).check()
    for kind, message in run.results.values():
        assert kind == "CheckpointMismatch"
        assert "none.ckpt" in message


def test_a_checkpoint_without_a_manifest_loads_and_is_called_unverified(tmp_path: Path) -> None:
    path = saved("ResilientFSDP", tmp_path)
    shutil.rmtree(path / ".distplus")
    run = spawn(load, 2, args=("ResilientFSDP", "", str(path), str(tmp_path))).check()
    assert set(run.results.values()) == {("resumed", 2)}
    assert "unverified" in run.logs[0]
