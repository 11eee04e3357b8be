"""What a check is given, what it says, and how checks are run."""

from __future__ import annotations

import logging
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from lightning_distplus import env
from lightning_distplus.env import Variable
from lightning_distplus.errors import PreflightError


class Status(str, Enum):
    """How much a finding matters."""

    ERROR = "error"
    """The run would fail, hang or be wrong: it does not start."""
    WARNING = "warning"
    """The run can start, and somebody should look."""
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

    @classmethod
    def error(cls, subject: str, **rest: str) -> Finding:
        """What ends the run before it starts."""
        return cls(status=Status.ERROR, subject=subject, **rest)

    @classmethod
    def warning(cls, subject: str, **rest: str) -> Finding:
        """What somebody should look at."""
        return cls(status=Status.WARNING, subject=subject, **rest)

    @classmethod
    def note(cls, subject: str, **rest: str) -> Finding:
        """Something to know."""
        return cls(status=Status.NOTE, subject=subject, **rest)

    def under(self, wish: Literal["off", "warn"] | None) -> Finding | None:
        """The same as somebody wants it: not at all, or an error as a warning."""
        status = Status.WARNING if wish == "warn" and self.status is Status.ERROR else self.status
        return None if wish == "off" else replace(self, status=status)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "status": self.status.value}

    def __str__(self) -> str:
        seen = f"\n  seen: {self.detail}" if self.detail else ""
        return self.subject + seen + (f"\n  do:   {self.remedy}" if self.remedy else "")


# -- what checks are given ---------------------------------------------------------------------------------------------

_PSEUDO_STEPS = 0xFFFF0000  # Slurm's batch, extern and interactive steps have ids above: srun started no tasks there


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a check may look at. Where there is no Trainer (``distplus doctor``), its fields keep their defaults."""

    variables: Mapping[str, str] = field(default_factory=env.snapshot)
    """The environment of this process."""
    devices: int | None = None
    """Processes per node that the Trainer expects."""
    num_nodes: int | None = None
    environment: str = ""
    """Class of the cluster environment that Lightning has chosen."""
    started: int | None = None
    """Processes that the launcher started, by that environment; None where Lightning starts them itself."""
    rank: int | None = None
    """Rank of this process, by that environment; None where it cannot tell."""
    accelerator: str = ""
    """``"cuda"``, ``"cpu"`` and so on."""
    folder: Path = field(default_factory=Path.cwd)
    trial_bytes: int = 64 << 20
    """How much the check of that folder writes, at most."""
    command: tuple[str, ...] = field(default_factory=lambda: _without_interpreter(sys.orig_argv))
    """What was started, without the interpreter and its options, so that torchrun takes it too."""
    spans_hosts: bool = False
    """Whether ranks run on other hosts as well; False where that is not known."""
    host: str = field(default_factory=socket.gethostname)

    def text(self, variable: Variable) -> str | None:
        """The value of a variable, or None where it is unset or empty."""
        return self.variables.get(variable.name) or None

    def number(self, variable: Variable) -> int | None:
        """The value as an integer, or None where it is unset or is none."""
        text = self.text(variable)
        return int(text) if text is not None and text.isdecimal() else None

    def shown(self, *variables: Variable) -> str:
        """Names and values, for a message: ``RANK=3, LOCAL_RANK unset``."""
        values = {variable.name: self.text(variable) for variable in variables}
        return ", ".join(f"{name} unset" if value is None else f"{name}={value}" for name, value in values.items())

    @property
    def world_size(self) -> int | None:
        """Processes that the Trainer expects."""
        return None if self.devices is None or self.num_nodes is None else self.devices * self.num_nodes

    @property
    def is_in_srun_step(self) -> bool:
        """Whether srun started this process; a batch script has the job's variables and no step of its own."""
        step = self.number(env.SLURM_STEP_ID)
        return step is not None and step < _PSEUDO_STEPS

    @property
    def launcher(self) -> str:
        """Who started this process, and how we know: by what only that launcher sets; the innermost one."""
        if self.text(env.TORCHELASTIC_RUN_ID):
            return "torchrun (TORCHELASTIC_RUN_ID is set)"
        if self.text(env.OMPI_COMM_WORLD_SIZE):
            return "mpirun (OMPI_COMM_WORLD_SIZE is set)"
        if self.is_in_srun_step:
            return "srun (SLURM_STEP_ID is set)"
        if self.text(env.PMI_SIZE):
            return "mpirun (PMI_SIZE is set)"
        if self.text(env.CROSS_SIZE):
            return "the DeepSpeed launcher (CROSS_SIZE is set, TORCHELASTIC_RUN_ID is not)"
        if self.text(env.LOCAL_RANK):
            return "a launcher that sets LOCAL_RANK (as Lightning does for the processes that it starts)"
        if self.text(env.RANK) and self.text(env.WORLD_SIZE):
            return "a Kubernetes job (RANK and WORLD_SIZE are set, LOCAL_RANK is not: PyTorchJob does so)"
        if self.text(env.SLURM_JOB_ID):
            return "plain python in a Slurm job (SLURM_JOB_ID is set, and SLURM_STEP_ID of an srun is not)"
        return "plain python (no launcher's variable is set)"

    def as_lightning_sees_it(self) -> dict[str, Any]:
        """Environment, processes and rank as Lightning would detect them here; for where there is no Trainer."""
        if self.text(env.TORCHELASTIC_RUN_ID):
            name, started, rank = "TorchElasticEnvironment", self.number(env.WORLD_SIZE), self.number(env.RANK)
        elif self.text(env.SLURM_NTASKS) and self.text(env.SLURM_JOB_NAME) not in ("bash", "interactive"):
            name, started, rank = "SLURMEnvironment", self.number(env.SLURM_NTASKS), self.number(env.SLURM_PROCID)
        else:
            name, local = "LightningEnvironment", self.number(env.LOCAL_RANK) or 0
            started = self.number(env.WORLD_SIZE) if self.text(env.LOCAL_RANK) is not None else None
            node = self.number(env.NODE_RANK) or self.number(env.GROUP_RANK) or 0
            rank = node * (self.devices or 1) + local
        return {"environment": name, "started": started, "rank": rank}

    def describe(self) -> str:
        """One line for reports: who this process is and who started it, with the variables read."""
        place = "" if self.rank is None else f", rank {self.rank}"
        size = f" of {self.world_size}" if place and self.world_size is not None else ""
        read = self.shown(*(variable for variable in env.LAUNCH_VARIABLES if self.text(variable) is not None))
        return f"host {self.host}{place}{size}; started by {self.launcher}; variables: {read or 'none'}"

    # -- commands for remedies ---------------------------------------------------------------------------------------

    def torchrun(self, node_rank: str = "$NODE_RANK", address: str = "<host of node 0>", port: str = "29500") -> str:
        """The torchrun line for this run; on one node it needs no address."""
        devices, nodes = self.devices or 1, self.num_nodes or 1
        if nodes == 1:
            return f"torchrun --standalone --nproc-per-node {devices} {self._script}"
        return (
            f"torchrun --nnodes {nodes} --nproc-per-node {devices} --node-rank {node_rank} --master-addr {address} "
            f"--master-port {port} {self._script}"
        )

    def srun(self) -> str:
        """The srun line for this run."""
        return f"srun --nodes {self.num_nodes or 1} --ntasks-per-node {self.devices or 1} python {self._script}"

    @property
    def _script(self) -> str:
        return shlex.join(self.command) if self.command else "train.py"


def _without_interpreter(command: Sequence[str]) -> tuple[str, ...]:
    """``python -u -X dev train.py`` is ``train.py``; ``-m`` and its module stay."""
    place = 1
    while place < len(command) and command[place].startswith("-") and command[place] not in ("-", "-m", "-c"):
        place += 2 if command[place] in ("-W", "-X") else 1
    return tuple(command[place:])


# -- how checks are run ------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
Check = Callable[[Facts], Iterable[Finding]]
"""``def my_check(facts: Facts) -> Iterable[Finding]``; it looks, changes nothing, and needs at most a second."""
Settings = Mapping[str, Literal["off", "warn"]]
"""By the name of a check: not run at all, or its errors are warnings."""


def run_checks(
    checks: Mapping[str, Check], facts: Facts, settings: Settings | None = None, *, deadline: timedelta | None = None
) -> list[Finding]:
    """Runs the checks in their order and names each finding after its check.

    A check that raises is a warning, not the end of the run: it is our bug, or that of its author. So is one that has
    not ended at the deadline of all: a folder that hangs must not hold the run up unheard. Its thread is left alone.
    """
    end = None if deadline is None else time.monotonic() + deadline.total_seconds()
    findings: list[Finding] = []
    for name, check in checks.items():
        wish = (settings or {}).get(name)
        found = [] if wish == "off" else _found_by(name, check, facts, end)
        findings += [replace(one, check=name) for finding in found if (one := finding.under(wish)) is not None]
    return findings


def _found_by(name: str, check: Check, facts: Facts, end: float | None) -> list[Finding]:
    found: list[Finding] = []
    switch = f'switch it off: preflight={{"{name}": "off"}}.'

    def make() -> None:
        try:
            found.extend(list(check(facts)))
        except Exception as error:
            subject, remedy = f"The check {name!r} could not be made.", f"If it always fails here, {switch}"
            found.append(Finding.warning(subject, detail=f"{type(error).__name__}: {error}", remedy=remedy))

    if end is None:
        make()
        return found
    thread = threading.Thread(target=make, name=f"distplus-check-{name}", daemon=True)
    thread.start()
    thread.join(max(0.0, end - time.monotonic()))
    remedy = f"Look at what it looks at; a file system that hangs? Or {switch}"
    late = Finding.warning(f"The check {name!r} had not ended at the deadline of all checks.", remedy=remedy)
    return [late] if thread.is_alive() else found


def raise_errors(findings: Iterable[Finding], facts: Facts) -> None:
    """Logs what is no error, and raises one ``PreflightError`` with everything that is.

    Raises:
        PreflightError: What is wrong, the evidence, the remedy, and who this process is.
    """
    findings = list(findings)
    levels = {Status.WARNING: logging.WARNING, Status.NOTE: logging.INFO}
    for finding in findings:
        if finding.status in levels:
            log.log(levels[finding.status], "preflight (%s): %s", finding.check, finding)
    errors = [finding for finding in findings if finding.status is Status.ERROR]
    if errors:
        names = ", ".join(f'"{name}": "off"' for name in dict.fromkeys(error.check for error in errors))
        told = "\n".join(map(str, errors))
        raise PreflightError(f"{told}\n  here: {facts.describe()}\n  (if this is a mistake: preflight={{{names}}})")
