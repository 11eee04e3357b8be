"""Exact resume with a real Trainer: samples, augmentation, validations and counters as if nothing had happened.

Rows R6 and R8.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_distplus import samplers
from lightning_distplus.data import ResumableDataModule, SampleAudit
from lightning_distplus.data.audit import audit_folder
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.testing import assert_same_on_all_ranks, spawn
from tests.distributed import resume_jobs
from tests.distributed.resume_jobs import (
    Augmented,
    Diary,
    FailsOnce,
    SampleDiary,
    SaveAt,
    assert_every_save_resumes_exactly,
    case_resumes_exactly,
    final_counters,
    fit,
    global_batches,
    map_data,
    quiet_trainer,
    token_data,
    write_tokens,
)
from tests.pairs import in_turn, kept

CASES: dict[str, dict[str, Any]] = {
    **resume_jobs.CASES,
    "accumulation": {"max_epochs": 2, "num_samples": 26, "accumulate_grad_batches": 3},
    "accumulation, last window cut": {"max_epochs": 2, "accumulate_grad_batches": 3, "limit_train_batches": 5},
    "validation in every second epoch": {"max_epochs": 4, "num_samples": 9, "check_val_every_n_epoch": 2},
    "schedule planned beforehand": {"max_epochs": 2, "plans_schedule": True, "accumulate_grad_batches": 2},
    "limited validation": {"max_epochs": 2, "limit_val_batches": 1, "val_check_interval": 3},
    "limited, and no validation at the end": {"max_epochs": 4, "limit_train_batches": 5, "check_val_every_n_epoch": 2},
    "limited by a share": {"max_epochs": 2, "limit_train_batches": 0.7, "limit_val_batches": 0.5},
    "loaders made anew in every second": {"max_epochs": 4, "num_samples": 9, "reload_dataloaders_every_n_epochs": 2},
    "overfitting": {"max_epochs": 4, "overfit_batches": 3},
    "overfitting a share": {"max_epochs": 4, "overfit_batches": 0.5, "accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("every", kept([1, 5], [5]))
@pytest.mark.parametrize("case", CASES)
def test_save_after_each_batch_resumes_exactly(case: str, every: int, tmp_path: Path) -> None:
    assert case_resumes_exactly(map_data, CASES[case], "on_train_batch_end", tmp_path, every) >= 10


def rolled(seed: int, epoch: int) -> Any:
    return np.roll(np.arange(17), seed + 5 * epoch)[:16].reshape(8, 2)


@pytest.mark.parametrize(
    "sampler",
    [
        samplers.weighted(np.arange(17.0), num_samples=20),
        samplers.weighted(np.arange(17.0), replacement=False),
        samplers.by_length(np.arange(17) % 5, global_batch=4),
        rolled,
    ],
    ids=["with replacement", "without", "by length", "batches of a function"],
)
def test_weights_lengths_and_samplers_resume_exactly_and_audit_clean(sampler: Any, tmp_path: Path) -> None:
    make_data = lambda: ResumableDataModule(Augmented(17), batch_size=2, seed=3, sampler=sampler)  # noqa: E731
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "limit_train_batches": 7}
    assert assert_every_save_resumes_exactly(make_data, "on_train_batch_end", tmp_path, 5, **arguments) == 14
    records = str(tmp_path / "audit")
    fit(make_data(), callbacks=[SampleAudit(records)], max_epochs=2, max_steps=9)
    fit(make_data(), callbacks=[SampleAudit(records)], max_epochs=2, ckpt_path=None)
    assert audit_folder(records).ok


def test_weights_lengths_and_the_global_batch_of_their_groups_are_part_of_the_identity(tmp_path: Path) -> None:
    def data(sampler: Any) -> ResumableDataModule:
        return map_data(17, sampler=sampler)

    saver = SaveAt("on_train_batch_end", tmp_path)
    fit(data(samplers.by_length(np.arange(17), global_batch=2)), callbacks=[saver], max_epochs=2)
    path = saver.saves[2][0]
    for other, words in (
        (samplers.weighted(np.ones(17)), "'weights .* in this run"),
        (samplers.by_length(np.arange(17), global_batch=4), "'lengths .* global_batch=4' in this run"),
    ):
        with pytest.raises(DatasetMismatch, match=rf"sampling: 'lengths .* in the checkpoint, {words}"):
            fit(data(other), ckpt_path=path, max_epochs=2)


@pytest.mark.parametrize(
    ("case", "hook"),
    in_turn(
        ["limited by steps", "validation inside windows", "accumulation"],
        [
            "on_train_batch_start",
            "on_validation_batch_end",
            "on_before_optimizer_step",
            "on_train_epoch_start",
            "on_validation_end",
            "on_train_epoch_end",
        ],
    ),
)
def test_save_at_any_other_moment_resumes_exactly(case: str, hook: str, tmp_path: Path) -> None:
    assert case_resumes_exactly(map_data, CASES[case], hook, tmp_path) >= 2


ANEW = {"reload_dataloaders_every_n_epochs": 1, "val_check_interval": 3}
PERSISTENT = {"persistent_workers": True, "prefetch_factor": 3}


@pytest.mark.usefixtures("reset_sigchld")
@pytest.mark.parametrize(("options", "settings"), [({}, {}), (PERSISTENT, {}), (PERSISTENT, ANEW)])
def test_workers_give_what_the_main_process_gives_after_a_resume_too(
    options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    undisturbed = fit(map_data(), callbacks=[saver], max_epochs=2, **settings)
    with_workers = fit(map_data(num_workers=2, **options), max_epochs=2, **settings)
    assert with_workers.events == undisturbed.events
    for path, num_before in (saver.saves[3], saver.saves[12]):
        resumed = fit(map_data(num_workers=2, **options), ckpt_path=path, max_epochs=2, **settings)
        assert resumed.events == undisturbed.events[num_before:]
        assert final_counters(resumed) == final_counters(undisturbed)


@pytest.mark.usefixtures("reset_sigchld")
@pytest.mark.parametrize("options", [{}, PERSISTENT], ids=["anew", "persistent"])
def test_resume_with_workers_over_token_files_is_exact(options: dict[str, Any], tmp_path: Path) -> None:
    files = {"a": write_tokens(tmp_path / "a", 121), "b": write_tokens(tmp_path / "b", 61, start=1000)}
    sources = [{"path": files["a"], "weight": 2.0}, {"path": files["b"]}]
    (tmp_path / "saves").mkdir()
    saver, settings = SaveAt("on_train_batch_end", tmp_path / "saves"), {"max_epochs": 2, "accumulate_grad_batches": 2}

    def run(num_workers: int, **arguments: Any) -> SampleDiary:
        data = token_data(sources=sources, num_workers=num_workers, **(options if num_workers else {}))
        return fit(data, diary=SampleDiary, **settings, **arguments)

    undisturbed = run(0)
    assert run(2, callbacks=[saver]).steps == undisturbed.steps
    assert len(saver.saves) == 2 * 22
    for number in (2, 7, 31):
        resumed = run(1 + number % 4 // 2, ckpt_path=saver.saves[number][0])
        first = (number + 1) // 2
        assert resumed.steps == {step: undisturbed.steps[step] for step in range(first, 22)}, number


@pytest.mark.parametrize("failing_batch", [4, 7, 15])
def test_save_after_an_error_inside_a_step_resumes_at_that_step(failing_batch: int, tmp_path: Path) -> None:
    undisturbed = fit(map_data(), max_epochs=2, accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match="planted"):
        fit(map_data(), max_epochs=2, accumulate_grad_batches=2, callbacks=[FailsOnce(failing_batch, tmp_path)])
    resumed = fit(map_data(), max_epochs=2, accumulate_grad_batches=2, ckpt_path=tmp_path / "error.ckpt")
    assert resumed.events == undisturbed.events[-len(resumed.events) :]
    assert final_counters(resumed) == final_counters(undisturbed)
    first = next(event for event in resumed.events if event[0] == "train")
    assert first[-2] == failing_batch - failing_batch % 2


def test_run_that_ended_at_max_steps_goes_on_exactly_with_more_steps(tmp_path: Path) -> None:
    longer = fit(map_data(), max_epochs=5, max_steps=21)
    saver = SaveAt("on_train_epoch_end", tmp_path)
    shorter = fit(map_data(), max_epochs=5, max_steps=13, callbacks=[saver])
    extended = fit(map_data(), max_epochs=5, max_steps=21, ckpt_path=saver.saves[-1][0])
    train = [[event for event in run.events if event[0] == "train"] for run in (shorter, extended, longer)]
    assert train[0] + train[1] == train[2]
    assert final_counters(extended) == final_counters(longer)


@pytest.mark.parametrize("kind", ["map", "tokens"])
def test_overfitting_repeats_the_same_batches_in_each_epoch(kind: str, tmp_path: Path) -> None:
    if kind == "map":
        data: Any = map_data()
    else:
        data = token_data(sources=write_tokens(tmp_path / "tokens", 401))
    model = fit(data, diary=SampleDiary, max_epochs=3, overfit_batches=3)
    batches = [model.steps[step] for step in range(9)]
    assert batches[:3] == batches[3:6] == batches[6:]
    assert batches[0] != batches[1]


def samples(run: Diary) -> list[tuple[Any, ...]]:
    return [event[3:5] for event in run.events if event[0] == "train"]


def test_second_fit_of_a_trainer_goes_on_and_a_new_trainer_begins_anew() -> None:
    data, model = map_data(), Diary()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(model, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data)
    whole = fit(map_data(), max_epochs=2)
    assert samples(model) == samples(whole)
    assert data.consumed_samples == 32
    assert samples(fit(data, max_epochs=1)) == samples(whole)[:8]


def fit_each(
    sources: Any, micro_batch: int, accumulation: int, world_size: int, saves: list[int], folder: str
) -> list[tuple[dict[int, list[list[int]]], int]]:
    """Trains by a stock strategy, or resumes from each save; the samples of this rank by step, and how many in all."""
    runs = []
    for path in [f"{folder}/{save}.ckpt" for save in saves] or [None]:
        options = {"callbacks": [] if path else [SaveAt("on_train_batch_end", Path(folder))], "devices": world_size}
        options |= {"strategy": "ddp" if world_size > 1 else "auto", "accumulate_grad_batches": accumulation}
        data = token_data(sources=sources, micro_batch_size=micro_batch)
        run = fit(data, diary=SampleDiary, ckpt_path=path, max_epochs=2, **options)
        runs.append((run.steps, data.consumed_samples))
    return runs


def test_two_ranks_resume_exactly_on_two_ranks_and_on_one(tmp_path: Path) -> None:
    sources = [
        {"path": write_tokens(tmp_path / "prose", 301), "weight": 0.7, "name": "prose"},
        {"path": write_tokens(tmp_path / "code", 121, start=10_000), "weight": 0.3, "name": "code"},
    ]

    def run(world_size: int, micro_batch: int, accumulation: int, *saves: int) -> dict[int, Any]:
        job = (sources, micro_batch, accumulation, world_size, list(saves), str(tmp_path))
        return spawn(fit_each, world_size, args=job, deadline="60s").check().results

    undisturbed, points = run(2, 2, 2), (2, 11, 12, 17)
    steps = global_batches(undisturbed)
    assert len(steps) >= 12
    assert_same_on_all_ranks({rank: runs[0][1] for rank, runs in undisturbed.items()})
    for cut in ((2, 2, 2), (1, 8, 1), (1, 2, 4)):
        resumed = run(*cut, *points)
        for place, point in enumerate(points):
            first = (point + 1) // 2
            assert global_batches(resumed, place) == {step: steps[step] for step in steps if step >= first}
            assert {runs[place][1] for runs in resumed.values()} == {undisturbed[0][0][1]}


def test_state_of_version_1_still_loads_and_one_of_a_growing_global_batch_is_refused_or_aligned(tmp_path: Path) -> None:
    def data() -> Any:
        return token_data(sources=str(tmp_path / "tokens"), global_batch_size=4)

    fit_tokens = partial(fit, diary=SampleDiary, max_steps=4)
    write_tokens(tmp_path / "tokens", 401)
    (tmp_path / "saves").mkdir()
    saver = SaveAt("on_train_batch_end", tmp_path / "saves")
    undisturbed = fit_tokens(data(), callbacks=[saver])
    path = saver.saves[3][0]
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["TokenDataModule"]
    state["version"] = 1
    torch.save(checkpoint, path)
    assert fit_tokens(data(), ckpt_path=path).steps == {step: undisturbed.steps[step] for step in (2, 3)}
    # Two samples less, as at the end of a ramp of which the first steps were smaller.
    state |= {"consumed_samples": 6, "offset": 6, "batches": 3, "total_batches": 3}
    torch.save(checkpoint, path)
    aligned = fit_tokens(data(), ckpt_path=path)
    assert [len(batches) for batches in aligned.steps.values()] == [2, 2], "windows begin where Lightning counts them"
    assert aligned.steps[2][0] == undisturbed.steps[1][1], "and no sample is left out"
    state["schedule"] = {"rest": "8f", "text": "2 from sample 0 on, 4 from sample 40 on"}
    torch.save(checkpoint, path)
    with pytest.raises(DatasetMismatch, match=r"schedule of global batches.* 2 from sample 0 on, 4 from"):
        fit_tokens(data(), ckpt_path=path)
