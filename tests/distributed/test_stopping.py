"""SIGTERM on any subset of ranks: all ranks stop at the same step, and no rank waits in a collective."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_distplus.testing import spawn
from tests.distributed import jobs


class Terminate(Callback):
    """Sends SIGTERM to this process when the third step ends."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.batches: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(trainer.global_step)
        if trainer.global_step == 3 and trainer.global_rank in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_until_terminated(name: str, ranks: tuple[int, ...], folder: str) -> tuple[str, int]:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    arguments: dict[str, Any] = {"stage": 2} if "DeepSpeed" in name else {}
    arguments["preemption"] = False  # what is tested is the stop without a handler, which raises another error
    trainer = jobs.trainer(
        jobs.strategy(name, timeout="20s", **arguments), 2, folder, max_steps=50, callbacks=[Terminate(ranks)]
    )
    try:
        trainer.fit(jobs.Model(), jobs.loader())
    except SIGTERMException as stopped:
        return type(stopped).__name__, trainer.global_step
    return "finished", trainer.global_step


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_a_sigterm_on_any_ranks_stops_all_of_them_at_the_same_step(ranks: tuple[int, ...], tmp_path: Path) -> None:
    run = spawn(fit_until_terminated, 2, args=("ResilientDDP", ranks, str(tmp_path)), deadline="30s").check()
    assert set(run.results.values()) == {("SIGTERMException", 3)}


@pytest.mark.parametrize("name", jobs.STRATEGIES[1:])
def test_every_strategy_stops_together_on_a_sigterm_to_rank_1(name: str, tmp_path: Path) -> None:
    run = spawn(fit_until_terminated, 2, args=(name, (1,), str(tmp_path)), deadline="30s").check()
    assert set(run.results.values()) == {("SIGTERMException", 3)}


def handlers_after_fit(folder: str) -> bool:
    def mine(signum: int, frame: Any) -> None:
        received.append(signum)

    received: list[int] = []
    signal.signal(signal.SIGTERM, mine)
    jobs.trainer(jobs.strategy("ResilientDDP"), 2, folder, max_steps=2).fit(jobs.Model(), jobs.loader())
    return signal.getsignal(signal.SIGTERM) is mine


def test_a_users_signal_handler_is_back_after_the_run(tmp_path: Path) -> None:
    assert spawn(handlers_after_fit, 2, args=(str(tmp_path),)).check().results == {0: True, 1: True}
