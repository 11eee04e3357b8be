"""How the ranks of a spawn are started: from a forkserver, as fresh interpreters, by torchrun, by Lightning."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, Protocol

import lightning_distplus
from lightning_distplus import env as environment
from lightning_distplus.testing.rank import Job, run_rank

__all__ = ["Mode", "Started", "free_port", "preload", "prepare", "rank_variables", "start"]

Mode = Literal["forkserver", "fresh", "torchrun", "lightning"]

_PRELOAD_S = 120.0

_forkserver_of: int | None = None  # the process that has its forkserver ready
_preloaded = ["torch", "torch.distributed", "lightning.pytorch"]
_OTHER_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "PMI_", "OMPI_", "PYTEST_")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


class Started(Protocol):
    """A process that was started here: a rank, or the launcher of all ranks."""

    @property
    def pid(self) -> int | None:
        """Its process id, and the id of its process group."""

    def poll(self) -> int | None:
        """Its exit code, a signal as a negative number; None while it lives. Also reaps it."""


class _Child:
    """A rank that multiprocessing has started."""

    def __init__(self, context: ForkServerContext | SpawnContext, job: Job, rank: int) -> None:
        self._process: BaseProcess = context.Process(target=run_rank, args=(job, rank), name=f"rank {rank}")
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode


def preload(*modules: str) -> None:
    """Adds modules that the forkserver imports once for all ranks. Call it before the first ``spawn``.

    A rank starts from the forkserver with everything imported that it holds: torch and Lightning always, and what is
    named here. A module that starts threads or opens connections when it is imported must not be preloaded.
    """
    _preloaded.extend(module for module in modules if module not in _preloaded)


def prepare(mode: Mode) -> None:
    """Waits until the forkserver has imported what it preloads, so that no job's deadline pays for that.

    Raises:
        RuntimeError: It is not ready within two minutes.
    """
    global _forkserver_of
    if mode != "forkserver" or _forkserver_of == os.getpid():
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_preloaded))
    with environment.changed(OMP_NUM_THREADS=1):  # torch reads it when it is imported
        multiprocessing.forkserver.ensure_running()
    first = context.Process(target=os.getpid)
    first.start()  # the server imports before it serves, and this waits until it serves
    first.join(_PRELOAD_S)
    if first.exitcode != 0:
        first.kill()
        raise RuntimeError(
            f"The forkserver is not ready after {_PRELOAD_S:g} s: it imports {', '.join(_preloaded)}. "
            'One of them may fail or wait when it is imported; mode="fresh" does without the server.'
        )
    _forkserver_of = os.getpid()


def start(job: Job, world_size: int, max_restarts: int) -> list[Started]:
    """Starts the job: one process per rank, or the one launcher."""
    match job.mode:
        case "forkserver":
            return [_Child(multiprocessing.get_context("forkserver"), job, rank) for rank in range(world_size)]
        case "fresh":
            return [_Child(multiprocessing.get_context("spawn"), job, rank) for rank in range(world_size)]
        case "lightning":
            return [_launch(job, "lightning_distplus.testing.rank", [_written(job)])]
        case _:
            return [
                _launch(job, "lightning_distplus.testing.torchrun", _torchrun_arguments(job, world_size, max_restarts))
            ]


def rank_variables(mode: Mode, world_size: int, changes: Mapping[str, str | int | None]) -> dict[str, str]:
    """The environment of the ranks: the caller's, without that of any launcher around it, and then the changes.

    ``forkserver`` and ``fresh`` also get what a launcher would set, so that a Trainer with ``devices=world_size``
    joins these processes and starts none of its own.
    """
    variables = {
        name: value
        for name, value in environment.snapshot().items()
        if not name.startswith(_OTHER_LAUNCHERS) and name not in _OF_A_RANK
    }
    variables["OMP_NUM_THREADS"] = "1"
    if mode in ("forkserver", "fresh"):
        variables.update(
            WORLD_SIZE=str(world_size), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    for name, value in changes.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = str(value)
    return variables


def free_port() -> int:
    """A TCP port that was free on the loopback interface a moment ago."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _launch(job: Job, module: str, arguments: list[str]) -> Started:
    root = str(Path(lightning_distplus.__file__).parents[1])
    search_path = os.pathsep.join(filter(None, [root, job.variables.get("PYTHONPATH")]))
    with (Path(job.log_folder) / "launcher.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**job.variables, "PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _torchrun_arguments(job: Job, world_size: int, max_restarts: int) -> list[str]:
    return [
        str(Path(job.folder) / "outcome.json"),
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={world_size}",
        f"--max-restarts={max_restarts}",
        "--monitor-interval=0.1",
        "-m",
        "lightning_distplus.testing.rank",
        _written(job),
    ]


def _written(job: Job) -> str:
    path = Path(job.folder) / "job"
    path.write_bytes(pickle.dumps(job))
    return str(path)
