"""The four strategies in real processes: deadlines on every group, the CPU, and else the parents' own behaviour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_distplus.testing import SpawnResult, spawn
from lightning_distplus.timeouts import Phase, Timeouts, group_timeout
from tests.distributed import jobs
from tests.pairs import kept, kept_rows

TIMEOUTS = {"setup": "50m", "step": "3m", "validation": "20m", "checkpoint": "40m"}


def seconds(phase: str) -> float:
    deadline = Timeouts(**TIMEOUTS).deadline(Phase(phase))
    return group_timeout(deadline).total_seconds()


def fit_and_note_timeouts(name: str, arguments: dict[str, Any], folder: str, world_size: int) -> dict[str, list[float]]:
    notes = jobs.GroupTimeouts()
    trainer = jobs.trainer(name, world_size, folder, **arguments, max_steps=5, val_check_interval=3, callbacks=[notes])
    trainer.fit(jobs.Model(), jobs.loader(), jobs.loader(8))
    trainer.save_checkpoint(str(Path(folder) / "end.ckpt"))
    notes.note("after a save")
    return notes.seen


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


def train_and_resume(name: str, arguments: dict[str, Any], precision: str, folder: str, world_size: int) -> Any:
    path = str(Path(folder) / "three.ckpt")
    model = jobs.Model()
    first = jobs.fit(name, world_size, folder, model, **arguments, max_steps=3, precision=precision)
    first.save_checkpoint(path)
    second = jobs.trainer(
        name, world_size, folder, **arguments, max_steps=5, precision=precision, gradient_clip_val=None
    )
    resumed = jobs.Model(seed=1)
    second.fit(resumed, jobs.loader(), ckpt_path=path)
    return {"step": second.global_step, "before": model.losses, "after": resumed.losses}


SHARDINGS = [
    ("FULL_SHARD", "32-true", "sharded"),
    ("SHARD_GRAD_OP", "bf16-true", "full"),
    ("NO_SHARD", "32-true", "sharded"),
    ("FULL_SHARD", "bf16-mixed", "full"),
]


def train_and_resume_each(folder: str) -> dict[Any, Any]:
    return {
        way: train_and_resume(
            "ResilientFSDP", {"sharding_strategy": way[0], "state_dict_type": way[2]}, way[1], f"{folder}/{number}", 2
        )
        for number, way in enumerate(SHARDINGS)
    }


def test_fsdp_trains_saves_and_resumes_on_the_cpu(tmp_path: Path) -> None:
    run = spawn(train_and_resume_each, 2, args=(str(tmp_path),), deadline="100s").check()
    for results in run.results.values():
        check_resumed(run, results)


def test_fsdp_hybrid_shard_resumes_on_a_mesh_of_two_by_two(tmp_path: Path) -> None:
    arguments = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    run = spawn(train_and_resume, 4, args=("ResilientFSDP", arguments, "32-true", str(tmp_path), 4)).check()
    check_resumed(run, run.results)


def check_resumed(run: SpawnResult, results: dict[Any, Any]) -> None:
    for result in results.values():
        assert result["step"] == 5
        assert len(result["after"]) == 2
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


def fit_with_hook(folder: str) -> int:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    calls = []

    def counting_hook(state, bucket):  # DDP compares annotations as objects, and here they would be text
        calls.append(bucket.index())
        return allreduce_hook(state, bucket)

    strategy = jobs.strategy("ResilientDDP", ddp_comm_hook=counting_hook)
    jobs.trainer(strategy, 2, folder, max_steps=3).fit(jobs.Model(), jobs.loader())
    return len(calls)


def test_a_ddp_communication_hook_works_on_gloo(tmp_path: Path) -> None:
    assert set(spawn(fit_with_hook, 2, args=(str(tmp_path),)).check().results.values()) == {3}
