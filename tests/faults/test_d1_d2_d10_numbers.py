"""Rows D1, D2 and D10: wrong numbers on one rank are named, on all ranks, and do not reach the others' weights."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributed.tensor import DTensor

from lightning_distplus import RankDivergenceMonitor
from lightning_distplus.divergence.gradients import BucketHook, LocalGradients
from lightning_distplus.divergence.replicas import fingerprint_of_each
from lightning_distplus.errors import ExitCode
from lightning_distplus.events import read_events
from lightning_distplus.testing import FaultCallback, FaultPlan, SpawnResult, spawn
from tests.distributed import jobs
from tests.pairs import kept, kept_rows

STRATEGIES = ("ResilientDDP", "ResilientFSDP", "ResilientModelParallel", "zero2", "zero3")
STEP = 3
NAN = FaultPlan().nan(rank=1, step=STEP)
FLIP = FaultPlan().flip_bit(rank=1, step=STEP)


class State(Callback):
    """Writes down what this rank holds before and after each step. Listed last."""

    def __init__(self) -> None:
        self.before: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before[trainer.global_step] = held(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after[trainer.global_step] = held(trainer)


def held(trainer: Any) -> list[int]:
    """Fingerprints of this rank's part of the weights and the optimizer's state."""
    tensors = [local(parameter) for parameter in trainer.strategy.model.parameters()]
    (optimizer,) = trainer.optimizers
    states = getattr(optimizer, "optimizer", optimizer).state
    tensors += [local(value) for state in states.values() for value in state.values() if torch.is_tensor(value)]
    return fingerprint_of_each(tensors).tolist()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; ZeRO-3 keeps it beside a parameter that is whole or empty, as it likes."""
    tensor = getattr(tensor, "ds_tensor", tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def poisoned(value: float) -> jobs.Model:
    """Its loss becomes this on rank 1 in one step, with sound gradients."""

    def poison(module: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
        is_due = (module.trainer.global_rank, module.trainer.global_step) == (1, STEP)
        return loss + torch.tensor(value) if is_due else loss

    return jobs.Model(change=poison)


def sampling_trainer(strategy: Any, world_size: int, folder: str, **options: Any) -> Any:
    """Every rank gets its own samples; the monitor rightly names ranks that train on the same ones."""
    return jobs.trainer(strategy, world_size, folder, use_distributed_sampler=True, **options)


def train(
    name: str, folder: str, size: int, policy: Any = "raise", value: float | None = None, **arguments: Any
) -> dict[str, Any]:
    state, options = State(), {"max_steps": 6, **arguments.pop("trainer", {})}
    more = [rots(one) if isinstance(one, str) else one for one in arguments.pop("callbacks", [])]
    monitor = RankDivergenceMonitor(on_divergence=policy, **arguments)
    trainer = sampling_trainer(name, size, folder, callbacks=[FaultCallback(), monitor, state, *more], **options)
    trainer.fit(jobs.Model() if value is None else poisoned(value), jobs.loader(400))
    weights = [local(parameter) for parameter in trainer.strategy.model.parameters()]
    return {
        "steps": trainer.global_step,
        "finite": all(bool(weight.isfinite().all()) for weight in weights),
        "unchanged": {step for step in state.before if state.before[step] == state.after.get(step + 1)},
        "last": held(trainer),
        "skipped": monitor.skips.total,
    }


def struck(
    folder: Path, plan: FaultPlan, policy: str = "raise", *, name: str = "ResilientDDP", size: int = 2, **named: Any
) -> SpawnResult:
    """The end of a run in which each of the faults has fired."""
    job = partial(train, name, str(folder), size, policy, **named)
    result = spawn(job, size, faults=plan, deadline="50s")
    assert result.faults_fired == len(plan.faults)
    return result


def require_named(result: SpawnResult, folder: Path, field: str, rank: int = 1) -> dict[str, Any]:
    """All ranks end with the same error; the verdict has it, and the ledger of each that has seen it."""
    assert set(result.exit_codes.values()) == {int(ExitCode.DIVERGENCE)}, result.logs
    assert result.alive == {}
    verdict = jobs.verdict_in(folder, "divergence", [rank])
    assert verdict["field"] == field
    told = [event for event in read_events(folder / "distplus") if event["kind"] == "divergence"]
    # Whose shard it is alone knows.
    assert {event["rank"] for event in told} == ({rank} if field == "state_at_rest" else set(result.exit_codes))
    return verdict


@pytest.mark.parametrize("name", kept([*STRATEGIES], ["ResilientDDP", "ResilientModelParallel", "zero3"]))
def test_a_gradient_that_is_not_finite_ends_all_ranks_before_the_step(name: str, tmp_path: Path) -> None:
    result = struck(tmp_path, NAN, name=name)
    verdict = require_named(result, tmp_path, "gradient")
    assert verdict["global_step"] == STEP
    assert "net." in verdict["parameter"]
    for log in result.logs.values():
        assert f"Rank 1 has a gradient that is not finite in step {STEP}" in log
        assert "no weight has changed" in log


@pytest.mark.parametrize("name", kept([*STRATEGIES], ["ResilientDDP", "ResilientFSDP", "zero2"]))
def test_a_skipped_step_changes_no_weight_and_no_optimizer_state_on_any_rank(name: str, tmp_path: Path) -> None:
    result = struck(tmp_path, NAN, "skip", name=name).check()
    for found in result.results.values():
        assert found["finite"]
        assert found["unchanged"] == {STEP}
        assert (found["steps"], found["skipped"]) == (6, 1)
    if name == "ResilientDDP":
        assert result.results[0]["last"] == result.results[1]["last"]


@pytest.mark.parametrize(("value", "text"), kept_rows([(math.nan, "nan"), (math.inf, "inf")], [(math.inf, "inf")]))
def test_a_loss_that_is_not_finite_counts_though_its_gradients_are_sound(
    value: float, text: str, tmp_path: Path
) -> None:
    verdict = require_named(struck(tmp_path, FaultPlan(), value=value), tmp_path, "loss")
    assert verdict["values"] == {"0": "finite", "1": f"loss is {text} in micro-batch {STEP}"}


def test_a_warned_step_is_made_without_the_rank_and_ranks_stay_equal(tmp_path: Path) -> None:
    result = struck(tmp_path, NAN, "warn").check()
    assert result.results[0]["last"] == result.results[1]["last"]
    for rank, found in result.results.items():
        assert (found["steps"], found["finite"], found["unchanged"]) == (6, True, set())
        assert "the step is made without it" in result.logs[rank]


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path: Path) -> None:
    faults = FaultPlan().nan(rank=1, step=2).nan(rank=0, step=3).nan(rank=1, step=4)
    result = struck(tmp_path, faults, "skip", max_skips_in_a_row=2, on_local_failure="skip_all")
    require_named(result, tmp_path, "gradient")
    assert "3 steps in a row would be skipped; max_skips_in_a_row is 2" in result.logs[0]


@pytest.mark.parametrize("name", ["ResilientDDP", "zero2"])
def test_a_gradient_of_an_earlier_micro_batch_counts(name: str, tmp_path: Path) -> None:
    """The fault callback strikes in the first micro-batch of a step, which nobody sums under DDP."""
    result = struck(tmp_path, NAN, "skip", name=name, trainer={"accumulate_grad_batches": 2}).check()
    for found in result.results.values():
        assert (found["finite"], found["steps"], found["skipped"]) == (True, 6, 1)
        assert found["last"] == result.results[0]["last"] or name == "zero2"


# -- row D2: copies that differ ----------------------------------------------------------------------------------------


def test_a_flipped_bit_is_named_with_parameter_and_element_before_the_next_step(tmp_path: Path) -> None:
    faults = FaultPlan().flip_bit(rank=1, step=STEP, parameter="net.2.weight")
    result = struck(tmp_path, faults, size=3)
    verdict = require_named(result, tmp_path, "parameters")
    assert (verdict["parameter"], verdict["global_step"]) == ("net.2.weight", STEP)
    assert verdict["values"]["0"] == verdict["values"]["2"] != verdict["values"]["1"]
    for log in result.logs.values():
        assert "wrong: rank 1" in log
        assert f"It happened at step {STEP - 1} or later" in log


def test_a_repaired_copy_trains_on_equal_to_the_others_and_stands_in_the_ledger(tmp_path: Path) -> None:
    result = struck(tmp_path, FLIP, size=3, repair_replicas=True).check()
    undisturbed = struck(tmp_path / "other", FaultPlan(), size=3).check()
    assert result.results[1]["last"] == result.results[0]["last"] == undisturbed.results[0]["last"]
    repaired = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "repaired"]
    assert [(event["name"], event["ranks"], event["source"]) for event in repaired] == [("net.0.weight", [1], 0)] * 3


def test_a_wrong_copy_is_named_before_it_is_saved_and_between_two_ranks_nobody_decides(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=STEP + 1)
    faults = FaultPlan().flip_bit(rank=1, step=STEP, where="batch_end")
    result = struck(tmp_path, faults, callbacks=[saver])
    assert set(result.exit_codes.values()) == {int(ExitCode.DIVERGENCE)}
    verdict = jobs.verdict_in(tmp_path, "divergence", [0, 1])
    assert (verdict["field"], verdict["parameter"]) == ("parameters", "net.0.weight")
    for log in result.logs.values():
        assert "undecided" in log
        assert f"before the save after {STEP + 1} steps" in log
    assert not list(tmp_path.glob("*.ckpt"))


@pytest.mark.parametrize("name", kept(["ResilientFSDP", "ResilientModelParallel"], ["ResilientFSDP"]))
def test_a_shard_that_changes_between_two_steps_is_named_by_the_rank_that_holds_it(name: str, tmp_path: Path) -> None:
    """No other rank has a copy of it."""
    result = struck(tmp_path, FLIP, name=name, state_at_rest=True)
    verdict = require_named(result, tmp_path, "state_at_rest")
    assert "net." in verdict["parameter"]
    assert f"between step {STEP} and the next one" in result.logs[0]


def rots(what: str) -> Callback:
    """Memory that changes by itself on rank 1, between two steps: what ZeRO keeps on that rank alone."""

    def rot(trainer: Any, module: Any, *_: Any) -> None:
        state = trainer.optimizers[0].optimizer.state
        held = {
            "weights": lambda: next(iter(state)),
            "moments": lambda: next(iter(state.values()))["exp_avg_sq"],
            "shard": lambda: next(module.parameters()).ds_tensor,
        }
        held[what]().detach().view(-1)[:1].add_(1.0)

    return jobs.At("on_train_batch_start", rot, rank=1, step=STEP)


ROTS = [
    ("zero2", "weights", "weights 0 of optimizer 0"),
    ("zero2", "moments", "optimizer 0/exp_avg_sq of part 0, rank 1 of 2"),
    ("zero3", "weights", "weights 0 of optimizer 0"),
    ("zero3", "shard", "weights/net.0.weight"),
]


@pytest.mark.parametrize(("name", "what", "parameter"), kept_rows(ROTS, ROTS[1:3]))
def test_what_zero_keeps_on_one_rank_is_named_when_it_changes_between_two_steps(
    name: str, what: str, parameter: str, tmp_path: Path
) -> None:
    result = struck(tmp_path, FaultPlan(), name=name, state_at_rest=True, callbacks=[what])
    verdict = require_named(result, tmp_path, "state_at_rest")
    assert (verdict["parameter"], verdict["global_step"]) == (parameter, STEP)


def count_skips(folder: str) -> tuple[dict[str, float], dict[str, Any], int]:
    """The figures and the state after a skipped step, and the count of a run that goes on from there."""
    path = f"{folder}/x.ckpt"
    monitor, resumed = RankDivergenceMonitor(on_divergence="skip"), RankDivergenceMonitor()
    trainer = sampling_trainer("ResilientDDP", 2, folder, callbacks=[FaultCallback(), monitor], max_steps=6)
    trainer.fit(jobs.Model(), jobs.loader(400))
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["callbacks"]["RankDivergenceMonitor"]
    trainer = sampling_trainer("ResilientDDP", 2, folder, callbacks=[resumed], max_steps=8)
    trainer.fit(jobs.Model(), jobs.loader(400), ckpt_path=path)
    return monitor.metrics(), saved["skips"], resumed.skips.total


def test_skipped_steps_are_counted_also_after_a_resume(tmp_path: Path) -> None:
    for told, saved, resumed in spawn(count_skips, 2, args=(str(tmp_path),), faults=NAN).check().results.values():
        assert (told["distplus/skipped_steps"], told["distplus/divergences"]) == (1.0, 0.0)
        assert (saved, resumed) == ({"in_a_row": 0, "total": 1}, 1)


# -- nothing is told where nothing is wrong ----------------------------------------------------------------------------


def train_twice(name: str, folder: str) -> list[list[Any]]:
    """The losses of a run without, and of one with a monitor that looks at everything in each step."""
    found = []
    for monitors in ([], [RankDivergenceMonitor(parameters_every_n_steps=1)]):
        trainer = sampling_trainer(
            name, 2, folder, callbacks=monitors, max_steps=9, accumulate_grad_batches=2,
            val_check_interval=4, num_sanity_val_steps=1,
        )  # fmt: skip
        model = jobs.Model()
        trainer.fit(model, jobs.loader(400), jobs.loader(8))
        # The shards of ZeRO-3 end in padding, which differs from run to run.
        found.append([*model.losses, *(held(trainer) if name != "zero3" else [])])
    return found


@pytest.mark.parametrize("name", kept([*STRATEGIES], ["ResilientModelParallel", "zero3"]))
def test_a_monitored_run_is_bit_for_bit_the_unmonitored_one(name: str, tmp_path: Path) -> None:
    for alone, monitored in spawn(train_twice, 2, args=(name, str(tmp_path))).check().results.values():
        assert alone == monitored


def mean_gradients(rank: int, folder: str) -> list[list[float]]:
    """Those of plain DDP on three ranks, with and without the hook."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    found = []
    for is_hooked in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Linear(64, 64)
        model = torch.nn.parallel.DistributedDataParallel(net)
        if is_hooked:
            names = {id(parameter): name for name, parameter in net.named_parameters()}
            hook = BucketHook(LocalGradients(), names, model.process_group)
            model.register_comm_hook(None, lambda state, bucket, hook=hook: hook(state, bucket))
        torch.manual_seed(rank + 1)
        model(torch.randn(16, 64)).pow(2).mean().backward()
        found.append(net.weight.grad.flatten().tolist())
        del model
    dist.destroy_process_group()
    return found


def test_the_mean_over_three_ranks_has_the_bits_that_ddp_gives_without_a_hook(tmp_path: Path) -> None:
    for stock, hooked in spawn(mean_gradients, 3, args=(str(tmp_path),), deadline="40s").check().results.values():
        assert hooked == stock


def train_with_scaler(folder: str) -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    monitor = RankDivergenceMonitor(on_divergence="skip", parameters_every_n_steps=3)
    trainer = sampling_trainer("ResilientDDP", 2, folder, callbacks=[monitor], plugins=[plugin], max_steps=100)
    trainer.fit(poisoned(math.nan), jobs.loader(1000))
    return {"scale": scaler.get_scale(), "skipped": monitor.skips.total, "last": held(trainer)}


def test_a_loss_that_is_not_finite_is_skipped_beside_a_loss_scaler(tmp_path: Path) -> None:
    results = spawn(train_with_scaler, 2, args=(str(tmp_path),)).check().results
    assert results[0] == results[1]
    assert results[0]["skipped"] == 1


# -- hybrid sharding: shards of which other ranks hold copies ----------------------------------------------------------


def train_hybrid(folder: str) -> int:
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    callbacks = [FaultCallback(), RankDivergenceMonitor(parameters_every_n_steps=1)]
    trainer = sampling_trainer("ResilientFSDP", 4, folder, callbacks=callbacks, max_steps=6, **hybrid)
    trainer.fit(jobs.Model(), jobs.loader(400))
    return trainer.global_step


def test_the_shards_of_hybrid_fsdp_are_compared_and_its_gradients_seen(tmp_path: Path) -> None:
    """Ranks 0 and 2, and ranks 1 and 3, hold the same shards."""
    assert set(spawn(train_hybrid, 4, args=(str(tmp_path),)).check().results.values()) == {6}
    for field, faults in {"gradient": NAN, "parameters": FLIP}.items():
        result = spawn(train_hybrid, 4, args=(str(tmp_path / field),), faults=faults)
        assert result.faults_fired == 1
        assert set(result.exit_codes.values()) == {int(ExitCode.DIVERGENCE)}, result.logs
        verdict = jobs.verdict_in(tmp_path / field)
        assert verdict["field"] == field
        assert sorted(verdict["values"]) == (["1", "3"] if field == "parameters" else ["0", "1", "2", "3"])
