"""Every environment variable that is read or set, with its meaning. Nothing else touches ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name and what it means to us."""

    name: str
    meaning: str

    def get(self) -> str | None:
        """The value, or None where it is unset or empty."""
        return os.environ.get(self.name) or None

    def integer(self) -> int | None:
        """The value as an integer, or None where it is unset.

        Raises:
            ValueError: The value is not an integer.
        """
        text = self.get()
        try:
            return None if text is None else int(text)
        except ValueError:
            raise ValueError(
                f"The environment variable {self.name} ({self.meaning}) is {text!r}, which is not an integer."
            ) from None

    def set(self, value: str | int) -> None:
        """Sets the variable for this process and the processes that it starts."""
        os.environ[self.name] = str(value)


RANK = Variable("RANK", "global rank of this process, set by torchrun")
LOCAL_RANK = Variable("LOCAL_RANK", "rank within the node, set by torchrun and by Lightning's own launcher")
WORLD_SIZE = Variable("WORLD_SIZE", "number of processes in the job, set by torchrun")
NODE_RANK = Variable("NODE_RANK", "index of this node, set by hand for Lightning's own launcher")
GROUP_RANK = Variable("GROUP_RANK", "index of this node, set by torchrun")
MASTER_ADDR = Variable("MASTER_ADDR", "host of rank 0")
MASTER_PORT = Variable("MASTER_PORT", "port of the store on the host of rank 0")
TORCHELASTIC_RUN_ID = Variable("TORCHELASTIC_RUN_ID", "id of the job under torchrun")
TORCHELASTIC_RESTART_COUNT = Variable("TORCHELASTIC_RESTART_COUNT", "how often torchrun has restarted the workers")
TORCHELASTIC_USE_AGENT_STORE = Variable(
    "TORCHELASTIC_USE_AGENT_STORE", '"True" when torchrun\'s agent already serves a store at MASTER_ADDR:MASTER_PORT'
)
PYTHONBREAKPOINT = Variable("PYTHONBREAKPOINT", "the debugger that breakpoint() enters; 0 turns breakpoints off")
SLURM_JOB_ID = Variable("SLURM_JOB_ID", "id of the Slurm job")
SLURM_ARRAY_JOB_ID = Variable("SLURM_ARRAY_JOB_ID", "id of the array of jobs to which the Slurm job belongs")
SLURM_ARRAY_TASK_ID = Variable("SLURM_ARRAY_TASK_ID", "its number in that array")
SLURM_RESTART_COUNT = Variable("SLURM_RESTART_COUNT", "how often Slurm has requeued the job")
NCCL_SOCKET_IFNAME = Variable("NCCL_SOCKET_IFNAME", "network interfaces that NCCL uses, or with ^ those that it avoids")
GLOO_SOCKET_IFNAME = Variable("GLOO_SOCKET_IFNAME", "network interfaces that gloo uses, by their whole names")
OMP_NUM_THREADS = Variable("OMP_NUM_THREADS", "threads of one process on the CPU")
DS_ACCELERATOR = Variable("DS_ACCELERATOR", 'DeepSpeed\'s device; set to "cpu" by us when the accelerator is the CPU')
PL_GLOBAL_SEED = Variable("PL_GLOBAL_SEED", "the seed of Lightning's seed_everything")
TORCH_EXTENSIONS_DIR = Variable("TORCH_EXTENSIONS_DIR", "where torch keeps the extensions that it has compiled")
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD = Variable(
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1 lets torch run what a checkpoint's pickle names, where nobody forbids it"
)

# What launchers set, for the launch check. Slurm's job variables are in a batch script too; its step variables are only
# where srun started the process.
SLURM_NTASKS = Variable("SLURM_NTASKS", "number of Slurm tasks; Lightning takes it for the number of processes")
SLURM_JOB_NAME = Variable("SLURM_JOB_NAME", "name of the Slurm job; to Lightning, bash is no batch job")
SLURM_NNODES = Variable("SLURM_NNODES", "number of nodes of the Slurm job")
SLURM_PROCID = Variable("SLURM_PROCID", "index of this Slurm task; Lightning takes it for the rank")
SLURM_STEP_ID = Variable("SLURM_STEP_ID", "the srun step that started this process; unset in a batch script")
SLURM_STEP_NUM_TASKS = Variable("SLURM_STEP_NUM_TASKS", "number of processes that srun started")
SLURM_STEP_NUM_NODES = Variable("SLURM_STEP_NUM_NODES", "number of nodes on which srun started them")
GROUP_WORLD_SIZE = Variable("GROUP_WORLD_SIZE", "number of torchrun agents, one a node")
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", "number of processes of this node, set by torchrun")
OMPI_COMM_WORLD_SIZE = Variable("OMPI_COMM_WORLD_SIZE", "number of processes that Open MPI started")
OMPI_COMM_WORLD_RANK = Variable("OMPI_COMM_WORLD_RANK", "index of this process under Open MPI")
PMI_SIZE = Variable("PMI_SIZE", "number of processes that MPICH or Intel MPI started")
PMI_RANK = Variable("PMI_RANK", "index of this process under MPICH or Intel MPI")
CROSS_SIZE = Variable("CROSS_SIZE", "number of nodes, set by DeepSpeed's launcher")
CROSS_RANK = Variable("CROSS_RANK", "index of this node, set by DeepSpeed's launcher")
NNODES = Variable("NNODES", "number of nodes, by the habit of many launch scripts")
PET_NNODES = Variable("PET_NNODES", "number of nodes, set by Kubeflow for torchrun")
KUBERNETES_SERVICE_HOST = Variable("KUBERNETES_SERVICE_HOST", "set in every pod of Kubernetes")
CUDA_VISIBLE_DEVICES = Variable("CUDA_VISIBLE_DEVICES", "the GPUs that this process may use")

LAUNCH_VARIABLES = (
    MASTER_ADDR, MASTER_PORT, NODE_RANK, GROUP_RANK, RANK, LOCAL_RANK, WORLD_SIZE, GROUP_WORLD_SIZE, LOCAL_WORLD_SIZE,
    NNODES, PET_NNODES, TORCHELASTIC_RUN_ID, SLURM_JOB_ID, SLURM_NNODES, SLURM_NTASKS, SLURM_PROCID, SLURM_STEP_ID,
    SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK, PMI_SIZE, PMI_RANK,
    CROSS_SIZE, CROSS_RANK, KUBERNETES_SERVICE_HOST, CUDA_VISIBLE_DEVICES,
)  # fmt: skip
"""What the launch check reads."""
DISTPLUS_ATTEMPT = Variable("DISTPLUS_ATTEMPT", "how often distplus launch has started the ranks before")
DISTPLUS_ELASTIC = Variable(
    "DISTPLUS_ELASTIC", "set by distplus launch where the number of hosts may change: num_nodes is torchrun's then"
)
DISTPLUS_HOME_FILE = Variable("DISTPLUS_HOME_FILE", "where ranks tell distplus launch their folder of artefacts")
DISTPLUS_RESUME = Variable(
    "DISTPLUS_RESUME",
    "1: where distplus launch has restarted a script, a fit that names no checkpoint goes on from the job's newest one",
)
DISTPLUS_RUN_ID = Variable(
    "DISTPLUS_RUN_ID", "the run's id in its events and verdicts, over all attempts; set by distplus launch"
)
TORCH_FR_BUFFER_SIZE = Variable(
    "TORCH_FR_BUFFER_SIZE", "how many collectives torch's Flight Recorder keeps; 0 turns it off"
)
TORCH_NCCL_TRACE_BUFFER_SIZE = Variable("TORCH_NCCL_TRACE_BUFFER_SIZE", "the older name of TORCH_FR_BUFFER_SIZE")

DISTPLUS_IN_HAND = Variable(
    "DISTPLUS_IN_HAND", "memory of distplus launch in which ranks note the samples that they have in hand"
)
DISTPLUS_METRICS_PORT = Variable(
    "DISTPLUS_METRICS_PORT", "the port on which rank 0 serves the figures of the run to Prometheus"
)
DISTPLUS_ON_VERDICT = Variable(
    "DISTPLUS_ON_VERDICT", "a URL or a command that gets the verdict on a run; distplus launch reads it too"
)
DISTPLUS_QUARANTINE = Variable(
    "DISTPLUS_QUARANTINE", "the ids of the samples that distplus launch --quarantine has set apart, as JSON"
)
DISTPLUS_SECRET = Variable(
    "DISTPLUS_SECRET", "what only the processes of this job know, the same on all its hosts: signs what they tell"
)
DISTPLUS_STARTER = Variable(
    "DISTPLUS_STARTER", "pid and start of rank 0 where it has started the other ranks; set by the strategy"
)
DISTPLUS_TRACEBACK = Variable(
    "DISTPLUS_TRACEBACK", "full: every rank prints its whole traceback; else the user's frames, of the rank that raised"
)
DISTPLUS_FAULTS = Variable("DISTPLUS_FAULTS", "the fault plan of a test, as JSON; set by testing.spawn")


def snapshot() -> dict[str, str]:
    """A copy of the whole environment."""
    return dict(os.environ)


def restore(values: Mapping[str, str]) -> None:
    """Makes the environment exactly ``values``: what is not in it is removed."""
    for name in set(os.environ) - set(values):
        del os.environ[name]
    os.environ.update(values)


@contextmanager
def changed(**values: str | int | None) -> Iterator[None]:
    """Sets variables for the length of a block and puts the old values back; None removes a variable."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _assign(values)
        yield
    finally:
        _assign(before)


def _assign(values: dict[str, str | int | None] | dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
