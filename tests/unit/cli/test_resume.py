from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus.checkpoint import SaveInfo, gather_alone
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.cli.training import checkpoint_folder, newest_checkpoint
from lightning_distplus.errors import CheckpointCorrupt


def trainer(root: Path, *savers: ModelCheckpoint) -> Trainer:
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=root, callbacks=list(savers), **options)


def save(path: Path, step: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    info = SaveInfo(global_step=step, epoch=0, strategy="test")
    commit(path, lambda stage: stage.write_bytes(b"weights"), info=info, gather=gather_alone, rank=0)
    return path


def test_auto_looks_where_the_first_model_checkpoint_saves(tmp_path: Path) -> None:
    savers = [ModelCheckpoint(dirpath=tmp_path / "a"), ModelCheckpoint(dirpath=tmp_path / "b", monitor="x")]
    assert checkpoint_folder(trainer(tmp_path, *savers)) == tmp_path / "a"


def test_a_model_checkpoint_without_a_folder_gets_the_one_that_auto_looks_in(tmp_path: Path) -> None:
    saver = ModelCheckpoint()
    assert checkpoint_folder(trainer(tmp_path, saver)) == tmp_path / "checkpoints"
    assert saver.dirpath == str(tmp_path / "checkpoints")


def test_auto_takes_the_newest_valid_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "a.ckpt", 2)
    newest = save(tmp_path / "checkpoints" / "b.ckpt", 3)
    save(tmp_path / "checkpoints" / "c.ckpt", 4).write_bytes(b"torn")
    assert newest_checkpoint(trainer(tmp_path)) == newest


def test_auto_starts_anew_where_nothing_is_there(tmp_path: Path) -> None:
    assert newest_checkpoint(trainer(tmp_path)) is None
    (tmp_path / "checkpoints").mkdir()
    assert newest_checkpoint(trainer(tmp_path)) is None


def test_auto_refuses_to_start_anew_over_checkpoints_that_it_cannot_trust(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints" / "torn.ckpt", 4).write_bytes(b"torn")
    with pytest.raises(CheckpointCorrupt, match=r"torn\.ckpt.*--allow_fresh"):
        newest_checkpoint(trainer(tmp_path))
    assert newest_checkpoint(trainer(tmp_path), allow_fresh=True) is None


def test_auto_refuses_a_foreign_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"foreign")
    with pytest.raises(CheckpointCorrupt, match="none of them committed"):
        newest_checkpoint(trainer(tmp_path))
