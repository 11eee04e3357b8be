"""A plain DataLoader under a Resilient strategy resumes exactly, at whichever moment its checkpoint was saved."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_distplus import ResilientDDP, ResumableDataModule
from lightning_distplus.data.dataloader import after
from lightning_distplus.errors import DatasetMismatch
from lightning_distplus.testing import spawn
from tests.distributed import resume_jobs
from tests.distributed.iterable_jobs import Counting, Endless, Resuming
from tests.distributed.resume_jobs import (
    Augmented,
    SaveAt,
    assert_every_save_resumes_exactly,
    final_counters,
    quiet_trainer,
)
from tests.pairs import kept

Make = Callable[[], Any]


class Diary(resume_jobs.Diary):
    """Notes every batch with the counters of the Trainer.

    Args:
        plans_schedule: Whether the number of steps is asked for before the loops are restored.
        draws: Whether each step draws random numbers, as dropout does; one that is done again draws others.
    """

    def __init__(self, *, plans_schedule: bool, draws: bool) -> None:
        super().__init__(plans_schedule=plans_schedule)
        self.draws = draws

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples = torch.cat([one.reshape(-1, 2) for one in _tensors(batch)])
        self.note("train", batch_idx, tuple(samples[:, 0].int().tolist()), tuple(samples[:, 1].tolist()))
        noise = torch.rand(1) * np.random.rand() if self.draws else 1
        return (self.layer(samples) * noise).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.note("validate", batch_idx, tuple(batch[:, 0].int().tolist()))


class WaitsForPlateau(Diary):
    """Its learning rate falls where a logged number does not."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("epoch", float(self.trainer.current_epoch))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "epoch"}}


class Peeks(Diary):
    """Looks at a batch of the loader by itself, before the training, in it, and between two epochs."""

    def look(self) -> None:
        next(iter(self.trainer.train_dataloader), None)

    def on_train_start(self) -> None:
        self.look()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.look()

    def on_train_epoch_end(self) -> None:
        self.look()
        super().on_train_epoch_end()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            self.look()
        return super().training_step(batch, batch_idx)


class Reads(Diary):
    """Reads all of the loader by itself before it trains."""

    def on_train_start(self) -> None:
        for _ in self.trainer.train_dataloader:
            pass


class OneSteps(Diary):
    """Of its two optimizers, the first steps in each batch, and the second sums its gradients up."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False
        self.other = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx) + self.other(batch).pow(2).mean())
        first, _ = self.optimizers()
        first.step()
        first.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (self.layer, self.other)]


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif batch is not None:
        for one in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(one)


def fit(
    loader: Any,
    *,
    ckpt_path: str | Path | None = None,
    plans_schedule: bool = False,
    draws: bool = True,
    diary: type[Diary] = Diary,
    strategy: Callable[[], Any] = ResilientDDP,
    seed: int = 5,
    **arguments: Any,
) -> Diary:
    """One fit on one rank, in this process."""
    pl.seed_everything(seed)
    model = diary(plans_schedule=plans_schedule, draws=draws)
    settings = {"strategy": strategy(), "max_epochs": 3, **arguments}
    val = DataLoader(torch.zeros(3, 2))
    random.random()
    with tempfile.TemporaryDirectory() as root:
        quiet_trainer(**{"default_root_dir": root, **settings}).fit(model, loader(), val, ckpt_path=ckpt_path)
    return model


def shuffled(data: Any = None, **arguments: Any) -> DataLoader:
    return DataLoader(Augmented() if data is None else data, **{"batch_size": 2, "shuffle": True, **arguments})


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Drawn(Sampler[int]):
    """Draws from python's and numpy's global generators, and from one of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(4)

    def __iter__(self) -> Iterator[int]:
        drawn = random.sample(range(17), 5) + np.random.permutation(17)[:4].tolist()
        yield from drawn
        yield from self.own.permutation(17).tolist()

    def __len__(self) -> int:
        return 26


class ByLength(Sampler[list[int]]):
    """Batches of as many samples as the draw says, made at once."""

    def __iter__(self) -> Iterator[list[int]]:
        first = random.randrange(3) + 1
        order = torch.randperm(17).tolist()
        return iter([order[:first], order[first:9], order[9:11], order[11:]])

    def __len__(self) -> int:
        return 4


class ByTheClock(Sampler[int]):
    """Another order at each time."""

    def __iter__(self) -> Iterator[int]:
        yield from np.random.default_rng(time.time_ns()).permutation(17).tolist()

    def __len__(self) -> int:
        return 17


def sampled_by(kind: str, **arguments: Any) -> DataLoader:
    samplers: dict[str, Any] = {
        "weighted": lambda: {"sampler": WeightedRandomSampler(range(1, 18), 17)},
        "subset": lambda: {"sampler": SubsetRandomSampler(range(0, 17, 2), generator=seeded())},
        "drawn": lambda: {"sampler": Drawn()},
        "by length": lambda: {"batch_sampler": ByLength(), "batch_size": 1},
        "clock": lambda: {"sampler": ByTheClock()},
        "with replacement": lambda: {"sampler": RandomSampler(range(17), replacement=True, num_samples=9)},
        "seeded": lambda: {"sampler": RandomSampler(range(17), generator=seeded())},
        "batches": lambda: {"sampler": BatchSampler(SequentialSampler(range(17)), 3, False), "batch_size": None},
    }
    return shuffled(**{"shuffle": None, **samplers[kind](), **arguments})


def combined(mode: str) -> CombinedLoader:
    parts = {"a": shuffled(), "b": [shuffled(batch_size=3, num_workers=1), DataLoader(Augmented(3), batch_size=1)]}
    return CombinedLoader(parts, mode)


def stream(data: type[IterableDataset] = Counting, num_samples: int = 19, **arguments: Any) -> DataLoader:
    return DataLoader(data(num_samples), **{"batch_size": 2, **arguments})


def stateful(data: Any = None, **arguments: Any) -> DataLoader:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Counting(19) if data is None else data, **{"batch_size": 2, **arguments})


def stateful_over_ids(**arguments: Any) -> DataLoader:
    return stateful(Augmented(), shuffle=True, **arguments)


class Plain(IterableDataset):
    """Has no state: a ``StatefulDataLoader`` reads it again up to the place."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(13):
            yield torch.tensor([float(number), torch.rand(()).item()])


class Hopeful(Counting):
    """Ends before the length that it says."""

    def __len__(self) -> int:
        return self.num_samples + 5


def streams(mode: str, num_workers: int = 1) -> CombinedLoader:
    return CombinedLoader([stream(), stream(num_samples=7, num_workers=num_workers)], mode)


BOTH = ["on_train_batch_end", "on_train_epoch_end"]
MOMENTS = [*BOTH, "on_validation_end", "on_train_epoch_start", "on_train_start"]
OWN = {"use_distributed_sampler": False, "max_epochs": 2}
WINDOWS = {"accumulate_grad_batches": 2, "draws": False}
TWO = {"max_epochs": 2}

ORACLES: dict[str, tuple[Make, list[str], dict[str, Any]]] = {
    "every moment": (shuffled, MOMENTS, {"val_check_interval": 3}),
    "before a step": (shuffled, ["on_before_optimizer_step"], {"val_check_interval": 3, "draws": False}),
    "windows": (shuffled, BOTH, {"limit_train_batches": 5, **WINDOWS}),
    "open windows": (shuffled, BOTH, {"accumulate_grad_batches": 4, "draws": False}),
    "planned schedule": (shuffled, BOTH, {"plans_schedule": True}),
    "loaders made anew": (shuffled, BOTH, {"reload_dataloaders_every_n_epochs": 1}),
    "overfit": (shuffled, BOTH, {"overfit_batches": 4}),
    "steps": (shuffled, BOTH, {"max_steps": 20, "max_epochs": -1}),
    "validation by steps": (shuffled, BOTH, {"check_val_every_n_epoch": None, "val_check_interval": 7}),
    "read by others": (shuffled, BOTH[:1], {**OWN, "diary": Reads}),
    "looked at by others": (shuffled, BOTH[:1], {**OWN, "diary": Peeks}),
    "workers": (partial(shuffled, num_workers=2), BOTH[:1], TWO),
    "persistent workers": (partial(shuffled, num_workers=2, persistent_workers=True, prefetch_factor=4), BOTH, TWO),
    "drop_last": (partial(shuffled, drop_last=True), BOTH[:1], TWO),
    "in order": (partial(shuffled, shuffle=False), BOTH[:1], TWO),
    "without batches": (partial(shuffled, batch_size=None, shuffle=None), BOTH[:1], TWO),
    "global generator": (shuffled, BOTH, OWN),
    "loader's generator": (lambda: shuffled(generator=seeded()), BOTH, OWN),
    "global generator, persistent workers": (partial(shuffled, num_workers=2, persistent_workers=True), BOTH, OWN),
    "with replacement": (partial(sampled_by, "with replacement"), BOTH, OWN),
    "sampler's generator": (partial(sampled_by, "seeded"), BOTH, OWN),
    "batches as indices": (partial(sampled_by, "batches"), BOTH, OWN),
    **{
        f"{kind}, {num_workers} workers": (partial(sampled_by, kind, num_workers=num_workers), BOTH, OWN)
        for kind in ("weighted", "subset", "drawn", "by length")
        for num_workers in (0, 2)
    },
    "wrapped by Lightning": (partial(sampled_by, "weighted"), BOTH[:1], TWO),
    **{mode: (partial(combined, mode), BOTH, OWN) for mode in ("max_size_cycle", "max_size", "min_size")},
    "stream": (stream, MOMENTS, TWO),
    "stream, windows": (stream, BOTH, WINDOWS),
    "stream, validation inside": (stream, BOTH, {"val_check_interval": 3}),
    "stream, 2 workers": (partial(stream, num_workers=2), BOTH, TWO),
    "stream, persistent workers": (partial(stream, num_workers=2, persistent_workers=True), BOTH, TWO),
    "stream, drop_last": (partial(stream, drop_last=True, num_workers=2), BOTH, TWO),
    "stream without batches": (partial(stream, batch_size=None), BOTH, TWO),
    "stream that begins at 0": (partial(stream, Resuming), BOTH, TWO),
    "stream that ends before its length": (partial(stream, Hopeful), BOTH, {**TWO, "limit_val_batches": 0}),
    "limited stream": (stream, BOTH, {"limit_train_batches": 4}),
    "limited stream that begins at 0": (partial(stream, Resuming), BOTH, {"limit_train_batches": 4}),
    "endless stream": (partial(stream, Endless), BOTH, {"limit_train_batches": 4}),
    "endless stream, steps": (partial(stream, Endless, num_workers=2), BOTH[:1], {"max_steps": 9, "max_epochs": -1}),
    "StatefulDataLoader": (stateful, BOTH, TWO),
    "StatefulDataLoader, workers": (partial(stateful, num_workers=2, persistent_workers=True), BOTH, TWO),
    "StatefulDataLoader over ids": (stateful_over_ids, BOTH, OWN),
    "StatefulDataLoader over ids, workers": (partial(stateful_over_ids, num_workers=2), BOTH, TWO),
    "StatefulDataLoader over no state": (lambda: stateful(Plain(), num_workers=2), BOTH[:1], TWO),
    **{f"streams, {mode}": (partial(streams, mode), BOTH, TWO) for mode in ("max_size_cycle", "max_size", "min_size")},
    **{
        f"streams without workers, {mode}": (partial(streams, mode, 0), BOTH, TWO)
        for mode in ("max_size_cycle", "max_size")
    },
    "cycle in windows": (partial(combined, "max_size_cycle"), BOTH, {**OWN, **WINDOWS}),
    "cycle over ranks": (partial(combined, "max_size_cycle"), BOTH[:1], TWO),
}
EACH_COMMIT = ["windows", "global generator", "drawn, 0 workers", "by length, 2 workers", "max_size_cycle", "stream"]
EACH_COMMIT += ["stream, persistent workers", "streams, max_size_cycle", "StatefulDataLoader over ids, workers"]
EACH_COMMIT += ["limited stream that begins at 0", "looked at by others"]


def resume_from_saves(names: list[str], every: int, folder: str) -> dict[str, int]:
    counts = {}
    for name in names:
        make, hooks, arguments = ORACLES[name]
        for hook in hooks:
            saves = Path(folder) / name / hook
            saves.mkdir(parents=True)
            counts[f"{name}, {hook}"] = assert_every_save_resumes_exactly(make, hook, saves, every, fit, **arguments)
    return counts


@pytest.mark.deadline(170)
@pytest.mark.parametrize(
    ("names", "every"),  # of the saves, counted from the last one
    [(EACH_COMMIT, 3), *(pytest.param([name], 1, marks=pytest.mark.soak) for name in ORACLES)],
    ids=lambda one: str(one) if isinstance(one, int) else one[0] if len(one) == 1 else "each commit",
)
def test_resume_from_every_save_is_the_undisturbed_run(names: list[str], every: int, tmp_path: Path) -> None:
    run = spawn(resume_from_saves, 1, args=(names, every, str(tmp_path)), deadline="150s").check()
    assert min(run.results[0].values()) >= 1


# -- single runs -------------------------------------------------------------------------------------------------------


def saved(make: Make, folder: str, **arguments: Any) -> tuple[Diary, list[Any]]:
    """A run that saves after each batch, and its saves."""
    saver = SaveAt("on_train_batch_end", Path(folder))
    run = fit(make, callbacks=[saver], **arguments)
    return run, saver.saves


def rest_of(run: Diary) -> list[Any]:
    return [event[2] for event in run.events if event[0] == "train"]


def on_one_rank(job: Callable[..., Any], *arguments: Any) -> Any:
    return spawn(job, 1, args=arguments, deadline="60s").check().results[0]


def reads_of_a_resume(folder: str) -> dict[str, Any]:
    arguments = {"max_epochs": 1, "diary": WaitsForPlateau}
    run, saves = saved(shuffled, folder, **arguments)
    data = Augmented()
    resumed = fit(lambda: DataLoader(data, batch_size=2, shuffle=True), ckpt_path=saves[4][0], **arguments)
    return {
        "read": data.read,
        "asked": [one for ids in rest_of(resumed) for one in ids],
        "whole": rest_of(run),
        "schedules": [one.trainer.lr_scheduler_configs[0].scheduler.state_dict() for one in (run, resumed)],
    }


def test_resume_reads_nothing_that_is_done_and_schedulers_that_wait_for_a_plateau_step(tmp_path: Path) -> None:
    found = on_one_rank(reads_of_a_resume, str(tmp_path))
    assert found["read"] == found["asked"] == [one for ids in found["whole"][5:] for one in ids]
    whole, resumed = found["schedules"]
    assert whole["last_epoch"] == 1
    assert resumed == whole


def save_inside_a_window(folder: str) -> int:
    return len(saved(shuffled, folder, diary=OneSteps, max_epochs=1)[1])


def test_save_that_leaves_gradients_out_is_told_once(tmp_path: Path) -> None:
    run = spawn(save_inside_a_window, 1, args=(str(tmp_path),), deadline="60s").check()
    assert run.results[0] == 9
    assert run.logs[0].count("behind batch 0 leaves gradients out: optimizer 1 (AdamW) has summed some") == 1


def resume_with_another_seed(folder: str) -> list[Any]:
    run, saves = saved(shuffled, folder)
    resumed = fit(shuffled, ckpt_path=saves[4][0], seed=99)
    return [run.events[-len(resumed.events) :], resumed.events]


@pytest.mark.soak
def test_seed_of_the_checkpoint_holds_to_the_end(tmp_path: Path) -> None:
    whole, resumed = on_one_rank(resume_with_another_seed, str(tmp_path))
    assert len(resumed) > 20
    assert resumed == whole


def samples_by_step(folder: str, save: int | None, batch_size: int, arguments: dict[str, Any]) -> dict[int, Any]:
    """Samples with their augmentation, by optimizer step; ``save`` is the checkpoint to resume from."""
    saver = SaveAt("on_train_batch_end", Path(folder))
    settings: dict[str, Any] = {"callbacks": [saver]} if save is None else {"ckpt_path": f"{folder}/{save}.ckpt"}
    settings["default_root_dir"] = folder
    loader = partial(shuffled, data=Augmented(24), batch_size=batch_size)
    run = fit(loader, max_epochs=2, strategy=partial(ResilientDDP, timeout="40s"), **settings, **arguments)
    steps: dict[int, list[Any]] = {}
    for event in run.events:
        if event[0] == "train":
            steps.setdefault(event[5], []).extend(zip(event[2], event[3], strict=True))
    return steps


def of_all_ranks(results: dict[int, dict[int, Any]]) -> dict[int, list[Any]]:
    return {step: sorted(pair for one in results.values() for pair in one[step]) for step in results[0]}


@pytest.mark.deadline(120)
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(tmp_path: Path) -> None:
    """Each step has the same samples, under the same augmentation."""
    args = (str(tmp_path), None, 2, {"devices": 2})
    whole = of_all_ranks(spawn(samples_by_step, 2, args=args, deadline="60s").check().results)
    for batch_size, accumulation in ((4, 1), (2, 2)):
        args = (str(tmp_path), 3, batch_size, {"accumulate_grad_batches": accumulation})
        resumed = of_all_ranks(spawn(samples_by_step, 1, args=args, deadline="60s").check().results)
        assert resumed == {step: samples for step, samples in whole.items() if step >= 4}


def fit_over_stream(rank: int, folder: str, num_workers: int, save: int | None, devices: int) -> Any:
    """What the rank trains on, and its weights, or why it is not resumed."""
    saver = SaveAt("on_train_batch_end", Path(folder))
    settings: dict[str, Any] = {"callbacks": [saver]} if save is None else {"ckpt_path": f"{folder}/{save}.ckpt"}
    strategy = partial(ResilientDDP, timeout="40s")
    loader = stateful if num_workers else DataLoader
    make = partial(loader, Counting(20), batch_size=2, num_workers=num_workers)
    try:
        run = fit(make, max_epochs=2, strategy=strategy, default_root_dir=folder, devices=devices, **settings)
    except DatasetMismatch as error:
        return str(error)
    return rest_of(run), final_counters(run)["weights"]


@pytest.mark.parametrize("num_workers", kept([0, 2], [2]))
def test_each_rank_goes_on_with_its_own_state_of_iterable_data(num_workers: int, tmp_path: Path) -> None:
    args = (str(tmp_path), num_workers)
    whole = spawn(fit_over_stream, 2, args=(*args, None, 2), deadline="60s").check().results
    resumed = spawn(fit_over_stream, 2, args=(*args, 2, 2), deadline="60s").check().results
    for rank in (0, 1):
        assert resumed[rank] == (whole[rank][0][3:], whole[rank][1])
    text = spawn(fit_over_stream, 1, args=(*args, 2, 1), deadline="60s").check().results[0]
    assert "x 2 data-parallel ranks x accumulation 1 in the checkpoint" in text
    assert "only the data know how they are divided" in text


def resume_twice(folder: str) -> list[Any]:
    """Undisturbed runs, and such as resume at the first save of one hook and then at the first of another one."""
    workers = partial(stream, num_workers=2, persistent_workers=True)
    runs = []
    for make, *hooks in (
        (workers, "on_train_epoch_end", "on_train_batch_end"),
        (stream, "on_validation_end", "on_train_epoch_end"),
    ):
        first, second = (SaveAt(hook, Path(folder) / hook) for hook in hooks)
        for one in (first, second):
            one.folder.mkdir(exist_ok=True)
        whole = fit(make, callbacks=[first], max_epochs=2)
        fit(make, callbacks=[second], ckpt_path=first.saves[0][0], max_epochs=2)
        runs.append((whole.events, fit(make, ckpt_path=second.saves[0][0], max_epochs=2).events))
    return runs


def test_run_that_resumes_between_two_epochs_and_soon_again_is_the_undisturbed_one(tmp_path: Path) -> None:
    """A worker that has given nothing since begins its pass in the next one; data that nobody has read stay."""
    for whole, resumed in on_one_rank(resume_twice, str(tmp_path)):
        assert len(resumed) > 8
        assert resumed == whole[-len(resumed) :]


def stop_inside_the_last_epoch(folder: str) -> list[Any]:
    """Undisturbed runs, and such as were stopped by their limit of steps and go on without it."""
    runs = []
    for make in (shuffled, stream):
        saver = SaveAt("on_train_epoch_end", Path(folder))
        whole = fit(make, max_epochs=1)
        fit(make, callbacks=[saver], max_epochs=1, max_steps=4)
        runs.append((whole.events, fit(make, ckpt_path=saver.saves[0][0], max_epochs=1).events))
    return runs


def test_run_that_was_stopped_inside_its_last_epoch_trains_the_rest_of_it(tmp_path: Path) -> None:
    for whole, resumed in on_one_rank(stop_inside_the_last_epoch, str(tmp_path)):
        assert len(resumed) > 6
        assert resumed == whole[-len(resumed) :]


def order_beside_stock(folder: str) -> list[Any]:
    runs = []
    own = {"max_epochs": 3, "use_distributed_sampler": False, "default_root_dir": folder}
    anew = {"reload_dataloaders_every_n_epochs": 1}
    streams = (stream, partial(stream, num_workers=2), partial(stateful, num_workers=2))
    drawless = partial(shuffled, data=torch.arange(34.0).view(17, 2))
    for make, arguments in (*((one, {}) for one in streams), (stateful_over_ids, {}), (drawless, {}), (drawless, anew)):
        strategies = [partial(ResilientDDP, data=data) for data in ("exact", "as_is")]
        runs.append([rest_of(fit(make, strategy=one, **own, **arguments)) for one in strategies])
    return runs


def test_order_is_that_of_stock(tmp_path: Path) -> None:
    """Of data with a state, and of a sampler that draws from the generator that the model draws from."""
    for exact, stock in on_one_rank(order_beside_stock, str(tmp_path)):
        assert len(exact) > 20
        assert exact == stock


def show_the_loader(folder: str) -> dict[str, Any]:
    loader = Named(Augmented(), batch_size=2, shuffle=True, persistent_workers=True, num_workers=1)
    run, saves = saved(lambda: loader, folder, max_epochs=1, use_distributed_sampler=False)
    shown: Any = run.trainer.train_dataloader
    state = torch.load(saves[3][0], weights_only=True)["lightning_distplus_dataloaders"]
    return {
        "is_of_class": isinstance(shown, Named) and type(shown).__name__ == "Named",
        "is_a_copy": shown is not loader and type(loader) is Named,
        "same": [name for name, value in vars(loader).items() if vars(shown)[name] is not value],
        "length": len(shown),
        "version": state["version"],
        "validation": type(run.trainer.val_dataloaders),
    }


class Named(DataLoader):
    """A class of a user's own that iterates as torch does."""


@pytest.mark.soak
def test_loader_looks_as_the_user_has_made_it(tmp_path: Path) -> None:
    found = on_one_rank(show_the_loader, str(tmp_path))
    expected = {"is_of_class": True, "is_a_copy": True, "same": [], "length": 9, "version": 3, "validation": DataLoader}
    assert found == expected


def use_as_is(folder: str) -> dict[str, Any]:
    loader = shuffled()
    strategy = partial(ResilientDDP, data="as_is")
    run, saves = saved(lambda: loader, folder, strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    checkpoint = torch.load(saves[3][0], weights_only=True)
    exact = fit(shuffled, max_epochs=1, use_distributed_sampler=False)
    return {
        "same": run.trainer.train_dataloader is loader,
        "state": "lightning_distplus_dataloaders" in checkpoint,
        "order": rest_of(run) == rest_of(exact),
        "whole": len(rest_of(fit(shuffled, ckpt_path=saves[3][0], max_epochs=1))),
    }


def test_as_is_leaves_the_loader_to_lightning(tmp_path: Path) -> None:
    """A checkpoint without a state is resumed as Lightning does: here with all batches, of which five are left."""
    assert on_one_rank(use_as_is, str(tmp_path)) == {"same": True, "state": False, "order": True, "whole": 5}


@pytest.mark.parametrize("data", ["exactly", None])
def test_other_words_are_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r'data is .*; it is "exact" or "as_is"'):
        ResilientDDP(data=data)


class Unsaved(Counting):
    """Its state holds what a checkpoint does not take."""

    def state_dict(self) -> dict[str, Any]:
        return {"done": object()}


class Doubling(DataLoader):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


def unknown(kind: str) -> Any:
    return {
        "iterable": lambda: DataLoader(Plain(), batch_size=2),
        "unsaved": lambda: DataLoader(Unsaved(6), batch_size=2),
        "own class": lambda: Doubling(Augmented(), batch_size=2),
        "own iterable": lambda: [torch.zeros(2, 2)] and Batches(),
        "any order": lambda: shuffled(num_workers=2, in_order=False),
        "with a loader": lambda: [shuffled(), DataLoader(Plain(), batch_size=2)],
    }[kind]()


class Batches:
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.zeros(3, 2, 2)


def warnings_of(kind: str, folder: str) -> tuple[list[str], bool]:
    _, saves = saved(partial(unknown, kind), folder, max_epochs=2)
    return "lightning_distplus_dataloaders" in torch.load(saves[0][0], weights_only=True), len(saves) > 1


WARNINGS = {
    "iterable": "Plain is iterable",
    "unsaved": "builtins.object at state_dict()",
    "own class": "Doubling iterates in a way of its own.",
    "own iterable": "Batches is no torch.utils.data.DataLoader.",
    "any order": "in_order=False",
    "with a loader": "Plain is iterable",
}


@pytest.mark.parametrize("kind", kept(list(WARNINGS), ["with a loader"]))
def test_one_warning_for_what_would_be_repeated(kind: str, tmp_path: Path) -> None:
    run = spawn(warnings_of, 1, args=(kind, str(tmp_path)), deadline="60s").check()
    assert run.results[0] == (False, True)
    told = [line for line in run.logs[0].splitlines() if "will begin the data of that epoch anew" in line]
    assert len(told) == 1
    assert WARNINGS[kind] in told[0]


def larger() -> DataLoader:
    return DataLoader(Augmented(21), batch_size=2, shuffle=True)


by_the_clock = partial(sampled_by, "clock")
by_workers = partial(stream, num_workers=2)
REFUSED: dict[str, tuple[Make, Make]] = {
    "num_samples: 17 in the checkpoint, 21 in this run": (shuffled, larger),
    "sampler: None in the checkpoint, 'RandomSampler' in this run": (by_workers, larger),
    "batch_size: 2 in the checkpoint, 3 in this run": (by_workers, partial(by_workers, batch_size=3)),
    "Plain is iterable": (shuffled, partial(unknown, "iterable")),
    "ByTheClock does not draw again what it drew before the checkpoint: its first 4 draws": (by_the_clock,) * 2,
}


def resume_with_others(folder: str) -> list[tuple[str, int]]:
    """What a resume inside an epoch says to another loader, and how much is left of the epoch as it is."""
    found = []
    for number, (make, other) in enumerate(REFUSED.values()):
        saver, inside = SaveAt("on_train_epoch_end", Path(folder) / str(number)), Path(folder) / f"{number} inside"
        for one in (saver.folder, inside):
            one.mkdir()
        arguments = {"max_epochs": 1, "use_distributed_sampler": False}
        _, saves = saved(make, str(inside), **arguments)
        fit(make, callbacks=[saver], **arguments)
        with pytest.raises(DatasetMismatch) as refused:
            fit(other, ckpt_path=saves[3][0], **arguments)
        as_is = partial(ResilientDDP, data="as_is")
        left = rest_of(fit(other, ckpt_path=saves[3][0], **arguments, strategy=as_is))
        assert rest_of(fit(other, ckpt_path=saver.saves[0][0], **{**arguments, "max_epochs": 2})), "the next epoch"
        found.append((str(refused.value), len(left)))
    return found


@pytest.mark.deadline(120)
def test_what_cannot_go_on_inside_an_epoch_is_refused_and_goes_on_between_two(tmp_path: Path) -> None:
    found = spawn(resume_with_others, 1, args=(str(tmp_path),), deadline="100s").check().results[0]
    for message, (text, num_left) in zip(REFUSED, found, strict=True):
        assert message in text
        assert 'data="as_is"' in text
        assert num_left > 0


def resume_with_another_batch(folder: str) -> tuple[list[Any], list[Any]]:
    _, saves = saved(shuffled, folder, max_epochs=1)
    other = partial(shuffled, batch_size=3)
    return rest_of(fit(other, ckpt_path=saves[2][0], max_epochs=1)), rest_of(fit(other, max_epochs=1))


def test_other_global_batch_inside_an_epoch_begins_it_anew_with_a_warning(tmp_path: Path) -> None:
    """As Lightning does, which counts the batches that are done, and reads from the beginning."""
    run = spawn(resume_with_another_batch, 1, args=(str(tmp_path),), deadline="60s").check()
    resumed, whole = run.results[0]
    assert resumed == whole[: len(whole) - 3]
    assert "begin anew, as they do in Lightning: batch size 2 x 1 data-parallel ranks x acc" in run.logs[0]


def resume_unseeded(folder: str) -> list[Any]:
    strategy = partial(ResilientDDP, seed_samples=False)
    run, saves = saved(shuffled, folder, strategy=strategy, max_epochs=1)
    resumed = fit(shuffled, ckpt_path=saves[3][0], strategy=strategy, max_epochs=1)
    seeded = fit(shuffled, max_epochs=1)
    return [run.events, resumed.events, seeded.events]


@pytest.mark.soak
def test_unseeded_samples_draw_as_torch_has_them(tmp_path: Path) -> None:
    """Without workers those draws are of the training process, whose generators a checkpoint holds."""
    run, resumed, seeded = on_one_rank(resume_unseeded, str(tmp_path))
    assert resumed == run[-len(resumed) :]
    trained = [[event[2] for event in one if event[0] == "train"] for one in (run, seeded)]
    drawn = [[event[3] for event in one if event[0] == "train"] for one in (run, seeded)]
    assert trained[0] == trained[1]
    assert drawn[0] != drawn[1]


def fit_ours(folder: str) -> list[str]:
    data = ResumableDataModule(Augmented(), batch_size=2)
    trainer = quiet_trainer(strategy=ResilientDDP(), max_epochs=1, default_root_dir=folder)
    trainer.fit(Diary(plans_schedule=False, draws=False), data)
    return [type(one).__name__ for one in (*trainer.callbacks, trainer.train_dataloader)]


def test_data_modules_of_ours_keep_their_loaders(tmp_path: Path) -> None:
    names = on_one_rank(fit_ours, str(tmp_path))
    assert "LoaderResume" not in names
    assert {"InStep", "SampleLoader"} <= set(names)


def test_place_of_a_million_batches_is_reached_at_once() -> None:
    """Of 8 million samples the permutation is made again: no data is read, and no batch is made."""
    batches = BatchSampler(DistributedSampler(range(8_000_000), 1, 0), 8, drop_last=False)
    began = time.perf_counter()
    assert len(list(after(batches, 999_990))) == 10
    assert time.perf_counter() - began < 10
