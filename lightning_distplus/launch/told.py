"""What the ranks tell their launcher: in which folder the artefacts of the run are."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["told_home"]


def told_home(file: str | Path | None) -> Path | None:
    """The folder that a rank has named; None where no rank came so far."""
    try:
        return Path(json.loads(Path(file or "").read_text())["home"])
    except (FileNotFoundError, IsADirectoryError):
        return None
