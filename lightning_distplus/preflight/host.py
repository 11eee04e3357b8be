"""What one host must have: software, GPUs, shared memory, open files, interfaces, a folder that takes files.

At the end the lock of that folder: two runs must not write their checkpoints into one.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import logging
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_distplus import env
from lightning_distplus.preflight.check import Check, Facts, Finding, Status
from lightning_distplus.process import ProcessState, address_towards, boot_id, process_state, start_time

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interfaces(facts: Facts) -> Iterator[Finding]:
    """The interfaces that variables name must be there; gloo wants whole names, NCCL takes beginnings."""
    there = [name for _, name in socket.if_nameindex()]
    gloo, nccl = facts.text(env.GLOO_SOCKET_IFNAME), facts.text(env.NCCL_SOCKET_IFNAME)
    if missing := [name for name in (gloo or "").split(",") if name and name not in there]:
        yield _missing(facts, env.GLOO_SOCKET_IFNAME, f"no interface {', '.join(missing)}", there, Status.ERROR)
    if nccl and not any(_takes(nccl, name) for name in there):
        status = Status.ERROR if facts.accelerator == "cuda" else Status.WARNING
        yield _missing(facts, env.NCCL_SOCKET_IFNAME, "no interface that this admits", there, status)


def _missing(facts: Facts, variable: env.Variable, what: str, there: list[str], status: Status) -> Finding:
    return Finding(
        status=status,
        subject=f"{facts.shown(variable)}, and host {facts.host} has {what}.",
        detail=f"its interfaces: {', '.join(there)}",
        remedy=f"Set {variable.name} to the one that leads to the other hosts, or unset it",
    )


def _takes(wanted: str, name: str) -> bool:
    """NCCL's rules: beginnings of names, whole ones after =, and what to leave out after ^."""
    is_excluded = wanted.startswith("^")
    text = wanted.removeprefix("^")
    is_whole = text.startswith("=")
    parts = [part for part in text.removeprefix("=").split(",") if part]
    found = any(name == part.partition(":")[0] if is_whole else name.startswith(part) for part in parts)
    return found is not is_excluded


def own_name(facts: Facts) -> Iterator[Finding]:
    """Where no interface is named, gloo tells the others to come where this host's own name leads."""
    if not facts.spans_hosts or facts.text(env.GLOO_SOCKET_IFNAME) is not None:
        return
    address = _own_address(facts.host)
    if address and not ipaddress.ip_address(address).is_loopback:
        return
    outward = _interface_towards(facts.text(env.MASTER_ADDR) or "") or "<the interface of this network>"
    yield Finding(
        # NCCL finds an interface by itself; only groups of the CPU (saves in the background) are gloo's there.
        status=Status.ERROR if facts.accelerator == "cpu" else Status.WARNING,
        subject=f"Host {facts.host} {f'calls itself {address}' if address else 'does not know its own name'}: gloo "
        "tells the other hosts a loopback address, and they cannot connect to it.",
        detail=f"'getent hosts {facts.host}' leads to {address or 'no address of it'}; "
        + facts.shown(env.GLOO_SOCKET_IFNAME),
        remedy=f"export GLOO_SOCKET_IFNAME={outward}, or give {facts.host} its address of this network in /etc/hosts",
    )


def _own_address(host: str) -> str:
    """The first address of this host to which its name leads, as gloo looks for it; empty where there is none."""
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind(place)
                return str(place[0])
    return ""


def _interface_towards(host: str) -> str:
    """The interface from which packets to a host leave; empty where none does, or none but loopback."""
    address = address_towards(host)
    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if name != "lo" and socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


# -- shared memory, open files, disk -----------------------------------------------------------------------------------

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the mount itself, nothing is written there
_MIN_SHARED_BYTES = 1 << 30
_MIN_OPEN_FILES = 4096
_MIN_FREE_BYTES = 10 << 30
_TRIAL_S = 2.0
_SLOW_MB_PER_S = 50


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Data workers hand their batches over in shared memory; a container gets 64 MiB unless told otherwise."""
    if not _SHARED_MEMORY.is_dir():
        return
    found = os.statvfs(_SHARED_MEMORY)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < _MIN_SHARED_BYTES:
        yield Finding.warning(
            f"Shared memory has {free_bytes >> 20} MiB free; data workers die of a bus error when it is full.",
            detail=f"{_SHARED_MEMORY}: {free_bytes >> 20} of {found.f_blocks * found.f_frsize >> 20} MiB free",
            remedy="docker run --ipc=host (or --shm-size=16g); in Kubernetes an emptyDir with medium: Memory",
        )


def open_files(facts: Facts) -> Iterator[Finding]:
    """Sockets to peers, data files and workers' pipes are open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        limit = "unlimited" if hard == resource.RLIM_INFINITY else hard
        yield Finding.warning(
            f"This process may open {soft} files; large jobs and many data workers need more.",
            detail=f"ulimit -n: {soft}, hard limit {limit}",
            remedy=f"ulimit -n {min(65536, hard) if hard != resource.RLIM_INFINITY else 65536}, before the run starts",
        )


def disk(facts: Facts) -> Iterator[Finding]:
    """The folder must take a file, keep space for checkpoints, and be written in a bearable time."""
    folder = facts.folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    try:
        mb_per_s = write_speed(folder, min(facts.trial_bytes, free_bytes // 2))
    except OSError as error:
        yield Finding.error(
            f"{facts.folder} cannot be written: {error.strerror}; no checkpoint could be saved.",
            detail=f"writing into {folder} on {facts.host}, {free_bytes >> 20} MiB free",
            remedy="Make room or give write permission there, or set another default_root_dir",
        )
        return
    detail = f"{folder}: {free_bytes / 1e9:.1f} GB free, {mb_per_s:.0f} MB/s with fsync"
    if free_bytes < _MIN_FREE_BYTES:
        subject = "Little space is left for checkpoints."
        remedy = "A checkpoint of N parameters with Adam needs 12 N to 16 N bytes, and its successor as much again"
        yield Finding.warning(subject, detail=detail, remedy=remedy)
    elif mb_per_s < _SLOW_MB_PER_S:
        subject = "The folder of the run is slow: every rank waits while a checkpoint is written."
        yield Finding.warning(subject, detail=detail, remedy="Save to a faster disk, or save less often")
    else:
        yield Finding.note("The folder of the run takes checkpoints.", detail=detail)


def write_speed(folder: Path, size_bytes: int) -> float:
    """MB/s into a file that is gone afterwards; at most two seconds and one block."""
    block = os.urandom(1 << 20)
    written = 0
    begin = time.monotonic()
    with tempfile.TemporaryFile(dir=folder) as file:
        while written < size_bytes and time.monotonic() - begin < _TRIAL_S:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return written / 1e6 / (time.monotonic() - begin)


HOST_CHECKS: Mapping[str, Check] = {
    "own_name": own_name,
    "shared_memory": shared_memory,
    "open_files": open_files,
    "disk": disk,
}
"""The checks of one host that a run makes, by name."""


# -- torch and its kin, and their known defects ------------------------------------------------------------------------

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
    variables: Mapping[str, str] = field(default_factory=dict)
    """It needs these variables, at these values."""
    status: Status
    subject: str
    remedy: str
    source: str
    seen_on: str = "2026-11-21"

    def is_here(self, installed: Mapping[str, str], facts: Facts) -> bool:
        """Whether the version and the variables are those of the defect."""
        parts = installed.get(self.package, "").split("+")[0].split(".")
        has_release = any(parts[: release.count(".") + 1] == release.split(".") for release in self.releases)
        return has_release and self.variables.items() <= facts.variables.items()


DEFECTS = (
    *(
        Defect(
            package=package,
            releases=("2.6.2", "2.6.3"),
            status=Status.ERROR,
            subject=f"This release of {package} was compromised: it runs foreign code when it is imported.",
            remedy=f"pip install '{package}>=2.6.4', and change every secret that this machine could read",
            source="Lightning-AI/pytorch-lightning#21691",
        )
        for package in ("lightning", "pytorch-lightning")
    ),
    Defect(
        package="torch",
        releases=("2.13",),
        variables={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        status=Status.WARNING,
        subject="DistributedDataParallel over gloo ends with a segmentation fault when it is made.",
        remedy="unset TORCH_DISTRIBUTED_DEBUG, or set it to INFO",
        source="tests/faults/test_s7_odd_ranks.py shows it",
    ),
)
"""Dated, and each with a test: a defect of torch that is no more makes its test fail."""


def versions() -> dict[str, str]:
    """The installed versions, without importing anything."""
    return {package: version for package in PACKAGES if (version := _version(package)) is not None}


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def torch_works(facts: Facts) -> Iterator[Finding]:
    """Imports torch in a child process, and multiplies two matrices on each GPU."""
    found, failure = _probe()
    if failure:
        is_missing = "No module named 'torch'" in failure
        yield Finding.error(
            "torch is not installed here." if is_missing else "torch is installed here and does not work.",
            detail=f"{sys.executable}: {failure}",
            remedy="pip install torch" if is_missing else "pip install --force-reinstall torch, for this host",
        )
        return
    if not found["gloo"]:
        yield Finding.error(
            "This torch was built without torch.distributed or without gloo.",
            detail=f"torch {found['version']} in {found['file']}",
            remedy="pip install a release of torch",
        )
    installed = versions().get("torch")
    if installed is not None and installed.split("+")[0] != found["version"].split("+")[0]:
        yield Finding.error(
            "Another torch is imported than the one that is installed.",
            detail=f"imported {found['version']} from {found['file']}, installed {installed}",
            remedy="Take the other one out of PYTHONPATH and of the working directory",
        )
    for index, gpu in enumerate(found["gpus"]):
        if not gpu["computes"]:
            yield Finding.error(
                f"GPU {index} multiplies two matrices of whole numbers wrongly.",
                detail=gpu["name"],
                remedy="Take this GPU out of service (nvidia-smi -q -d ECC shows more)",
            )
        if gpu["free"] < 0.9 * gpu["total"]:
            yield Finding.warning(
                f"GPU {index} is in use by somebody else.",
                detail=f"{gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB are free",
                remedy="nvidia-smi shows the processes",
            )
    gpus = ", ".join(gpu["name"] for gpu in found["gpus"]) or "no GPU"
    nccl = f", NCCL {found['nccl']}" if found.get("nccl") else ""
    yield Finding.note(f"torch {found['version']} works.", detail=f"{gpus}{nccl}; {found['file']}")


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


_OPTIONAL = "deepspeed"  # everything but ResilientDeepSpeed works without it


def requirements(facts: Facts) -> Iterator[Finding]:
    """The installed versions against those that this package asks for."""
    try:
        from packaging.requirements import Requirement

        needed = [Requirement(line) for line in metadata.requires("lightning-distplus") or []]
    except (ImportError, metadata.PackageNotFoundError):
        return
    for one in needed:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        version, remedy = _version(one.name), f"pip install '{one.name}{one.specifier}'"
        if version is None and one.name != _OPTIONAL:
            yield Finding.error(f"{one.name} is not installed.", detail="lightning_distplus needs it", remedy=remedy)
        if version is not None and not one.specifier.contains(version, prereleases=True):
            yield Finding.error(
                f"{one.name} {version} does not fit: {one.specifier} is needed.",
                detail=f"lightning_distplus with {', '.join(f'{name} {found}' for name, found in versions().items())}",
                remedy=remedy,
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


# -- GPUs, as nvidia-smi tells -----------------------------------------------------------------------------------------

_DEADLINE_S = 20.0
_FIELDS = (
    "index", "name", "ecc.errors.uncorrected.volatile.total", "ecc.errors.uncorrected.aggregate.total",
    "clocks_throttle_reasons.hw_thermal_slowdown", "clocks_throttle_reasons.hw_power_brake_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown", "clocks.max.sm", "clocks.applications.graphics",
)  # fmt: skip
_LOW_SHARE = 0.7  # of the highest clock that may be set


def health(facts: Facts) -> Iterator[Finding]:
    """Errors of the memory since the last reset, and clocks that are held down by heat, power or settings."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):  # there is none
        return
    rows = [[part.strip() for part in line.split(",")] for line in ended.stdout.splitlines()]
    for gpu in (dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS)):
        name = f"GPU {gpu['index']} ({gpu['name']})"
        now, ever, highest, set_to = (_number(gpu[field]) for field in (*_FIELDS[2:4], *_FIELDS[-2:]))
        if now:
            yield Finding.error(
                f"{name} has {now:.0f} uncorrected errors of its memory since it was last reset.",
                detail=f"{'unknown' if ever is None else f'{ever:.0f}'} in its life",
                remedy="Take it out of service, or reset it: nvidia-smi -q -d ECC,ROW_REMAPPER shows more",
            )
        if reasons := [field.partition(".")[2] for field in _FIELDS if "throttle" in field and gpu[field] == "Active"]:
            yield Finding.warning(
                f"{name} is slowed down: every other rank waits for it.",
                detail=", ".join(reasons),
                remedy="Look at its cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
            )
        if highest and set_to and set_to < _LOW_SHARE * highest:
            yield Finding.warning(
                f"{name} is set to {set_to:.0f} MHz of {highest:.0f}.",
                remedy="nvidia-smi --reset-applications-clocks, where that is not meant",
            )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]": this GPU has none
        return None


DOCTOR_CHECKS: Mapping[str, Check] = {
    "torch": torch_works,
    "requirements": requirements,
    "defects": defects,
    **HOST_CHECKS,
    "gpu_health": health,
}
"""The same and those of the installation and of the GPUs, which a run does not make."""


# -- the lock of a checkpoint folder: which run writes there, and whether that run is still alive ----------------------

# A file below the folder tells host, process, job and time; its owner touches it every second. Where the owner lived on
# this host, its process is asked; elsewhere the file is watched. So a lock that a killed run has left is taken over,
# and nothing depends on the locks of a network file system.
#
# filelock's ``FileLock`` is a lock of an open file. Its ``SoftFileLease`` (3.30 and later) is touched as this one is,
# but takes the lease of a run that is only stopped, also on this host (measured: after 4.0 s). Its record has no room
# for job and attempt, by which a restart knows the lock of its own job.

_LOCK = Path(".distplus", "run.lock")
_BEAT_S = 1.0
_WATCH_S = 4.0
_LOOK_S = 0.1
_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock, as its file tells it."""

    version: int = 1
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=socket.gethostname)
    boot: str = field(default_factory=boot_id)
    pid: int = field(default_factory=os.getpid)
    started: int | None = field(default_factory=lambda: start_time(os.getpid()))
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    job: str = ""
    attempt: int = 0
    beat: int = 0
    """Counted up while the run lives: release 0.2.0 takes a lock for abandoned that does not count."""

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"host {self.host}, pid {self.pid}{job}, since {self.since}"


def _read(path: Path) -> tuple[Holder, int] | None:
    """Whose lock it is, and when it was last touched; None where there is none."""
    for _ in range(_ATTEMPTS):
        with suppress(ValueError, TypeError, AttributeError):  # it is being made
            try:
                with path.open("rb") as file:  # a network file system tells the time of an open file anew
                    told, touched_ns = json.loads(file.read()), os.fstat(file.fileno()).st_mtime_ns
            except FileNotFoundError:
                return None
            return Holder(**{name: value for name, value in told.items() if name in _NAMES}), touched_ns
        time.sleep(_LOOK_S)
    return Holder(token="", host="unknown", boot="", pid=0, started=None, since="unknown"), 0  # nobody's: it may go


_NAMES = frozenset(one.name for one in fields(Holder))


class RunLock:
    """Says that this run writes into a folder.

    Args:
        folder: Of the checkpoints; made when missing.
        job: The launcher's name of the job, or "".
        attempt: How often that job was restarted before.
    """

    def __init__(self, folder: Path, *, job: str = "", attempt: int = 0) -> None:
        self.path = folder / _LOCK
        self._folder = folder
        self._mine = Holder(job=job, attempt=attempt)
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> Iterator[Finding]:
        """Takes the lock; an error where a living run holds it. Waits at most four seconds, for a sign of life.

        Raises:
            OSError: The folder takes no file.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            with suppress(FileExistsError):
                with self.path.open("xb") as file:
                    file.write(json.dumps(asdict(self._mine)).encode())
                self._thread = threading.Thread(target=self._beat, name="distplus-run-lock", daemon=True)
                self._thread.start()
                return
            if (found := _read(self.path)) is None:
                continue  # released at this moment
            if evidence := self._evidence_of_life(*found):
                yield Finding.error(
                    f"Another run writes its checkpoints into {self._folder}: {found[0]}.",
                    detail=f"{evidence}; this run: {self._mine}",
                    remedy="Give each run its own default_root_dir or dirpath. Where both are meant to be one run, its "
                    "number of nodes was forgotten: Trainer(num_nodes=...), the same on every node",
                )
                return
            if self._remove(found[0]):
                subject = f"The lock of a run that ended without a word was taken over in {self._folder}."
                yield Finding.note(subject, detail=str(found[0]))
        yield Finding.warning(
            f"The lock of {self._folder} cannot be taken; this run goes on without it.",
            detail=f"{self.path} was there to be made and gone to be read, {_ATTEMPTS} times",
            remedy="Give each run its own default_root_dir or dirpath; where there is one run only, remove that file",
        )

    def release(self) -> None:
        """Gives the lock back where it is still ours; never raises."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join(timeout=10 * _BEAT_S)
            self._thread = None
            with suppress(OSError):
                if (found := _read(self.path)) is not None and found[0].token == self._mine.token:
                    self.path.unlink()

    def _evidence_of_life(self, other: Holder, touched_ns: int) -> str:
        """Why that run is alive, or "" where it is not."""
        is_same_boot = other.boot == self._mine.boot
        if is_same_boot and other.pid == os.getpid():
            return ""  # an earlier run of this process
        if other.job and other.job == self._mine.job and other.attempt < self._mine.attempt:
            return ""  # this is its restart
        if other.boot and is_same_boot:
            state = process_state(other.pid, other.started)
            if state is not ProcessState.UNKNOWN:
                return "" if state is ProcessState.GONE else f"process {other.pid} of this host is {state.value}"
        seen = {touched_ns}
        until = time.monotonic() + _WATCH_S
        while time.monotonic() < until:
            time.sleep(_LOOK_S)
            now = _read(self.path)
            if now is None or now[0].token != other.token:
                return ""
            seen.add(now[1])
            if len(seen) > 2:  # the first one may have been on its way
                return "its lock was touched twice meanwhile"
        return ""

    def _remove(self, other: Holder) -> bool:
        """Takes a dead lock away; of several that try, one succeeds, and a lock that was made meanwhile is put back."""
        aside = self.path.with_name(f"{self.path.name}.{self._mine.token}.old")
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return False
        found = _read(aside)
        is_dead = found is None or found[0].token == other.token
        if not is_dead:
            with suppress(OSError):
                self.path.hardlink_to(aside)
        aside.unlink()
        return is_dead

    def _beat(self) -> None:
        """Writes the lock anew until the end; says once where another run has taken it."""
        while not self._has_ended.wait(_BEAT_S):
            with suppress(OSError, ValueError, KeyError), self.path.open("r+b") as file:  # gone: the next save tells it
                found = json.loads(file.read())
                if found["token"] != self._mine.token:
                    log.error(
                        "another run has taken the folder %s over: host %s, pid %s; both write there now",
                        self._folder, found["host"], found["pid"],
                    )  # fmt: skip
                    return
                file.seek(0)
                file.write(json.dumps({**found, "beat": found["beat"] + 1}).encode())
