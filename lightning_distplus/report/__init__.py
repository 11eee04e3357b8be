"""What a run leaves behind by itself: its report as one HTML page that needs nothing else, and ``on_verdict``."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_distplus.report.run import artefacts_of, describe_job, describe_runs, read_ledgers
from lightning_distplus.watchdog.verdict import Verdict

__all__ = [
    "PAGE",
    "after_verdict",
    "artefacts_of",
    "describe_job",
    "describe_runs",
    "leave_page",
    "read_ledgers",
    "render_page",
    "write_page",
]

log = logging.getLogger(__name__)

PAGE = "report.html"
PATIENCE_S = 2.0
"""So long the end of a run waits for its page, and for ``on_verdict``."""


def render_page(jobs: Sequence[dict[str, Any]]) -> str:
    """The whole page, with the data of ``describe_runs`` in it."""
    # A "<" within the data could end its element; JSON may write it as an escape. It has no NaN.
    data = json.dumps(_finite(jobs), default=str, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = _file("page.html")
    for name, text in (("style", _file("page.css")), ("script", _file("page.js")), ("data", data)):
        page = page.replace(f"{{{{{name}}}}}", text, 1)
    return page


def write_page(home: Path, path: Path | None = None, jobs: Sequence[dict[str, Any]] | None = None) -> Path:
    """Writes the page beside its name and renames it; by default into the folder of the artefacts.

    Args:
        home: The folder of the artefacts.
        path: Where the page goes.
        jobs: What it shows; by default all that is in the folder.
    """
    path = home / PAGE if path is None else path
    stage = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        stage.write_text(render_page(describe_runs(read_ledgers(home)) if jobs is None else jobs), encoding="utf-8")
        stage.replace(path)
    finally:
        stage.unlink(missing_ok=True)
    return path


def leave_page(home: Path, *, waits: bool = True) -> None:
    """Writes the page of a run that ends, or has come to a verdict. It takes 2 s at most, and never raises.

    On a thread of its own: a run with many steps, or a slow disk, may take longer. It is left alone then, and what it
    has written lies beside the name of the page.

    Args:
        home: The folder of the artefacts.
        waits: Whether this process is about to end.
    """
    writer = threading.Thread(target=_try_to_write, args=(home,), name="distplus-report", daemon=True)
    writer.start()
    if waits:
        writer.join(PATIENCE_S)


def _try_to_write(home: Path) -> None:
    try:
        write_page(home)
    except Exception as error:  # the run has ended, and its page can be written again
        log.debug("The report page of %s is not written (%s); `distplus report` writes it.", home, error)


def _file(name: str) -> str:
    return files("lightning_distplus.report").joinpath(name).read_text(encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


# -- on_verdict: a command or a URL of the user's ----------------------------------------------------------------------


def after_verdict(path: Path, on_verdict: str | None, *, waits: bool = True) -> None:
    """Leaves the page and sends the verdict, both at once; takes 2 s at most, and never raises.

    Args:
        path: The file of the verdict, in the folder of the artefacts.
        on_verdict: A URL, or a command for the shell; None: nobody is told.
        waits: Whether this process is about to end.
    """
    end = time.monotonic() + PATIENCE_S
    sender = threading.Thread(target=_try_to_send, args=(path, on_verdict), name="distplus-on-verdict", daemon=True)
    sender.start()
    leave_page(path.parent, waits=waits)
    if waits:
        sender.join(max(end - time.monotonic(), 0.0))


def _try_to_send(path: Path, on_verdict: str | None) -> None:
    try:
        if on_verdict is not None and _is_first(path):
            _send_verdict(path, on_verdict)
    except Exception as error:  # whatever a command or a host of the user's does, the run ends as it would have ended
        log.warning("on_verdict has failed (%s: %s); the verdict is in %s", type(error).__name__, error, path)


def _is_first(path: Path) -> bool:
    """Whether no other host, where they share the folder, has sent this incident."""
    incident = json.loads(path.read_text()).get("incident", path.stem)
    try:
        path.with_name(f".verdict-{incident}.sent").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a full disk: better told twice than by nobody
        return True
    return True


def _send_verdict(path: Path, on_verdict: str) -> None:
    """Posts the verdict to a URL, or gives it to a command as its input; waits 2 s for either.

    Both get the JSON of the file, with ``text`` (as it was printed) and ``path`` added.

    Raises:
        OSError: The host cannot be reached, or refuses.
        subprocess.SubprocessError: The command fails, or runs longer; it is killed then, with what it has started.
    """
    data = path.read_bytes()
    fields = {**json.loads(data), "text": Verdict.from_json(data).render(), "path": str(path)}
    message = json.dumps(fields).encode()
    if on_verdict.startswith(("http://", "https://")):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(on_verdict, message, headers)  # noqa: S310  (the schemes are known)
        with urllib.request.urlopen(request, timeout=PATIENCE_S):  # noqa: S310
            return
    process = subprocess.Popen(
        ["/bin/sh", "-c", on_verdict], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.communicate(message, timeout=PATIENCE_S - 0.2)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, on_verdict)
