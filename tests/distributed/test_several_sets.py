"""Several data sets in one data module: one that returns a dict in training, one after the other in validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset

from lightning_distplus.data import ResumableDataModule
from lightning_distplus.errors import DatasetMismatch
from tests.distributed.resume_jobs import Augmented, Diary, SaveAt, assert_every_save_resumes_exactly, fit

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
