"""Several data sets in one data module: side by side in training, one after the other in validation."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_distplus.data import ResumableDataModule, SampleAudit
from lightning_distplus.data.audit_merge import audit
from tests.distributed.iterable_jobs import Counting
from tests.distributed.resume_jobs import (
    Augmented,
    Diary,
    SaveAt,
    assert_every_save_resumes_exactly,
    fit,
)

SIZES = {"long": 17, "short": 5}


class Pairs(Diary):
    """Notes the samples of both parts, and which validation set a batch comes from."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids = list(zip(*(batch[name][:, 0].int().tolist() for name in SIZES), strict=True))
        assert ids == self.trainer.datamodule.sample_ids(batch_idx)
        self.note("train", batch_idx, 0, tuple(ids), tuple(batch["short"][:, 1].tolist()))
        return self.layer(batch["long"]).pow(2).mean() + self.layer(batch["short"]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("validate", dataloader_idx, batch_idx, tuple(batch[:, 0].int().tolist()))


def both(**arguments: Any) -> ResumableDataModule:
    parts = {name: Augmented(size) for name, size in SIZES.items()}
    validation = {"first": Augmented(5), "second": Augmented(3)}
    return ResumableDataModule(parts, validation, **{"batch_size": 2, "seed": 3, **arguments})


def pairs(run: Diary) -> list[tuple[int, int]]:
    return [one for event in run.events if event[0] == "train" for one in event[3]]


@pytest.mark.parametrize("combine", ["max_size_cycle", "min_size"])
def test_parts_side_by_side_resume_exactly_from_every_save_and_audit_clean(combine: Any, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"max_epochs": 8 if combine == "min_size" else 2, "val_check_interval": 2}
    num_saves = assert_every_save_resumes_exactly(
        lambda: both(combine=combine), "on_train_batch_end", tmp_path, diary=Pairs, **arguments
    )
    assert num_saves == 16
    run = fit(both(combine=combine), diary=Pairs, callbacks=[SampleAudit(str(tmp_path / "audit"))], **arguments)
    assert audit(tmp_path / "audit").ok
    long, short = (Counter(one) for one in zip(*pairs(run), strict=True))
    assert sum(long.values()) == sum(short.values()) == 32
    assert max(short.values()) - min(short.values()) <= 2, "a short part is read over and over"
    assert max(long.values()) <= 3


def test_validation_sets_are_read_one_after_the_other() -> None:
    run = fit(both(), diary=Pairs, max_epochs=1)
    seen = [event[1:4] for event in run.events if event[0] == "validate"]
    assert seen == [(0, 0, (0, 1)), (0, 1, (2, 3)), (0, 2, (4,)), (1, 0, (0, 1)), (1, 1, (2,))]


@pytest.fixture
def _worker_handler() -> Iterator[None]:
    """torch sets a handler for SIGCHLD with its first worker, and never takes it back."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_worker_handler")
def test_workers_give_what_the_main_process_gives(tmp_path: Path) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    undisturbed = fit(both(), diary=Pairs, callbacks=[saver], max_epochs=2)
    resumed = fit(both(num_workers=2, persistent_workers=True), diary=Pairs, ckpt_path=saver.saves[4][0], max_epochs=2)
    assert resumed.events == undisturbed.events[saver.saves[4][1] :]


def test_each_part_is_collated_by_itself() -> None:
    shapes: list[dict[str, Any]] = []

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        assert all(isinstance(sample, torch.Tensor) for sample in samples)
        return torch.stack(samples)

    class Shapes(Pairs):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            shapes.append({name: tuple(one.shape) for name, one in batch.items()})
            return super().training_step(batch, batch_idx)

    fit(both(collate_fn=collate), diary=Shapes, max_steps=2)
    assert shapes == [{"long": (2, 2), "short": (2, 2)}] * 2


def stacked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def combined_loader(mode: Any = "max_size_cycle", *, batch_size: int = 6, kind: type = dict) -> CombinedLoader:
    loaders = {
        "long": DataLoader(Augmented(SIZES["long"]), batch_size=2, shuffle=True),
        "short": DataLoader(Augmented(SIZES["short"] + 7), batch_size=batch_size, collate_fn=stacked),
    }
    return CombinedLoader(loaders if kind is dict else kind(loaders.values()), mode)


class Sizes(Diary):
    """Takes the parts by name or by place."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        long, short = batch.values() if isinstance(batch, dict) else batch
        ids = tuple(tuple(part[:, 0].int().tolist()) for part in (long, short))
        drawn = [(row[0], row[1:]) for row in self.trainer.datamodule.sample_ids(batch_idx)]
        assert ids == (tuple(row[0] for row in drawn), tuple(one for row in drawn for one in row[1]))
        self.note("train", type(batch).__name__, ids, tuple(short[:, 1].tolist()))
        return self.layer(long).pow(2).mean() + self.layer(short).mean()


@pytest.mark.parametrize("kind", [dict, list])
def test_combined_loader_resumes_exactly_in_its_own_batch_sizes_and_structure(kind: type, tmp_path: Path) -> None:
    def data() -> ResumableDataModule:
        return ResumableDataModule(combined_loader(kind=kind), batch_size=2, seed=3)

    num_saves = assert_every_save_resumes_exactly(data, "on_train_batch_end", tmp_path, diary=Sizes, max_epochs=2)
    assert num_saves == 16
    run = fit(data(), diary=Sizes, callbacks=[SampleAudit(str(tmp_path / "audit"))], max_epochs=2)
    assert audit(tmp_path / "audit").ok
    assert {event[1] for event in run.events if event[0] == "train"} == {kind.__name__}
    batches = [event[2] for event in run.events if event[0] == "train"]
    assert {(len(long), len(short)) for long, short in batches} == {(2, 6)}
    assert [one for _, short in batches[:8] for one in short] == [*range(12)] * 4, "this loader does not shuffle"
    first_epoch = [one for long, _ in batches[:8] for one in long]
    assert len({*first_epoch}) == 16
    assert first_epoch != sorted(first_epoch)


def test_combined_loader_for_validation_is_lightnings(tmp_path: Path) -> None:
    validation = CombinedLoader([DataLoader(Augmented(5), 2), DataLoader(Augmented(3), 2)], "sequential")
    run = fit(ResumableDataModule(Augmented(4), validation, batch_size=2), diary=ByLoader, max_epochs=1)
    seen = [event[1:4] for event in run.events if event[0] == "validate"]
    assert seen == [(0, 0, (0, 1)), (0, 1, (2, 3)), (0, 2, (4,)), (1, 0, (0, 1)), (1, 1, (2,))]


class ByLoader(Diary):
    validation_step = Pairs.validation_step


class Hub(dict):
    """As ``datasets.DatasetDict``."""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": Augmented(4), "b": Counting(4)}, r"'b' \(Counting\) has no index"),
        ({"a": Augmented(4), "b": []}, r"'b' \(list\) has no index, or no sample"),
        (Hub(train=Augmented(4), test=Augmented(2)), "a Hub of train, test. Pass one of them"),
        (combined_loader("sequential"), "CombinedLoader of mode 'sequential'.*ConcatDataset"),
        (combined_loader("max_size"), "CombinedLoader of mode 'max_size'.* Pass a dict of their data sets"),
        (CombinedLoader({"a": [DataLoader(Augmented(4))]}), "Part 'a' of the CombinedLoader is a list;"),
        (CombinedLoader(DataLoader(Augmented(4))), "CombinedLoader over a DataLoader; it is a dict, list or tuple"),
        (combined_loader(batch_size=3), "batches of 2, 3, and batch_size is 2.*pass batch_size=1"),
        (CombinedLoader([DataLoader(Counting(4), batch_size=2)], "min_size"), r"draws by a _InfiniteConstantSampler"),
        (
            CombinedLoader([DataLoader(Augmented(4), 2, sampler=WeightedRandomSampler([1.0] * 4, 4))], "min_size"),
            "Part '0' of the CombinedLoader draws by a WeightedRandomSampler, whose place only it knows",
        ),
    ],
)
def test_what_cannot_be_read_side_by_side_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(ResumableDataModule(data, batch_size=2), max_steps=1)


def test_unknown_way_to_combine_and_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="combine is 'max_size'"):
        fit(both(combine="max_size"), max_steps=1)
    with pytest.raises(ValueError, match="weights needs one data set with an index"):
        fit(both(weights=[1.0] * 17), max_steps=1)
