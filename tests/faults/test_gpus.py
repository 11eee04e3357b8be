"""What ``nvidia-smi`` tells, with a stand-in for it in PATH: no GPU is here."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_distplus.preflight.gpus import _FIELDS
from tests.faults.test_doctor import doctor, findings

SOUND = {
    "index": "0", "name": "NVIDIA H100", "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.uncorrected.aggregate.total": "0", "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
    "clocks_throttle_reasons.sw_thermal_slowdown": "Not Active", "clocks.max.sm": "1980",
    "clocks.applications.graphics": "1980",
}  # fmt: skip
OFF = ("--json", "--off", "torch", "--off", "disk", "--off", "requirements")


def stand_in(folder: Path, *gpus: dict[str, str], links: str = "") -> str:
    """A PATH in which nvidia-smi says this."""
    rows = "\n".join(", ".join({**SOUND, **gpu}[name] for name in _FIELDS) for gpu in gpus)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nif [ $1 = nvlink ]; then cat <<E\n{links}\nE\nelse cat <<E\n{rows}\nE\nfi\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_what_is_wrong_with_a_gpu_is_named_with_its_number(tmp_path: Path) -> None:
    path = stand_in(
        tmp_path,
        {},
        {"index": "1", "ecc.errors.uncorrected.volatile.total": "3", "ecc.errors.uncorrected.aggregate.total": "[N/A]"},
        links="GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>",
    )
    ended = doctor(*OFF, PATH=path, NCCL_P2P_DISABLE="1")
    found = findings(ended)
    assert ended.returncode == 173
    assert found["gpu_health"]["subject"].startswith("GPU 1 (NVIDIA H100) has 3 uncorrected errors")
    assert found["gpu_health"]["detail"] == "unknown in its life"
    assert found["nvlink"]["subject"] == "GPU 0: 1 of 2 NVLink connections are inactive."
    assert (found["nccl"]["status"], "NVLink that this host has" in found["nccl"]["subject"]) == ("advice", True)


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


def test_advice_about_nccl_has_its_evidence_and_its_source_and_sets_nothing() -> None:
    variables = {"NCCL_TIMEOUT": "7200", "NCCL_BUFFSIZE": str(64 << 20), "NCCL_ASYNC_ERROR_HANDLING": "1"}
    ended = doctor(*OFF, **variables)
    assert ended.returncode == 0
    text = ended.stdout
    for words in (
        "NCCL_TIMEOUT has no effect",
        "NCCL_BUFFSIZE=67108864",
        "old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ):
        assert words in text
    assert text.count('"status": "advice"') == text.count("https://") == 3
    assert "nccl" not in findings(doctor(*OFF))
