"""Row R10: a run that was stopped inside its last epoch is resumed with the limit lifted, and trains the rest of it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.distributed.iterable_jobs import Counting, iterable_data
from tests.distributed.resume_jobs import Diary, Numbered, final_counters, fit, map_data
from tests.pairs import kept


def stop(trainer: pl.Trainer, *_: Any) -> None:
    trainer.should_stop = True


def run_out_of_time(trainer: pl.Trainer, *_: Any) -> None:
    timer = next(one for one in trainer.callbacks if type(one).__name__ == "Timer")
    timer._duration = 0.0


class Scheduled(Diary):
    """Changes its learning rate at the end of each epoch, in two ways, and notes it with every step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        bar = self.trainer.progress_bar_callback.train_progress_bar
        self.note("learning rate", self.optimizers().param_groups[0]["lr"], bar.n, bar.total)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("loss", 1.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [steps, {"scheduler": plateau, "monitor": "loss"}]


def last_of(folder: Path, *callbacks: pl.Callback) -> dict[str, Any]:
    saver = ModelCheckpoint(dirpath=folder, save_last=True, save_on_train_epoch_end=True)
    return {"callbacks": [*callbacks, saver, TQDMProgressBar()]}


def stop_by(how: str, step: int, folder: Path) -> dict[str, Any]:
    """After so many steps, or with so many under way when the time is over."""
    if how == "max_steps":
        return {**last_of(folder), "max_steps": step}
    if how == "should_stop":
        return last_of(folder, jobs.At("on_train_batch_end", stop, step=step))
    out_of_time = jobs.At("on_train_batch_start", run_out_of_time, step=step - 1)
    return {**last_of(folder, out_of_time), "max_time": timedelta(hours=1)}


def trained(run: Diary) -> list[Any]:
    return [event for event in run.events if event[0] == "train"]


def data_of(kind: str) -> Any:
    return iterable_data(Counting(19)) if kind == "iterable" else map_data(17)


@pytest.mark.parametrize(
    ("how", "max_epochs", "kind"),
    [
        pytest.param(how, max_epochs, kind, marks=[] if (max_epochs == 1) == (kind == "map") else pytest.mark.soak)
        for how in ("max_steps", "should_stop", "max_time")
        for max_epochs in (1, 3)
        for kind in ("map", "iterable")
    ],
)
def test_chain_of_stopped_runs_is_the_undisturbed_run(how: str, max_epochs: int, kind: str, tmp_path: Path) -> None:
    length = 8 if kind == "map" else 9
    begin = (max_epochs - 1) * length
    settings: dict[str, Any] = {"max_epochs": max_epochs, "diary": Scheduled, "enable_progress_bar": True}
    settings["val_check_interval"] = 4 if kind == "map" else 1.0
    undisturbed = fit(data_of(kind), callbacks=[TQDMProgressBar()], **settings)
    path, parts = None, []
    for step in (begin + 3, begin + 6, None):
        limit = last_of(tmp_path) if step is None else stop_by(how, step, tmp_path)
        parts.append(fit(data_of(kind), ckpt_path=path, **settings, **limit))
        path = tmp_path / "last.ckpt"
    assert [len(trained(part)) for part in parts] == [begin + 3, 3, length - 6]
    assert [event for part in parts for event in trained(part)] == trained(undisturbed)
    assert parts[-1].events == undisturbed.events[-len(parts[-1].events) :]
    assert final_counters(parts[-1]) == final_counters(undisturbed)
    assert schedules(parts[-1]) == schedules(undisturbed)
    assert trained(fit(data_of(kind), ckpt_path=path, **settings)) == []


def schedules(run: Diary) -> list[Any]:
    return [config.scheduler.state_dict() for config in run.trainer.lr_scheduler_configs]


def test_run_that_stops_inside_a_window_does_that_window_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 4}
    undisturbed = fit(map_data(), **settings)
    stopped = fit(map_data(), **settings, **{**stop_by("max_time", 2, tmp_path), "enable_progress_bar": True})
    assert len(trained(stopped)) == 5
    resumed = fit(map_data(), **settings, ckpt_path=tmp_path / "last.ckpt")
    assert trained(resumed) == trained(undisturbed)[4:]
    assert final_counters(resumed) == final_counters(undisturbed)


def stop_and_go_on(name: str, folder: str) -> tuple[list[Any], list[Any], list[Any]]:
    runs = []
    for limit in ({}, {"max_steps": 2, **last_of(Path(folder))}, {}):
        settings = {"timeout": "60s", "max_epochs": 1, "enable_progress_bar": "max_steps" in limit, **limit}
        path = f"{folder}/last.ckpt" if len(runs) == 2 else None
        data = map_data(24, val_dataset=None)
        trainer = jobs.fit(name, 2, folder, model := Numbered(), data, ckpt_path=path, **settings)
        runs.append([*model.events, weights_digest(trainer.strategy.model)])
    return tuple(runs)


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, ["ResilientFSDP", "ResilientModelParallel"]))
def test_every_strategy_trains_the_rest_of_its_only_epoch(name: str, tmp_path: Path) -> None:
    results = spawn(stop_and_go_on, 2, args=(name, str(tmp_path)), deadline="100s").check().results
    for undisturbed, stopped, resumed in results.values():
        assert len(undisturbed) == 6 + 1
        assert len(stopped) == 2 + 1
        assert stopped[:-1] + resumed == undisturbed
