"""What a check says: what is wrong, by which evidence, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["Finding", "Status"]


class Status(str, Enum):
    """How much a finding matters."""

    ERROR = "error"
    """The run would fail, hang or be wrong: it does not start."""
    WARNING = "warning"
    """The run can start, and somebody should look."""
    ADVICE = "advice"
    """A setting for which something that was seen speaks; it is never applied by itself."""
    NOTE = "note"
    """Something to know; nothing is wrong."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a check has found."""

    status: Status
    subject: str
    """What is wrong, in one sentence."""
    detail: str = ""
    """The evidence: names and values, of both sides."""
    remedy: str = ""
    """What to do, with the command to run."""
    check: str = ""
    """The name by which it can be switched off; set by ``run_checks``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "status": self.status.value}

    def __str__(self) -> str:
        lines = [self.subject]
        if self.detail:
            lines.append(f"  seen: {self.detail}")
        if self.remedy:
            lines.append(f"  do:   {self.remedy}")
        return "\n".join(lines)
