"""Starting wrong: every rank says what is wrong, soon, and ends with the exit code for it (rows S5 and S8)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.cpp_extension import get_default_build_root

from lightning_distplus import env
from lightning_distplus.errors import DistplusError, ExitCode
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.pairs import kept

ARGUMENTS: dict[str, dict[str, Any]] = {"ResilientDeepSpeed": {"stage": 2}}


def fit(rank: int, name: str, devices: int, absent: int | None, folder: str, timeout: Any) -> None:
    """Fits and notes how long it took to fail, and how; a rank that is absent leaves at once."""
    if rank == absent:
        return
    strategy = jobs.strategy(name, timeout=timeout, **ARGUMENTS.get(name, {}))
    begin = time.monotonic()
    try:
        jobs.trainer(strategy, devices, folder, max_steps=1).fit(jobs.Model(), jobs.loader())
    except DistplusError as error:
        seconds = time.monotonic() - begin
        note = [seconds, isinstance(error, ValueError), getattr(error, "ranks", []), f"{type(error).__name__}: {error}"]
        Path(folder, f"rank{rank}").write_text("\n".join(map(str, note)))
        raise


def _notes(folder: Path) -> dict[int, tuple[float, bool, str, str]]:
    """Per rank: seconds until the error, whether it is a ValueError, its ranks, its text."""
    notes = {}
    for path in sorted(folder.glob("rank?")):
        seconds, is_value_error, ranks, text = path.read_text().split("\n", 3)
        notes[int(path.name[-1])] = (float(seconds), is_value_error == "True", ranks, text)
    return notes


@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, ["ResilientModelParallel", "ResilientDeepSpeed"]))
def test_wrong_number_of_devices_is_one_preflight_error_on_all_ranks(name: str, tmp_path: Path) -> None:
    """Row S5, the count check: torchrun has started two processes for a Trainer that expects one."""
    variables = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 2}

    run = spawn(fit, 2, args=(name, 1, None, str(tmp_path), "20s"), env=variables, deadline="40s")

    assert run.exit_codes == {0: ExitCode.PREFLIGHT, 1: ExitCode.PREFLIGHT}, run.logs
    notes = _notes(tmp_path)
    assert set(notes) == {0, 1}
    for seconds, is_value_error, _, text in notes.values():
        assert seconds < 5
        assert is_value_error
        assert text.startswith("PreflightError: The launcher (TorchElasticEnvironment) started 2 processes, but ")
        assert "Trainer(devices=1, num_nodes=1) expects 1 x 1 = 1." in text
        assert "torchrun --nnodes 1 --nproc-per-node 1" in text


@pytest.mark.parametrize(("name", "absent"), [("ResilientDDP", 1), ("ResilientFSDP", 0)])
def test_missing_rank_is_named_by_the_ranks_that_came(name: str, absent: int, tmp_path: Path) -> None:
    """Row S8 with a Trainer: the rendezvous deadline + 1 s, on every rank that came."""
    run = spawn(fit, 3, args=(name, 3, absent, str(tmp_path), {"rendezvous": "2s"}), deadline="40s")

    present = [rank for rank in range(3) if rank != absent]
    assert run.exit_codes == {absent: 0, **dict.fromkeys(present, ExitCode.PEER_LOST)}, run.logs
    notes = _notes(tmp_path)
    assert set(notes) == set(present)
    for seconds, _, ranks, text in notes.values():
        assert seconds < 3
        assert ranks == f"[{absent}]"
        assert text.startswith("PeerMissing: Rank ")
        assert f"rank {absent}" in text


def fit_with_a_lock_left_behind(built: str, folder: str) -> list[str]:
    jobs.fit("ResilientDeepSpeed", 2, folder, stage=2, max_steps=1)
    return [str(lock) for lock in Path(built).glob("*/lock")]


def test_a_start_that_was_killed_does_not_block_the_next_one(tmp_path: Path) -> None:
    """A process that was killed while DeepSpeed looked for its compiled collective has left torch's lock there.

    Stock waits for the lock without end.
    """
    built = tmp_path / "built"  # other tests lock the folder of all
    for library in Path(env.TORCH_EXTENSIONS_DIR.get() or get_default_build_root()).glob("**/*.so"):
        shutil.copytree(library.parent, built / library.parent.name)
        (built / library.parent.name / "lock").touch()  # by no rank: one that came late would lock out all others
    variables = {"TORCH_EXTENSIONS_DIR": str(built)}
    run = spawn(fit_with_a_lock_left_behind, 2, args=(str(built), str(tmp_path)), env=variables, deadline="40s").check()
    assert run.results == {0: [], 1: []}


STARTED_BY_RANK_0 = """
import os, time
from pathlib import Path
from tests.distributed import jobs
late = os.environ["LATE"]
if os.environ.get("LOCAL_RANK") == "1":
    Path(late + "_is_up").write_text(str(os.getpid()))
    while not Path(late).exists():
        time.sleep(0.05)
jobs.trainer(jobs.strategy("ResilientDDP"), 2, os.environ["PLACE"], max_steps=20).fit(jobs.Model(), jobs.loader())
"""


def is_served(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    "is_serving",
    [
        pytest.param(False, id="before the next job serves"),
        pytest.param(True, id="while the next job serves", marks=pytest.mark.soak),
    ],
)
@pytest.mark.deadline(150)
def test_a_rank_whose_rank_0_was_killed_ends_and_joins_no_other_job(is_serving: bool, tmp_path: Path) -> None:
    """Row S8: it waited for its store, and met that of the next job, which had the same port."""
    script, late = tmp_path / "train.py", tmp_path / "late"
    script.write_text(STARTED_BY_RANK_0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {**os.environ, "MASTER_PORT": str(port), "PYTHONPATH": str(Path.cwd()), "LATE": str(late)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        variables.pop(name, None)

    def start(place: str, **others: str) -> subprocess.Popen[bytes]:
        (tmp_path / place).mkdir()
        with (tmp_path / f"{place}.log").open("wb") as log:
            environment = {**variables, "PLACE": str(tmp_path / place), **others}
            command = [sys.executable, str(script)]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)

    def until(is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < end, [path.read_text() for path in sorted(tmp_path.glob("*.log"))]
            time.sleep(0.02)

    first = start("first")
    until((tmp_path / "late_is_up").exists)
    orphan = int((tmp_path / "late_is_up").read_text() or 0)
    first.kill()
    first.wait()
    waits = tmp_path / "waits"
    second = start("second", LATE=str(waits))
    if is_serving:
        until((tmp_path / "waits_is_up").exists)
        until(lambda: is_served(port))
    late.touch()
    until(lambda: not Path(f"/proc/{orphan}").exists())
    waits.touch()
    assert second.wait(60) == 0, (tmp_path / "second.log").read_text()
    said = (tmp_path / "first.log").read_text()
    assert "rank 0, which has started this process and was to serve the store, is gone" in said
