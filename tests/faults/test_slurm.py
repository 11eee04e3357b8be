"""Row P2: on a real Slurm of two nodes, a job that is asked to stop saves, is requeued once, and continues exactly."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_distplus.events import read_events
from lightning_distplus.launch.slurm import SlurmJob
from tests.distributed.slurm_cluster import Cluster, missing_programs, slurm
from tests.faults.test_restarting import undisturbed

ROOT = Path(__file__).parents[2]

# `distplus fit` is the small job of the launcher's tests; everything else is the real command.
DISTPLUS = f"""#!/bin/bash
cd {ROOT}
if [ "$1" = fit ]; then exec {sys.executable} -m tests.distributed.launch_jobs "${{@:2}}"; fi
exec {sys.executable} -m lightning_distplus.cli "$@"
"""

pytestmark = [
    pytest.mark.soak,  # Slurm takes a minute to start a requeued job
    pytest.mark.skipif(bool(missing_programs()), reason=f"no Slurm here: {', '.join(missing_programs())} not found"),
    pytest.mark.deadline(400),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm")) as one:
        (one.folder / "distplus").write_text(DISTPLUS)
        (one.folder / "distplus").chmod(0o755)
        yield one


def submit(cluster: Cluster, folder: Path, *job: str, options: tuple[str, ...] = ()) -> str:
    """The number of the job. The names of the nodes resolve nowhere: all of them are this host."""
    script = folder / "job.sh"
    command = ["fit", str(folder), *job]
    script.write_text(SlurmJob(command=command, nodes=2, time="10", grace_s=60).script())
    return cluster.call(
        "sbatch", "--parsable", f"--chdir={folder}", *options, str(script),
        PATH=f"{cluster.folder}:{cluster.environment['PATH']}", PYTHONPATH=str(ROOT), MASTER_ADDR="127.0.0.1",
        OMP_NUM_THREADS="1", HOME=os.environ.get("HOME", "/"),
    )  # fmt: skip


def wait_for_step(cluster: Cluster, folder: Path, step: int) -> None:
    until = time.monotonic() + 120
    while not list((folder / "checkpoints").glob(f"*step={step}.ckpt")):
        assert time.monotonic() < until, cluster.logs()
        time.sleep(0.05)


def weights(folder: Path) -> list[object]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]


def kinds(folder: Path, rank: int) -> list[str]:
    told = ("preempted", "requeue", "loaded", "launch_end")
    return [
        event["kind"] for event in read_events(folder / "distplus") if event["rank"] == rank and event["kind"] in told
    ]


def test_a_job_that_is_told_of_its_limit_saves_is_requeued_once_and_continues_exactly(
    cluster: Cluster, tmp_path: Path
) -> None:
    number = submit(cluster, tmp_path, "0.3")
    wait_for_step(cluster, tmp_path, 2)
    cluster.call("scancel", "--signal=USR1", number)  # what Slurm sends to the ranks before the limit
    ended = cluster.wait(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", deadline_s=300)
    log = (tmp_path / f"distplus-{number}.log").read_text()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "1", "0:0"), log
    assert weights(tmp_path) == undisturbed()
    assert kinds(tmp_path, -1) == ["requeue", "launch_end"]
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == ["preempted", "loaded"]


def test_a_job_that_is_cancelled_saves_and_stays_away(cluster: Cluster, tmp_path: Path) -> None:
    number = submit(cluster, tmp_path, "0.3")
    wait_for_step(cluster, tmp_path, 2)
    cluster.call("scancel", number)
    until = time.monotonic() + 60
    while cluster.call("squeue", "--noheader"):
        assert time.monotonic() < until, cluster.logs()
        time.sleep(0.2)
    assert cluster.job(number)["JobState"] == "CANCELLED"
    assert list((tmp_path / "checkpoints").glob("preempt-step=*.ckpt")), cluster.logs()
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == ["preempted"]
