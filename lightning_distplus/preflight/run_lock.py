"""The lock of a checkpoint folder: which run writes there, and whether that run is still alive.

A file below the folder tells host, process, job and time, and a number that its owner raises every second. Where the
owner lived on this host, its process is asked; elsewhere the number is watched. So a lock that a killed run has left is
taken over, and nothing depends on the locks of a network file system.

filelock's ``FileLock`` is a lock of an open file. Its ``SoftFileLease`` (3.30 and later) counts as this one does, but
takes the lease of a run that is only stopped, also on this host (measured: after 4.0 s). Its record has no room for
job and attempt, by which a restart knows the lock of its own job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lightning_distplus.preflight.check import Finding, Status
from lightning_distplus.process import ProcessState, boot_id, process_state, start_time

__all__ = ["Holder", "RunLock"]

log = logging.getLogger(__name__)

_PLACE = Path(".distplus", "run.lock")
_BEAT_S = 1.0
_WATCH_S = 4.0
_LOOK_S = 0.1
_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock, as its file tells it."""

    version: int = 1
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=socket.gethostname)
    boot: str = field(default_factory=boot_id)
    pid: int = field(default_factory=os.getpid)
    started: int | None = field(default_factory=lambda: start_time(os.getpid()))
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    job: str = ""
    attempt: int = 0
    beat: int = 0

    def encoded(self) -> bytes:
        """Of one length as long as it beats, so that it can be written in place."""
        return json.dumps({**asdict(self), "beat": f"{self.beat:012d}"}).encode()

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"host {self.host}, pid {self.pid}{job}, since {self.since}"


class RunLock:
    """Says that this run writes into a folder.

    Args:
        folder: Of the checkpoints; made when missing.
        job: The launcher's name of the job, or "".
        attempt: How often that job was restarted before.
    """

    def __init__(self, folder: Path, *, job: str = "", attempt: int = 0) -> None:
        self.path = folder / _PLACE
        self._mine = Holder(job=job, attempt=attempt)
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> Iterator[Finding]:
        """Takes the lock; an error where a living run holds it. Waits at most four seconds, for a sign of life.

        Raises:
            OSError: The folder takes no file.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            if self._create():
                self._thread = threading.Thread(target=self._beat, name="distplus-run-lock", daemon=True)
                self._thread.start()
                return
            other = self._read()
            if other is None:
                continue  # released at this moment
            evidence = self._evidence_of_life(other)
            if evidence:
                yield self._held(other, evidence)
                return
            if self._remove(other):
                subject = f"The lock of a run that ended without a word was taken over in {self.path.parent.parent}."
                yield Finding(status=Status.NOTE, subject=subject, detail=str(other))
        yield Finding(
            status=Status.WARNING,
            subject=f"The lock of {self.path.parent.parent} cannot be taken; this run goes on without it.",
            detail=f"{self.path} was there to be made and gone to be read, {_ATTEMPTS} times",
            remedy="Give each run its own default_root_dir or dirpath; where there is one run only, remove that file",
        )

    def release(self) -> None:
        """Gives the lock back where it is still ours; never raises."""
        self._has_ended.set()
        if self._thread is None:
            return
        self._thread.join(timeout=10 * _BEAT_S)
        self._thread = None
        with contextlib.suppress(OSError):
            other = self._read()
            if other is not None and other.token == self._mine.token:
                self.path.unlink()

    def _create(self) -> bool:
        """Makes the file with its content at once, where there is none."""
        stage = self.path.with_name(f"{self.path.name}.{self._mine.token}")
        stage.write_bytes(self._mine.encoded())
        try:
            self.path.hardlink_to(stage)
        except FileExistsError:
            return False
        except OSError:  # a file system without links; then a reader may meet an empty file, and reads again
            return self._create_in_place()
        finally:
            stage.unlink()
        return True

    def _create_in_place(self) -> bool:
        try:
            with self.path.open("xb") as file:
                file.write(self._mine.encoded())
        except FileExistsError:
            return False
        return True

    def _read(self) -> Holder | None:
        for _ in range(_ATTEMPTS):
            try:
                found = json.loads(self.path.read_bytes())
                return Holder(**{**found, "beat": int(found["beat"])})
            except FileNotFoundError:
                return None
            except (ValueError, TypeError, KeyError):  # in the middle of a beat
                time.sleep(_LOOK_S)
        return Holder(host="unknown", boot="", pid=0, started=None, since="unknown")  # not ours to read: it may go

    def _evidence_of_life(self, other: Holder) -> str:
        """Why that run is alive, or "" where it is not."""
        if other.pid == os.getpid() and other.boot == self._mine.boot:
            return ""  # an earlier run of this process
        if other.job and other.job == self._mine.job and other.attempt < self._mine.attempt:
            return ""  # this is its restart
        if other.boot and other.boot == self._mine.boot:
            state = process_state(other.pid, other.started)
            if state is not ProcessState.UNKNOWN:
                return "" if state is ProcessState.GONE else f"process {other.pid} of this host is {state.value}"
        until = time.monotonic() + _WATCH_S
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            now = self._read()
            if now is None:
                return ""
            if now.token == other.token and now.beat > other.beat + 1:  # one beat may have been on its way
                return f"its lock counted from {other.beat} to {now.beat} meanwhile"
        return ""

    def _held(self, other: Holder, evidence: str) -> Finding:
        folder = self.path.parent.parent
        return Finding(
            status=Status.ERROR,
            subject=f"Another run writes its checkpoints into {folder}: {other}.",
            detail=f"{evidence}; this run: {self._mine}",
            remedy="Give each run its own default_root_dir or dirpath. Where both are meant to be one run, its number "
            "of nodes was forgotten: Trainer(num_nodes=...), the same on every node",
        )

    def _remove(self, other: Holder) -> bool:
        """Takes a dead lock away; of several that try, one succeeds, and a lock that was made meanwhile is put back."""
        aside = self.path.with_name(f"{self.path.name}.{self._mine.token}.old")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return False
        is_dead = b'"token": "' + other.token.encode() + b'"' in aside.read_bytes() or other.host == "unknown"
        if not is_dead:
            with contextlib.suppress(OSError):
                self.path.hardlink_to(aside)
        aside.unlink()
        return is_dead

    def _beat(self) -> None:
        """Counts until the end; says once where another run has taken the lock."""
        mine = self._mine
        while not self._has_ended.wait(_BEAT_S):
            mine = replace(mine, beat=mine.beat + 1)
            try:
                with self.path.open("r+b") as file:
                    found = json.loads(file.read())
                    if found["token"] != mine.token:
                        log.error(
                            "another run has taken the folder %s over: host %s, pid %s; both write there now",
                            self.path.parent.parent, found["host"], found["pid"],
                        )  # fmt: skip
                        return
                    file.seek(0)
                    file.write(mine.encoded())
            except (OSError, ValueError, KeyError):  # a folder that is gone is told by the next save
                continue
