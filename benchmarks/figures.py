"""One measured number beside its target, and the statistics behind it."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import numpy as np

__all__ = ["Figure", "bootstrap_ci95", "machine", "median"]

_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of a benchmark's table."""

    name: str
    value: float
    unit: str
    ci95: tuple[float, float] | None = None
    """Bootstrap interval of a median; None where the value is not a median of many."""
    target: float | None = None
    """The largest value that is good; None where the figure is only shown."""
    note: str = ""

    @classmethod
    def of(
        cls, name: str, values: Sequence[float], unit: str, *, target: float | None = None, note: str = ""
    ) -> Figure:
        """The median of many values, with its interval."""
        interval = bootstrap_ci95(values)
        return cls(name=name, value=median(values), unit=unit, ci95=interval, target=target, note=note)

    @property
    def verdict(self) -> str:
        """Whether the target is met: "yes", "no", "within noise" where the interval holds it; "" without one."""
        if self.target is None:
            return ""
        low, high = self.ci95 or (self.value, self.value)
        if low <= self.target < high:
            return "within noise"
        return "yes" if high <= self.target else "no"


def median(values: Sequence[float]) -> float:
    """The median as a plain number."""
    return float(statistics.median(values))


def bootstrap_ci95(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median; the same values give the same interval."""
    draws = np.random.default_rng(0).choice(np.asarray(values), size=(_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(low), float(high)


def machine() -> str:
    """The machine and the versions, in one line."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "lightning"))
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    now = datetime.now(timezone.utc)
    return (
        f"{_cpu()}, {os.cpu_count()} cores (load {loads}), Python {platform.python_version()}, {versions}, "
        f"{now:%Y-%m-%d %H:%M} UTC"
    )


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
