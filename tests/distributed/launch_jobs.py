"""A run that ``distplus launch`` starts, as ``python -m tests.distributed.launch_jobs``, in the place of ``fit``."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_distplus import PreemptionHandler, newest_valid
from lightning_distplus.data import SampleAudit
from lightning_distplus.errors import install_exit_codes
from lightning_distplus.testing import FaultCallback, FaultPlan, spawn, weights_digest
from tests.distributed.preemption_jobs import STEPS, make, train
from tests.processes import LAUNCH, start

JOB = ["--no-resume", "-m", "tests.distributed.launch_jobs"]  # it finds its checkpoint by itself


def planted(plan: FaultPlan | None, folder: Path) -> dict[str, str]:
    """This process's variables, with the faults for the ranks that are started."""
    told = {} if plan is None else {"DISTPLUS_FAULTS": FaultPlan(plan.faults, str(folder / "faults")).to_json()}
    return {**os.environ, **told}


def launch(
    folder: Path,
    *job: str,
    options: tuple[str, ...] = (),
    plan: FaultPlan | None = None,
    then: Callable[[subprocess.Popen[str]], object] = lambda launcher: None,
) -> tuple[int, str]:
    """Launches this job on two ranks; the exit code, and what the launcher wrote."""
    log, command = folder / "launcher.log", [*LAUNCH, "--nproc", "2", "--log-dir", folder / "logs", *options, *JOB]
    launcher = start(*command, folder, *job, log=log, env=planted(plan, folder))
    try:
        then(launcher)
        return launcher.wait(timeout=380), log.read_text()
    finally:
        launcher.kill()


def results(folder: Path) -> list[dict[str, object]]:
    """What both ranks have come to."""
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]


@functools.cache
def undisturbed() -> list[dict[str, object]]:
    """What both ranks come to where nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        run = spawn(train, 2, args=("ResilientDDP", folder, None, {}), deadline="120s").check()
    return [{"weights": run.results[rank]["weights"], "step": STEPS} for rank in (0, 1)]


class Poison(Callback):
    """No rank can stand a sample that rank 1 meets in one step, however often, and wherever, it is met again."""

    def __init__(self, folder: str, step: int, effect: str) -> None:
        self.sample = Path(folder, "poison")
        self.step = step
        self.effect = effect

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        ids = [str(int(one)) for one in batch[:, 0]]
        if (trainer.global_rank, trainer.global_step) == (1, self.step) and not self.sample.exists():
            self.sample.write_text(ids[0])
        if self.sample.exists() and self.sample.read_text() in ids:
            if self.effect == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("this batch is poison")


def main(folder: str, slow_s: str = "0", poisoned_step: str = "-1", effect: str = "raise") -> None:
    install_exit_codes()
    callbacks = [PreemptionHandler(), FaultCallback(), SampleAudit(), Poison(folder, int(poisoned_step), effect)]
    num_nodes = int(os.environ.get("SLURM_NNODES") or os.environ.get("GROUP_WORLD_SIZE") or 1)
    world_size = int(os.environ.get("SLURM_NTASKS") or os.environ["WORLD_SIZE"])
    nodes: dict[str, Any] = {"num_nodes": num_nodes, "world_size": 1} if num_nodes > 1 else {"world_size": world_size}
    if world_size == 1:  # the same global batch, and validation after the same samples
        nodes |= {"accumulate_grad_batches": 2, "val_check_interval": 6}
    trainer, model, data = make("ResilientDDP", folder, callbacks, **nodes)
    trainer.checkpoint_callbacks[0]._every_n_train_steps = 1
    model.slow_s = float(slow_s)
    found = newest_valid(Path(folder) / "checkpoints")
    how = "warm" if b"launch.warm" in Path("/proc/self/cmdline").read_bytes() else "cold"
    Path(folder, f"began-{trainer.global_rank}-{time.time()}").write_text(how)
    trainer.fit(model, datamodule=data, ckpt_path=str(found) if found else None)
    result = {"weights": weights_digest(model), "step": trainer.global_step}
    Path(folder, f"result-{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*itertools.takewhile(lambda word: word != "--ckpt_path", sys.argv[1:]))  # it finds its checkpoint by itself
