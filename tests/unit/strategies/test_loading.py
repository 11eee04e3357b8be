from __future__ import annotations

from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_distplus import ResilientDDP
from lightning_distplus.checkpoint import verify
from lightning_distplus.checkpoint.copies import Copies
from lightning_distplus.errors import CheckpointCorrupt
from lightning_distplus.events import EventLog
from lightning_distplus.strategies.loading import Search, choose_checkpoint, newest_checkpoint, settle_checkpoint_folder
from lightning_distplus.world import World
from tests.unit.checkpoint.conftest import DEADLINE_S, ThreadGather, saved


def trainer(root: Path, *savers: ModelCheckpoint, **options: Any) -> Trainer:
    options |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=root, callbacks=list(savers), **options)


def test_auto_looks_where_the_first_model_checkpoint_saves(tmp_path: Path) -> None:
    for second in (ModelCheckpoint(dirpath=tmp_path / "b", monitor="x"), ModelCheckpoint(monitor="x")):
        savers = ModelCheckpoint(dirpath=tmp_path / "a"), second
        assert settle_checkpoint_folder(trainer(tmp_path, *savers)) == tmp_path / "a"


def test_a_model_checkpoint_without_a_folder_gets_the_one_that_auto_looks_in(tmp_path: Path) -> None:
    saver = ModelCheckpoint()
    assert settle_checkpoint_folder(trainer(tmp_path, saver)) == tmp_path / "checkpoints"
    assert saver.dirpath == str(tmp_path / "checkpoints")


def test_auto_takes_the_newest_valid_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints" / "a.ckpt", 2)
    newest = saved(tmp_path / "checkpoints" / "b.ckpt", 3)
    saved(tmp_path / "checkpoints" / "c.ckpt", 4).write_bytes(b"torn")
    assert newest_checkpoint(trainer(tmp_path)) == newest


def test_auto_refuses_to_start_anew_over_checkpoints_that_it_cannot_trust(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints" / "torn.ckpt", 4).write_bytes(b"torn")
    with pytest.raises(CheckpointCorrupt, match=r"torn\.ckpt.*--allow_fresh"):
        newest_checkpoint(trainer(tmp_path))
    assert newest_checkpoint(trainer(tmp_path), allow_fresh=True) is None


def test_auto_refuses_a_foreign_checkpoint_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"foreign")
    with pytest.raises(CheckpointCorrupt, match="none of them committed"):
        newest_checkpoint(trainer(tmp_path))


def resilient(root: Path, *savers: ModelCheckpoint, fn: TrainerFn = TrainerFn.FITTING, **options: Any) -> Trainer:
    made = trainer(root, *savers, strategy=ResilientDDP(**options))
    made.state.fn = fn
    return made


def test_auto_in_a_script_is_what_it_is_on_the_command_line(tmp_path: Path) -> None:
    made = resilient(tmp_path)
    assert choose_checkpoint(made, "auto") is None
    newest = saved(tmp_path / "checkpoints" / "a.ckpt", 2)
    assert choose_checkpoint(made, "auto") == str(newest)
    assert made.strategy.search == Search(tmp_path / "checkpoints")
    assert choose_checkpoint(made, "last") == "last"
    assert choose_checkpoint(made, None) is None
    newest.write_bytes(b"torn")
    with pytest.raises(CheckpointCorrupt, match="in a script without ckpt_path"):
        choose_checkpoint(made, "auto")


def test_an_evaluation_without_any_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ckpt_path auto found no checkpoint to test"):
        choose_checkpoint(resilient(tmp_path, fn=TrainerFn.TESTING), "auto")


def test_other_strategies_are_left_alone(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints" / "a.ckpt", 2)
    assert choose_checkpoint(trainer(tmp_path), "auto") == "auto"


def test_auto_takes_a_copy_where_the_folder_has_damaged_ones_only(tmp_path: Path) -> None:
    url, folder = f"file://{tmp_path}/durable", tmp_path / "checkpoints"
    plane: Any = SimpleNamespace(world=World(rank=0, size=1), gather_json=lambda name, mine, deadline: [mine])
    newest = saved(folder / "a.ckpt", 2)
    for is_copied in (False, True):
        if is_copied:
            saved(newest, 3)
            Copies(url).put(newest)
        newest.write_bytes(b"torn")
        made = resilient(tmp_path, copy_to=url)
        loads = made.strategy.loads
        assert choose_checkpoint(made, "auto") is None
        loads.begin(plane, Copies(url))
        if is_copied:
            assert loads.agree_on_resume(None) == str(newest)
            assert verify(newest).ok
        else:
            with pytest.raises(CheckpointCorrupt, match=r"a\.ckpt.*--allow_fresh"):
                loads.agree_on_resume(None)


def test_a_rank_that_found_nothing_searches_with_the_others(tmp_path: Path) -> None:
    """As on a host whose folders are its own: it would begin anew, and wait for nobody."""
    path, gathers, chosen = saved(tmp_path / "a.ckpt", 2), ThreadGather(2), {}

    def resume(rank: int) -> None:
        world, gather = World(rank=rank, size=2), gathers.of(rank)
        plane: Any = SimpleNamespace(world=world, gather_json=lambda name, mine, deadline: gather(name, mine))
        strategy = ResilientDDP()
        strategy.search = Search(tmp_path) if rank == 0 else None
        strategy.loads.begin(plane, None)
        chosen[rank] = strategy.loads.agree_on_resume(path if rank == 0 else None)

    ranks = [Thread(target=resume, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(DEADLINE_S)
    assert chosen == {0: str(path), 1: str(path)}


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"DISTPLUS_RUN_ID": "job", "DISTPLUS_ATTEMPT": "1", "DISTPLUS_RESUME": "1"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def first_attempt(root: Path, *paths: Path) -> None:
    with EventLog(root / "distplus", 0, attempt=0, run_id="job") as events:
        events.write("start", function="fit")
        for path in paths:
            events.write("saved", path=str(path), global_step=2)


def test_a_restarted_script_that_names_no_checkpoint_gets_that_of_its_job(
    restarted: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = saved(tmp_path / "version_0" / "b.ckpt", 9)
    mine = saved(tmp_path / "version_0" / "a.ckpt", 2)
    first_attempt(tmp_path, mine)
    of_others = ModelCheckpoint(dirpath=tmp_path / "best", monitor="x")
    savers = ModelCheckpoint(), of_others
    made = resilient(tmp_path, *savers)
    assert choose_checkpoint(made, None) == str(mine)
    assert f"goes on from {mine}" in caplog.text
    assert made.strategy.search == Search(mine.parent, but=(foreign,))
    assert (savers[0].dirpath, of_others.dirpath) == (str(mine.parent), str(tmp_path / "best"))
    for name, value in {"DISTPLUS_ATTEMPT": "0", "DISTPLUS_RESUME": "0", "DISTPLUS_RUN_ID": "another"}.items():
        caplog.clear()
        with restarted.context() as changed:
            changed.setenv(name, value)
            assert choose_checkpoint(resilient(tmp_path), None) is None
            assert ("starts anew" in caplog.text) == (value == "another")
    assert choose_checkpoint(resilient(tmp_path, fn=TrainerFn.VALIDATING), None) is None


def test_a_restarted_script_without_a_checkpoint_starts_anew_and_says_so(
    restarted: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_attempt(tmp_path)
    saver = ModelCheckpoint()
    assert choose_checkpoint(resilient(tmp_path, saver), None) is None
    assert saver.dirpath is None
    assert "starts anew: this job has no checkpoint yet" in caplog.text
