"""Iterable data sets: each rank its own state, nothing lost to what was read ahead. Row R4."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_distplus import ResilientDDP, ResilientFSDP
from lightning_distplus.data import ResumableDataModule
from lightning_distplus.data.iterable import stateful
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.testing import FaultPlan, SpawnResult, spawn
from lightning_distplus.world import DataParallel
from tests.distributed.iterable_jobs import (
    EPOCH,
    Counting,
    Endless,
    Lopsided,
    Noise,
    Resuming,
    iterable_data,
    loader_of_torchdata,
    nodes_of_torchdata,
    train_on_ranks,
)
from tests.distributed.resume_jobs import (
    Diary,
    SaveAt,
    assert_every_save_resumes_exactly,
    final_counters,
    fit,
    map_data,
    quiet_trainer,
)
from tests.pairs import in_turn, kept

CASES: dict[str, dict[str, Any]] = {
    "three epochs": {"max_epochs": 3, "num_samples": 9},
    "limited by steps": {"max_epochs": 5, "max_steps": 18},
    "accumulation, last window cut": {"max_epochs": 2, "num_samples": 22, "accumulate_grad_batches": 3},
    "epochs of a number of batches": {"max_epochs": 4, "limit_train_batches": 5, "num_samples": 14},
    "limit in the middle of a window": {"max_epochs": 3, "limit_train_batches": 5, "accumulate_grad_batches": 2},
    "validation inside the epoch": {"max_epochs": 2, "val_check_interval": 3},
    "validation across epochs": {"max_epochs": 2, "val_check_interval": 3, "check_val_every_n_epoch": None},
    "limit and validation inside the epoch": {"max_epochs": 3, "limit_train_batches": 5, "val_check_interval": 3},
    "validation inside windows": {"max_epochs": 2, "val_check_interval": 1, "accumulate_grad_batches": 2},
    "loaders made anew in each epoch": {"max_epochs": 3, "num_samples": 9, "reload_dataloaders_every_n_epochs": 1},
    "schedule planned beforehand": {"max_epochs": 2, "max_steps": 14, "plans_schedule": True},
    "sanity check": {"max_epochs": 2, "num_sanity_val_steps": 1},
}


@pytest.mark.parametrize(
    ("case", "style"),
    [*((case, Counting) for case in CASES), *((case, Resuming) for case in ("three epochs", "limited by steps"))],
)
@pytest.mark.parametrize("every", kept([1, 5], [5]))
def test_save_after_each_batch_resumes_exactly(case: str, style: Any, every: int, tmp_path: Path) -> None:
    arguments = dict(CASES[case])
    num_samples = arguments.pop("num_samples", 17)
    found = assert_every_save_resumes_exactly(
        lambda: iterable_data(style(num_samples)), "on_train_batch_end", tmp_path, every, **arguments
    )
    assert found >= 10


@pytest.mark.parametrize(
    ("case", "hook"),
    in_turn(
        ["limit and validation inside the epoch", "accumulation, last window cut"],
        ["on_train_batch_start", "on_train_epoch_start", "on_validation_end", "on_train_epoch_end"],
    ),
)
def test_save_at_any_other_moment_resumes_exactly(case: str, hook: str, tmp_path: Path) -> None:
    arguments = dict(CASES[case])
    num_samples = arguments.pop("num_samples", 17)
    found = assert_every_save_resumes_exactly(lambda: iterable_data(Counting(num_samples)), hook, tmp_path, **arguments)
    assert found >= 2


@pytest.mark.usefixtures("reset_sigchld")
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "prefetch_factor": 3}])
def test_nothing_is_lost_to_what_workers_read_ahead(options: dict[str, Any], tmp_path: Path) -> None:
    def make_data() -> Any:
        return iterable_data(Counting(23), num_workers=2, **options)  # 12 and 11 samples: 6 and 5 batches

    saver = SaveAt("on_train_batch_end", tmp_path)
    undisturbed = fit(make_data(), callbacks=[saver], max_epochs=2, accumulate_grad_batches=2)
    seen = numbers(undisturbed)
    assert len(seen) == len(set(seen)) == 2 * 22, "each pass leaves out the one sample that makes no whole batch"
    assert {number // EPOCH for number in seen} == {0, 1}
    for number in (1, 9, 10, 17):  # the last batch of the shorter worker, the last of the epoch, and others
        path, num_before = saver.saves[number]
        resumed = fit(make_data(), ckpt_path=path, max_epochs=2, accumulate_grad_batches=2)
        num_left = len(undisturbed.events) - num_before
        assert num_left <= len(resumed.events) <= num_left + 1
        assert resumed.events == undisturbed.events[-len(resumed.events) :], path.name
        assert final_counters(resumed) == final_counters(undisturbed)


class Padded(Diary):
    """Is given a weight for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0], batch_idx)


@pytest.mark.usefixtures("reset_sigchld")
@pytest.mark.parametrize(
    "arguments",
    kept(
        [{"num_workers": 2, "persistent_workers": True}, {"num_workers": 2}, {}],
        [{"num_workers": 2, "persistent_workers": True}],
    ),
)
def test_worker_that_has_padded_its_last_batch_is_not_asked_again(arguments: dict[str, Any], tmp_path: Path) -> None:
    """One worker ends after its second batch, with data that begin anew by themselves; the other goes on."""
    data = partial(Lopsided if arguments else Counting, 11)

    def make_data() -> Any:
        return iterable_data(data(), uneven="pad", **arguments)

    saver = SaveAt("on_train_batch_end", tmp_path)
    settings: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 0, "diary": Padded}
    undisturbed = fit(make_data(), callbacks=[saver], **settings)
    assert sorted(set(numbers(undisturbed))) == [epoch * EPOCH + number for epoch in range(3) for number in range(11)]
    for path, num_before in saver.saves[1:7]:
        resumed = fit(make_data(), ckpt_path=path, **settings)
        num_left = len(undisturbed.events) - num_before
        assert num_left <= len(resumed.events) <= num_left + 1, path.name
        assert resumed.events == undisturbed.events[-len(resumed.events) :], path.name


@pytest.mark.parametrize("arguments", [{"max_steps": 14}, {"max_epochs": 3, "limit_train_batches": 5}])
def test_data_without_an_end_resumes_exactly(arguments: dict[str, Any], tmp_path: Path) -> None:
    make_data = lambda: iterable_data(Endless(0))  # noqa: E731
    assert assert_every_save_resumes_exactly(make_data, "on_train_batch_end", tmp_path, 5, **arguments) >= 14


OF_TORCHDATA = [
    partial(loader_of_torchdata, "iterable"),
    partial(loader_of_torchdata, "shuffled", 2),
    partial(nodes_of_torchdata, "batches"),
    partial(nodes_of_torchdata, "ahead"),
    partial(loader_of_torchdata, "in order"),
    partial(loader_of_torchdata, "shuffled"),
    partial(nodes_of_torchdata, "samples"),
]


@pytest.mark.usefixtures("reset_sigchld")
@pytest.mark.parametrize(
    "make",
    kept(OF_TORCHDATA, OF_TORCHDATA[:4]),
    ids=lambda make: f"{make.func.__name__}-{make.args}",
)
def test_loaders_and_nodes_of_torchdata_resume_exactly(make: Any, tmp_path: Path) -> None:
    batched = make.args[0] == "batches"
    saver = SaveAt("on_train_batch_end", tmp_path)
    undisturbed = fit(iterable_data(make(), batched=batched), callbacks=[saver], max_epochs=3)
    num_workers = len(make.args) - 1
    for path, num_before in saver.saves[:: 6 if num_workers or make.args[0] == "ahead" else 1]:
        resumed = fit(iterable_data(make(), batched=batched), ckpt_path=path, max_epochs=3)
        if not resumed.events:
            assert path == saver.saves[-1][0]
        elif num_workers:  # torchdata's workers do not save their random numbers
            assert numbers(resumed) == numbers(undisturbed, num_before)
        else:
            assert resumed.events == undisturbed.events[num_before:], path.name
        assert final_counters(resumed)["consumed"] == final_counters(undisturbed)["consumed"]


def resilient_ddp() -> Any:
    return ResilientDDP(timeout="60s")


def resilient_fsdp() -> Any:
    return ResilientFSDP(timeout="60s", sharding_strategy="FULL_SHARD", auto_wrap_policy={torch.nn.Linear})


@pytest.mark.parametrize(
    ("strategy", "num_workers", "killed_at", "goes_on_at"), [(resilient_ddp, 2, 7, 6), (resilient_fsdp, 0, 5, 4)]
)
def test_killed_run_goes_on_on_each_rank_with_its_own_state(
    strategy: Any, num_workers: int, killed_at: int, goes_on_at: int, tmp_path: Path
) -> None:
    def run(folder: str, resume_from: str | None = None, faults: FaultPlan | None = None) -> SpawnResult:
        (tmp_path / folder).mkdir(exist_ok=True)
        job = (strategy, str(tmp_path / folder), resume_from, num_workers, {})
        return spawn(train_on_ranks, 2, args=job, faults=faults, deadline="60s")

    undisturbed = run("undisturbed").check().results
    killed = run("killed", faults=FaultPlan().kill(1, step=killed_at, where="before_optimizer_step"))
    assert [fired.fault.rank for fired in killed.faults] == [1]
    assert killed.exit_codes[1] == -9
    resumed = run("killed", "newest").check().results

    for rank in (0, 1):
        steps, weights = undisturbed[rank]
        assert resumed[rank] == ({number: steps[number] for number in range(goes_on_at, 8)}, weights)
    passes = [number for steps, _ in undisturbed.values() for batches in steps.values() for number in batches]
    assert len(passes) == len(set(passes)), "no number twice in a pass, on any rank"


def test_other_ranks_or_workers_are_refused_with_the_reason_and_a_stock_strategy_gathers_too(tmp_path: Path) -> None:
    folder, saved = str(tmp_path), str(tmp_path / "batch=7.ckpt")
    undisturbed = spawn(train_on_ranks, 2, args=("ddp", folder, None, 0, {}), deadline="60s").check().results
    resumed = spawn(train_on_ranks, 2, args=("ddp", folder, saved, 0, {}), deadline="60s").check().results
    for rank in (0, 1):
        steps = undisturbed[rank][0]
        assert resumed[rank][0] == {number: steps[number] for number in range(4, 8)}
    with pytest.raises(DatasetMismatch, match="ranks: 2 in the checkpoint, 1 in this run"):
        train_on_ranks("auto", folder, saved, 0, {"devices": 1, "accumulate_grad_batches": 4})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saver = SaveAt("on_train_batch_end", tmp_path_factory.mktemp("saved"))
    fit(iterable_data(Counting(17)), callbacks=[saver], max_steps=3)
    return saver.saves[-1][0]


@pytest.mark.parametrize(
    ("make_data", "message"),
    [
        (lambda: iterable_data(Counting(17), num_workers=2), "num_workers: 0 in the checkpoint, 2 in this run"),
        (
            lambda: iterable_data(nodes_of_torchdata("batches"), batched=True, batch_size=1),
            "batch_size: 2 in the checkpoint, 1 in this run",
        ),
        (lambda: map_data(17), "num_samples: None in the checkpoint, 17 in this run"),
        (lambda: iterable_data(Counting(17), seed=4), "seed: 3 in the checkpoint, 4 in this run"),
    ],
)
def test_data_that_cannot_go_on_is_refused_with_both_sides(make_data: Any, message: str, saved: Path) -> None:
    with pytest.raises(DatasetMismatch, match=message):
        fit(make_data(), ckpt_path=saved, max_steps=5)


def test_checkpoint_of_map_style_data_is_refused(tmp_path: Path) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    fit(map_data(17), callbacks=[saver], max_steps=1)
    with pytest.raises(DatasetMismatch, match="holds no states of an iterable data set"):
        fit(iterable_data(Counting(17), ignore_fingerprint=True), ckpt_path=saver.saves[0][0], max_steps=5)


def test_checkpoint_without_a_position_begins_iterable_data_where_that_is_wished(saved: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(saved, weights_only=True)
    del checkpoint["ResumableDataModule"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    anew = fit(iterable_data(Counting(17), start_sample=0), ckpt_path=tmp_path / "old.ckpt", max_steps=6)
    samples = [event[3] for event in anew.events if event[0] == "train"]
    assert samples == [
        event[3] for event in fit(iterable_data(Counting(17)), max_steps=3).events if event[0] == "train"
    ]
    with pytest.raises(ValueError, match="iterable training data begins at its beginning only, start_sample=0"):
        fit(iterable_data(Counting(17), start_sample=4), ckpt_path=tmp_path / "old.ckpt", max_steps=6)


class Stateless(Counting):
    state_dict = load_state_dict = None  # type: ignore[assignment]


class Strange(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"deep": [1, random.Random()]}


@pytest.mark.parametrize(
    ("make_data", "message"),
    [
        (lambda: iterable_data(Stateless(17)), r"Stateless is iterable and has no state.*allow_stateless=True"),
        (lambda: iterable_data(Strange(17)), r"state of Strange holds a random.Random at .*deep"),
        (lambda: iterable_data(Counting(17), uneven="error"), "where it ends is known only when it does"),
        (lambda: iterable_data(Counting(17), uneven="pad", batched=True), "the data yields batches"),
        (lambda: iterable_data(Counting(0)), "yields nothing on this rank"),
        (lambda: iterable_data(DataLoader(Noise(4), shuffle=True)), "which has no state: it shuffles and counts"),
        (lambda: iterable_data(loader_of_torchdata("in order"), batch_size=3), "makes batches of 2"),
        (lambda: iterable_data(loader_of_torchdata("in order"), num_workers=1), "starts workers by itself"),
        (lambda: iterable_data(nodes_of_torchdata("samples"), num_workers=1), "run workers of their own"),
        (lambda: iterable_data(OfItsLoader(17)), "it is made by its own loader"),
    ],
)
def test_data_that_could_not_be_resumed_is_refused_before_it_starts(make_data: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fit(make_data(), max_steps=2)


class OfItsLoader(Counting):
    def state_dict(self, num_samples_yielded: int, num_workers: int) -> dict[str, Any]:  # type: ignore[override]
        return {"done": num_samples_yielded // num_workers}


def test_each_rank_would_see_every_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="each of 2 ranks would see every sample"):
        stateful(
            loader_of_torchdata("shuffled"),
            batch_size=2,
            num_workers=0,
            batched=False,
            ranks=DataParallel(size=2),
            allow_stateless=False,
        )


def test_workers_of_torchdata_over_data_that_ends_are_warned_about(caplog: Any) -> None:
    for kind, num_workers, is_told in (("iterable", 2, True), ("iterable", 1, False), ("shuffled", 2, False)):
        caplog.clear()
        data = loader_of_torchdata(kind, num_workers)
        stateful(data, batch_size=2, num_workers=0, batched=False, ranks=DataParallel(), allow_stateless=False)
        assert ("with 2 workers asks a worker whose data has ended once more" in caplog.text) == is_told


def test_data_without_a_state_begins_anew_where_that_is_wished(tmp_path: Path, caplog: Any) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    make = partial(iterable_data, allow_stateless=True, shuffle=False)
    undisturbed = fit(make(Stateless(17)), callbacks=[saver], max_steps=3)
    resumed = fit(make(Stateless(17)), ckpt_path=saver.saves[-1][0], max_steps=6)
    assert numbers(resumed) == numbers(undisturbed)
    assert "begins anew, because allow_stateless=True" in caplog.text


def test_padded_pass_has_every_sample_once_and_iterable_validation_reads_all() -> None:
    seen: list[tuple[int, float]] = []
    validated: list[int] = []

    class Weighing(Diary):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            samples, weights = batch
            seen.extend(zip(samples[:, 0].int().tolist(), weights.tolist(), strict=True))
            return (self.layer(samples).squeeze(1) * weights).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            samples, weights = batch
            validated.extend(samples[weights == 1, 0].int().tolist())

    data = ResumableDataModule(Counting(8), Resuming(7), batch_size=3, uneven="pad")
    quiet_trainer(max_epochs=2).fit(Weighing(), data)
    assert len(seen) == 18
    assert sorted(number for number, weight in seen if weight) == [*range(8), *range(EPOCH, EPOCH + 8)]
    assert validated == [*range(7), *range(7)]


def test_trainer_that_fits_again_goes_on_and_another_one_begins_anew() -> None:
    data, model = iterable_data(Counting(17)), Diary()
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(model, data)
    trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(model, data)
    whole = fit(iterable_data(Counting(17)), max_steps=6)
    assert numbers(model) == numbers(whole)
    assert numbers(fit(data, max_steps=2)) == numbers(whole)[:4]


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Forty tensors as litdata writes them."""
    pytest.importorskip("litdata", reason="litdata is not installed: pip install litdata")
    folder = str(tmp_path_factory.mktemp("litdata") / "chunks")
    write = (
        "import litdata; from tests.distributed.iterable_jobs import tensor_of; "
        f"litdata.optimize(tensor_of, list(range(40)), {folder!r}, chunk_bytes=64, num_workers=1)"
    )
    subprocess.run([sys.executable, "-c", write], check=True, timeout=50)  # it changes its process for good
    return folder


@pytest.mark.soak  # its writer takes ten seconds
@pytest.mark.usefixtures("reset_sigchld")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_of_litdata_resumes_exactly(num_workers: int, chunks: str, tmp_path: Path) -> None:
    import litdata

    def make_data() -> Any:
        data = litdata.StreamingDataset(chunks, shuffle=True, drop_last=True, seed=1)
        return iterable_data(litdata.StreamingDataLoader(data, batch_size=2, num_workers=num_workers))

    saver = SaveAt("on_train_batch_end", tmp_path)
    undisturbed = fit(make_data(), callbacks=[saver], max_epochs=2)
    assert sorted(numbers(undisturbed)) == sorted([*range(40), *range(40)])
    for path, num_before in saver.saves[2::7]:
        assert fit(make_data(), ckpt_path=path, max_epochs=2).events == undisturbed.events[num_before:], path.name


def numbers(run: Any, first: int = 0) -> list[int]:
    return [number for event in run.events[first:] if event[0] == "train" for number in event[3]]
