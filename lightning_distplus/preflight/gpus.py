"""The state of this host's GPUs as NVML tells it, through ``nvidia-smi``: errors of memory, throttled clocks, links."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache

from lightning_distplus.preflight.facts import Facts
from lightning_distplus.preflight.finding import Finding, Status
from lightning_distplus.preflight.running import Check

__all__ = ["GPU_CHECKS", "links", "query"]

_DEADLINE_S = 20.0
_FIELDS = (
    "index", "name", "ecc.errors.uncorrected.volatile.total", "ecc.errors.uncorrected.aggregate.total",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown", "clocks.max.sm", "clocks.applications.graphics",
)  # fmt: skip
_LOW_SHARE = 0.7  # of the highest clock that may be set


def health(facts: Facts) -> Iterator[Finding]:
    """Errors of the memory since the last reset, and clocks that are held down by heat, power or settings."""
    for gpu in query():
        name = f"GPU {gpu['index']} ({gpu['name']})"
        now = _number(gpu["ecc.errors.uncorrected.volatile.total"])
        ever = _number(gpu["ecc.errors.uncorrected.aggregate.total"])
        if now:
            yield Finding(
                status=Status.ERROR,
                subject=f"{name} has {now:.0f} uncorrected errors of its memory since it was last reset.",
                detail=f"{'unknown' if ever is None else f'{ever:.0f}'} in its life",
                remedy="Take it out of service, or reset it: nvidia-smi -q -d ECC,ROW_REMAPPER shows more",
            )
        reasons = [key.partition(".")[2] for key, value in gpu.items() if "throttle" in key and value == "Active"]
        if reasons:
            yield Finding(
                status=Status.WARNING,
                subject=f"{name} is slowed down: every other rank waits for it.",
                detail=", ".join(reasons),
                remedy="Look at its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
            )
        highest, set_to = _number(gpu["clocks.max.sm"]), _number(gpu["clocks.applications.graphics"])
        if highest and set_to and set_to < _LOW_SHARE * highest:
            yield Finding(
                status=Status.WARNING,
                subject=f"{name} is set to {set_to:.0f} MHz of {highest:.0f}.",
                remedy="nvidia-smi --reset-applications-clocks, where that is not meant",
            )


def link_health(facts: Facts) -> Iterator[Finding]:
    """NVLink connections that are down on a GPU that has others up."""
    for gpu, states in links().items():
        down = [number for number, is_up in enumerate(states) if not is_up]
        if down and any(states):
            yield Finding(
                status=Status.WARNING,
                subject=f"GPU {gpu}: {len(down)} of {len(states)} NVLink connections are inactive.",
                detail=f"links {', '.join(map(str, down))}",
                remedy="nvidia-smi nvlink --status; a link that was up before needs its host drained",
            )


@lru_cache(maxsize=1)
def query() -> tuple[Mapping[str, str], ...]:
    """One mapping a GPU; none where there is no driver."""
    printed = _nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    rows = [[part.strip() for part in line.split(",")] for line in printed.splitlines() if line.strip()]
    return tuple(dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS))


@lru_cache(maxsize=1)
def links() -> Mapping[str, list[bool]]:
    """By the number of the GPU, whether each of its NVLink connections is up."""
    found: dict[str, list[bool]] = {}
    gpu = ""
    for line in _nvidia_smi("nvlink", "--status").splitlines():
        if line.startswith("GPU "):
            gpu = line.split()[1].rstrip(":")
        elif line.strip().startswith("Link "):
            found.setdefault(gpu, []).append("inactive" not in line.lower())
    return found


def _nvidia_smi(*arguments: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        command = ["nvidia-smi", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]": this GPU has none
        return None


GPU_CHECKS: Mapping[str, Check] = {"gpu_health": health, "nvlink": link_health}
"""What NVML tells of the GPUs, by name."""
