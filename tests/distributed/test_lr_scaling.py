"""The learning rate follows the global batch: the whole schedule, said once, and never twice after a resume."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import lr_scheduler as schedulers

from tests.distributed.resume_jobs import Diary, SaveAt, map_data, quiet_trainer

SCHEDULES = {
    "none": None,
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 7, eta_min=1e-3),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, eta_min=1e-3),
    "one cycle": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "cyclic": lambda o: schedulers.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 9),
    "warm-up, cosine": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.CosineAnnealingLR(o, 5)],
        milestones=[3],
    ),
}


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen[trainer.global_step] = float(trainer.optimizers[0].param_groups[0]["lr"])


class Scheduled(Diary):
    def __init__(self, schedule: Any, rate: float = 0.05) -> None:
        super().__init__()
        self.schedule, self.rate = schedule, rate

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}


def rates(name: str, load: Any = None, callbacks: Any = (), accumulate: int = 2, **arguments: Any) -> dict[int, float]:
    heard = Rates()
    trainer = quiet_trainer(max_epochs=2, callbacks=[heard, *callbacks], accumulate_grad_batches=accumulate)
    trainer.fit(Scheduled(SCHEDULES[name]), map_data(16, val_batch_size=5, **arguments), ckpt_path=load)
    return heard.seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_whole_schedule_is_scaled_once_also_after_a_resume(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = rates(name)
    saver = SaveAt("on_train_batch_end", tmp_path)
    scaling = {"scale_lr": "linear", "base_global_batch_size": 1}
    with caplog.at_level(logging.INFO, "lightning_distplus"):
        scaled = rates(name, callbacks=[saver], **scaling)
    assert scaled == pytest.approx({step: 4 * rate for step, rate in plain.items()}), "the global batch is 4"
    line = "learning rate x 4 (linear: global batch 4, base 1): "
    assert caplog.text.count(line) == 1
    caplog.clear()
    with caplog.at_level(logging.INFO, "lightning_distplus"):
        resumed = rates(name, load=saver.saves[6][0], **scaling)
    assert resumed == pytest.approx({step: scaled[step] for step in resumed}, rel=1e-9)
    assert min(resumed) == 3
    assert f"{line}already in place" in caplog.text


def test_resume_with_another_batch_scales_by_what_has_changed(tmp_path: Path) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    scaling = {"scale_lr": "sqrt", "base_global_batch_size": 1}
    before = rates("none", callbacks=[saver], **scaling)
    assert [*{*before.values()}] == pytest.approx([0.05 * 2])
    path = saver.saves[3][0]
    larger = rates("none", load=path, accumulate=1, batch_size=16, allow_global_batch_change=True, **scaling)
    assert [*{*larger.values()}] == pytest.approx([0.05 * 4])
    untouched = rates("none", load=path)
    assert [*{*untouched.values()}] == pytest.approx([0.05 * 2]), "without scale_lr it stays what the checkpoint says"
    first = rates("none", callbacks=[SaveAt("on_train_batch_end", tmp_path / "plain")])
    assert set(first.values()) == {0.05}
    late = rates("none", load=tmp_path / "plain" / "3.ckpt", **scaling)
    assert [*{*late.values()}] == pytest.approx([0.05 * 2]), "a checkpoint that was never scaled is scaled once"


def test_half_an_option_and_an_unknown_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="belong together"):
        map_data(scale_lr="linear")
    with pytest.raises(ValueError, match="scale_lr is 'cubic'"):
        map_data(scale_lr="cubic", base_global_batch_size=4)
    with pytest.raises(ValueError, match="at least 1"):
        map_data(scale_lr="linear", base_global_batch_size=0)
