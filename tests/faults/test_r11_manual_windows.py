"""Row R11: manual optimization that accumulates by itself is resumed without a gradient lost or summed twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.distributed.iterable_jobs import Counting, iterable_data
from tests.distributed.resume_jobs import Diary, Numbered, SaveAt, final_counters, fit, map_data, trained

WINDOW = 3


def step_by_hand(module: Any, loss: torch.Tensor, batch_idx: int, *, is_due: bool = False) -> None:
    optimizer = module.optimizers()
    module.manual_backward(loss / WINDOW)
    if is_due or (batch_idx + 1) % WINDOW == 0:
        optimizer.step()
        optimizer.zero_grad()


class Accumulates(Diary):
    """Steps after every third micro-batch of an epoch; what is left of an epoch goes into the next one's first step."""

    automatic_optimization = False
    flushes = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        is_due = self.flushes and self.trainer.is_last_batch
        step_by_hand(self, super().training_step(batch, batch_idx), batch_idx, is_due=is_due)


class Flushes(Accumulates):
    """Steps at the end of an epoch too."""

    flushes = True


class TwoOptimizers(Diary):
    """Has two optimizers that step in each batch, as a GAN does."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx) + self.other(batch).pow(2).mean()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (self.layer, self.other)]


class OtherWindows(TwoOptimizers):
    """The first optimizer steps in each batch, the second after every third, with the gradients of all three."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = Diary.training_step(self, batch, batch_idx) + self.other(batch).pow(2).mean()
        self.manual_backward(loss)
        for optimizer, size in zip(self.optimizers(), (1, WINDOW), strict=True):
            if (batch_idx + 1) % size == 0:
                optimizer.step()
                optimizer.zero_grad()


class RarelySteps(TwoOptimizers):
    """The second optimizer trains on every third batch alone; its gradients stay until it does so again."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        self.manual_backward(Diary.training_step(self, batch, batch_idx))
        first.step()
        if (batch_idx + 1) % WINDOW == 0:
            second.zero_grad()
            self.manual_backward(self.other(batch).pow(2).mean())
            second.step()


def counters(model: Diary) -> Any:
    return model.trainer.global_step, model.trainer.datamodule.position(), final_counters(model)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith("lightning_distplus.data")]


@pytest.mark.parametrize("make_data", [map_data, lambda: iterable_data(Counting(17))], ids=["map", "iterable"])
@pytest.mark.parametrize("kind", [Accumulates, Flushes, TwoOptimizers, RarelySteps])
def test_each_save_resumes_exactly_inside_windows_and_across_epochs_and_says_nothing(
    kind: type[Diary], make_data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ends").mkdir()
    saver, ends = SaveAt("on_train_batch_end", tmp_path), SaveAt("on_train_epoch_end", tmp_path / "ends")
    undisturbed = fit(make_data(), diary=kind, max_epochs=2, callbacks=[saver, ends])
    assert len(saver.saves) >= 16
    for path, num_before in (*saver.saves, *ends.saves[:1]):
        resumed = fit(make_data(), diary=kind, ckpt_path=path, max_epochs=2)
        repeated = trained(resumed.events) - trained(undisturbed.events[num_before:])
        assert 0 <= repeated <= 2 * (WINDOW - 1), path
        assert resumed.events == undisturbed.events[len(undisturbed.events) - len(resumed.events) :], path
        assert counters(resumed) == counters(undisturbed), path
    assert warnings_of(caplog) == []
    finished = fit(make_data(), diary=kind, ckpt_path=ends.saves[-1][0], max_epochs=2)
    assert finished.events == []


def test_save_that_leaves_gradients_out_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    undisturbed = fit(map_data(), diary=OtherWindows, max_epochs=1, callbacks=[saver])
    (text,) = warnings_of(caplog)
    assert text == (
        "a checkpoint behind batch 0 leaves gradients out: optimizer 1 (AdamW) has summed some since its last step, "
        "and another one has stepped meanwhile: a run that resumes there takes the next step of the first without "
        "them. Save where the windows of all optimizers end in the same batch"
    )
    by_batch = [path for path, _ in saver.saves[:WINDOW]]
    exact = [weights_digest(fit(map_data(), diary=OtherWindows, ckpt_path=one, max_epochs=1)) for one in by_batch]
    assert [one == weights_digest(undisturbed) for one in exact] == [False, False, True]


def test_saves_at_the_ends_of_all_windows_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)  # 1 + 1 + 2 steps
    fit(map_data(), diary=OtherWindows, max_epochs=1, callbacks=[saver])
    assert list(tmp_path.glob("*.ckpt"))
    assert warnings_of(caplog) == []


def test_max_steps_counts_the_steps_of_the_optimizers(tmp_path: Path) -> None:
    undisturbed = fit(map_data(), diary=Accumulates, max_steps=4)
    saver = SaveAt("on_train_batch_end", tmp_path)
    fit(map_data(), diary=Accumulates, max_steps=3, callbacks=[saver])
    resumed = fit(map_data(), diary=Accumulates, ckpt_path=saver.saves[-1][0], max_steps=4)
    assert counters(resumed) == counters(undisturbed)


class SavesBehindTheStep(Diary):
    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        self.trainer.save_checkpoint(self.trainer.default_root_dir + "/behind.ckpt")


class SavesBetweenSteps(TwoOptimizers):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.trainer.save_checkpoint(self.trainer.default_root_dir + "/behind.ckpt")


@pytest.mark.parametrize("kind", [SavesBehindTheStep, SavesBetweenSteps])
def test_save_behind_the_step_of_an_unfinished_batch_is_refused(kind: type[Diary], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="in the middle of batch 0, after its optimizer step"):
        fit(map_data(), diary=kind, max_epochs=1, default_root_dir=str(tmp_path))
    assert not (tmp_path / "behind.ckpt").exists()


class Manual(Numbered):
    """Accumulates by itself."""

    automatic_optimization = False

    def grow(self) -> None:
        self.net[1].p = 0.0  # a window that is done again gets other random numbers

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        step_by_hand(self, super().training_step(batch, batch_idx), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def resume_inside_a_window(name: str, folder: str) -> list[tuple[list[Any], str]]:
    runs = []
    for path in (None, f"{folder}/4.ckpt"):
        model = Manual()
        callbacks: list[pl.Callback] = [SaveAt("on_train_batch_end", Path(folder))] if path is None else []
        trainer = jobs.trainer(name, 2, folder, timeout="60s", max_epochs=1, callbacks=callbacks)
        trainer.fit(model, map_data(36, val_dataset=None), ckpt_path=path)
        runs.append((model.events, weights_digest(trainer.strategy.model)))
    return runs


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", [name for name in jobs.STRATEGIES if name != "ResilientFSDP"])  # no backward inside
def test_every_strategy_replays_an_open_window(name: str, tmp_path: Path) -> None:
    results = spawn(resume_inside_a_window, 2, args=(name, str(tmp_path)), deadline="110s").check().results
    for undisturbed, resumed in results.values():
        assert len(undisturbed[0]) == 9
        assert resumed[0] == undisturbed[0][3:]
        assert resumed[1] == undisturbed[1]
