"""From a fault on one of two ranks to the name of the guilty one, and to the next training step, against others.

Each arm trains the same job below its own launcher, with the same deadline and one restart; torchft, which replaces no
process, has its own job, and trains on with the replica that is left. The rivals need an environment of their own, of
which ``DISTPLUS_RIVALS_PYTHON`` names the interpreter, else they are left out: torch 2.13.0, and then lightning 2.6.6,
nvidia-resiliency-ext 0.4.1 and torchft 0.2.0. So many jobs run at a time that each rank has a core: a restart is mostly
the import of torch and Lightning, which takes a core some five seconds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from pathlib import Path
from socket import socket

from benchmarks.figures import Figure, median
from lightning_distplus.process import children

__all__ = ["Outcome", "has_rivals", "measure", "run"]

_DEADLINE_S = 8.0
_FAULTS = ("stop", "hang", "kill")
_JOB = Path(__file__).parent / "hang_job.py"
_TORCHFT_JOB = _JOB.with_name("hang_torchft.py")
# Below `distplus launch` in place of `distplus fit`: the job finds its checkpoint by itself.
_LAUNCH = """
import sys
from lightning_distplus.cli import launch
launch.resuming = lambda command: lambda has_saved: command
sys.exit(launch.main(sys.argv[1:]))
"""
_RIVALS = ("nvrx", "torchft")
_AT_ONCE = max(1, len(os.sched_getaffinity(0)) // 2)
_LONGEST_S = 90.0
_LONGEST_TORCHFT_S = 45.0
# How the monitors of NVIDIA's launcher speak of a rank that they have found silent.
_FLAGGED = re.compile(r"RankMonServer\d+@[^:]*:(\d+)\] Did not get \w+ heartbeat")


@dataclass(frozen=True)
class Outcome:
    """What one run has shown; seconds after the fault, None where it did not come."""

    detected_s: float | None
    training_s: float | None
    named: list[int]


def run(quick: bool) -> list[Figure]:
    """Three runs of each fault and arm (quick: one)."""
    arms = ("ours", "stock", *(("nvrx", "torchft") if has_rivals() else ()))
    cases = [(arm, fault) for _ in range(1 if quick else 3) for fault in _FAULTS for arm in arms]
    with ThreadPoolExecutor(_AT_ONCE) as at_once:
        seen = list(zip(cases, at_once.map(_measure, cases), strict=True))
    return [
        figure
        for arm in arms
        for fault in _FAULTS
        for figure in _figures(arm, fault, [outcome for case, outcome in seen if case == (arm, fault)])
    ]


def _measure(case: tuple[str, str]) -> Outcome:
    arm, fault = case
    return measure(arm, fault, _LONGEST_TORCHFT_S if arm == "torchft" else _LONGEST_S)


def _figures(arm: str, fault: str, outcomes: list[Outcome]) -> list[Figure]:
    named = "; ".join(sorted({str(outcome.named or "nobody") for outcome in outcomes}))
    bound_s = 1.0 if fault != "kill" else 2.0 - _DEADLINE_S

    def figure(what: str, values: list[float | None], target: float | None, note: str) -> Figure:
        seen = [value for value in values if value is not None]
        value = median(seen) if len(seen) == len(values) else float("inf")
        return Figure(name=f"{arm}, {fault}: {what}", value=value, unit="s", target=target, note=note)

    is_ours = arm == "ours"
    return [
        figure(
            "detected", [one.detected_s for one in outcomes], _DEADLINE_S + bound_s if is_ours else None,
            f"named: {named}; {len(outcomes)} runs",
        ),
        figure(
            "training again", [one.training_s for one in outcomes], _DEADLINE_S + 8.0 if is_ours else None,
            f"deadline {_DEADLINE_S:g} s",
        ),
    ]  # fmt: skip


def measure(arm: str, fault: str, longest_s: float = _LONGEST_S, after_fault_s: float = inf) -> Outcome:
    """One run of one arm with one fault; the arms "warm" and "cold" are ours below ``distplus launch --start``.

    Args:
        arm: Whose launcher and strategy.
        fault: What happens to rank 1.
        longest_s: How long the run may take.
        after_fault_s: How long after its fault it is given up.
    """
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        home = Path(folder)
        output = home / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [
                    *_launcher(arm, home), *([] if arm == "torchft" else [str(_JOB), arm]), fault, folder,
                    str(_DEADLINE_S),
                ],
                stdout=file, stderr=subprocess.STDOUT, cwd=_JOB.parents[1], env=_environment(arm),
            )  # fmt: skip
            flagged_at = _watch(process, home, output if arm == "nvrx" else None, longest_s, after_fault_s)
        return _outcome(home, output.read_text(), flagged_at)


def _watch(
    process: subprocess.Popen[bytes], home: Path, output: Path | None, longest_s: float, after_fault_s: float
) -> float | None:
    """Waits until a later attempt trains, then ends the job; when the launcher first spoke of a silent rank."""
    flagged_at, end = None, time.time() + longest_s
    while process.poll() is None and time.time() < end:
        if output is not None and flagged_at is None and _FLAGGED.search(output.read_text()):
            flagged_at = time.time()
        journal = _journal(home)
        if any(what == "step" and attempt > 0 for _, what, _, attempt in journal):
            break
        if any(what == "fault" and at + after_fault_s < time.time() for at, what, _, _ in journal):
            for rank in children(process.pid):  # torchrun would wait for them for 30 s
                os.kill(rank, signal.SIGKILL)
            break
        time.sleep(0.05)
    process.terminate()
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return flagged_at


def _outcome(home: Path, output: str, flagged_at: float | None) -> Outcome:
    journal = _journal(home)
    fault_at = next(at for at, what, _, _ in journal if what == "fault")
    verdicts = list(home.glob("distplus/verdict-*.json"))
    detected = [at for at, what, _, _ in journal if what == "error"] + [path.stat().st_mtime for path in verdicts]
    detected += [] if flagged_at is None else [flagged_at]
    trained = [at for at, what, _, attempt in journal if what == "step" and attempt > 0]
    named = {rank for path in verdicts for rank in json.loads(path.read_text())["culprits"]}
    named |= {int(rank) for rank in re.findall(r"[Pp]rocess of rank (\d+) \(host", output)}
    if flagged_at is not None:
        named |= {int(rank) for rank in _FLAGGED.findall(output)}
    return Outcome(
        detected_s=min(detected) - fault_at if detected else None,
        training_s=min(trained) - fault_at if trained else None,
        named=sorted(named),
    )


def _journal(home: Path) -> list[tuple[float, str, int, int]]:
    lines = [line.split() for path in home.glob("journal-*") for line in path.read_text().splitlines(keepends=True)]
    return sorted((float(at), what, int(rank), int(attempt)) for at, what, rank, attempt, _ in lines)


def _launcher(arm: str, home: Path) -> list[str]:
    if arm in ("warm", "cold"):
        options = ["--nproc", "2", "--max-restarts", "1", "--start", arm, "--log-dir", str(home / "logs")]
        return [sys.executable, "-c", _LAUNCH, *options, "--"]
    python = _rivals_python() if arm in _RIVALS else sys.executable
    if arm == "torchft":
        return [python, str(_TORCHFT_JOB)]
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--nproc-per-node", "2", "--nnodes", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    arguments += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    if arm != "nvrx":
        return [python, "-m", "torch.distributed.run", *arguments]
    silent = [f"--ft-rank-heartbeat-timeout={_DEADLINE_S}", "--ft-initial-rank-heartbeat-timeout=60"]
    return [
        python, str(Path(python).parent / "ft_launcher"), *arguments, *silent, "--ft-workload-check-interval=0.5",
        "--ignore-missing-fault-tol-cfg",
    ]  # fmt: skip


def has_rivals() -> bool:
    """Whether there is an environment for them."""
    return bool(_rivals_python())


def _rivals_python() -> str:
    return os.environ.get("DISTPLUS_RIVALS_PYTHON", "")


def _environment(arm: str) -> dict[str, str]:
    changed = {"PYTHONPATH": "" if arm in _RIVALS else str(_JOB.parents[1]), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **changed}
