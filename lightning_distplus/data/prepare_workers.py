"""Worker processes of a preparation: each takes one shard after the other from its parent."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_distplus import env
from lightning_distplus.data.documents import Shard
from lightning_distplus.data.prepare_stage import Stage, load_plan
from lightning_distplus.data.shards import Encoder, ShardFiles

__all__ = ["load_encoder", "write_shards"]

_ERRORS = {error.__name__: error for error in (ValueError, FileNotFoundError, ModuleNotFoundError, PermissionError)}


def write_shards(
    stage: Stage, shards: Sequence[Shard], todo: Sequence[int], num_workers: int, on_bytes: Callable[[int], None]
) -> None:
    """Writes the shards numbered in ``todo``, in so many processes.

    Raises:
        ChildProcessError: A worker died.
        ValueError, OSError: A worker's own error.
    """
    heard: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    waiting, busy = deque(todo), {}
    workers = [_start(stage) for _ in range(min(num_workers, len(todo)))]
    try:
        for place, worker in enumerate(workers):
            threading.Thread(target=_listen, args=(worker, place, heard), daemon=True).start()
            busy[place] = _hand_over(worker, waiting.popleft())
        while busy:
            place, message = heard.get()
            if message is None:
                _report_death(workers[place], shards[busy[place]], stage)
            elif "error" in message:
                raise _ERRORS.get(message["error"], OSError)(message["message"])
            elif "bytes" in message:
                on_bytes(message["bytes"])
            else:
                del busy[place]
                if waiting:
                    busy[place] = _hand_over(workers[place], waiting.popleft())
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                if stream is not None:
                    stream.close()


def _start(stage: Stage) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(stage.folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        pass_fds=[stage.lock_descriptor],
        # The threads of tokenizers in each worker would compete with the other workers.
        env={
            **env.snapshot(),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )


def _hand_over(worker: subprocess.Popen[str], number: int) -> int:
    assert worker.stdin is not None, "it was started with a pipe"
    worker.stdin.write(f"{number}\n")
    return number


def _listen(worker: subprocess.Popen[str], place: int, heard: queue.Queue[tuple[int, dict[str, Any] | None]]) -> None:
    assert worker.stdout is not None, "it was started with a pipe"
    try:
        for line in worker.stdout:
            heard.put((place, json.loads(line)))
    except ValueError:  # a line cut by a kill, or the stream closed at the end
        pass
    heard.put((place, None))


def _report_death(worker: subprocess.Popen[str], shard: Shard, stage: Stage) -> None:
    code = worker.wait()
    what = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise ChildProcessError(
        f"Worker process {worker.pid} ended with {what} while it read {shard.extents[0].path}. The complete parts are "
        f"in {stage.folder}; the same command goes on from them. With less memory than processes, use fewer workers."
    )


def load_encoder(folder: Path, settings: dict[str, Any]) -> Encoder:
    """The encoder of a stage."""
    from tokenizers import Tokenizer

    codec = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Encoder(codec=codec, end=settings["end"], dtype=settings["dtype"], text_key=settings["text_key"])


def main(folder: Path) -> None:
    """The worker: reads numbers of shards, one a line, and answers with JSON lines."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of it too, and ends its workers
    parent = os.getppid()
    shards, settings = load_plan(folder)
    encoder = load_encoder(folder, settings)

    def say(**message: Any) -> None:
        if os.getppid() != parent:
            os._exit(1)  # the parent is dead: leave the folder to its successor
        print(json.dumps(message), flush=True)  # noqa: T201 - the parent reads it

    for line in sys.stdin:
        number = int(line)
        try:
            ShardFiles(folder, number).write(shards[number], encoder, lambda size: say(bytes=size))
        except (ValueError, OSError, ImportError) as error:
            say(error=type(error).__name__, message=str(error))
            return
        say(done=number)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
