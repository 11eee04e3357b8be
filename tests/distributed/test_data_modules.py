"""Data modules in runs: several data sets, mixtures that change, padded samples, ranks that have other data.

Rows R7, D3 and D7.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from lightning_distplus import ResilientDDP
from lightning_distplus.cli.__main__ import main
from lightning_distplus.data import ResumableDataModule, SampleAudit, Source
from lightning_distplus.data.order import BLOCK, Mixture
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.testing import spawn
from tests.distributed.resume_jobs import (
    Augmented,
    Diary,
    SampleDiary,
    SaveAt,
    assert_every_save_resumes_exactly,
    fit,
    map_data,
    quiet_trainer,
    token_data,
    write_tokens,
)

SIZES = {"long": 9, "short": 5}


class SideBySide(Dataset):
    """As in docs/guides/data.md."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return max(len(one) for one in self.parts.values())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: one[index % len(one)] for name, one in self.parts.items()}


class Pairs(Diary):
    """Notes the samples of both parts, and which validation set a batch comes from."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = [tuple(batch[name][:, 0].int().tolist()) for name in SIZES]
        self.note("train", batch_idx, 0, *ids, tuple(batch["short"][:, 1].tolist()))
        return self.layer(batch["long"]).pow(2).mean() + self.layer(batch["short"]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("validate", dataloader_idx, batch_idx, tuple(batch[:, 0].int().tolist()))


class ByLoader(Diary):
    validation_step = Pairs.validation_step


def both() -> ResumableDataModule:
    parts = SideBySide(**{name: Augmented(size) for name, size in SIZES.items()})
    return ResumableDataModule(parts, {"first": Augmented(5), "second": Augmented(3)}, batch_size=2, seed=3)


def test_a_data_set_that_returns_a_dict_resumes_exactly_from_every_save(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 2}
    assert assert_every_save_resumes_exactly(both, "on_train_batch_end", tmp_path, diary=Pairs, **settings) == 8


def test_validation_sets_are_read_one_after_the_other_also_as_lightning_combines_them() -> None:
    combined = CombinedLoader([DataLoader(Augmented(5), 2), DataLoader(Augmented(3), 2)], "sequential")
    given = {"first": Augmented(5), "second": Augmented(3)}
    for validation in (given, combined):
        run = fit(ResumableDataModule(Augmented(4), validation, batch_size=2), diary=ByLoader, max_epochs=1)
        seen = [event[1:4] for event in run.events if event[0] == "validate"]
        assert seen == [(0, 0, (0, 1)), (0, 1, (2, 3)), (0, 2, (4,)), (1, 0, (0, 1)), (1, 1, (2,))]


class Hub(dict):
    """As ``datasets.DatasetDict``."""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": Augmented(4), "b": Augmented(4)}, "The training data is a dict, and .* samples are dicts"),
        (CombinedLoader([DataLoader(Augmented(4))], "min_size"), "The training data is a CombinedLoader"),
        (Hub(train=Augmented(4), test=Augmented(2)), "a Hub of train, test. Pass one of them"),
    ],
)
def test_several_training_sets_are_refused_with_what_to_pass(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(ResumableDataModule(data, batch_size=2), max_steps=1)


def test_a_checkpoint_over_several_training_sets_is_refused(tmp_path: Path) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    fit(both(), diary=Pairs, callbacks=[saver], max_steps=2)
    checkpoint = torch.load(saver.saves[0][0], weights_only=True)
    checkpoint["ResumableDataModule"]["parts"] = [9, 5]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.raises(DatasetMismatch, match=r"several data sets side by side \(their sizes\): \[9, 5\]"):
        fit(both(), diary=Pairs, ckpt_path=tmp_path / "old.ckpt", max_steps=2)


# -- a mixture that changes between runs: recorded, deterministic, no sample of a source repeated or missed ------------

FIRST = {"a": 3.0, "b": 1.0}
SECOND = {"b": 1.0, "c": 1.0, "a": 0.5}
PER_STEP = 4


def run(folder: Path, weights: dict[str, float], max_steps: int, load: Any = None, **arguments: Any) -> Any:
    """Ids are the first token of each sample: source a holds 0.., b 10,000.., c 20,000.. in steps of 4."""
    sources = [Source(path=str(folder / name), weight=weight, name=name) for name, weight in weights.items()]
    callbacks: list[Any] = [SaveAt("on_train_batch_end", folder / str(max_steps))]
    callbacks += [SampleAudit(str(folder / "audit"))] if arguments.pop("audits", True) else []
    data = token_data(sources=sources, micro_batch_size=PER_STEP, **arguments)
    return fit(data, diary=SampleDiary, ckpt_path=load, max_steps=max_steps, callbacks=callbacks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate("abc"):
        write_tokens(tmp_path / name, 801 if name == "a" else 401, start=10_000 * number)
    return tmp_path


def ids_of(model: Any) -> dict[int, list[int]]:
    return {step: batches[0] for step, batches in model.steps.items()}


def test_changed_mixture_is_a_recorded_phase_in_which_every_source_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run(folder, FIRST, 20)
    with pytest.raises(DatasetMismatch, match="number of sources: 2 in the checkpoint, 3 in this run"):
        run(folder, SECOND, 40, load=folder / "20" / "19.ckpt", audits=False)
    with caplog.at_level(logging.WARNING):
        after = run(folder, SECOND, 40, load=folder / "20" / "19.ckpt", allow_mixture_change=True)
    assert caplog.text.count("the mixture changes at sample 80: weights 0.75, 0.25 become b 0.4 (from its sample ") == 1

    state = torch.load(folder / "40" / "9.ckpt", weights_only=True)["TokenDataModule"]
    drawn = Mixture([3.0, 1.0], seed=3).draws_at(80)
    assert state["phase"] == [80, [drawn[1], 0, drawn[0]], [1, 2, 0]]
    assert state["past_mixtures"] == [[0, [0.75, 0.25]]]
    assert len(repr(state)) < 1000

    # A later run needs no permission, on another cut, and is the same; so is the same change made once more.
    again = run(folder, SECOND, 60, load=folder / "40" / "9.ckpt")
    assert ids_of(again)[35] == ids_of(run(folder, SECOND, 36, load=folder / "40" / "14.ckpt", audits=False))[35]
    assert {step: ids_of(after)[step] for step in range(30, 40)} == {
        step: ids_of(again)[step] for step in range(30, 40)
    }
    third = run(folder, FIRST, 62, load=folder / "60" / "29.ckpt", allow_mixture_change=True)
    assert third.trainer.datamodule.state_dict()["past_mixtures"] == [[0, [0.75, 0.25]], [80, [0.4, 0.4, 0.2]]]

    steps = ids_of(before) | ids_of(after) | ids_of(again) | ids_of(third)
    seen = np.array([steps[step] for step in range(62)]).ravel()
    shares = np.bincount(seen[80:240] // 10_000) / 160
    assert np.abs(shares - [0.2, 0.4, 0.4]).max() < 0.1
    assert len(np.unique(seen)) == 248, "no source has run out, so that no sample comes twice"
    assert main(["audit", str(folder / "audit")]) == 0
    assert "repeated 0, missed 0" in capsys.readouterr().out.splitlines()


def test_draws_before_any_number_are_counted() -> None:
    mixture = Mixture([0.6, 0.3, 0.1], seed=2)
    sources, _ = mixture.locate(np.arange(3 * BLOCK))
    for number in (0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 7, 3 * BLOCK - 1):
        assert mixture.draws_at(number) == np.bincount(sources[:number], minlength=3).tolist()


def test_permission_does_not_cover_another_seed_and_ignoring_needs_no_phase(folder: Path) -> None:
    run(folder, FIRST, 6, audits=False)
    path = folder / "6" / "5.ckpt"
    with pytest.raises(DatasetMismatch, match="seed: 3 in the checkpoint, 4 in this run"):
        run(folder, SECOND, 8, load=path, allow_mixture_change=True, audits=False, seed=4)
    ignored = run(folder, SECOND, 8, load=path, ignore_fingerprint=True, audits=False)
    assert "phase" not in ignored.trainer.datamodule.state_dict()
    same = run(folder, FIRST, 8, load=path, allow_mixture_change=True, audits=False)
    assert "phase" not in same.trainer.datamodule.state_dict(), "nothing has changed"


# -- padded samples weigh nothing in means and metrics over ranks ------------------------------------------------------


class Weighted(SampleDiary):
    """Takes means as docs/guides/data.md says."""

    def __init__(self) -> None:
        super().__init__()
        self.means = torch.nn.ModuleDict({"of_train": MeanMetric(), "of_val": MeanMetric()})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.note("of_train", batch)
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("of_val", batch)

    def note(self, name: str, batch: Any) -> None:
        samples, weights = batch
        self.means[name].update(samples[:, 0], weights)
        self.log(name, self.means[name], on_step=False, on_epoch=True)


def fit_padded(rank: int, folder: str) -> dict[str, float]:
    settings = {"strategy": ResilientDDP(timeout="30s"), "devices": 2, "default_root_dir": folder}
    run = fit(map_data(17, batch_size=5, uneven="pad"), diary=Weighted, max_epochs=1, **settings)
    return {name: value.item() for name, value in run.trainer.logged_metrics.items()}


def test_means_over_ranks_do_not_count_padded_samples(tmp_path: Path) -> None:
    results = spawn(fit_padded, 2, args=(str(tmp_path),), deadline="40s").check().results
    for means in results.values():
        assert means == {"of_train": sum(range(17)) / 17, "of_val": sum(range(5)) / 5}


# -- ranks that do not have the same data, or do not stand at the same place in it -------------------------------------


def fit_with_odd_rank(rank: int, stock: bool, odd: dict[str, Any], folder: str) -> tuple[str, int]:
    strategy: Any = "ddp" if stock else ResilientDDP(timeout="30s")
    trainer = quiet_trainer(strategy=strategy, devices=3, max_steps=2, default_root_dir=folder)
    model = SampleDiary()
    try:
        trainer.fit(model, map_data(**{"num_samples": 26, "seed": 3, **(odd if rank == 1 else {})}))
    except DatasetMismatch as error:
        return str(error), len(model.steps)
    return "finished", len(model.steps)


@pytest.mark.parametrize(
    ("stock", "odd", "line"),
    [
        (True, {"num_samples": 24}, "num_samples: 26 on ranks 0, 2; 24 on rank 1"),
        (False, {"seed": 4}, "seed: 3 on ranks 0, 2; 4 on rank 1"),
        (False, {}, ""),
    ],
)
def test_rank_with_other_data_is_named_on_all_ranks_before_the_first_batch(
    stock: bool, odd: dict[str, Any], line: str, tmp_path: Path
) -> None:
    run = spawn(fit_with_odd_rank, 3, args=(stock, odd, str(tmp_path)), deadline="40s")
    for rank in range(3):  # a rank that is slow to end is ended by its peers' failure: then its log has the line
        text, num_steps = run.results.get(rank, (run.logs[rank], 0))
        assert line in text
        assert num_steps == (0 if line else 2)
        assert (text == "finished") is not bool(line)


@pytest.mark.parametrize("limit", [{"max_steps": 4}, {"max_epochs": 1}])
def test_finished_training_says_so(limit: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = SaveAt("on_train_epoch_end" if "max_epochs" in limit else "on_train_batch_end", tmp_path)
    fit(map_data(17), callbacks=[saver], **{"max_epochs": 2, **limit})
    with caplog.at_level(logging.WARNING, "lightning_distplus"):
        again = fit(map_data(17), ckpt_path=saver.saves[-1][0], **{"max_epochs": 2, **limit})
    (name, value), num_samples = *limit.items(), 8 if "max_steps" in limit else 16
    assert not [event for event in again.events if event[0] == "train"]
    assert f"training is already finished: the checkpoint stands after step {num_samples // 2}" in caplog.text
    assert f"sample {num_samples}, and {name} is {value}; raise it to go on" in caplog.text


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            {"max_steps": 11},
            r"after step 12, epoch 1, sample 24, and this run ends before, with max_steps=11\. Raise max_s",
        ),
        (
            {"max_epochs": 1},
            r"after step 16, epoch 2, sample 32, and this run ends before, with max_epochs=1\. Raise max_e",
        ),
    ],
)
def test_checkpoint_past_the_end_of_the_run_is_refused(limit: dict[str, int], words: str, tmp_path: Path) -> None:
    saver = SaveAt("on_train_epoch_end" if "max_epochs" in limit else "on_train_batch_end", tmp_path)
    fit(map_data(17), callbacks=[saver], max_epochs=2)
    path = saver.saves[-1 if "max_epochs" in limit else 11][0]
    with pytest.raises(DatasetMismatch, match=f"training already finished: the checkpoint stands {words}"):
        fit(map_data(17), ckpt_path=path, **{"max_epochs": 2, **limit})
