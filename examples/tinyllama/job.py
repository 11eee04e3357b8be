"""One torchrun job as a child of this process: started, watched through its records, and never left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.05
GRACE_S = 5.0


@dataclass
class Start:
    """One start of one rank: where it resumed, and every micro-batch that it trained on."""

    rank: int
    number: int
    pid: int
    first_step: int
    batches: list[dict[str, Any]] = field(default_factory=list)


class Job:
    """A run of ``distplus fit`` under torchrun; leaving the ``with`` block ends every process of it.

    Args:
        folder: Of the run: ``record/`` is watched, the output goes to ``log.txt``.
        arguments: Of ``distplus fit``.
        num_ranks: Processes.
    """

    def __init__(self, folder: Path, arguments: list[str], num_ranks: int = 2) -> None:
        self.folder = folder
        self.starts: dict[tuple[int, int], Start] = {}
        self._offsets: dict[Path, int] = {}
        self._workers: set[int] = set()
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
            *("--max-restarts", "3", "--monitor-interval", "0.1", "--shutdown-timeout", "3"),
            *("-m", "lightning_distplus.cli", "fit", *arguments),
        ]

    def __enter__(self) -> "Job":
        self.folder.mkdir(parents=True)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (self.folder / "log.txt").open("wb") as log:
            # A session of its own: Ctrl-C reaches this process alone, which then ends the others in order.
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave anything behind
        try:
            self._end()
        finally:
            signal.signal(signal.SIGINT, ignored)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._note_workers()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        self._note_workers()
        for pid in self._workers:  # each leads a process group of its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def watch(self) -> Iterator[None]:
        """Yields each time that the records may have grown, until the job has ended.

        Raises:
            RuntimeError: The job failed; the message has the end of its log.
        """
        while self._process.poll() is None:
            self._read_records()
            self._note_workers()
            yield
            time.sleep(POLL_S)
        self._read_records()
        if self._process.returncode != 0:
            log = self.folder / "log.txt"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise RuntimeError(f"The job ended with exit code {self._process.returncode}. The end of {log}:\n{tail}")
        yield

    def newest(self, rank: int) -> Start | None:
        """The latest start of a rank; None before its first."""
        numbers = [start.number for start in self.starts.values() if start.rank == rank]
        return self.starts[rank, max(numbers)] if numbers else None

    def _note_workers(self) -> None:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError):
            self._workers = {int(pid) for pid in children.read_text().split()}

    def _read_records(self) -> None:
        for path in sorted((self.folder / "record").glob("rank*-start*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]  # a killed process may leave half a line
            self._offsets[path] = self._offsets.get(path, 0) + len(complete)
            for line in complete.splitlines():
                self._take(path, json.loads(line))

    def _take(self, path: Path, line: dict[str, Any]) -> None:
        rank, number = (int(part.lstrip("rankst")) for part in path.stem.split("-"))
        if "pid" in line:
            self.starts[rank, number] = Start(rank, number, line["pid"], line["step"])
        else:
            self.starts[rank, number].batches.append(line)
