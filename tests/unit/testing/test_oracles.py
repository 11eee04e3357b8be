"""Oracles: an exact run passes, and each way of not being exact is named."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_distplus.testing import (
    FaultCallback,
    FaultPlan,
    LightningRun,
    SpawnResult,
    Trace,
    assert_resumes_exactly,
    assert_same_on_all_ranks,
    spawn,
    weights_digest,
)

STEPS = 4


def _counting_run(forgets: str, max_steps: int, ckpt_path: str | None, save_at: Mapping[int, str]) -> Trace:
    """A run whose whole state is a number; it forgets one thing when it resumes, or adds one when it saves."""
    step, weight = json.loads(Path(ckpt_path).read_text()) if ckpt_path else (0, 1.0)
    samples, losses = {}, {}
    while step < max_steps:
        samples[step] = [step + (1 if ckpt_path and forgets == "position" else 0)]
        weight *= 1.5 if not (ckpt_path and forgets == "weight" and step == max_steps - 1) else 1.25
        losses[step] = [float(1 / (1 + step)).hex() if forgets != "loss" or not ckpt_path else "0x0"]
        step += 1
        if step in save_at:
            weight += 1 if forgets == "saving" else 0
            Path(save_at[step]).write_text(json.dumps([step, weight]))
    return Trace(samples=samples, losses=losses, weights=str(weight))


def _run(forgets: str) -> Any:
    return functools.partial(_counting_run, forgets)


def test_exact_run_passes_at_every_save_point() -> None:
    traces = assert_resumes_exactly(_run("nothing"), max_steps=STEPS, world_size=2)

    assert traces[1].samples == {step: [step] for step in range(STEPS)}


@pytest.mark.parametrize(
    ("forgets", "expected"),
    [
        ("position", r"resumed after 1 steps differs .*samples of rank 0 in step 1\n  undisturbed: \[1\]\n  .*\[2\]"),
        ("loss", "resumed after 1 steps differs .*losses of rank 0 in step 1"),
        ("weight", "resumed after 1 steps saw the same samples and losses.*final weights of rank 0 differ"),
        ("saving", r"a run that saves at \[1, 2, 3\] saw the same samples and losses"),
    ],
)
def test_run_that_is_not_exact_is_named_by_save_point_rank_and_step(forgets: str, expected: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){expected}"):
        assert_resumes_exactly(_run(forgets), max_steps=STEPS)


class _Numbers(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, position: int) -> None:
        self.position = position

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((3,), float(index)) for index in range(self.position, 100))


class _Data(LightningDataModule):
    """Two samples a step; the position is restored, or forgotten."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.remembers = remembers
        self.position = 0

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(_Numbers(self.position), batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"position": 2 * self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"] if self.remembers else 0


class _Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch / 100).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def _trainer(max_steps: int, callbacks: list[Any], **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", max_steps=max_steps, callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **{"devices": 1, **options},
    )  # fmt: skip


def _data(remembers: bool) -> _Data:
    return _Data(remembers)


def _ids(batch: torch.Tensor) -> list[float]:
    return batch[:, 0].tolist()


def test_lightning_run_that_restores_its_position_is_exact_and_one_that_forgets_it_is_caught() -> None:
    run = functools.partial(LightningRun, make_trainer=_trainer, make_model=_Model, sample_ids=_ids)

    traces = assert_resumes_exactly(run(make_data=functools.partial(_data, True)), max_steps=3)
    with pytest.raises(AssertionError, match="samples of rank 0 in step 1"):
        assert_resumes_exactly(run(make_data=functools.partial(_data, False)), max_steps=3, save_at=[1])

    assert traces[0].samples == {0: [0.0, 1.0], 1: [2.0, 3.0], 2: [4.0, 5.0]}


def _fit_two_ranks() -> str:
    trainer = _trainer(3, [FaultCallback()], devices=2, strategy="ddp")
    model = _Model()
    trainer.fit(model, datamodule=_Data(True))
    trainer.save_checkpoint("unused.ckpt")
    return weights_digest(model)


def test_callback_fires_at_each_point_of_a_trainer_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    points = ("batch_start", "before_backward", "after_backward", "before_optimizer_step", "batch_end")
    plan = functools.reduce(lambda plan, where: plan.slow(1, 2, 0.01, where=where), points, FaultPlan())
    plan = plan.slow(1, 3, 0.01, where="save")

    result = spawn(_fit_two_ranks, 2, faults=plan).check()

    assert [fired.fault.where for fired in result.faults] == [*points, "save"]
    assert_same_on_all_ranks(result)


def test_flipped_bit_in_a_trainer_makes_the_ranks_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    result = spawn(_fit_two_ranks, 2, faults=FaultPlan().flip_bit(1, 1, "layer.weight")).check()

    with pytest.raises(AssertionError, match=r"The value differs between ranks:\n  ranks \[0\]: .*\n  ranks \[1\]: "):
        assert_same_on_all_ranks(result)


def test_ranks_that_differ_are_named_by_value() -> None:
    assert_same_on_all_ranks({0: {"step": 3}, 1: {"step": 3}}, key="step")
    with pytest.raises(AssertionError, match=r"'step' differs between ranks:\n  ranks \[0, 2\]: 3\n  ranks \[1\]: 4"):
        assert_same_on_all_ranks({0: {"step": 3}, 1: {"step": 4}, 2: {"step": 3}}, key="step")
    with pytest.raises(AssertionError, match="the results are empty"):
        assert_same_on_all_ranks({})
    with pytest.raises(AssertionError, match=r"Ranks \[1\] returned nothing"):
        assert_same_on_all_ranks(
            SpawnResult(exit_codes={0: 0, 1: 1}, logs={}, results={0: 1}, elapsed_s=0.0, deadline_s=1.0)
        )


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.tensor([1.0, 2.5]), "b": {"c": 3}},
        {"a": torch.tensor([[1.0, 2.0]]), "b": {"c": 3}},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "b": {"c": 3}},
        {"x": torch.tensor([1.0, 2.0]), "b": {"c": 3}},
        {"a": torch.tensor([1.0, 2.0]), "b": {"c": 4}},
    ],
    ids=["value", "shape", "dtype", "name", "plain value"],
)
def test_digest_tells_apart_value_shape_dtype_and_name(changed: dict[str, Any]) -> None:
    base = {"a": torch.tensor([1.0, 2.0]), "b": {"c": 3}}

    assert weights_digest(base) == weights_digest({"a": base["a"].clone(), "b": {"c": 3}})
    assert weights_digest(changed) != weights_digest(base)


def test_digest_of_a_module_reads_parameters_and_buffers_of_any_shape() -> None:
    module = torch.nn.BatchNorm1d(2)
    before = weights_digest(module)

    module.num_batches_tracked += 1  # a scalar buffer

    assert weights_digest(module) != before
    assert weights_digest(torch.nn.Linear(2, 2).to(torch.bfloat16))
