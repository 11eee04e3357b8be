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

from lightning_distplus.data import ResumableDataModule
from lightning_distplus.data.iterable import stateful
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.testing import spawn
from lightning_distplus.world import DataParallel
from tests.distributed import resume_jobs
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
)
from tests.distributed.resume_jobs import (
    Diary,
    SaveAt,
    assert_every_save_resumes_exactly,
    case_resumes_exactly,
    final_counters,
    fit,
    map_data,
    quiet_trainer,
    trained,
)
from tests.pairs import in_turn, kept

CASES: dict[str, dict[str, Any]] = {
    **resume_jobs.CASES,
    "accumulation, last window cut": {"max_epochs": 2, "num_samples": 22, "accumulate_grad_batches": 3},
    "epochs of a number of batches": {"max_epochs": 4, "limit_train_batches": 5, "num_samples": 14},
    "limit in the middle of a window": {"max_epochs": 3, "limit_train_batches": 5, "accumulate_grad_batches": 2},
    "limit and validation inside the epoch": {"max_epochs": 3, "limit_train_batches": 5, "val_check_interval": 3},
    "schedule planned beforehand": {"max_epochs": 2, "max_steps": 14, "plans_schedule": True},
}


@pytest.mark.parametrize(
    ("case", "style"),
    [*((case, Counting) for case in CASES), *((case, Resuming) for case in ("three epochs", "limited by steps"))],
)
@pytest.mark.parametrize("every", kept([1, 5], [5]))
def test_save_after_each_batch_resumes_exactly(case: str, style: Any, every: int, tmp_path: Path) -> None:
    data_of = lambda num_samples: iterable_data(style(num_samples))  # noqa: E731
    assert case_resumes_exactly(data_of, CASES[case], "on_train_batch_end", tmp_path, every) >= 10


@pytest.mark.parametrize(
    ("case", "hook"),
    in_turn(
        ["limit and validation inside the epoch", "accumulation, last window cut"],
        ["on_train_batch_start", "on_train_epoch_start", "on_validation_end", "on_train_epoch_end"],
    ),
)
def test_save_at_any_other_moment_resumes_exactly(case: str, hook: str, tmp_path: Path) -> None:
    data_of = lambda num_samples: iterable_data(Counting(num_samples))  # noqa: E731
    assert case_resumes_exactly(data_of, CASES[case], hook, tmp_path) >= 2


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


def train_and_resume(folder: str) -> list[tuple[list[Any], dict[str, Any]]]:
    """On two ranks of stock: the events and the counters of a run, and of one that resumes inside a window."""
    runs = []
    for path in (None, f"{folder}/6.ckpt"):
        saver = [] if path else [SaveAt("on_train_batch_end", Path(folder))]
        settings = {"strategy": "ddp", "devices": 2, "max_steps": 8, "accumulate_grad_batches": 2, "callbacks": saver}
        run = fit(iterable_data(Counting(32)), ckpt_path=path, **settings)
        runs.append((run.events, final_counters(run)))
    return runs


def test_each_rank_of_a_stock_strategy_goes_on_with_its_own_state_and_another_number_is_refused(tmp_path: Path) -> None:
    """Kills under the Resilient strategies are in ``tests/faults/test_r1_r3_r5_r12_killed_runs.py``."""
    results = spawn(train_and_resume, 2, args=(str(tmp_path),), deadline="60s").check().results
    seen = [
        number for (events, _), _ in results.values() for event in events if event[0] == "train" for number in event[3]
    ]
    assert len(seen) == len(set(seen)) == 64, "no number twice in a pass, on any rank"
    for (events, counters), (resumed, resumed_counters) in results.values():
        assert resumed == events[-len(resumed) :]
        assert trained(resumed) == 16 - 6
        assert resumed_counters == counters
    with pytest.raises(DatasetMismatch, match="ranks: 2 in the checkpoint, 1 in this run"):
        fit(iterable_data(Counting(32)), ckpt_path=tmp_path / "6.ckpt", max_steps=8, accumulate_grad_batches=4)


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
    fit(data, diary=Weighing, max_epochs=2)
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
