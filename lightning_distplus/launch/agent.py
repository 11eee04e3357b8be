"""One attempt: the ranks of this host under torchrun's own agent, by its public interface, and the signals for them."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_distplus.errors import ExitCode
from lightning_distplus.launch.rendezvous import BETWEEN_HOSTS, ON_ONE_HOST, HostsApart

__all__ = ["HANDLED", "Hosts", "RankOutput", "Signals", "Stop", "run_attempt"]

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_MONITOR_S = 0.1
_SHUTDOWN_S = 10  # for ranks that outlive a peer: they name it and end by themselves within seconds
_POLL_S = 0.1
_OVERWRITTEN_EVERY_S = 1.0
_CHUNK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 16
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r(?!\Z))")  # a \r at the very end may be the begin of \r\n
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # before each line of an uncaught error; ours says the same


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


class _MetAgain(Exception):
    """The agent wants to start ranks a second time, because a host has joined."""


class _RankLogs(LogsSpecs):
    """Two files for each rank, ``rank00003.out`` and ``.err``, by global rank."""

    def __init__(
        self, folder: Path, write: Callable[[str], object], signals: Signals, on_start: Callable[[int], object]
    ) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._write_line = write
        self._signals = signals
        self._on_start = on_start
        self._follower: _Follower | None = None
        self.ranks: list[int] = []
        """The ranks of this host, once they are known."""

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent, once the ranks of this host are known.

        Raises:
            _MetAgain: It was called before. torch 2.13 tells a host that joins no address of the agents' store, so that
                a join takes another attempt.
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
        outputs = [
            RankOutput(path, ranks[one], self._write_line) for paths in (outs, errs) for one, path in paths.items()
        ]
        self._follower = _Follower(outputs, self._signals)
        self._follower.start()
        self._signals.ranks_begin()
        return LogsDest(
            stdouts={local_rank: str(path) for local_rank, path in outs.items()},
            stderrs={local_rank: str(path) for local_rank, path in errs.items()},
            error_files={local_rank: str(stem.with_suffix(".error.json")) for local_rank, stem in stems.items()},
        )

    def close(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None


class RankOutput:
    r"""Shows what one rank writes into one file, line by line, with the rank before each.

    It keeps its place, and the begin of an unfinished line. A ``\r`` ends a line as well: of those that a progress bar
    overwrites, one a second is shown.

    Args:
        path: The file; one that is not there yet is waited for.
        rank: The rank.
        write: Gets each line.
    """

    def __init__(self, path: Path, rank: int, write: Callable[[str], object]) -> None:
        self._path = path
        self._rank = rank
        self._write = write
        self._file: BinaryIO | None = None
        self._begun = b""
        self._overwritten = b""
        self._shown_at = -_OVERWRITTEN_EVERY_S

    def look(self) -> None:
        """Shows the lines that have come."""
        if self._file is None:
            with contextlib.suppress(FileNotFoundError):
                self._file = self._path.open("rb", buffering=0)
        while self._file is not None and (chunk := self._file.read(_CHUNK_BYTES)):
            self._take(chunk)
        if self._overwritten and time.monotonic() - self._shown_at >= _OVERWRITTEN_EVERY_S:
            self._show(self._overwritten)
            self._overwritten, self._shown_at = b"", time.monotonic()

    def close(self) -> None:
        """Shows what is left."""
        self.look()
        for line in (self._overwritten, self._begun.rstrip(b"\r")):
            if line:
                self._show(line)
        if self._file is not None:
            self._file.close()

    def _take(self, chunk: bytes) -> None:
        text, end = self._begun + chunk, 0
        for match in _LINE.finditer(text):
            end = match.end()
            if match[2] != b"\r":
                self._overwritten = b""
                self._show(match[1])
            elif match[1]:
                self._overwritten = match[1]
        self._begun = text[end:]
        if len(self._begun) > _LONGEST_LINE_BYTES:
            self._show(self._begun)
            self._begun = b""

    def _show(self, line: bytes) -> None:
        text = _TORCHS_PREFIX.sub("", line.decode(errors="replace"))
        with contextlib.suppress(OSError):  # the terminal is gone; the file keeps it
            self._write(f"[{self._rank}] {text}\n")


class _Follower(threading.Thread):
    """Shows what the ranks write while they run, and tells those that come late of a signal."""

    def __init__(self, outputs: Sequence[RankOutput], signals: Signals) -> None:
        super().__init__(name="distplus-logs", daemon=True)
        self._outputs = outputs
        self._signals = signals
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(_POLL_S):
            self._signals.pass_on()
            for output in self._outputs:
                output.look()
        for output in self._outputs:
            output.close()

    def stop(self) -> None:
        """Shows what is left and ends."""
        self._stopping.set()
        self.join()


def run_attempt(
    command: Sequence[str],
    hosts: Hosts,
    *,
    run_id: str,
    log_dir: Path,
    write: Callable[[str], object],
    signals: Signals,
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
        write: Gets the lines of all ranks.
        signals: Those of this process.
        on_start: Told, before the ranks are started, on how many hosts they are.

    Returns:
        The exit codes of the ranks that failed, as far as the agent saw them; a signal is a negative number.

    Raises:
        Stop: A signal came while no rank was there.
        HostsApart: Too few hosts came, or the one that serves the store has left.
    """
    logs = _RankLogs(log_dir, write, signals, on_start)
    try:
        with signals.interrupting():
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
    gc.collect()  # the error held the agent, and with it the port at which the next attempt meets
    return failures


def _config(hosts: Hosts, run_id: str, logs: LogsSpecs) -> LaunchConfig:
    is_alone = hosts.max_nodes == 1
    return LaunchConfig(
        min_nodes=hosts.min_nodes,
        max_nodes=hosts.max_nodes,
        nproc_per_node=hosts.nproc,
        run_id=run_id,
        rdzv_backend=ON_ONE_HOST if is_alone else BETWEEN_HOSTS,
        # The launchers' own store serves the agents as well, so that it outlives their attempts.
        rdzv_endpoint=hosts.rdzv,
        rdzv_configs={} if is_alone else {"last_call_timeout": hosts.join_s},
        local_addr=_LOOPBACK if is_alone else None,
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        logs_specs=logs,
        signals_to_handle="SIGQUIT",
        shutdown_timeout=_SHUTDOWN_S,
    )


# -- the signals of the launcher ---------------------------------------------------------------------------------------


HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stop(BaseException):
    """The launcher was asked to stop while no rank was there to be told."""


class Signals:
    """Takes the signals of the launcher, from its first moment to its last.

    A rank that is just being started when a signal comes hears of it as soon as it is there. A SIGHUP, the end of the
    terminal, reaches the ranks as a SIGTERM; where it is ignored (``nohup``) it stays so.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        """The name of the last signal."""
        self._number: signal.Signals | None = None
        self._told: set[int] = set()
        self._is_interruptible = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        for number in HANDLED:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def has_reached_ranks(self) -> bool:
        """Whether a rank was there to be told."""
        return bool(self._told)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal ends the block, in which no rank is there; so does one that came before.

        Raises:
            Stop: There was one.
        """
        self._is_interruptible = True
        try:
            if self.asked is not None:
                raise Stop
            yield
        finally:
            self._is_interruptible = False

    def ranks_begin(self) -> None:
        """From here on ranks are being started: a signal is for them."""
        self._is_interruptible = False

    def pass_on(self) -> None:
        """Tells the ranks that have come since the signal. Called again and again, from any thread."""
        if self._number is not None:
            self._tell(set(_ranks()) - self._told)

    def stop_ranks(self) -> None:
        """Sends a SIGTERM to the ranks of this host."""
        for pid in _ranks():
            _send(pid, signal.SIGTERM)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        self._number = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        self._tell(set(_ranks()))
        if self._is_interruptible:
            raise Stop

    def _tell(self, ranks: set[int]) -> None:
        assert self._number is not None
        self._told |= ranks
        for pid in ranks:
            _send(pid, self._number)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _ranks() -> list[int]:
    """Processes that this one has started as leaders of sessions of their own, which is how the agent starts ranks."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            for word in (task / "children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(int(word)) == int(word):
                        found.append(int(word))
    return found
