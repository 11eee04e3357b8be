"""Row S7: what one rank has otherwise is named before the first step, on all ranks; ``distplus doctor`` on one host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_distplus import env
from lightning_distplus.cli.preflight import run_preflight
from lightning_distplus.errors import ExitCode, PreflightError
from lightning_distplus.preflight.host import _FIELDS
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.folders import read_only
from tests.processes import ROOT

ODD = 1
BOUND_S = 5.0


class OtherModel(jobs.Model):
    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.nn.Sequential(torch.nn.Linear(jobs.NUM_FEATURES, 12), torch.nn.Linear(12, 1))


def installed(folder: Path, package: str, version: str) -> str:
    """A place for the path of Python in which this version of a package seems to be."""
    information = folder / f"{package}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return str(folder)


def fit(rank: int, fault: str, folder: str, strategy: str) -> None:
    """Trains three ranks, of which one is odd in one thing."""
    odd = fault if rank == ODD else ""
    here = Path(folder, f"checkout{rank}")
    (here / ".git").mkdir(parents=True)
    (here / ".git" / "HEAD").write_text(("b" if odd == "revision" else "a") * 40 + "\n")
    variables: dict[str, Any] = {"NCCL_ALGO": "Tree" if odd == "variable" else "Ring"}
    variables["PL_GLOBAL_SEED"] = 43 if odd == "seed" else 42
    if odd == "version":
        sys.path.insert(0, installed(here, "torchdata", "0.1.0"))
    generator = torch.Generator().manual_seed(8 if odd == "content" else 7)
    samples = torch.randn(60 if odd == "data" else 64, jobs.NUM_FEATURES, generator=generator)
    loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, num_replicas=3, rank=rank))
    begin = time.monotonic()
    os.chdir(here)
    try:
        with env.changed(**variables):
            trainer = jobs.trainer(strategy, 3, folder, max_steps=5 if odd == "setting" else 4)
            trainer.fit(OtherModel() if odd == "model" else jobs.Model(), loader)
    except PreflightError as error:
        Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - begin} {trainer.global_step}\n{error}")
        raise


@pytest.mark.parametrize(
    ("fault", "strategy", "says"),
    [
        ("version", "ResilientDDP", ("The version of torchdata differs on rank 1.", ": 0.1.0; the other 2 ranks: 0.1")),
        ("revision", "ResilientDDP", ("The git revision differs on rank 1.", "b" * 40, "2 ranks: " + "a" * 40)),
        ("seed", "ResilientDDP", ("The seed differs on rank 1.", ": 43; the other 2 ranks: 42")),
        ("variable", "ResilientDDP", ("NCCL_ALGO differs on rank 1.", ": Tree; the other 2 ranks: Ring")),
        ("setting", "ResilientFSDP", ("Trainer: max_steps differs on rank 1.", ": 5; the other 2 ranks: 4")),
        ("model", "ResilientFSDP",
         ("The model differs on rank 1.", "net.0.weight: float32 [12, 8]", "the other 2 ranks: parameter net.0")),
        ("content", "ResilientDDP", ("Data: content of the data set differs on rank 1.",)),
        ("data", "ResilientDDP", ("length of the data set differs on rank 1.", ": 60; the other 2 ranks: 64")),
    ],
)  # fmt: skip
def test_the_odd_rank_is_named_before_the_first_step(
    fault: str, strategy: str, says: tuple[str, ...], tmp_path: Path
) -> None:
    run = spawn(fit, 3, args=(fault, str(tmp_path), strategy), deadline="40s")

    assert run.exit_codes == dict.fromkeys(range(3), ExitCode.PREFLIGHT), run.logs
    texts = set()
    for rank in range(3):
        first, text = (tmp_path / f"rank{rank}").read_text().split("\n", 1)
        seconds, step = first.split()
        assert float(seconds) < BOUND_S
        assert step == "0"
        texts.add(text.partition("  here:")[0])
        for words in says:
            assert words in text
    assert len(texts) == 1


def test_ranks_that_agree_have_no_finding(tmp_path: Path) -> None:
    run = spawn(fit, 3, args=("nothing", str(tmp_path), "ResilientDDP"), deadline="40s").check()
    assert jobs.findings_of_preflight(run) == []


def fit_without_validation_on_one_rank(rank: int, folder: str, strategy: str) -> None:
    """The settings are not compared, and rank 1 has validation switched off."""
    arguments = {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 0 if rank == ODD else 1}
    arguments["num_sanity_val_steps"] = 0  # rank 0 would be named for it before
    jobs.fit(strategy, 2, folder, data=(jobs.loader(), jobs.loader()), preflight={"trainer": "off"}, **arguments)


@pytest.mark.parametrize("strategy", ["ResilientDDP", pytest.param("ResilientFSDP", marks=pytest.mark.soak)])
def test_validation_on_one_rank_only_is_named_where_the_settings_are_not_compared(
    strategy: str, tmp_path: Path
) -> None:
    run = spawn(fit_without_validation_on_one_rank, 2, args=(str(tmp_path), strategy), deadline="60s")
    assert run.exit_codes == dict.fromkeys(range(2), ExitCode.DIVERGENCE), run.logs
    for log in run.logs.values():
        assert "rank 0" in log
        assert "val_dataloader" in log
        assert "rank 1" in log
        assert "the start of training" in log


def preflight(rank: int, odd: bool) -> int:
    with env.changed(NCCL_PROTO="LL" if odd and rank == ODD else "Simple"):
        return run_preflight(["--json", "--off", "torch", "--warn", "disk", "--devices", "3", "--deadline", "20s"])


@pytest.mark.parametrize(("odd", "code"), [(True, ExitCode.PREFLIGHT), (False, ExitCode.DONE)])
def test_distplus_preflight_meets_all_ranks_and_rank_0_prints_what_differs(odd: bool, code: ExitCode) -> None:
    run = spawn(preflight, 3, args=(odd,), deadline="40s").check()
    assert run.results == dict.fromkeys(range(3), int(code)), run.logs
    report = json.loads(run.logs[0][run.logs[0].index("{\n") : run.logs[0].rindex("}") + 1])
    assert report["ranks"] == 3
    found = {finding["check"]: finding for finding in report["findings"] if finding["status"] == "error"}
    assert list(found) == (["variables"] if odd else [])
    if odd:
        assert found["variables"]["subject"] == "NCCL_PROTO differs on rank 1."
    assert '"version": 1' not in run.logs[1] + run.logs[2]


# -- ``distplus doctor``, on a host where something is wrong -----------------------------------------------------------

QUICK = ["--off", "torch"]
OTHER_TORCH = """
def __getattr__(name):
    raise ImportError("libtorch_cuda.so: cannot open shared object file")
raise ImportError("libtorch_cuda.so: cannot open shared object file")
"""


def doctor(*arguments: str, python: str = sys.executable, path: str = "", limit: str = "", **variables: str) -> Any:
    """``distplus doctor`` as a process of its own, in almost no environment."""
    kept = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    command = ["bash", "-c", f'{limit}exec "$@"', "-", python, "-m", "lightning_distplus.cli", "doctor", *arguments]
    env = {**kept, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)


def findings_of(ended: Any) -> list[dict[str, Any]]:
    report = json.loads(ended.stdout)
    assert report["version"] == 1
    return [finding for finding in report["findings"] if finding["status"] != "note"]


def found_by(ended: Any) -> dict[str, Any]:
    return {finding["check"]: finding for finding in findings_of(ended)}


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
    found = found_by(ended)["torch"]
    assert found["subject"] == "torch is installed here and does not work."
    assert "libtorch_cuda.so: cannot open shared object file" in found["detail"]


def test_another_torch_than_the_one_that_fits_is_named_with_both_versions(tmp_path: Path) -> None:
    ended = doctor("--json", *QUICK, path=installed(tmp_path, "torch", "2.4.0"))
    assert ended.returncode == ExitCode.PREFLIGHT
    found = found_by(ended)["requirements"]
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


def test_the_launch_is_held_against_what_is_asked_for() -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}
    launch = ("--json", *QUICK, "--off", "disk", "--devices", "4", "--nodes", "2")
    ended = doctor(*launch, **variables)
    assert ended.returncode == ExitCode.PREFLIGHT
    assert found_by(ended)["slurm"]["remedy"].endswith("srun --nodes 2 --ntasks-per-node 4 python train.py")
    assert doctor(*launch, "--warn", "slurm", **variables).returncode == 0
    unknown = doctor("--off", "slrum")
    assert unknown.returncode == 2
    assert "there is no check 'slrum'" in unknown.stderr


DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def make_ddp(folder: str) -> None:
    jobs.fit("DDPStrategy", 2, folder, max_steps=1)


@pytest.mark.soak  # of each new torch, not of each change here
@pytest.mark.deadline(120)
def test_the_known_defect_of_detail_is_there(tmp_path: Path) -> None:
    """When this fails because nothing crashes, the defect is mended upstream: take it out of ``DEFECTS``."""
    run = spawn(make_ddp, 2, args=(str(tmp_path),), env=DETAIL, mode="fresh", deadline="80s")
    assert run.exit_codes == {0: -signal.SIGSEGV, 1: -signal.SIGSEGV}, run.logs


SOUND = {
    "name": "NVIDIA H100", "ecc.errors.uncorrected.volatile.total": "0",
    "ecc.errors.uncorrected.aggregate.total": "0", "clocks_throttle_reasons.hw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.hw_power_brake_slowdown": "Not Active",
    "clocks_throttle_reasons.sw_thermal_slowdown": "Not Active", "clocks.max.sm": "1980",
    "clocks.applications.graphics": "1980",
}  # fmt: skip


def stand_in(folder: Path, *gpus: dict[str, str]) -> str:
    """A PATH in which nvidia-smi says this of GPU 0 and so on."""
    told = [{**SOUND, "index": str(index), **gpu} for index, gpu in enumerate(gpus)]
    rows = "\n".join(", ".join(gpu[name] for name in _FIELDS) for gpu in told)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<E\n{rows}\nE\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


NO_GHOSTS = """
from lightning_distplus.preflight import Finding, Status
def no_ghosts(facts):
    yield Finding(status=Status.ERROR, subject=f"{facts.host} is haunted.")
"""
ECC = {"ecc.errors.uncorrected.volatile.total": "3", "ecc.errors.uncorrected.aggregate.total": "[N/A]"}
HOT = {"clocks_throttle_reasons.hw_thermal_slowdown": "Active"}
SET = {"clocks.applications.graphics": "1005"}


def test_all_that_is_wrong_with_a_host_is_named(tmp_path: Path) -> None:
    """A folder, a limit, the GPUs, the defects of a release and a variable, and a check of one's own."""
    full, gpus = tmp_path / "full", stand_in(tmp_path, {}, ECC, HOT, SET)
    (tmp_path / "mine.py").write_text(NO_GHOSTS)
    options = ("--json", *QUICK, "--off", "requirements", "--check", "mine:no_ghosts", "--folder", f"{full}/run")
    path = installed(tmp_path, "lightning", "2.6.3")
    with read_only(full):
        ended = doctor(*options, path=path, limit="ulimit -n 256; ", PATH=gpus, **DETAIL)
    assert ended.returncode == ExitCode.PREFLIGHT
    told: dict[str, list[tuple[str, str]]] = {}
    for one in findings_of(ended):
        told.setdefault(one["check"], []).append((one["status"], f"{one['subject']} {one['detail']}"))

    def require(check: str, status: str, words: str) -> None:
        assert any(said == status and words in text for said, text in told[check]), told

    require("disk", "error", "cannot be written: Read-only file system")
    require("open_files", "warning", "ulimit -n: 256")
    require("no_ghosts", "error", "is haunted.")
    require("defects", "error", "compromised")
    require("defects", "warning", "TORCH_DISTRIBUTED_DEBUG=DETAIL")
    require("defects", "warning", "torch 2.13")
    require("gpu_health", "error", "GPU 1 (NVIDIA H100) has 3 uncorrected errors")
    require("gpu_health", "error", "unknown in its life")
    require("gpu_health", "warning", "GPU 2 (NVIDIA H100) is slowed down")
    require("gpu_health", "warning", "is set to 1005 MHz of 1980")
    assert not any("GPU 0" in text for _, text in told["gpu_health"])
