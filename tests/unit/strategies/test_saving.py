"""The staged copy: values of its moment, in the memory of the copy before it. What a ModelCheckpoint knows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus import ResilientDDP
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.errors import SaveFailed
from lightning_distplus.strategies.saving import BackgroundSave, SaveHooks, Staging
from lightning_distplus.timeouts import Phase, Timeouts
from tests.unit.checkpoint.conftest import saved


def staged(staging: Staging, *states: Any) -> list[Any]:
    staging.begin()
    copies = [staging.copy(state, place) for place, state in enumerate(states)]
    staging.end()
    return copies


def test_a_copy_lies_in_the_memory_of_the_one_before_and_holds_what_is_now() -> None:
    staging, weight = Staging(None), torch.zeros(4, 3)
    (first,) = staged(staging, {"state": {"weight": weight}, "lr": [0.1]})
    weight += 1
    assert first["state"]["weight"].tolist() == [[0.0] * 3] * 4
    # A state that is gathered anew for each save is at the same place, and another tensor.
    (second,) = staged(staging, {"state": {"weight": weight.clone()}, "lr": [0.2]})
    assert second["state"]["weight"].tolist() == [[1.0] * 3] * 4
    assert second["state"]["weight"].data_ptr() == first["state"]["weight"].data_ptr()
    assert (first["lr"], second["lr"]) == ([0.1], [0.2])


def test_states_of_one_save_do_not_share_memory_and_what_is_not_saved_any_more_is_freed() -> None:
    staging, weight = Staging(None), torch.ones(3)
    mine, yours = staged(staging, [weight], [weight * 2])
    assert (mine[0].tolist(), yours[0].tolist()) == ([1.0] * 3, [2.0] * 3)
    assert len(staging._kept) == 2
    staged(staging, [weight])
    assert len(staging._kept) == 1
    (other,) = staged(staging, [torch.ones(5, dtype=torch.int64)])
    assert (other[0].shape, other[0].dtype, len(staging._kept)) == ((5,), torch.int64, 1)


def test_types_attributes_strides_ties_and_values_that_are_no_tensors_are_kept() -> None:
    state = OrderedDict(a=torch.arange(6.0).view(2, 3).t(), step=torch.tensor(3.0), none=None, size=torch.Size([2]))
    state._metadata = {"version": 1}  # type: ignore[attr-defined]
    state["tied"], state["empty"], state["books"] = state["a"], torch.empty(0, 3), {"best": {1, 2}}
    state["weight"] = torch.nn.Parameter(torch.ones(2))
    ((copy, as_list),) = [tuple(staged(Staging(None), state, (1, [2.0])))]
    assert type(copy) is OrderedDict
    assert copy._metadata == {"version": 1}
    assert copy["a"].stride() == state["a"].stride()
    assert copy["tied"] is copy["a"]
    assert all(torch.equal(copy[key], state[key]) for key in ("a", "step", "empty", "weight"))
    assert not copy["weight"].requires_grad
    assert (copy["none"], copy["size"], copy["books"], as_list) == (None, torch.Size([2]), {"best": {1, 2}}, (1, [2.0]))
    assert copy["books"]["best"] is not state["books"]["best"]


def test_a_part_of_a_buffer_is_copied_without_the_rest_and_found_by_what_it_is_a_copy_of() -> None:
    staging, buffer = Staging(None), torch.arange(1000.0)
    ((copy,),) = staged(staging, [buffer[10:20]])
    assert copy.untyped_storage().nbytes() == 40
    assert staging.copy_of(buffer[10:20]) is copy
    assert staging.copy_of(buffer[10:21]) is None
    staging.begin()
    assert staging.copy_of(buffer[10:20]) is None


def test_a_tensor_in_memory_that_another_one_of_the_save_has_left_is_copied_anew() -> None:
    staging, addresses, buffer = Staging(None), [], torch.empty(3)
    staging.begin()
    assert [staging.copy(buffer.fill_(number), ("buffer", number))[0] for number in range(2)] == [0, 1]
    for number in range(20):
        gathered = torch.full((1000,), float(number))  # for this state alone, as engines gather them
        addresses.append(gathered.data_ptr())
        assert staging.copy([gathered], number)[0][0] == number
        del gathered
    assert len(set(addresses)) < len(addresses), "no memory was used again"


class Hooks(SaveHooks):
    """Saves of one process behind the training; those of ``failing_steps`` fail."""

    failing_steps: tuple[int, ...] = ()

    def _save(self, checkpoint: dict[str, Any], target: Any, storage_options: Any, writes: Any) -> BackgroundSave:
        step = checkpoint["global_step"]

        def work() -> None:
            if step in self.failing_steps:
                raise SaveFailed("No space left", [1])
            saved(Path(target), step)

        return BackgroundSave(str(target), step, work)


class Job:
    """A fit as Lightning's ModelCheckpoint sees it, which saves after each step."""

    def __init__(self, folder: Path, failing_steps: tuple[int, ...], **settings: Any) -> None:
        self.strategy = strategy = ResilientDDP(async_save=True, parallel_devices=[torch.device("cpu")])
        strategy.cluster_environment = LightningEnvironment()
        strategy.loads = SimpleNamespace(follow=lambda path: None, group=lambda: None)  # type: ignore[assignment]
        strategy.reduce_boolean_decision = lambda decision, all=True: decision  # type: ignore[method-assign] # noqa: A006
        self.hooks = strategy.saves = Hooks(strategy, "continue")
        self.hooks.failing_steps, self.hooks._moves = failing_steps, threading.Lock()
        self.saver = ModelCheckpoint(folder, filename="{step}", auto_insert_metric_name=False, **settings)
        self.other = ModelCheckpoint(save_last=True)
        self.trainer: Any = SimpleNamespace(
            strategy=strategy,
            checkpoint_callbacks=[self.saver, self.other],
            loggers=[],
            is_global_zero=True,
            current_epoch=0,
            ckpt_path=None,
            global_step=0,
            save_checkpoint=self.save,
        )
        self.hooks.failing.begin(self.trainer)

    def save(self, path: str, weights_only: bool) -> None:
        self.hooks.save({"global_step": self.trainer.global_step}, path, None)

    def step(self, score: float) -> None:
        self.trainer.global_step += 1
        self.trainer.callback_metrics = {"score": torch.tensor(score)}
        candidates = self.saver._monitor_candidates(self.trainer)
        self.saver._save_topk_checkpoint(self.trainer, candidates)
        self.saver._save_last_checkpoint(self.trainer, candidates)

    def books(self) -> tuple[str, list[str]]:
        return Path(self.saver.best_model_path).stem, sorted(Path(path).stem for path in self.saver.best_k_models)


TOP = {"monitor": "score", "mode": "max", "save_top_k": 2}


@pytest.mark.parametrize(
    ("failing_steps", "settings", "known", "left"),
    [
        ((3,), TOP, [("2", ["1", "2"]), ("4", ["2", "4"])], "24"),
        ((3, 4), TOP, [("2", ["1", "2"]), ("2", ["1", "2"])], "12"),
        ((1,), TOP, [("3", ["2", "3"]), ("4", ["3", "4"])], "34"),
        ((2,), TOP, [("3", ["1", "3"]), ("4", ["3", "4"])], "34"),
        ((3,), {}, [("2", []), ("4", [])], "4"),
        ((3, 4), {}, [("2", []), ("2", [])], "2"),
    ],
)
def test_what_a_failed_save_behind_the_training_leaves_known_is_there_and_nothing_else(
    failing_steps: tuple[int, ...], settings: dict[str, Any], known: Any, left: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, failing_steps, **settings)
    job.other.last_model_path = "of its own"
    for step in range(1, 4):
        job.step(score=step)  # while the save before it is in flight
    job.hooks.settle()
    assert job.books() == known[0]
    job.hooks.save({"global_step": 0}, str(tmp_path / "of the user.pt"), None)
    job.hooks.settle()
    assert all((tmp_path / f"{name}.ckpt").exists() for name in (known[0][0], *known[0][1]))
    job.step(score=4)
    job.hooks.settle()
    assert job.books() == known[1]
    assert job.other.last_model_path == "of its own"
    refusal = pytest.raises(SaveFailed, match=r"2 saves failed in this run.*No space left")
    with refusal if 4 in failing_steps else nullcontext():
        job.strategy.require_saved()
    assert "".join(sorted(path.stem for path in tmp_path.glob("*.ckpt"))) == left


def test_a_link_to_another_checkpoint_leaves_what_the_save_in_flight_stands_in_for(tmp_path: Path) -> None:
    job = Job(tmp_path, failing_steps=(2,))
    job.strategy.barrier = lambda *_: None  # type: ignore[method-assign]
    saved(tmp_path / "other.ckpt", 1)
    for step in (1, 2):
        job.step(score=step)
    job.hooks.link(job.trainer, str(tmp_path / "other.ckpt"), str(tmp_path / "last.ckpt"))
    job.hooks.settle()
    assert job.books() == ("1", [])
    assert (tmp_path / "1.ckpt").exists()


def test_a_last_checkpoint_whose_retry_succeeds_keeps_its_name(tmp_path: Path) -> None:
    job = Job(tmp_path, failing_steps=(1,), save_top_k=0, save_last=True)
    for step in range(1, 4):
        job.step(score=step)
        job.hooks.settle() if step == 3 else None
        assert job.saver.last_model_path == str(tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]


def test_the_last_valid_checkpoint_goes_when_another_one_is_committed(tmp_path: Path) -> None:
    job, paths = Job(tmp_path, ()), [tmp_path / "1.ckpt", tmp_path / "2.ckpt"]
    for path in paths:
        job.hooks.save({"global_step": 1}, path, None)
        job.hooks.settle()
        job.hooks.remove(paths[0])
        assert path.exists()
    assert not paths[0].exists()


def test_what_cannot_be_removed_ends_no_run_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, stuck, obstacle = Job(tmp_path, ()), tmp_path / "other" / "old.ckpt", tmp_path / "other" / ".distplus"
    stuck.mkdir(parents=True)
    obstacle.touch()  # in the place of the folder in which a checkpoint lies on its way out
    job.hooks.remove(stuck)
    assert stuck.exists()
    assert f"{stuck} cannot be removed" in caplog.text
    obstacle.unlink()
    job.hooks.save({"global_step": 1}, tmp_path / "1.ckpt", None)
    job.hooks.settle()
    assert not stuck.exists()


def test_a_run_awaits_no_save_of_one_that_has_failed_before_it(tmp_path: Path) -> None:
    job = Job(tmp_path, failing_steps=(1,))
    job.step(score=1)
    job.hooks.end(has_failed=True)
    assert not job.hooks.has_ended_behind
    job.hooks.failing.begin(job.trainer)
    job.hooks.settle()
    assert job.strategy.num_failed_saves == 0


@pytest.mark.parametrize(("validation", "after"), [("2h", Phase.VALIDATION), ("30m", Phase.CHECKPOINT)])
def test_a_save_amid_a_phase_with_a_longer_deadline_gives_that_back(validation: str, after: Phase) -> None:
    strategy, during = ResilientDDP(timeout=Timeouts(validation=validation, checkpoint="1h")), []
    strategy.phases.enter(Phase.VALIDATION)
    strategy.saves.announced(lambda: during.append(strategy.phases.current))()
    assert (during, strategy.phases.current) == ([Phase.CHECKPOINT], after)


@pytest.mark.parametrize("state", [{"at": 3}, {"at": float("nan")}, {"at": torch.ones(1)}, [3]])
def test_a_manifest_holds_the_state_of_the_data_where_it_can(state: Any, tmp_path: Path) -> None:
    job, data = Job(tmp_path, ()), SimpleNamespace()
    job.strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(datamodule=data))
    job.strategy.loads.parent = None
    info = job.hooks._info({"SimpleNamespace": state})
    commit(tmp_path / "a.ckpt", lambda stage: stage.write_text("weights"), info)
    assert read_manifest(tmp_path / "a.ckpt").data == (state if state == {"at": 3} else None)
