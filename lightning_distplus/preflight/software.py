"""Whether torch and its kin work here and fit together, and which of their defects are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any

from lightning_distplus.preflight.facts import Facts
from lightning_distplus.preflight.finding import Finding, Status
from lightning_distplus.preflight.running import Check

__all__ = ["DEFECTS", "SOFTWARE_CHECKS", "Defect", "versions"]

PACKAGES = ("torch", "lightning", "pytorch-lightning", "deepspeed", "torchdata", "numpy")
_PROBE_S = 90.0

_PROBE = """
import json, torch, torch.distributed as dist
found = {"version": torch.__version__, "file": torch.__file__, "distributed": dist.is_available()}
found["gloo"] = dist.is_available() and dist.is_gloo_available()
found["cuda"] = torch.version.cuda
found["gpus"] = []
for index in range(torch.cuda.device_count()):
    left, right = torch.arange(4096.).reshape(64, 64) % 7, torch.arange(4096.).reshape(64, 64) % 5
    same = torch.equal((left.to(f"cuda:{index}") @ right.to(f"cuda:{index}")).cpu(), left @ right)
    free, total = torch.cuda.mem_get_info(index)
    found["gpus"].append({"name": torch.cuda.get_device_name(index), "computes": same, "free": free, "total": total})
if found["gpus"]:
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Defect:
    """A defect of a released version, with its evidence and the day on which that was looked at."""

    package: str
    releases: tuple[str, ...]
    """Prefixes: ``"2.13"`` is every 2.13.x."""
    variables: Mapping[str, str]
    """It needs these variables, at these values."""
    status: Status
    subject: str
    remedy: str
    source: str
    seen_on: str

    def is_here(self, installed: Mapping[str, str], facts: Facts) -> bool:
        """Whether the version and the variables are those of the defect."""
        parts = installed.get(self.package, "").split("+")[0].split(".")
        has_release = any(parts[: release.count(".") + 1] == release.split(".") for release in self.releases)
        return has_release and all(facts.variables.get(name) == value for name, value in self.variables.items())


DEFECTS = (
    Defect(
        package="lightning",
        releases=("2.6.2", "2.6.3"),
        variables={},
        status=Status.ERROR,
        subject="This release of lightning was compromised: it runs foreign code when it is imported.",
        remedy="pip install 'lightning>=2.6.4', and change every secret that this machine could read",
        source="Lightning-AI/pytorch-lightning#21691",
        seen_on="2026-11-21",
    ),
    Defect(
        package="pytorch-lightning",
        releases=("2.6.2", "2.6.3"),
        variables={},
        status=Status.ERROR,
        subject="This release of pytorch-lightning was compromised: it runs foreign code when it is imported.",
        remedy="pip install 'pytorch-lightning>=2.6.4', and change every secret that this machine could read",
        source="Lightning-AI/pytorch-lightning#21691",
        seen_on="2026-11-21",
    ),
    Defect(
        package="torch",
        releases=("2.13",),
        variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        status=Status.WARNING,
        subject="DistributedDataParallel over gloo ends with a segmentation fault when it is made.",
        remedy="unset TORCH_DISTRIBUTED_DEBUG, or set it to INFO",
        source="tests/faults/test_doctor.py shows it",
        seen_on="2026-11-21",
    ),
)
"""Dated, and each with a test: a defect of torch that is no more makes its test fail."""


def versions() -> dict[str, str]:
    """The installed versions, without importing anything."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def torch_works(facts: Facts) -> Iterator[Finding]:
    """Imports torch in a child process, and multiplies two matrices on each GPU."""
    found, failure = _probe()
    if failure:
        is_missing = "No module named 'torch'" in failure
        yield Finding(
            status=Status.ERROR,
            subject="torch is not installed here." if is_missing else "torch is installed here and does not work.",
            detail=f"{sys.executable}: {failure}",
            remedy="pip install torch" if is_missing else "pip install --force-reinstall torch, for this host",
        )
        return
    if not found["gloo"]:
        yield Finding(
            status=Status.ERROR,
            subject="This torch was built without torch.distributed or without gloo.",
            detail=f"torch {found['version']} in {found['file']}",
            remedy="pip install a release of torch",
        )
    installed = versions().get("torch")
    if installed is not None and installed.split("+")[0] != found["version"].split("+")[0]:
        yield Finding(
            status=Status.ERROR,
            subject="Another torch is imported than the one that is installed.",
            detail=f"imported {found['version']} from {found['file']}, installed {installed}",
            remedy="Take the other one out of PYTHONPATH and of the working directory",
        )
    yield from _gpus(found["gpus"])
    gpus = ", ".join(gpu["name"] for gpu in found["gpus"]) or "no GPU"
    nccl = f", NCCL {found['nccl']}" if found.get("nccl") else ""
    subject, detail = f"torch {found['version']} works.", f"{gpus}{nccl}; {found['file']}"
    yield Finding(status=Status.NOTE, subject=subject, detail=detail)


def _gpus(gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    for index, gpu in enumerate(gpus):
        if not gpu["computes"]:
            yield Finding(
                status=Status.ERROR,
                subject=f"GPU {index} multiplies two matrices of whole numbers wrongly.",
                detail=gpu["name"],
                remedy="Take this GPU out of service (nvidia-smi -q -d ECC shows more)",
            )
        if gpu["free"] < 0.9 * gpu["total"]:
            yield Finding(
                status=Status.WARNING,
                subject=f"GPU {index} is in use by somebody else.",
                detail=f"{gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB are free",
                remedy="nvidia-smi shows the processes",
            )


@lru_cache(maxsize=1)
def _probe() -> tuple[dict[str, Any], str]:
    """What torch says of itself, or the last line of its failure."""
    command = [sys.executable, "-c", _PROBE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False, cwd=os.sep)
    except subprocess.TimeoutExpired:
        return {}, f"import torch had not ended after {_PROBE_S:g} s"
    if ended.returncode == 0:
        return json.loads(ended.stdout.splitlines()[-1]), ""
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return {}, lines[-1] if lines else f"import torch ended with {ended.returncode}"


def requirements(facts: Facts) -> Iterator[Finding]:
    """The installed versions against those that this package asks for."""
    try:
        from packaging.requirements import Requirement

        needed = [Requirement(line) for line in metadata.requires("lightning-distplus") or []]
    except (ImportError, metadata.PackageNotFoundError):
        return
    installed = versions()
    for requirement in needed:
        version = installed.get(requirement.name)
        is_ours = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if version is not None and is_ours and not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                status=Status.ERROR,
                subject=f"{requirement.name} {version} does not fit: {requirement.specifier} is needed.",
                detail=f"lightning_distplus with {', '.join(f'{name} {found}' for name, found in installed.items())}",
                remedy=f"pip install '{requirement.name}{requirement.specifier}'",
            )


def defects(facts: Facts) -> Iterator[Finding]:
    """Known defects of the installed versions, under the variables of this process."""
    installed = versions()
    for defect in DEFECTS:
        if defect.is_here(installed, facts):
            needs = "".join(f", {name}={value}" for name, value in defect.variables.items())
            yield Finding(
                status=defect.status,
                subject=defect.subject,
                detail=f"{defect.package} {installed[defect.package]}{needs} ({defect.source}, {defect.seen_on})",
                remedy=defect.remedy,
            )


SOFTWARE_CHECKS: Mapping[str, Check] = {"torch": torch_works, "requirements": requirements, "defects": defects}
"""The checks of the installation, by name."""
