"""One attempt: the ranks of this host under torchrun's own agent, by its public interface."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_distplus.errors import ExitCode
from lightning_distplus.launch.meeting import HostsApart
from lightning_distplus.launch.merged_log import MergedLog

__all__ = ["PASSED_ON", "Hosts", "Stop", "run_attempt", "tell_ranks"]

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_MONITOR_S = 0.1
_SHUTDOWN_S = 10  # for ranks that outlive a peer: they name it and end by themselves within seconds
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Where the ranks run."""

    min_nodes: int = 1
    max_nodes: int = 1
    nproc: int = 1
    rdzv: str = ""
    """``host:port`` at which the nodes meet; empty on one host."""
    join_s: int = 30
    """How long an attempt waits for further hosts when ``min_nodes`` are there."""


class Stop(BaseException):
    """The launcher was asked to stop while no rank was there to be told."""


class _MetAgain(Exception):
    """The agent wants to start ranks a second time, because a host has joined."""


class _RankLogs(LogsSpecs):
    """Two files for each rank, ``rank00003.out`` and ``.err``, by global rank."""

    def __init__(self, folder: Path, write: Callable[[str], object], on_start: Callable[[int], object]) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._write_line = write
        self._on_start = on_start
        self.merged: MergedLog | None = None
        self.ranks: list[int] = []
        """The ranks of this host, once they are known."""

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent, once the ranks of this host are known.

        Raises:
            _MetAgain: It was called before. torch keeps the store, its keys and the restart count when a host joins, so
                that old and new ranks would read each other's keys: that takes another attempt.
        """
        if self.ranks:
            raise _MetAgain
        self._on_start(min(int(variables["GROUP_WORLD_SIZE"]) for variables in envs.values()))
        self._folder.mkdir(parents=True, exist_ok=True)
        ranks = {local_rank: int(variables["RANK"]) for local_rank, variables in envs.items()}
        self.ranks = sorted(ranks.values())
        stems = {local_rank: self._folder / f"rank{rank:05d}" for local_rank, rank in ranks.items()}
        outs = {local_rank: stem.with_suffix(".out") for local_rank, stem in stems.items()}
        errs = {local_rank: stem.with_suffix(".err") for local_rank, stem in stems.items()}
        self.close()
        self.merged = MergedLog(
            {path: ranks[local_rank] for paths in (outs, errs) for local_rank, path in paths.items()}, self._write_line
        )
        self.merged.start()
        return LogsDest(
            stdouts={local_rank: str(path) for local_rank, path in outs.items()},
            stderrs={local_rank: str(path) for local_rank, path in errs.items()},
            error_files={local_rank: str(stem.with_suffix(".error.json")) for local_rank, stem in stems.items()},
        )

    def close(self) -> None:
        if self.merged is not None:
            self.merged.stop()
            self.merged = None


def run_attempt(
    command: Sequence[str],
    hosts: Hosts,
    *,
    run_id: str,
    log_dir: Path,
    write: Callable[[str], object],
    on_signal: Callable[[str], None],
    on_start: Callable[[int], object] = lambda num_nodes: None,
) -> dict[int, int]:
    """Runs ``python <command>`` on the ranks of this host until all have ended.

    A signal to this process goes on to the ranks, which stop in their own time; torchrun's agent would kill them 30 s
    later.

    Args:
        command: What follows the interpreter.
        hosts: Where the ranks run.
        run_id: Names the attempt; the same on all nodes.
        log_dir: Where the ranks' output goes.
        write: Gets the merged lines.
        on_signal: Told the name of a signal.
        on_start: Told, before the ranks are started, on how many hosts they are.

    Returns:
        The exit codes of the ranks that failed, as far as the agent saw them; a signal is a negative number.

    Raises:
        Stop: A signal came while no rank was there.
        HostsApart: Too few hosts came, or the one that serves the store has left.
    """
    before = {number: signal.signal(number, _Forward(on_signal)) for number in PASSED_ON}
    logs = _RankLogs(log_dir, write, on_start)
    try:
        elastic_launch(_config(hosts, run_id, logs), sys.executable)(*command)
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except (_MetAgain, RendezvousError) as error:
        # The agent has ended the ranks here: a host has joined, or the host that serves the store has left.
        failures = dict.fromkeys(logs.ranks, int(ExitCode.PEER_LOST))
        if not failures:
            raise HostsApart(str(error)) from error
    else:
        failures = {}
    finally:
        logs.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    gc.collect()  # the error held the agent, and with it the port at which the next attempt meets
    return failures


def _config(hosts: Hosts, run_id: str, logs: LogsSpecs) -> LaunchConfig:
    is_alone = hosts.max_nodes == 1
    return LaunchConfig(
        min_nodes=hosts.min_nodes,
        max_nodes=hosts.max_nodes,
        nproc_per_node=hosts.nproc,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=hosts.rdzv or f"{_LOOPBACK}:0",
        # Between hosts the launchers' own store serves the agents as well, so that it outlives their attempts.
        rdzv_configs={} if is_alone else {"is_host": "false", "last_call_timeout": hosts.join_s},
        local_addr=_LOOPBACK if is_alone else None,
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        logs_specs=logs,
        signals_to_handle="SIGHUP,SIGQUIT",
        shutdown_timeout=_SHUTDOWN_S,
    )


class _Forward:
    """The launcher's signal handler."""

    def __init__(self, on_signal: Callable[[str], None]) -> None:
        self._on_signal = on_signal

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._on_signal(signal.Signals(signum).name)
        if not tell_ranks(signum):
            raise Stop


def tell_ranks(signum: int) -> bool:
    """Sends a signal to the ranks of this host; returns whether there are any."""
    ranks = _ranks()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    return bool(ranks)


def _ranks() -> list[int]:
    """Processes that this one has started as leaders of sessions of their own, which is how the agent starts ranks."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for word in (task / "children").read_text().split():
            try:
                if os.getsid(int(word)) == int(word):
                    found.append(int(word))
            except ProcessLookupError:
                continue
    return found
