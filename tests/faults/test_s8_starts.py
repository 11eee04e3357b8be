"""Row S8: a rank that never comes is named by those that came; what a killed start leaves blocks no other one."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.utils.cpp_extension import get_default_build_root

from lightning_distplus import env
from lightning_distplus.errors import ExitCode, PeerMissing
from lightning_distplus.testing import spawn
from lightning_distplus.testing.spawning import rank_variables
from tests.distributed import jobs
from tests.processes import start, wait_until


def fit(rank: int, name: str, absent: int, folder: str) -> None:
    """Notes how long it took to fail, and the error; a rank that is absent leaves at once."""
    if rank == absent:
        return
    strategy = jobs.strategy(name, timeout={"rendezvous": "2s"})
    begin = time.monotonic()
    try:
        jobs.fit(strategy, 3, folder, max_steps=1)
    except PeerMissing as error:
        Path(folder, f"rank{rank}").write_text(json.dumps([time.monotonic() - begin, error.ranks, str(error)]))
        raise


@pytest.mark.parametrize(("name", "absent"), [("ResilientDDP", 1), ("ResilientFSDP", 0)])
def test_missing_rank_is_named_by_the_ranks_that_came(name: str, absent: int, tmp_path: Path) -> None:
    """By the rendezvous deadline + 1 s, on every rank that came."""
    run = spawn(fit, 3, args=(name, absent, str(tmp_path)), deadline="40s")
    present = {0, 1, 2} - {absent}
    assert run.exit_codes == {absent: 0, **dict.fromkeys(present, ExitCode.PEER_LOST)}, run.logs
    for rank in present:
        seconds, ranks, text = json.loads((tmp_path / f"rank{rank}").read_text())
        assert seconds < 3
        assert ranks == [absent]
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


@pytest.mark.parametrize("is_serving", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.deadline(150)
def test_a_rank_whose_rank_0_was_killed_ends_and_joins_no_other_job(is_serving: bool, tmp_path: Path) -> None:
    """It waited for its store, and met that of the next job, which had the same port, or which came later."""
    late, waits = tmp_path / "late", tmp_path / "waits"
    (tmp_path / "train.py").write_text(STARTED_BY_RANK_0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {**rank_variables("torchrun", 2, {}), "MASTER_PORT": str(port)}

    def begin(place: str, until: Path) -> subprocess.Popen[str]:
        (tmp_path / place).mkdir()
        own = {"PLACE": str(tmp_path / place), "LATE": str(until)}
        return start("train.py", log=tmp_path / f"{place}.log", cwd=tmp_path, env={**variables, **own})

    def wait(is_so: Callable[[], object]) -> None:
        wait_until(is_so, lambda: [path.read_text() for path in sorted(tmp_path.glob("*.log"))], within_s=60)

    first = begin("first", late)
    wait((tmp_path / "late_is_up").exists)
    orphan = int((tmp_path / "late_is_up").read_text() or 0)
    first.kill()
    first.wait()
    second = begin("second", waits)
    if is_serving:
        wait((tmp_path / "waits_is_up").exists)
        wait(lambda: is_served(port))
    late.touch()
    wait(lambda: not Path(f"/proc/{orphan}").exists())
    waits.touch()
    assert second.wait(60) == 0, (tmp_path / "second.log").read_text()
    said = (tmp_path / "first.log").read_text()
    assert "rank 0, which has started this process and was to serve the store, is gone" in said
