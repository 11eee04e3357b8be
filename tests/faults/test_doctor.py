"""``distplus doctor`` as a process of its own, on a host where something is wrong (row S7)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.errors import ExitCode
from lightning_distplus.preflight.host import _FIELDS
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.folders import read_only

ROOT = Path(__file__).parents[2]
QUICK = ["--off", "torch"]
OTHER_TORCH = """
def __getattr__(name):
    raise ImportError("libtorch_cuda.so: cannot open shared object file")
raise ImportError("libtorch_cuda.so: cannot open shared object file")
"""


def doctor(*arguments: str, python: str = sys.executable, path: str = "", **variables: str) -> Any:
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(
        [python, "-m", "lightning_distplus.cli", "doctor", *arguments],
        env={**kept, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
        cwd=ROOT, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip


def findings(ended: Any) -> dict[str, Any]:
    report = json.loads(ended.stdout)
    assert report["version"] == 1
    return {finding["check"]: finding for finding in report["findings"] if finding["status"] != "note"}


def test_a_sound_host_ends_with_0_and_a_table() -> None:
    ended = doctor("--warn", "disk")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "started by plain python" in ended.stdout
    assert "works." in ended.stdout
    assert "error (" not in ended.stdout


def test_a_torch_that_does_not_load_is_named_with_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(OTHER_TORCH)
    ended = doctor("--json", path=str(tmp_path))
    assert ended.returncode == ExitCode.PREFLIGHT
    found = findings(ended)["torch"]
    assert found["subject"] == "torch is installed here and does not work."
    assert "libtorch_cuda.so: cannot open shared object file" in found["detail"]


def test_another_torch_than_the_one_that_fits_is_named_with_both_versions(tmp_path: Path) -> None:
    information = tmp_path / "torch-2.4.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0\n")
    ended = doctor("--json", *QUICK, path=str(tmp_path))
    assert ended.returncode == ExitCode.PREFLIGHT
    found = findings(ended)["requirements"]
    assert found["subject"].startswith("torch 2.4.0 does not fit: ")
    assert "2.11" in found["remedy"]


def test_without_torch_and_without_any_other_package_the_report_is_the_same_in_plain_lines() -> None:
    python = getattr(sys, "_base_executable", sys.executable)
    probe = [python, "-c", "import torch"]
    if subprocess.run(probe, capture_output=True, check=False, cwd="/", env={}).returncode == 0:
        pytest.skip(f"a Python without torch is missing: {python} has one")
    ended = doctor(python=python)
    assert ended.returncode == ExitCode.PREFLIGHT, ended.stderr
    assert "error (torch): torch is not installed here." in ended.stdout
    assert "do:   pip install torch" in ended.stdout
    assert "nothing to say: " in ended.stdout


def test_a_folder_that_takes_no_file_and_a_small_limit_are_named(tmp_path: Path) -> None:
    full = tmp_path / "full"
    with read_only(full):
        command = f"ulimit -n 256; exec {sys.executable} -m lightning_distplus.cli doctor --json --off torch"
        ended = subprocess.run(
            ["bash", "-c", f"{command} --folder {full}/run"], cwd=ROOT, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert ended.returncode == ExitCode.PREFLIGHT
    found = findings(ended)
    assert "cannot be written: Read-only file system" in found["disk"]["subject"]
    assert found["open_files"]["status"] == "warning"
    assert "ulimit -n: 256" in found["open_files"]["detail"]


def test_the_launch_is_held_against_what_is_asked_for() -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
    launch = ("--json", *QUICK, "--off", "disk", "--devices", "4", "--nodes", "2")
    ended = doctor(*launch, **variables)
    assert ended.returncode == ExitCode.PREFLIGHT
    assert findings(ended)["slurm"]["remedy"].endswith("srun --nodes 2 --ntasks-per-node 4 python train.py")
    assert doctor(*launch, "--warn", "slurm", **variables).returncode == 0
    unknown = doctor("--off", "slrum")
    assert unknown.returncode == 2
    assert "there is no check 'slrum'" in unknown.stderr


def test_a_check_of_ones_own_is_taken_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lightning_distplus.preflight import Finding, Status\n"
        "def no_ghosts(facts):\n"
        "    yield Finding(status=Status.ERROR, subject=f'{facts.host} is haunted.')\n"
    )
    ended = doctor("--json", *QUICK, "--check", "mine:no_ghosts", path=str(tmp_path))
    assert ended.returncode == ExitCode.PREFLIGHT
    assert findings(ended)["no_ghosts"]["subject"].endswith("is haunted.")


def make_ddp(folder: str) -> None:
    jobs.fit("DDPStrategy", 2, folder, max_steps=1)


DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


@pytest.mark.soak  # of each new torch, not of each change here
@pytest.mark.deadline(120)
def test_the_known_defect_of_detail_is_there(tmp_path: Path) -> None:
    """When this fails because nothing crashes, the defect is mended upstream: take it out of ``DEFECTS``."""
    run = spawn(make_ddp, 2, args=(str(tmp_path),), env=DETAIL, mode="fresh", deadline="80s")
    assert run.exit_codes == {0: -signal.SIGSEGV, 1: -signal.SIGSEGV}, run.logs


def test_the_known_defect_of_detail_is_named() -> None:
    found = findings(doctor("--json", *QUICK, **DETAIL))["defects"]
    assert "torch 2.13" in found["detail"]
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in found["detail"]


def test_a_compromised_release_is_an_error(tmp_path: Path) -> None:
    information = tmp_path / "lightning-2.6.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning\nVersion: 2.6.3\n")
    found = findings(doctor("--json", *QUICK, "--off", "requirements", path=str(tmp_path)))["defects"]
    assert (found["status"], "compromised" in found["subject"]) == ("error", True)


# -- what ``nvidia-smi`` tells, with a stand-in for it in PATH ---------------------------------------------------------

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
