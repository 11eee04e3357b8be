"""Row R13: loaders that are made anew get new validation data; new training data is refused before training."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lightning_distplus import ResumableDataModule
from tests.distributed.resume_jobs import Augmented, SampleDiary, fit, quiet_trainer


class Shifted(Dataset):
    """Samples from a number on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.first + index), 0.0])


class NewValidation(ResumableDataModule):
    """Has other validation data in each epoch."""

    def val_dataset(self) -> Any:
        return Shifted(100 * self.trainer.current_epoch)


class NewTraining(ResumableDataModule):
    """Has other training data in each epoch."""

    def train_dataset(self) -> Any:
        return Shifted(100 * self.trainer.current_epoch)


def test_validation_data_is_asked_for_anew_where_loaders_are_made_anew() -> None:
    run = partial(fit, diary=SampleDiary, max_epochs=3)
    data = [NewValidation(Augmented(4), batch_size=2) for _ in range(2)]
    seen = [run(data[every], reload_dataloaders_every_n_epochs=every).validated for every in (0, 1)]
    assert seen == [[0, 1] * 3, [0, 1, 100, 101, 200, 201]]


def test_new_training_data_in_later_epochs_is_refused_before_training() -> None:
    model = SampleDiary()
    with pytest.raises(ValueError, match=r"NewTraining.train_dataset\(\) is asked once in a run"):
        quiet_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model, NewTraining(batch_size=2))
    assert model.steps == {}
    assert len(fit(NewTraining(batch_size=2), diary=SampleDiary, max_epochs=3).steps) == 3
