"""Spawn: real processes in every mode, a deadline for all of them, and no survivor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lightning_distplus.testing import FaultPlan, spawn
from lightning_distplus.testing.spawning import free_port
from tests.processes import ROOT, wait_until

MODULE = "tests.unit.testing.test_spawn"


def _all_reduced(rank: int, offset: int) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    dist.destroy_process_group()
    print(f"rank {rank} reduced on {torch.get_num_threads()} thread")
    return int(value)


@pytest.mark.parametrize("mode", ["forkserver", "fresh"])
def test_ranks_form_a_group_and_return_results_and_logs(mode: str, tmp_path: Path) -> None:
    result = spawn(_all_reduced, 2, args=(10,), mode=mode, log_dir=tmp_path).check()

    assert result.results == {0: 21, 1: 21}
    assert result.exit_codes == {0: 0, 1: 0}
    assert "rank 1 reduced on 1 thread" in result.logs[1]
    assert (tmp_path / "rank00001.log").read_text() == result.logs[1]


def test_a_free_port_is_held_for_the_server_that_reuses_addresses() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        pass  # `create_server` reuses addresses, as torch's store does
    assert len({free_port() for _ in range(100)}) > 32


def test_start_from_the_forkserver_takes_a_fraction_of_a_second() -> None:
    spawn(_all_reduced, 2, args=(0,)).check()

    fastest = min(spawn(_all_reduced, 2, args=(0,)).check().elapsed_s for _ in range(3))

    assert fastest < 1.0


def _fit() -> tuple[int, int, str]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=2, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(BoringModel())
    return trainer.world_size, trainer.global_rank, type(trainer.strategy.cluster_environment).__name__


def test_trainer_joins_the_spawned_processes_as_its_ranks() -> None:
    result = spawn(_fit, 2).check()

    assert result.results == {rank: (2, rank, "LightningEnvironment") for rank in range(2)}


def test_trainer_starts_the_other_ranks_itself_in_lightning_mode() -> None:
    result = spawn(_fit, 2, mode="lightning").check()

    assert result.results == {rank: (2, rank, "LightningEnvironment") for rank in range(2)}


def _killed_in_the_first_attempt(rank: int) -> str:
    FaultPlan.from_environment().fire(rank, step=0)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_torchrun_restarts_the_ranks_and_the_fault_fires_in_one_attempt_only() -> None:
    plan = FaultPlan().kill(1, step=0)

    result = spawn(_killed_in_the_first_attempt, 2, faults=plan, mode="torchrun", max_restarts=1).check()

    assert result.results == {0: "1", 1: "1"}
    assert result.exit_codes == {0: 0, 1: 0}


def _ends_in_its_own_way(rank: int) -> None:
    if rank == 1:
        raise LookupError("the second rank fails")
    if rank == 2:
        sys.exit(143)
    if rank == 3:
        os._exit(170)


def test_each_rank_has_its_own_exit_code_and_check_shows_the_log_of_those_that_failed() -> None:
    result = spawn(_ends_in_its_own_way, 4)

    assert result.exit_codes == {0: 0, 1: 1, 2: 143, 3: 170}
    with pytest.raises(
        AssertionError, match=r"(?s)rank 1 \(exit code 1\), rank 2 .*LookupError: the second rank fails"
    ):
        result.check()


def test_torchrun_tells_the_exit_code_of_each_rank() -> None:
    assert spawn(_dies, 2, mode="torchrun").exit_codes[1] == -signal.SIGKILL


def _dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def _has_children(rank: int) -> None:
    subprocess.Popen(["sleep", "1234.5"])
    subprocess.Popen(["sleep", "1234.5"], start_new_session=True)
    if rank == 1:
        time.sleep(60)


def test_no_process_survives_the_deadline_nor_a_rank_that_has_ended() -> None:
    result = spawn(_has_children, 2, deadline=3)

    assert result.alive == {1: "running"}
    assert result.exit_codes == {0: 0, 1: -signal.SIGKILL}
    assert result.elapsed_s < 5.5
    assert not _processes("1234.5")


def _sleep_visibly(marker: str) -> None:
    subprocess.Popen(["sleep", marker])
    Path(os.environ["STARTED"]).touch()
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_process_that_spawned_them(number: signal.Signals, tmp_path: Path) -> None:
    script = f"""
        from lightning_distplus.testing import spawn
        from {MODULE} import _sleep_visibly
        spawn(_sleep_visibly, 1, args=("2345.6",), mode="fresh", env={{"STARTED": {str(tmp_path / "started")!r}}})
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    )
    try:
        wait_until((tmp_path / "started").exists, within_s=20.0)
        ranks = _descendants_named(parent.pid)
        parent.send_signal(number)
        parent.communicate(timeout=20)
        assert parent.returncode == -number
        wait_until(lambda: not any(Path(f"/proc/{pid}/fd/1").exists() for pid in ranks), within_s=5.0)
        if number == signal.SIGINT:
            assert not _processes("2345.6"), "Ctrl-C also ends what the ranks started"
    finally:
        parent.kill()
        for pid in _processes("2345.6"):
            os.kill(pid, signal.SIGKILL)


def _variables() -> dict[str, str]:
    return dict(os.environ)


def test_ranks_get_the_environment_of_the_call_and_not_that_of_the_forkserver(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn(_variables, 1).check()
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.setenv("SLURM_PROCID", "5")

    found = spawn(_variables, 2, env={"GIVEN": 3, "HOME": None}).check().results[1]

    assert (found["SET_LATER"], found["GIVEN"], found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (
        "yes", "3", "1", "1", "2",
    )  # fmt: skip
    assert not {"HOME", "SLURM_PROCID"} & set(found)


def test_mistakes_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="stands at the top of a module"):
        spawn(lambda: None, 1)
    with pytest.raises(ValueError, match="world_size is 0"):
        spawn(_variables, 0)
    with pytest.raises(ValueError, match="max_restarts is 1"):
        spawn(_variables, 1, max_restarts=1)
    with pytest.raises(ValueError, match="mode is 'threads'"):
        spawn(_variables, 1, mode="threads")


def test_importing_the_package_loads_neither_torch_nor_lightning() -> None:
    script = (
        "import sys, lightning_distplus.testing as t; t.spawn, t.FaultPlan, t.preload\n"
        "assert not {'torch', 'lightning'} & set(sys.modules); assert callable(t.spawn)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=30)


def _processes(argument: str) -> list[int]:
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"sleep\0{argument}\0" in cmdline.read_text():
                found.append(int(cmdline.parent.name))
        except OSError:
            continue
    return found


def _descendants_named(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
