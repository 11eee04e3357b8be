"""``on_verdict``: hands a verdict to a command or a URL of the user's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from lightning_distplus.report.page import PATIENCE_S, leave_page
from lightning_distplus.watchdog.verdict import Verdict

__all__ = ["after_verdict", "send_verdict"]

log = logging.getLogger(__name__)


def after_verdict(path: Path, on_verdict: str | None, *, waits: bool = True) -> None:
    """Leaves the page and sends the verdict, both at once; takes 2 s at most, and never raises.

    Args:
        path: The file of the verdict, in the folder of the artefacts.
        on_verdict: A URL, or a command for the shell; None: nobody is told.
        waits: Whether this process is about to end.
    """
    end = time.monotonic() + PATIENCE_S
    sender = None if on_verdict is None else threading.Thread(
        target=_try_to_send, args=(path, on_verdict), name="distplus-on-verdict", daemon=True
    )  # fmt: skip
    if sender is not None:
        sender.start()
    leave_page(path.parent, waits=waits)
    if sender is not None and waits:
        sender.join(max(end - time.monotonic(), 0.0))


def _try_to_send(path: Path, on_verdict: str) -> None:
    try:
        if _is_first(path):
            send_verdict(path, on_verdict)
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


def send_verdict(path: Path, on_verdict: str) -> None:
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
