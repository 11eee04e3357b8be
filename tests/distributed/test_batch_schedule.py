"""Batch-size warm-up in a Trainer: the steps of the schedule, exact from every save, on any number of ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_distplus import ResilientDDP, TokenDataModule
from lightning_distplus.data.batch_schedule import BatchSchedule
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.distributed.resume_jobs import (
    SampleDiary,
    SaveAt,
    fit,
    global_batches,
    map_data,
    quiet_trainer,
    token_data,
    write_tokens,
)
from tests.distributed.test_elastic import SaveAfter

STAGES = [(0, 2), (7, 6), (30, 12), (70, 4)]
NUM_STEPS = 12


class Learner(SampleDiary):
    """Its weights tell which samples came together in a step, and by how much each step's loss was divided."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulations: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        super().training_step(batch, batch_idx)
        self.events.append(batch_idx)
        self.accumulations.append(int(self.trainer.accumulate_grad_batches))
        return self.layer(batch["input_ids"][:, :1].float() / 100).pow(2).mean()


def run(prefix: str, load: str | None = None, callbacks: Any = (), max_steps: int = NUM_STEPS, **arguments: Any) -> Any:
    model = Learner()
    trainer = quiet_trainer(max_steps=max_steps, callbacks=list(callbacks))
    data = token_data(sources=prefix, **{"global_batch_size": STAGES, **arguments})
    trainer.fit(model, data, ckpt_path=load)
    return model


def plain_steps(model: Any) -> dict[int, list[int]]:
    return {step: [sample for batch in batches for sample in batch] for step, batches in model.steps.items()}


def in_order(model: Any) -> list[int]:
    return [sample for batch in plain_steps(model).values() for sample in batch]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "tokens", 801)


def test_every_step_has_the_size_of_its_stage_and_resumes_exactly_from_every_save(prefix: str, tmp_path: Path) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    undisturbed = run(prefix, callbacks=[saver])
    expected = plain_steps(undisturbed)
    assert [len(batch) for batch in expected.values()] == [2, 2, 2, 2, 6, 6, 6, 6, 12, 12, 12, 12]
    one_batch = run(prefix, global_batch_size=4, max_steps=30)
    assert in_order(undisturbed) == in_order(one_batch)[:80]
    assert undisturbed.accumulations == [1] * 4 + [3] * 12 + [6] * 24
    assert undisturbed.trainer.datamodule.consumed_samples == 80
    first_of_step = [0, 1, 2, 3, 4, 7, 10, 13, 16, 22, 28, 34, 40]
    for number, (path, _) in enumerate(saver.saves):
        resumed = run(prefix, load=str(path))
        # The save after micro-batch `number` holds the steps that are complete by then.
        step = max(place for place, first in enumerate(first_of_step) if first <= number + 1)
        assert plain_steps(resumed) == {place: expected[place] for place in range(step, NUM_STEPS)}, number
        assert weights_digest(resumed) == weights_digest(undisturbed), number
        assert resumed.trainer.global_step == NUM_STEPS
        assert len(str(torch.load(path, weights_only=True)["TokenDataModule"])) < 1024


def test_run_goes_on_past_its_end_and_through_the_last_stage(prefix: str, tmp_path: Path) -> None:
    longer = run(prefix, max_steps=20)
    saver = SaveAt("on_train_end", tmp_path)
    run(prefix, max_steps=6, callbacks=[saver])
    resumed = run(prefix, load=str(saver.saves[0][0]), max_steps=20)
    assert plain_steps(resumed) == {step: plain_steps(longer)[step] for step in range(6, 20)}
    assert weights_digest(resumed) == weights_digest(longer)
    assert [len(batch) for batch in plain_steps(longer).values()][8:] == [12, 12, 12, 12, *[4] * 8]


LEGS = [(2, 1, 0, 9), (1, 2, 2, 21), (3, 2, 0, 0)]  # ranks, micro-batch, workers, micro-batch of the save


def leg(prefix: str, number: int, folder: str) -> Any:
    logging.getLogger("lightning_distplus").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s", force=True)
    size, micro_batch, workers, save_after = LEGS[number]
    model = SampleDiary()
    trainer = quiet_trainer(
        strategy=ResilientDDP(timeout="60s"),
        devices=size,
        default_root_dir=folder,
        max_steps=11,
        callbacks=[SaveAfter(save_after, f"{folder}/{number + 1}.ckpt")],
    )
    stages = STAGES[:3]
    data = token_data(sources=prefix, micro_batch_size=micro_batch, num_workers=workers, global_batch_size=stages)
    trainer.fit(model, data, ckpt_path=f"{folder}/{number}.ckpt" if number else None)
    return [(model.steps, data.consumed_samples)]


def test_ramp_goes_on_from_2_to_1_to_3_ranks_with_the_same_steps(prefix: str, tmp_path: Path) -> None:
    runs = [
        spawn(leg, size, args=(prefix, n, str(tmp_path)), deadline="60s").check() for n, (size, *_) in enumerate(LEGS)
    ]
    expected = plain_steps(run(prefix, max_steps=11))
    # 9 and 21 micro-batches of 2 samples: 5 steps (14 samples) and 8 steps (32 samples, and 10 of the next).
    for first, one in zip([0, 5, 8], runs, strict=True):
        assert global_batches(one.results) == {step: expected[step] for step in range(first, 11)}
        assert one.results[0][0][1] == 68
    assert "global batch 2 (batch size 1 x 2 data-parallel ranks x accumulation 1)" in runs[0].logs[0]
    change = "global batch 6 (batch size 1 x 2 data-parallel ranks x accumulation 3) from sample 8, step 4 on"
    assert runs[0].logs[0].count(change) == 1
    assert "from sample" not in runs[0].logs[1]


SAVED_AFTER = (9, 19)  # micro-batches: inside a window of the second stage, and of the third
FIRST_STEPS = (5, 8)


def fit_under(name: str, prefix: str, folder: str, stages: tuple[int, ...]) -> list[Any]:
    """The undisturbed run, and one resumed from each save, per ZeRO stage: samples of each step, digest, weights."""
    runs = []
    for stage in stages:
        arguments = {"stage": stage} if stage else {}
        for load in (None, *SAVED_AFTER):
            trainer = quiet_trainer(
                strategy=jobs.strategy(name, timeout="60s", **arguments),
                devices=2,
                default_root_dir=folder,
                max_steps=NUM_STEPS,
                callbacks=[] if load else [SaveAfter(save, f"{folder}/{stage}-{save}.ckpt") for save in SAVED_AFTER],
            )
            model = Learner()
            data = token_data(sources=prefix, micro_batch_size=1, global_batch_size=STAGES)
            trainer.fit(model, data, ckpt_path=load and f"{folder}/{stage}-{load}.ckpt")
            weights = [value.detach().flatten().tolist() for value in model.parameters()]
            runs.append((model.steps, weights_digest(model), weights))
    return runs


@pytest.mark.deadline(180)
def test_zero_follows_the_schedule_exactly_and_takes_the_steps_of_ddp(prefix: str, tmp_path: Path) -> None:
    jobs_of = {"ResilientDDP": (0,), "ResilientDeepSpeed": (1, 2, 3)}
    found = {
        name: spawn(fit_under, 2, args=(name, prefix, str(tmp_path), stages), deadline="80s").check().results
        for name, stages in jobs_of.items()
    }
    for rank in range(2):
        ddp, *_ = found["ResilientDDP"][rank]
        assert [len(batches) for batches in ddp[0].values()] == [1] * 4 + [3] * 4 + [6] * 4
        for first in (0, 3, 6):
            undisturbed, *resumed = found["ResilientDeepSpeed"][rank][first : first + 3]
            assert undisturbed[0] == ddp[0]
            for begins, (steps, digest, _) in zip(FIRST_STEPS, resumed, strict=True):
                assert steps == {step: ddp[0][step] for step in range(begins, NUM_STEPS)}
                assert digest == undisturbed[1]
            if first < 6:  # ZeRO 3 has shards
                assert torch.allclose(torch.tensor(undisturbed[2]), torch.tensor(ddp[2]), atol=1e-7)


def test_what_does_not_go_with_a_schedule_is_refused(prefix: str, tmp_path: Path) -> None:
    for arguments, words in [
        ({"max_epochs": 1}, r"max_steps alone. Pass Trainer\(max_steps=...\)"),
        ({"max_steps": 3, "limit_train_batches": 2}, "Leave limit_train_batches"),
        ({"max_steps": 3, "accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\) contradicts the schedule"),
    ]:
        with pytest.raises(ValueError, match=words):
            quiet_trainer(**arguments).fit(SampleDiary(), token_data(sources=prefix, global_batch_size=STAGES))
    with pytest.raises(ValueError, match="global batches of 3, 5, no multiples of batch size 2 x 1 data-parallel"):
        run(prefix, global_batch_size=[(0, 3), (10, 5), (20, 6)])
    with pytest.raises(ValueError, match="leads to a single global_batch_size; that is None"):
        token_data(sources=prefix, rampup_batch_size=(2, 2, 40))


def test_another_schedule_ahead_is_refused_unless_allowed_and_then_recorded(prefix: str, tmp_path: Path) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    run(prefix, max_steps=5, callbacks=[saver])
    path = str(saver.saves[-1][0])  # sample 14, a global batch of 6
    with pytest.raises(DatasetMismatch, match=r"(?s)From sample 14 on .* in the checkpoint, no schedule in this run"):
        run(prefix, load=path, global_batch_size=6)
    same_ahead = run(prefix, load=path, global_batch_size=[(0, 4), (4, 6), (30, 12), (70, 4)])
    assert [len(batch) for batch in plain_steps(same_ahead).values()] == [6, 6, 6, 12, 12, 12, 12]
    changed = run(prefix, load=path, global_batch_size=[(0, 2), (20, 8)], allow_global_batch_change=True)
    assert [len(batch) for batch in plain_steps(changed).values()] == [2, 2, 2, 8, 8, 8, 8]
    assert changed.trainer.datamodule.state_dict()["global_batch_changes"] == [[14, 6, 2]]


def test_state_of_version_1_still_loads(prefix: str, tmp_path: Path) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    undisturbed = run(prefix, global_batch_size=4, max_steps=4, callbacks=[saver])
    path = saver.saves[3][0]
    state = torch.load(path, weights_only=True)
    assert "schedule" not in state["TokenDataModule"]
    state["TokenDataModule"]["version"] = 1
    torch.save(state, path)
    resumed = run(prefix, load=str(path), global_batch_size=4, max_steps=4)
    assert plain_steps(resumed) == {step: plain_steps(undisturbed)[step] for step in (2, 3)}


def test_ramp_of_megatron_is_followed(prefix: str) -> None:
    model = run(prefix, max_steps=9, global_batch_size=8, rampup_batch_size=(2, 2, 24))
    sizes, consumed = [], 0
    for _ in range(9):
        sizes.append(BatchSchedule.ramp(2, 2, 24, 8).size_at(consumed))
        consumed += sizes[-1]
    assert [len(batch) for batch in plain_steps(model).values()] == sizes == [2, 2, 2, 2, 4, 4, 6, 6, 8]


def test_schedule_is_read_from_yaml(tmp_path: Path) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(TokenDataModule, "data")
    text = "data: {sources: x, seq_len: 8, micro_batch_size: 2, global_batch_size: [[0, 8], [1000, 16]]}"
    assert parser.parse_string(text).data.global_batch_size == [(0, 8), (1000, 16)]
    text = "data: {sources: x, seq_len: 8, micro_batch_size: 2, global_batch_size: 16, rampup_batch_size: [8, 8, 100]}"
    assert parser.parse_string(text).data.rampup_batch_size == (8, 8, 100)


def test_callbacks_that_ask_for_the_end_of_a_window_as_lightning_does_are_right(prefix: str) -> None:
    model = run(prefix)
    assert fit(map_data(17), max_epochs=1).trainer.accumulate_grad_batches == 1
    window = model.trainer.accumulate_grad_batches
    assert [batch for batch in range(16, 41) if batch % window == 0] == [16, 22, 28, 34, 40]
