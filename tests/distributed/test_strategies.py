"""The four strategies in real processes: deadlines on every group, the CPU, and else the parents' own behaviour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_distplus import _compat
from lightning_distplus.control import GateRecord
from lightning_distplus.testing import spawn
from lightning_distplus.timeouts import Phase, Timeouts, group_timeout
from tests.distributed import jobs
from tests.pairs import kept, kept_rows

TIMEOUTS = {"setup": "50m", "step": "3m", "validation": "20m", "checkpoint": "40m"}


def seconds(phase: str) -> float:
    deadline = Timeouts(**TIMEOUTS).deadline(Phase(phase))
    return group_timeout(deadline).total_seconds()


def fit_and_note_timeouts(name: str, arguments: dict[str, Any], folder: str, world_size: int) -> dict[str, list[float]]:
    """The time-outs in force on every group, at one moment of each phase."""
    seen: dict[str, list[float]] = {}

    def note(moment: str) -> None:
        groups = _compat.process_groups()
        seen[moment] = [_compat.read_group_timeout(group).total_seconds() for group in groups]

    hooks = {"on_fit_start": "setup", "on_validation_batch_start": "validation", "on_train_end": "end"}
    notes = [jobs.At(hook, lambda *_, moment=moment: note(moment)) for hook, moment in hooks.items()]
    notes += [
        jobs.At("on_train_batch_start", lambda *_, moment=moment: note(moment), step=step)
        for step, moment in ((2, "step"), (4, "step after validation"))
    ]
    data = (jobs.loader(), jobs.loader(8))
    options = {"max_steps": 5, "val_check_interval": 3, "callbacks": notes}
    trainer = jobs.fit(name, world_size, folder, data=data, **arguments, **options)
    trainer.save_checkpoint(str(Path(folder) / "end.ckpt"))
    note("after a save")
    return seen


GROUPS: list[tuple[str, dict[str, Any], int, int]] = [
    ("ResilientDDP", {}, 2, 1),
    ("ResilientFSDP", {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}, 4, 3),
    ("ResilientModelParallel", {"data_parallel_size": 2, "tensor_parallel_size": 2}, 4, 3),
    ("ResilientDeepSpeed", {"stage": 2}, 2, 2),
    ("ResilientFSDP", {}, 2, 1),
    ("ResilientFSDP", {"sharding_strategy": "HYBRID_SHARD", "auto_wrap_policy": {nn.Linear}}, 2, 2),
    ("ResilientDeepSpeed", {"stage": 1}, 2, 2),
    ("ResilientDeepSpeed", {"stage": 3}, 2, 2),
]


@pytest.mark.parametrize(("name", "arguments", "world_size", "num_groups"), kept_rows(GROUPS, GROUPS[:4]))
def test_every_process_group_has_the_deadline_of_its_phase(
    name: str, arguments: dict[str, Any], world_size: int, num_groups: int, tmp_path: Path
) -> None:
    run = spawn(
        fit_and_note_timeouts,
        world_size,
        args=(name, {**arguments, "timeout": TIMEOUTS}, str(tmp_path), world_size),
        deadline="3m",
    ).check()
    for seen in run.results.values():
        assert len(seen["setup"]) >= num_groups
        expected = {
            "setup": "setup",
            "step": "step",
            "validation": "validation",
            "step after validation": "step",
            "after a save": "checkpoint",
        }
        for moment, phase in expected.items():
            assert set(seen[moment]) == {seconds(phase)}, (moment, seen)


def test_timeout_none_leaves_the_time_outs_of_deepspeed(tmp_path: Path) -> None:
    run = spawn(fit_and_note_timeouts, 2, args=("ResilientDeepSpeed", {"timeout": None}, str(tmp_path), 2)).check()
    assert {value for seen in run.results.values() for values in seen.values() for value in values} == {1800.0}


def losses(name: str, arguments: dict[str, Any], folder: str) -> list[str]:
    model = jobs.Model()
    jobs.fit(name, 2, folder, model, **arguments, max_steps=6, accumulate_grad_batches=2)
    return model.losses


def test_the_loss_curve_is_the_parents_bit_for_bit(tmp_path: Path) -> None:
    """Of FSDP2; of DDP the weights are compared in ``test_settings``."""
    mesh = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    resilient = spawn(losses, 2, args=("ResilientModelParallel", {}, str(tmp_path))).check()
    stock = spawn(losses, 2, args=("ModelParallelStrategy", mesh, str(tmp_path))).check()
    assert len(stock.results[0]) == 12
    assert resilient.results == stock.results


def train_and_resume(folder: str, world_size: int, arguments: dict[str, Any], precision: str) -> dict[str, Any]:
    options, path = {"precision": precision, **arguments}, f"{folder}/three.ckpt"
    jobs.fit("ResilientFSDP", world_size, folder, max_steps=3, **options).save_checkpoint(path)
    resumed = jobs.Model(seed=1)
    second = jobs.fit("ResilientFSDP", world_size, folder, resumed, ckpt_path=path, max_steps=5, **options)
    return {"step": second.global_step, "after": len(resumed.losses)}


WAYS: dict[int, list[tuple[dict[str, Any], str]]] = {
    2: [
        ({"sharding_strategy": "FULL_SHARD", "state_dict_type": "sharded"}, "32-true"),
        ({"sharding_strategy": "SHARD_GRAD_OP", "state_dict_type": "full"}, "bf16-true"),
        ({"sharding_strategy": "NO_SHARD", "state_dict_type": "sharded"}, "32-true"),
        ({"sharding_strategy": "FULL_SHARD", "state_dict_type": "full"}, "bf16-mixed"),
    ],
    4: [({"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}, "32-true")],
}


def train_and_resume_each(folder: str, world_size: int) -> list[dict[str, Any]]:
    return [train_and_resume(f"{folder}/{number}", world_size, *way) for number, way in enumerate(WAYS[world_size])]


@pytest.mark.parametrize("world_size", WAYS)
def test_fsdp_trains_saves_and_resumes_on_the_cpu(world_size: int, tmp_path: Path) -> None:
    run = spawn(train_and_resume_each, world_size, args=(str(tmp_path), world_size), deadline="100s").check()
    expected = [{"step": 5, "after": 2}] * len(WAYS[world_size])
    assert run.results == dict.fromkeys(range(world_size), expected)
    assert not any("Traceback" in log for log in run.logs.values())


def all_entry_points(name: str, folder: str) -> dict[str, Any]:
    model, data = jobs.Model(), jobs.loader(16)
    trainer = jobs.fit(name, 2, folder, model, (data, data), max_epochs=1)
    first = trainer.global_step
    metrics = trainer.validate(model, data, verbose=False)[0]
    metrics |= trainer.test(model, data, verbose=False)[0]
    predictions = len(trainer.predict(model, data, return_predictions=True))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data, data)
    return {"steps": [first, trainer.global_step], "metrics": sorted(metrics), "predictions": predictions}


@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, ["ResilientFSDP", "ResilientDeepSpeed"]))
def test_fit_validate_test_predict_and_a_second_fit_run_in_one_process(name: str, tmp_path: Path) -> None:
    run = spawn(all_entry_points, 2, args=(name, str(tmp_path)), deadline="2m").check()
    expected = {"steps": [4, 8], "metrics": ["test_loss", "val_loss"], "predictions": 4}
    assert run.results == {0: expected, 1: expected}
    lines = [line for log in run.logs.values() for line in log.splitlines() if "[c10d]" in line or "Traceback" in line]
    # A resolver that does not answer is the machine's matter.
    assert [line for line in lines if "hostname of the client socket cannot be retrieved" not in line] == []


def gates_of_a_fit(accumulate: int, folder: str) -> list[tuple[int, int, int]]:
    strategy: Any = jobs.strategy("ResilientDDP", timeout="20s")
    seen: list[tuple[int, int, int]] = []
    passed = strategy.pass_gate

    def noted(records: list[GateRecord]) -> None:
        seen.append((records[0].epoch, records[0].micro_batch, records[0].global_step))
        passed(records)

    strategy.pass_gate = noted
    jobs.fit(strategy, 2, folder, max_epochs=2, limit_train_batches=5, accumulate_grad_batches=accumulate)
    return seen


@pytest.mark.parametrize(
    ("accumulate", "expected"),
    [
        (1, [(epoch, batch, 5 * epoch + batch) for epoch in range(2) for batch in range(5)]),
        (2, [(epoch, 2 * step, 3 * epoch + step) for epoch in range(2) for step in range(3)]),
    ],
)
def test_there_is_one_gate_at_the_head_of_each_optimizer_step(
    accumulate: int, expected: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    run = spawn(gates_of_a_fit, 2, args=(accumulate, str(tmp_path)), deadline="30s").check()
    assert run.results == {0: expected, 1: expected}
