"""Rows D3 to D15: ranks that differ are named before a collective pairs them, on all ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_distplus import RankDivergenceMonitor, _compat
from lightning_distplus.control import connected
from lightning_distplus.divergence.mailbox import Mailbox, TieToLoss
from lightning_distplus.errors import DivergenceError, ExitCode
from lightning_distplus.events import read_events
from lightning_distplus.testing import FaultCallback, FaultPlan, spawn
from tests.distributed import jobs

STEP = 3  # the fault strikes when so many steps are done
SOON_S = 2.0


class Plant(Callback):
    """Does a deed to rank 1 at the end of a step, and notes on all ranks where their collectives stand then."""

    def __init__(self, deed: Callable[[pl.Trainer, Any], None], rank: int = 1) -> None:
        self.deed = deed
        self.rank = rank
        self.collectives = 0
        self.planted_at = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == STEP and not self.planted_at:
            self.planted_at = time.time()
            self.collectives = _compat.num_collectives()
            if trainer.global_rank == self.rank:
                self.deed(trainer, module)


def own_loader(rank: int, num_samples: int = 200, **options: Any) -> DataLoader:
    """Samples of this rank's own."""
    samples = torch.randn(num_samples, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(rank))
    return DataLoader(samples, **{"batch_size": 4, **options})


def fit(rank: int, name: str, folder: str, *callbacks: Callback, **arguments: Any) -> Any:
    """A short fit on two ranks with a monitor; returns the Trainer."""
    options: dict[str, Any] = {"stage": 2} if "DeepSpeed" in name else {}
    if name.startswith("Resilient"):
        options["timeout"] = "20s"
    options.update(arguments.pop("strategy", {}))
    monitor = arguments.pop("monitor", None) or RankDivergenceMonitor()
    data = arguments.pop("data") if "data" in arguments else own_loader(rank)
    module = arguments.pop("module", None) or jobs.Model()
    settings = {"max_steps": 6, **arguments, "callbacks": [*callbacks, monitor]}
    trainer = jobs.trainer(jobs.strategy(name, **options), 2, folder, **settings)
    trainer.fit(module, **data) if isinstance(data, dict) else trainer.fit(module, data)
    return trainer


def caught(run: Callable[[], Any], plant: Plant | None = None) -> dict[str, Any]:
    """What a rank raised, how long after the fault, and how many collectives it started in between."""
    try:
        run()
    except DivergenceError as error:
        return {
            "field": error.field,
            "ranks": error.ranks,
            "values": error.values,
            "message": str(error),
            "seconds": time.time() - plant.planted_at if plant else 0.0,
            "collectives": _compat.num_collectives() - plant.collectives if plant else 0,
        }
    return {"field": "nothing was raised"}


def agreed(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The same error on all ranks, in at most 15 lines."""
    first = results[0]
    for found in results.values():
        assert (found["field"], found["ranks"], found["values"]) == (first["field"], first["ranks"], first["values"])
        assert len(found["message"].splitlines()) <= 15
    return first


# -- D8 and the rest of what is compared before a step ----------------------------------------------------------------


def halve_rate(trainer: pl.Trainer, module: Any) -> None:
    trainer.optimizers[0].param_groups[0]["lr"] /= 2


def decay_more(trainer: pl.Trainer, module: Any) -> None:
    trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.5


def freeze(trainer: pl.Trainer, module: Any) -> None:
    next(module.parameters()).requires_grad = False


def count_a_step(trainer: pl.Trainer, module: Any) -> None:
    next(iter(trainer.optimizers[0].state.values()))["step"] += 1


def skip_a_batch(trainer: pl.Trainer, module: Any) -> None:
    next(trainer.fit_loop._data_fetcher)
    trainer.fit_loop.epoch_loop.batch_progress.increment_by(1)


FAULTS = {
    "rate": (halve_rate, "learning_rate", {0: 0.01, 1: 0.005}, [0, 1]),
    "decay": (decay_more, "weight_decay of optimizer 0, group 0", {0: 0.01, 1: 0.5}, [0, 1]),
    "frozen": (freeze, "requires_grad of", {0: True, 1: False}, [0, 1]),
    "step count": (count_a_step, "step count of optimizer 0", {0: 3.0, 1: 4.0}, [0, 1]),
    "batch skipped": (skip_a_batch, "micro_batch", {0: 3, 1: 4}, [1]),
}


def train_with(rank: int, name: str, fault: str, folder: str) -> dict[str, Any]:
    plant = Plant(FAULTS[fault][0])
    return caught(lambda: fit(rank, name, folder, plant), plant)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("ResilientDDP", fault) for fault in FAULTS),
        ("ResilientFSDP", "rate"),
        ("ResilientModelParallel", "decay"),
        ("DDPStrategy", "rate"),
        ("DDPStrategy", "batch skipped"),
    ],
)
def test_what_differs_is_named_before_the_next_collective(name: str, fault: str, tmp_path: Path) -> None:
    run = spawn(train_with, 2, args=(name, fault, str(tmp_path)), deadline="40s").check()
    found = agreed(run.results)
    _, field, values, ranks = FAULTS[fault]
    assert found["field"].startswith(field)
    assert (found["values"], found["ranks"]) == (values, ranks)
    assert found["collectives"] == 0
    assert found["seconds"] < SOON_S


def train_to_the_end_of_the_process(rank: int, folder: str) -> None:
    fit(rank, "ResilientDDP", folder, Plant(halve_rate))


def test_a_difference_leaves_a_verdict_a_line_in_each_ledger_and_its_exit_code(tmp_path: Path) -> None:
    result = spawn(train_to_the_end_of_the_process, 2, args=(str(tmp_path),), deadline="40s")
    assert set(result.exit_codes.values()) == {int(ExitCode.DIVERGENCE)}
    (path,) = (tmp_path / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    assert (verdict["kind"], verdict["field"], verdict["global_step"]) == ("divergence", "learning_rate", STEP)
    assert verdict["values"] == {"0": 0.01, "1": 0.005}
    assert "scheduler" in verdict["remedy"]
    events = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "divergence"]
    assert {event["rank"] for event in events} == {0, 1}
    for log in result.logs.values():
        assert "learning_rate" in log
        assert "rank 1: 0.005" in log


# -- D7 and D14: whose samples ----------------------------------------------------------------------------------------


class CastingModel(jobs.Model):
    def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
        if self.trainer.training and self.trainer.global_rank == 1 and self.trainer.global_step == STEP:
            return batch.double()
        return batch


def train_on_another_type(rank: int, folder: str) -> dict[str, Any]:
    plant = Plant(lambda trainer, module: None)
    return caught(lambda: fit(rank, "ResilientDDP", folder, plant, module=CastingModel()), plant)


def test_a_batch_of_another_type_is_named_before_the_forward(tmp_path: Path) -> None:
    found = agreed(spawn(train_on_another_type, 2, args=(str(tmp_path),), deadline="40s").check().results)
    assert found["field"] == "batch"
    assert found["values"] == {0: "float32 tensor of 2 dimensions", 1: "float64 tensor of 2 dimensions"}
    assert found["collectives"] == 0


def train_on_the_same_batches(rank: int, name: str, folder: str) -> dict[str, Any]:
    return caught(lambda: fit(rank, name, folder, data=own_loader(7)))


@pytest.mark.parametrize("name", ["ResilientDDP", "ResilientFSDP", "DDPStrategy"])
def test_two_ranks_with_the_same_batches_are_named_at_the_second_one(name: str, tmp_path: Path) -> None:
    found = agreed(spawn(train_on_the_same_batches, 2, args=(name, str(tmp_path)), deadline="40s").check().results)
    assert (found["field"], found["ranks"]) == ("duplicate_batches", [0, 1])
    assert "before step 1" in found["message"]


def train_on_tensor_parallel_peers(rank: int, has_own: bool, folder: str) -> dict[str, Any]:
    options = {"data_parallel_size": 1, "tensor_parallel_size": 2}
    data = own_loader(rank if has_own else 7)
    return caught(lambda: fit(rank, "ResilientModelParallel", folder, strategy=options, data=data))


def test_different_batches_of_tensor_parallel_peers_are_named_and_equal_ones_are_not(tmp_path: Path) -> None:
    equal = spawn(train_on_tensor_parallel_peers, 2, args=(False, str(tmp_path)), deadline="40s").check().results
    assert {found["field"] for found in equal.values()} == {"nothing was raised"}
    unequal = spawn(train_on_tensor_parallel_peers, 2, args=(True, str(tmp_path)), deadline="40s").check().results
    found = agreed(unequal)
    assert (found["field"], found["ranks"]) == ("tensor_parallel_batch", [0, 1])
    assert "before step 0" in found["message"]


def train_on_one_shard(rank: int, folder: str) -> dict[str, Any]:
    data = torch.randn(64, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(0))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
    return caught(lambda: fit(rank, "ResilientDDP", folder, data=DataLoader(data, batch_size=4, sampler=sampler)))


def test_two_ranks_with_one_shard_are_named_before_the_first_step(tmp_path: Path) -> None:
    found = agreed(spawn(train_on_one_shard, 2, args=(str(tmp_path),), deadline="40s").check().results)
    assert (found["field"], found["ranks"]) == ("shard", [0, 1])
    assert "before the first step" in found["message"]


class Turned(Callback):
    """Rank 1's sampler does not hear of the second epoch."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            trainer.train_dataloader.sampler.set_epoch(0)


def train_in_another_epoch(rank: int, folder: str) -> dict[str, Any]:
    data = torch.randn(16, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(0))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=rank)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    return caught(lambda: fit(rank, "ResilientDDP", folder, Turned(), data=loader))


def test_a_sampler_in_another_epoch_is_named_before_its_first_backward(tmp_path: Path) -> None:
    found = agreed(spawn(train_in_another_epoch, 2, args=(str(tmp_path),), deadline="40s").check().results)
    assert (found["field"], found["values"]) == ("epoch of sampler 0", {0: 1, 1: 0})
    assert "before step 2" in found["message"]


# -- D3: uneven batches -----------------------------------------------------------------------------------------------


def train_on_fewer_batches(rank: int, name: str, folder: str) -> dict[str, Any]:
    return caught(lambda: fit(rank, name, folder, data=own_loader(rank, 16 - 4 * rank)))


@pytest.mark.parametrize("name", [*jobs.STRATEGIES[:3], "DDPStrategy"])
def test_a_rank_that_runs_out_of_batches_is_named_before_the_others_wait(name: str, tmp_path: Path) -> None:
    found = agreed(spawn(train_on_fewer_batches, 2, args=(name, str(tmp_path)), deadline="40s").check().results)
    assert (found["field"], found["values"]) == ("number of training batches", {0: 4, 1: 3})


class Stream(torch.utils.data.IterableDataset):
    """Batches that nobody can count beforehand."""

    def __init__(self, rank: int, num_batches: int) -> None:
        self.rank = rank
        self.num_batches = num_batches

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.rank)
        return (torch.randn(4, jobs.NUM_FEATURES, generator=generator) for _ in range(self.num_batches))


def train_on_fewer_streamed(rank: int, folder: str) -> dict[str, Any]:
    data = DataLoader(Stream(rank, 5 - 2 * rank), batch_size=None)
    return caught(lambda: fit(rank, "ResilientDDP", folder, data=data, max_steps=20))


def test_a_stream_that_ends_early_on_one_rank_is_named_at_its_last_batch(tmp_path: Path) -> None:
    found = agreed(spawn(train_on_fewer_streamed, 2, args=(str(tmp_path),), deadline="40s").check().results)
    assert (found["field"], found["values"]) == ("last_batch", {0: False, 1: True})
    assert "before step 2" in found["message"]


# -- D4: decisions ----------------------------------------------------------------------------------------------------


def stop(trainer: pl.Trainer, module: Any) -> None:
    trainer.should_stop = True


class CountValidations(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def train_until_somebody_stops(rank: int, name: str, ranks: int, accumulate: int, folder: str) -> tuple[int, list[int]]:
    plants = [Plant(stop, rank=each) for each in range(2) if each >= 2 - ranks]
    count = CountValidations()
    data = {"train_dataloaders": own_loader(rank), "val_dataloaders": own_loader(rank, 8)}
    options = {"accumulate_grad_batches": accumulate, "num_sanity_val_steps": 0, "max_steps": 20}
    trainer = fit(rank, name, folder, *plants, count, data=data, **options)
    return trainer.global_step, count.steps


@pytest.mark.parametrize(
    ("name", "ranks", "accumulate", "stops_at"),
    [
        ("ResilientDDP", 1, 1, STEP + 1),
        ("ResilientDDP", 2, 1, STEP),
        ("ResilientFSDP", 1, 2, STEP + 1),
        ("DDPStrategy", 1, 1, STEP + 1),
    ],
)
def test_all_ranks_stop_and_validate_at_the_same_step(
    name: str, ranks: int, accumulate: int, stops_at: int, tmp_path: Path
) -> None:
    run = spawn(train_until_somebody_stops, 2, args=(name, ranks, accumulate, str(tmp_path)), deadline="40s").check()
    assert run.results == {0: (stops_at, [stops_at]), 1: (stops_at, [stops_at])}


class Skewed(Callback):
    """Rank 1's clock of validations runs ahead of the others by a second."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            trainer._last_val_time -= 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.05)


def train_with_validation_by_the_clock(rank: int, folder: str) -> list[int]:
    count = CountValidations()
    data = {"train_dataloaders": own_loader(rank), "val_dataloaders": own_loader(rank, 8)}
    options = {"val_check_interval": "00:00:00:01", "num_sanity_val_steps": 0, "max_steps": 26}
    fit(rank, "ResilientDDP", folder, Skewed(), count, data=data, **options)
    return count.steps


def test_validation_by_the_clock_comes_at_the_same_steps_on_all_ranks(tmp_path: Path) -> None:
    results = spawn(train_with_validation_by_the_clock, 2, args=(str(tmp_path),), deadline="40s").check().results
    assert results[0] == results[1]
    assert results[0][0] == 2
    assert len(results[0]) >= 2


def save_alone(trainer: pl.Trainer, module: Any) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "alone.ckpt")


def train_with_a_save_on_one_rank(rank: int, name: str, folder: str) -> dict[str, Any]:
    plant = Plant(save_alone)
    return caught(lambda: fit(rank, name, folder, plant), plant)


@pytest.mark.parametrize("name", ["ResilientDDP", "ResilientFSDP", "DDPStrategy"])
def test_a_save_on_one_rank_is_named_before_it_waits(name: str, tmp_path: Path) -> None:
    found = agreed(spawn(train_with_a_save_on_one_rank, 2, args=(name, str(tmp_path)), deadline="40s").check().results)
    assert found["field"] == "moment"
    assert found["values"][1].startswith("a save")
    assert found["values"][0].startswith("the start of a step")
    assert found["collectives"] == 0
    assert found["seconds"] < SOON_S


# -- D5 and D6: metrics -----------------------------------------------------------------------------------------------


class Logging(jobs.Model):
    """Logs as a careless user does."""

    def __init__(self, syncs: bool, on_rank_1_only: bool) -> None:
        super().__init__()
        self.syncs = syncs
        self.on_rank_1_only = on_rank_1_only

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("first", torch.tensor(1.0 + self.trainer.global_rank), sync_dist=self.syncs)
        if self.on_rank_1_only and self.trainer.global_rank == 1:
            self.log("odd", torch.tensor(3.0), sync_dist=True)
        self.log("last", torch.tensor(2.0), sync_dist=True)


def validate(rank: int, name: str, monitored: bool, odd: bool, folder: str) -> dict[str, Any]:
    module = Logging(syncs=not monitored, on_rank_1_only=odd)
    stopper = [pl.callbacks.EarlyStopping("first")] if monitored else []
    data = {"train_dataloaders": own_loader(rank, 16), "val_dataloaders": own_loader(rank, 8)}
    return caught(lambda: fit(rank, name, folder, *stopper, module=module, data=data))


@pytest.mark.parametrize("name", ["ResilientDDP", "DDPStrategy"])
def test_a_monitored_metric_that_differs_is_named_with_the_argument_to_change(name: str, tmp_path: Path) -> None:
    found = agreed(spawn(validate, 2, args=(name, True, False, str(tmp_path)), deadline="40s").check().results)
    assert (found["field"], found["values"]) == ("monitored metric 'first'", {0: 1.0, 1: 2.0})
    assert "self.log('first', ..., sync_dist=True)" in found["message"]


@pytest.mark.parametrize("name", ["ResilientDDP", "DDPStrategy"])
def test_a_metric_that_one_rank_alone_logs_is_named_before_it_is_mixed_with_another(name: str, tmp_path: Path) -> None:
    found = agreed(spawn(validate, 2, args=(name, False, True, str(tmp_path)), deadline="40s").check().results)
    assert found["field"] == "logged metric 'odd'"
    assert found["values"][0] == "absent"


# -- D12 and D13: the start -------------------------------------------------------------------------------------------


class Unlike(jobs.Model):
    """Rank 1 builds its layers in another order, type or number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        is_odd = self.trainer.global_rank == 1
        parts = {"first": torch.nn.Linear(jobs.NUM_FEATURES, 8), "other": torch.nn.Linear(8, 8)}
        names = ["other", "first"] if is_odd and self.how == "order" else ["first", "other"]
        for name in names:
            setattr(self, name, parts[name])
        if is_odd and self.how == "dtype":
            self.other.double()
        if is_odd and self.how == "buffer":
            self.register_buffer("scale", torch.ones(3))
        if is_odd and self.how == "frozen":
            self.other.bias.requires_grad = False
        self.net = self.first


MODELS = {
    "order": ("parameter first.weight: float32 [8, 8], trainable", "parameter other.weight: float32 [8, 8], trainable"),
    "dtype": ("other.weight: float32", "other.weight: float64"),
    "buffer": ("nothing", "buffer scale: float32 [3]"),
    "frozen": ("other.bias: float32 [8], trainable", "other.bias: float32 [8], frozen"),
}


def build(rank: int, name: str, how: str, folder: str) -> dict[str, Any]:
    return caught(lambda: fit(rank, name, folder, module=Unlike(how)))


@pytest.mark.parametrize(
    ("name", "how"), [*(("ResilientDDP", how) for how in MODELS), ("ResilientFSDP", "dtype"), ("DDPStrategy", "order")]
)
def test_a_model_that_is_built_unlike_is_named_before_the_engine_wraps_it(name: str, how: str, tmp_path: Path) -> None:
    found = agreed(spawn(build, 2, args=(name, how, str(tmp_path)), deadline="40s").check().results)
    assert found["field"] == "model"
    assert all(part in found["values"][rank] for rank, part in enumerate(MODELS[how]))


class Seed(Callback):
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_fit_start(self, *_: Any) -> None:
        torch.manual_seed(self.seed)


def start_with_generators(rank: int, policy: dict[str, Any], seeds: tuple[int, int], folder: str) -> dict[str, Any]:
    monitor = RankDivergenceMonitor(rng_policy=policy)
    return caught(lambda: fit(rank, "ResilientDDP", folder, Seed(seeds[rank]), monitor=monitor))


@pytest.mark.parametrize(("policy", "seeds"), [("distinct", (1, 1)), ("same", (1, 2))])
def test_a_generator_against_its_policy_is_named(policy: str, seeds: tuple[int, int], tmp_path: Path) -> None:
    arguments = ({"torch": policy}, seeds, str(tmp_path))
    found = agreed(spawn(start_with_generators, 2, args=arguments, deadline="40s").check().results)
    assert (found["field"], found["ranks"]) == ("the state of the torch generator", [0, 1])


# -- D11: gradients of different steps --------------------------------------------------------------------------------


def sum_step_by_step(rank: int, dtype: torch.dtype, folder: str) -> dict[str, Any]:
    """A plain DDP loop without any gate; rank 1 leaves out one sum of same-shaped gradients."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    module = torch.nn.Linear(jobs.NUM_FEATURES, 1).to(dtype)
    mailbox = Mailbox(rank, 2, module.weight)
    module.register_parameter("mailbox", mailbox.parameter)
    model = DistributedDataParallel(module)
    del module.mailbox
    numbers: list[list[int | None]] = []
    hooks = TieToLoss(module, lambda loss: mailbox.tie(loss, step))
    for step in range(1000, 1006):
        if rank == 1 and step == 1003:
            continue
        model(torch.randn(4, jobs.NUM_FEATURES, dtype=dtype)).mean().backward()
        letter = mailbox.read(mailbox.take())
        numbers.append(letter.numbers)
        if len(set(letter.numbers)) > 1:
            break
    hooks.remove()
    # The last holder of a gloo group joins its threads: DDP would do that with the global lock, which they may need.
    del model
    dist.destroy_process_group()
    return {"numbers": numbers, "parameters": len(list(module.parameters()))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_two_steps_is_seen_in_that_very_step_by_all_ranks(dtype: torch.dtype, tmp_path: Path) -> None:
    results = spawn(sum_step_by_step, 2, args=(dtype, str(tmp_path)), deadline="30s").check().results
    assert results[0] == results[1]
    assert results[0]["numbers"] == [[1000, 1000], [1001, 1001], [1002, 1002], [1003, 1004]]
    assert results[0]["parameters"] == 2


class CountSteps(Callback):
    """Stands behind the monitor: sees the steps that it lets through."""

    def __init__(self) -> None:
        self.steps = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps += 1


def train_without_one_sum(rank: int, name: str, folder: str) -> dict[str, Any]:
    count = CountSteps()
    found = caught(lambda: fit(rank, name, folder, FaultCallback(), count))
    return {**found, "steps": count.steps}


@pytest.mark.parametrize("name", ["ResilientDDP", "DDPStrategy"])
def test_a_rank_that_leaves_out_a_sum_of_gradients_is_named_before_it_steps(name: str, tmp_path: Path) -> None:
    faults = FaultPlan().skip_collective(rank=1, step=STEP)
    run = spawn(train_without_one_sum, 2, args=(name, str(tmp_path)), faults=faults, deadline="30s")
    assert run.faults_fired == 1
    found = run.results[1]
    assert (found["field"], found["ranks"]) == ("gradient_sum", [1])
    assert found["steps"] == STEP
    assert run.alive == {}
    if name == "ResilientDDP":  # on a stock strategy the others see that the connection is closed
        assert run.results[0]["field"] == "gradient_sum"


# -- D9: a batch that fails on one rank -------------------------------------------------------------------------------


class Failing(jobs.Model):
    """Rank 1 has no loss in some steps: no memory, or a caught error and None."""

    def __init__(self, how: str, batches: tuple[int, ...]) -> None:
        super().__init__()
        self.how = how
        self.batches = batches
        self.weights: list[str] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        self.weights.append(self.net[0].weight.detach().sum().item().hex())
        if self.trainer.global_rank != 1 or batch_idx not in self.batches:
            return loss
        if self.how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (planted)")
        return None


def train_with_failing_batches(
    rank: int, name: str, how: str, batches: tuple[int, ...], accumulate: int, folder: str
) -> dict[str, Any]:
    module = Failing(how, batches)
    monitor = RankDivergenceMonitor(on_local_failure="skip_all", max_skips_in_a_row=2)
    found = caught(lambda: fit(rank, name, folder, module=module, monitor=monitor, accumulate_grad_batches=accumulate))
    return {
        **found,
        "weights": module.weights,
        "skipped": monitor.skips.total,
        "global_step": module.trainer.global_step,
    }


@pytest.mark.parametrize(
    ("name", "how", "accumulate"),
    [("ResilientDDP", "memory", 1), ("ResilientDDP", "none", 2), ("DDPStrategy", "memory", 1)],
)
def test_all_ranks_leave_out_a_step_whose_batch_fails_on_one(
    name: str, how: str, accumulate: int, tmp_path: Path
) -> None:
    arguments = (name, how, (2, 5), accumulate, str(tmp_path))
    results = spawn(train_with_failing_batches, 2, args=arguments, deadline="40s").check().results
    assert results[0] == results[1]
    found = results[0]
    assert (found["field"], found["skipped"], found["global_step"]) == ("nothing was raised", 2, 6)
    first = found["weights"]
    steps = [first[index] for index in range(0, len(first), accumulate)]
    skipped = {2 // accumulate, 5 // accumulate}
    assert {index for index in range(5) if steps[index] == steps[index + 1]} == skipped - {5}


def test_too_many_steps_left_out_in_a_row_end_the_run(tmp_path: Path) -> None:
    arguments = ("ResilientDDP", "memory", (1, 2, 3), 1, str(tmp_path))
    found = agreed(spawn(train_with_failing_batches, 2, args=arguments, deadline="40s").check().results)
    assert (found["field"], found["ranks"]) == ("training_step", [1])
    assert "max_skips_in_a_row is 2" in found["message"]


def start_on_fsdp(rank: int, folder: str) -> str:
    try:
        fit(rank, "ResilientFSDP", folder, monitor=RankDivergenceMonitor(on_local_failure="skip_all"))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_sharded_strategy_refuses_to_leave_out_a_step_that_failed_locally(tmp_path: Path) -> None:
    for message in spawn(start_on_fsdp, 2, args=(str(tmp_path),), deadline="40s").check().results.values():
        assert "works with DDP, not with ResilientFSDP" in message


# -- no false alarm ---------------------------------------------------------------------------------------------------


class AsksLate(Callback):
    """Rank 1 still has a question when rank 0, whose process serves the store, has nothing left to do."""

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(1.0)
            plane = connected()
            assert plane is not None
            plane.read("anything")


def end_late(rank: int, folder: str) -> int:
    trainer = jobs.trainer(
        jobs.strategy("DDPStrategy"),
        2,
        folder,
        max_steps=2,
        callbacks=[AsksLate(), RankDivergenceMonitor()],
        use_distributed_sampler=True,
    )
    trainer.fit(jobs.Model(), jobs.loader())
    return trainer.global_step


def test_rank_0_of_a_stock_strategy_serves_the_store_to_the_last(tmp_path: Path) -> None:
    assert spawn(end_late, 2, args=(str(tmp_path),), deadline="40s").check().results == {0: 2, 1: 2}
