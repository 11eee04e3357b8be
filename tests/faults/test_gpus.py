"""What ``nvidia-smi`` tells, with a stand-in for it in PATH: no GPU is here (row S7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_distplus.preflight.host import _FIELDS
from tests.faults.test_doctor import doctor, findings

SOUND = {
    "index": "0", "name": "NVIDIA H100", "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.uncorrected.aggregate.total": "0", "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
    "clocks_throttle_reasons.sw_thermal_slowdown": "Not Active", "clocks.max.sm": "1980",
    "clocks.applications.graphics": "1980",
}  # fmt: skip
OFF = ("--json", "--off", "torch", "--off", "disk", "--off", "requirements")


def stand_in(folder: Path, *gpus: dict[str, str]) -> str:
    """A PATH in which nvidia-smi says this."""
    rows = "\n".join(", ".join({**SOUND, **gpu}[name] for name in _FIELDS) for gpu in gpus)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<E\n{rows}\nE\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_what_is_wrong_with_a_gpu_is_named_with_its_number(tmp_path: Path) -> None:
    path = stand_in(
        tmp_path,
        {},
        {"index": "1", "ecc.errors.uncorrected.volatile.total": "3", "ecc.errors.uncorrected.aggregate.total": "[N/A]"},
    )
    ended = doctor(*OFF, PATH=path)
    found = findings(ended)
    assert ended.returncode == 173
    assert found["gpu_health"]["subject"].startswith("GPU 1 (NVIDIA H100) has 3 uncorrected errors")
    assert found["gpu_health"]["detail"] == "unknown in its life"


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ({"clocks_throttle_reasons.hw_thermal_slowdown": "Active"}, "is slowed down"),
        ({"clocks.applications.graphics": "1005"}, "is set to 1005 MHz of 1980"),
    ],
)
def test_a_slow_gpu_is_a_warning(gpu: dict[str, str], words: str, tmp_path: Path) -> None:
    ended = doctor(*OFF, PATH=stand_in(tmp_path, gpu))
    assert ended.returncode == 0
    assert words in findings(ended)["gpu_health"]["subject"]
