"""Row P2: on a real Slurm of two nodes, a job that is asked to stop saves, is requeued once, and continues exactly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_distplus.events import read_events
from tests.distributed.launch_jobs import results, undisturbed
from tests.distributed.slurm_cluster import Cluster, missing_programs, slurm
from tests.faults.strangers import HANG, line_of, script_of, verdict_at_the_end_of
from tests.processes import ROOT, start, wait_until

# `distplus fit` is the small job of the launcher's tests; everything else is the real command.
DISTPLUS = f"""#!/bin/bash
cd {ROOT}
if [ "$1" = fit ] && [ -n "$SLURM_ARRAY_TASK_ID" ]; then
  set -- fit "$2/$SLURM_ARRAY_TASK_ID" "${{@:3}}"; mkdir -p "$2"
fi
if [ "$1" = fit ]; then exec {sys.executable} -m tests.distributed.launch_jobs "${{@:2}}"; fi
exec {sys.executable} -m lightning_distplus.cli "$@"
"""

pytestmark = [
    pytest.mark.soak,  # Slurm takes a minute to start a requeued job
    pytest.mark.skipif(bool(missing_programs()), reason=f"no Slurm here: {', '.join(missing_programs())} not found"),
    pytest.mark.deadline(500),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm")) as one:
        (one.folder / "distplus").write_text(DISTPLUS)
        (one.folder / "distplus").chmod(0o755)
        yield one


def submit(
    cluster: Cluster, folder: Path, *job: str, time: str = "10", options: tuple[str, ...] = (), has_srun: bool = True
) -> str:
    """The number of the job. The names of the nodes resolve nowhere: all of them are this host."""
    environment = {
        **cluster.environment, "PATH": f"{cluster.folder}:{cluster.environment['PATH']}", "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "HOME": os.environ.get("HOME", "/"),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "lightning_distplus.cli", "launch", "slurm", "--nodes=2", f"--time={time}", "--grace=60",
        *(f"--sbatch={option}" for option in options), *(["--submit"] if has_srun else []),
        "--", "fit", str(folder), *job,
    ]  # fmt: skip
    asked = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    if not has_srun:
        script = re.sub("^srun --kill-on-bad-exit=0 ", "", asked.stdout, flags=re.MULTILINE)
        asked = subprocess.run(
            ["sbatch"], input=script, cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
    return re.findall(r"job (\d+)", asked.stdout)[0]


def wait_for_step(cluster: Cluster, number: str, folder: Path, step: int) -> None:
    wait_until(lambda: list((folder / "checkpoints").glob(f"*step={step}.ckpt")), cluster.logs)
    assert cluster.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), cluster.logs()


def end_of(cluster: Cluster, number: str, deadline_s: float = 300) -> dict[str, str]:
    return cluster.wait(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", deadline_s=deadline_s)


def kinds(folder: Path, rank: int) -> list[str]:
    told = ("preempted", "requeue", "loaded", "launch_end")
    return [
        event["kind"] for event in read_events(folder / "distplus") if event["rank"] == rank and event["kind"] in told
    ]


def test_a_job_that_is_told_of_its_limit_saves_is_requeued_once_and_continues_exactly(
    cluster: Cluster, tmp_path: Path
) -> None:
    number = submit(cluster, tmp_path, "0.3")
    wait_for_step(cluster, number, tmp_path, 2)
    cluster.call("scancel", "--signal=USR1", number)  # what Slurm sends to the ranks before the limit
    ended = end_of(cluster, number)
    log = (tmp_path / f"distplus-{number}.log").read_text()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "1", "0:0"), log
    assert results(tmp_path) == undisturbed()
    assert kinds(tmp_path, -1) == ["requeue", "launch_end"]
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == ["preempted", "loaded"]


@pytest.mark.deadline(800)
def test_a_real_time_limit_is_met_by_a_save_and_a_requeue(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm sends the signal 60 to 120 s before the limit of 3 minutes; the whole job takes longer."""
    number = submit(cluster, tmp_path, "14", time="3")
    ended = end_of(cluster, number, 700)
    log = (tmp_path / f"distplus-{number}.log").read_text()
    assert ended["JobState"] == "COMPLETED", log
    assert (restarts := int(ended["Restarts"])) >= 1, log
    assert results(tmp_path) == undisturbed()
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == ["preempted", "loaded"] * restarts


def test_a_task_of_an_array_is_requeued_alone_and_the_other_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    number = submit(cluster, tmp_path, "0.3", options=("--array=3,5%1",))
    wait_for_step(cluster, f"{number}_3", tmp_path / "3", 2)
    cluster.call("scancel", "--signal=USR1", f"{number}_3")
    for task, restarts in (("3", "1"), ("5", "0")):
        ended = end_of(cluster, f"{number}_{task}")
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", restarts), cluster.logs()
        assert results(tmp_path / task) == undisturbed()


def test_a_node_that_dies_costs_one_requeue(cluster: Cluster, tmp_path: Path) -> None:
    """The job that Slurm's own --requeue starts again continues from the newest checkpoint."""
    number = submit(cluster, tmp_path, "0.3")
    wait_for_step(cluster, number, tmp_path, 2)
    # A daemon that still answers brings it back.
    cluster.call("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    ended = end_of(cluster, number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), cluster.logs()
    assert results(tmp_path) == undisturbed()


@pytest.mark.parametrize("mistake", ["two tasks per node", "no srun"])
def test_a_wrong_start_is_refused_at_once_and_not_requeued(mistake: str, cluster: Cluster, tmp_path: Path) -> None:
    if mistake == "no srun":
        number = submit(cluster, tmp_path, has_srun=False)
    else:
        number = submit(cluster, tmp_path, options=("--ntasks-per-node=2",))
    ended = end_of(cluster, number, 120)
    log = (tmp_path / f"distplus-{number}.log").read_text()
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "173:0"), log
    assert ("srun" if mistake == "no srun" else "ntasks-per-node") in log


def test_a_job_that_is_cancelled_saves_and_stays_away(cluster: Cluster, tmp_path: Path) -> None:
    number = submit(cluster, tmp_path, "0.3")
    wait_for_step(cluster, number, tmp_path, 2)
    cluster.call("scancel", number)
    wait_until(lambda: not cluster.call("squeue", "--noheader"), cluster.logs)
    assert cluster.job(number)["JobState"] == "CANCELLED"
    assert list((tmp_path / "checkpoints").glob("preempt-step=*.ckpt")), cluster.logs()
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == ["preempted"]


def test_the_verdict_is_the_last_thing_that_srun_shows(cluster: Cluster, tmp_path: Path) -> None:
    script = script_of(HANG, 'timeout="4s"')
    (tmp_path / "train.py").write_text(script)
    prefix = ["srun", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--overcommit"]
    variables = {**cluster.environment, "MASTER_ADDR": "127.0.0.1", "DISTPLUS_TRACEBACK": ""}
    ended = start("train.py", prefix=prefix, cwd=tmp_path, env=variables)
    shown, _ = ended.communicate(timeout=200)
    lines = [line for line in shown.rstrip().splitlines() if not line.startswith(("srun: ", "slurmstepd: "))]
    block = verdict_at_the_end_of(lines[-40:])
    place = f"in training_step, train.py:{line_of(script, HANG)}"
    assert re.fullmatch(rf"RANK 1 HANGS \(host \S+, pid \d+\) {place}", block[0])
    assert not any("Traceback" in line for line in lines)
    assert ended.returncode != 0


CONFIG = """
trainer:
  {accelerator: cpu, num_nodes: 2, devices: 1, max_steps: 40, limit_val_batches: 0, enable_progress_bar: false,
   enable_model_summary: false, logger: false, strategy: {class_path: lightning_distplus.ResilientDDP, init_args:
   {preflight: {loopback: "off"}}}}
model: slow.Model
data: lightning.pytorch.demos.boring_classes.BoringDataModule
"""
SLOW = """
import time
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        time.sleep(0.5)
        return super().training_step(batch, batch_idx)
"""


def test_the_line_of_the_readme_stops_at_one_step_is_requeued_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """Typed as it stands there, but for one GPU a node in the place of eight: Slurm hands out a number, no device."""
    section = (ROOT / "README.md").read_text().partition("**Slurm's time limit, a SIGTERM.**")[2]
    (line, *_) = re.findall(r"^\$ (distplus launch slurm .*)$", section, flags=re.MULTILINE)
    shown = re.findall(r"^rank \d stops at .*$", section, flags=re.MULTILINE)
    assert len(shown) == 2
    assert "--gpus-per-node 8 " in line
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "slow.py").write_text(SLOW)
    environment = {
        **cluster.environment, "PATH": f"{Path(sys.executable).parent}:{cluster.environment['PATH']}",
        "PYTHONPATH": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    asked = subprocess.run(
        line.replace("--gpus-per-node 8", "--gpus-per-node 1"), shell=True, cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    number = re.findall(r"job (\d+)", asked.stdout)[0]
    wait_until(lambda: [one for one in read_events(tmp_path / "distplus") if one["kind"] == "steps"], cluster.logs)
    pids = {one["rank"]: one["pid"] for one in read_events(tmp_path / "distplus") if one["kind"] == "start"}
    os.kill(pids[1], signal.SIGTERM)
    ended = end_of(cluster, number)
    log = (tmp_path / f"distplus-{number}.log").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log
    for told in shown:
        pattern = re.sub(r"step \d+", r"step \\d+", re.escape(told).replace("\\ ", " "))
        assert re.search(f"{pattern}$", log, flags=re.MULTILINE), log
    assert kinds(tmp_path, 0) == kinds(tmp_path, 1) == ["preempted", "loaded"]
