"""Fault plans: values that strike once, in real processes."""

from __future__ import annotations

import itertools
import math
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.testing import Fault, FaultPlan, SpawnResult, spawn


def _planted() -> FaultPlan:
    return FaultPlan.from_environment()


def _steps(rank: int) -> int:
    for step in range(4):
        _planted().fire(rank, step)
        _planted().fire(rank, step)  # the second call of the same point finds the fault spent
    return step


def _outcome(plan: FaultPlan, **options: Any) -> SpawnResult:
    result = spawn(_steps, 2, faults=plan, **options)
    assert result.faults_fired == 1
    assert result.exit_codes[0] == 0, "only the rank that the plan names is struck"
    return result


@pytest.mark.parametrize(
    ("plan", "code", "log"),
    [
        (FaultPlan().kill(1, step=2), -signal.SIGKILL, ""),
        (FaultPlan().sigterm(1, step=2), -signal.SIGTERM, ""),
        (FaultPlan().raise_(1, step=2, exc=ZeroDivisionError("planted")), 1, "ZeroDivisionError: planted"),
        (FaultPlan().oom(1, step=2), 1, "OutOfMemoryError: CUDA out of memory"),
    ],
    ids=lambda one: one.faults[0].kind if isinstance(one, FaultPlan) else "",
)
def test_a_struck_rank_ends_as_its_fault_says(plan: FaultPlan, code: int, log: str) -> None:
    result = _outcome(plan)
    assert result.exit_codes[1] == code
    assert log in result.logs[1]


@pytest.mark.parametrize(
    ("plan", "state", "stack"),
    [
        (FaultPlan().stop(1, step=2), "stopped", ""),
        (FaultPlan().hang(1, step=2), "running", "in _steps"),
        (FaultPlan().hang_gil(1, step=2), "running", "in _hold_gil"),
    ],
    ids=["stop", "hang", "hang_gil"],
)
def test_a_rank_that_stands_at_the_deadline_is_named_and_shows_its_stack(
    plan: FaultPlan, state: str, stack: str
) -> None:
    result = _outcome(plan, deadline=3)
    assert result.alive == {1: state}
    assert stack in result.logs[1]
    with pytest.raises(AssertionError, match=rf"After 3 s .* had not ended and were killed: rank 1 \({state}\)"):
        result.check()


def _longest_silence_s(fault: str) -> float:
    beats = [time.monotonic()]
    threading.Thread(target=lambda: [(time.sleep(0.01), beats.append(time.monotonic())) for _ in range(80)]).start()
    assert _planted().fire(0, 0), fault
    time.sleep(0.1)
    return max(later - earlier for earlier, later in itertools.pairwise(beats))


def test_only_a_held_gil_silences_the_other_threads() -> None:
    deaf = spawn(_longest_silence_s, 1, args=("hang_gil",), faults=FaultPlan().hang_gil(0, 0, duration_s=0.5)).check()
    asleep = spawn(_longest_silence_s, 1, args=("hang",), faults=FaultPlan().hang(0, 0, duration_s=0.5)).check()

    assert deaf.results[0] >= 0.45
    assert asleep.results[0] < 0.4


def test_slow_rank_loses_the_planned_time_once() -> None:
    assert 0.3 <= _outcome(FaultPlan().slow(1, 2, 0.3)).check().elapsed_s < 0.6 + 5


def _train_once(where: str) -> tuple[float, list[int]]:
    import torch

    model = torch.nn.Linear(3, 2)
    loss = model(torch.ones(4, 3)).square().mean()
    _planted().fire(0, 0, "before_backward", loss=loss, module=model)
    loss.backward()
    _planted().fire(0, 0, "after_backward", module=model)
    return loss.item(), [int(p.grad.isnan().sum()) for p in model.parameters() if p.grad is not None]


def test_nan_before_the_backward_poisons_the_loss_and_all_gradients() -> None:
    result = spawn(_train_once, 1, args=("before_backward",), faults=FaultPlan().nan(0, 0)).check()

    loss, nan_counts = result.results[0]
    assert math.isnan(loss)
    assert nan_counts == [6, 2]


def test_nan_after_the_backward_poisons_one_element_of_one_gradient() -> None:
    plan = FaultPlan().nan(0, 0, parameter="bias", where="after_backward")
    loss, nan_counts = spawn(_train_once, 1, args=("after_backward",), faults=plan).check().results[0]

    assert math.isfinite(loss)
    assert nan_counts == [0, 1]


def _weights_before_and_after() -> tuple[list[float], list[float]]:
    import torch

    model = torch.nn.Linear(3, 2)
    before = model.weight.flatten().tolist()
    _planted().fire(0, 0, module=model)
    return before, model.weight.flatten().tolist()


def test_flipped_bit_changes_one_finite_value_of_the_named_parameter() -> None:
    result = spawn(_weights_before_and_after, 1, faults=FaultPlan().flip_bit(0, 0, "weight")).check()

    before, after = result.results[0]
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    assert math.isfinite(changed[0][1])


def _sums(rank: int) -> list[int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    sums = []
    for step in range(3):
        _planted().fire(rank, step)
        value = torch.tensor(100 * rank + step)
        dist.all_reduce(value)
        sums.append(int(value))
    if rank == 1:
        dist.all_reduce(value)  # the one that rank 0 still waits for
    dist.destroy_process_group()
    return sums


def test_skipped_collective_pairs_each_step_with_the_next_one_of_the_other_rank() -> None:
    result = spawn(_sums, 2, faults=FaultPlan().skip_collective(1, step=1)).check()

    assert result.results[0][:2] == [100, 1 + 102]
    assert result.results[1][1] == 101, "the output of the skipped call is as it was"


def _gradient_sums_per_step() -> list[int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    calls: list[int] = []
    step = 0

    def counted(state, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations, and here they are text
        calls.append(step)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, counted)
    for step in range(3):
        _planted().fire(0, step, module=model)
        model(torch.ones(2, 2)).sum().backward()
    dist.destroy_process_group()
    return calls


def test_skipped_collective_of_ddp_is_the_gradient_sum_of_one_step() -> None:
    assert spawn(_gradient_sums_per_step, 1, faults=FaultPlan().skip_collective(0, step=1)).check().results[0] == [0, 2]


def test_fault_fires_once_per_job_across_restarts(tmp_path: Path) -> None:
    plan = FaultPlan().kill(1, step=2).recorded_in(tmp_path / "record")

    first = spawn(_steps, 2, faults=plan)
    second = spawn(_steps, 2, faults=plan).check()

    assert (first.faults_fired, second.faults_fired) == (1, 0)
    assert first.exit_codes == {0: 0, 1: -9}


def test_planned_fault_that_does_not_fire_fails_the_check() -> None:
    with pytest.raises(AssertionError, match="0 of 1 planned faults fired"):
        spawn(_steps, 2, faults=FaultPlan().kill(1, step=99)).check()


def test_plan_is_a_value_that_survives_pickle_and_json() -> None:
    plan = FaultPlan().kill(1, 2).nan(0, 3, parameter="head").raise_(0, 1, exc=KeyError("x")).slow(1, 1, 0.5)

    assert pickle.loads(pickle.dumps(plan)) == plan
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert FaultPlan.from_dict({"faults": [{"kind": "kill", "rank": 1, "step": 2}]}) == FaultPlan().kill(1, 2)


def test_random_kill_is_a_function_of_its_seed() -> None:
    assert FaultPlan.random_kill(7, 4, 100) == FaultPlan.random_kill(7, 4, 100)
    drawn = [FaultPlan.random_kill(seed, 4, 100).faults[0] for seed in range(200)]
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert all(fault.kind == "kill" and fault.step < 100 for fault in drawn)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"kind": "explode"}, "Fault.kind is 'explode'"),
        ({"kind": "kill", "where": "lunch"}, "Fault.where is 'lunch'"),
        ({"kind": "kill", "rank": -1}, "Fault.rank is -1"),
        ({"kind": "slow"}, "a slow rank needs a duration"),
        ({"kind": "hang", "duration_s": 0.0}, "Fault.duration_s is 0.0"),
    ],
)
def test_impossible_fault_is_refused_with_field_and_value(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Fault(**{"rank": 0, "step": 0, **values})


def test_plan_without_a_record_refuses_to_strike() -> None:
    with pytest.raises(ValueError, match=r"no record.*plan.recorded_in\(path\)"):
        FaultPlan().slow(0, 0, 0.1).fire(0, 0)
