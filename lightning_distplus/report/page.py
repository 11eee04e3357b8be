"""The report as one HTML page that needs nothing else, and the page that a run leaves behind by itself."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_distplus.report.run import describe_runs, read_ledgers

__all__ = ["PAGE", "PATIENCE_S", "leave_page", "render_page", "write_page"]

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
