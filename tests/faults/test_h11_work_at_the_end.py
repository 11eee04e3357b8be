"""Row H11: a rank that works alone at the end finishes; one that hangs or raises there is heard by all."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from lightning_distplus.testing.faults import Fault, commit
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, side_by_side
from tests.pairs import kept

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

DEADLINE_S = 1.5
LONG_S = 3 * DEADLINE_S
TEARDOWN_S = 5.0


class AtTheEnd(Callback):
    """One rank does something in one of the last hooks."""

    def __init__(self, hook: str, rank: int, deed: Callable[[], object]) -> None:
        self.hook, self.rank, self.deed = hook, rank, deed
        setattr(self, hook, self._do)

    def _do(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_rank == self.rank:
            Path(trainer.default_root_dir, "begun").touch()
            self.deed()
            Path(trainer.default_root_dir, "finished").touch()


def long_work() -> None:
    time.sleep(LONG_S)


def hang() -> None:
    time.sleep(1000)


def hold_the_lock() -> None:
    commit(Fault(kind="hang_gil", rank=1, step=0), None, None)


def raise_planted() -> None:
    raise RuntimeError("the planted error")


def run(name: str, hook: str, rank: int, deed: Callable[[], object], teardown_s: float | None, folder: str) -> None:
    timeouts = {"step": DEADLINE_S, "validation": DEADLINE_S, "setup": "60s", "report_after": 1.0}
    if teardown_s is not None:
        timeouts["teardown"] = teardown_s
    trainer = jobs.trainer(
        name,
        2,
        folder,
        timeout=timeouts,
        max_steps=4,
        limit_test_batches=2,
        limit_predict_batches=2,
        callbacks=[AtTheEnd(hook, rank, deed)],
    )
    {"on_test_end": trainer.test, "on_predict_end": trainer.predict}.get(hook, trainer.fit)(jobs.Model(), jobs.loader())


def ended(*what: Any, folder: Path, mode: Any = "forkserver", teardown_s: float | None = None) -> SpawnResult:
    result = spawn(run, 2, args=(*what, teardown_s, str(folder)), mode=mode, deadline="60s")
    assert (folder / "begun").exists(), result.logs
    return result


# Each strategy, hook and launcher once; rank 0 serves the store, or the other one works.
WORK = {
    "DDP, on_train_end": ("ResilientDDP", "on_train_end", 0),
    "FSDP, on_fit_end": ("ResilientFSDP", "on_fit_end", 1),
    "FSDP2, on_train_end": ("ResilientModelParallel", "on_train_end", 1),
    "ZeRO, teardown": ("ResilientDeepSpeed", "teardown", 0),
    "DDP, on_test_end": ("ResilientDDP", "on_test_end", 0),
    "DDP, on_predict_end": ("ResilientDDP", "on_predict_end", 1),
    "torchrun": ("ResilientDDP", "on_train_end", 1),
    "lightning": ("ResilientDDP", "on_train_end", 1),
}
HOOKS = ("on_train_end", "on_fit_end", "teardown")


def long_one(what: str, folder: Path) -> SpawnResult:
    mode = what if what in ("torchrun", "lightning") else "forkserver"
    return ended(*WORK[what], long_work, folder=folder, mode=mode)


def failing(hook: str, folder: Path) -> SpawnResult:
    return ended("ResilientDDP", hook, HOOKS.index(hook) % 2, raise_planted, folder=folder)


def hanging(deed: Callable[[], object], folder: Path) -> tuple[SpawnResult, Path]:
    return ended("ResilientDDP", "on_fit_end", 1, deed, folder=folder, teardown_s=TEARDOWN_S), folder


CALLS: dict[str, Callable[[Path], Any]] = {
    **{what: partial(long_one, what) for what in WORK},
    **{f"raises in {hook}": partial(failing, hook) for hook in HOOKS},
    "hangs": partial(hanging, hang),
    "holds the lock": partial(hanging, hold_the_lock),
}
SELDOM = ("DDP, on_test_end", "lightning", "raises in on_fit_end")
runs = side_by_side(CALLS, [what for what in CALLS if what not in SELDOM])


@pytest.mark.parametrize("what", kept([*WORK], [what for what in WORK if what not in SELDOM]))
def test_a_rank_that_works_alone_at_the_end_finishes_and_nobody_is_blamed(what: str, runs: Runs) -> None:
    result = runs(what).check()
    assert not any("RANK " in log or "ends alone" in log for log in result.logs.values())


@pytest.mark.parametrize("hook", kept(HOOKS, ["on_train_end", "teardown"]))
def test_an_error_in_the_last_hooks_of_one_rank_ends_all_and_each_shows_it(hook: str, runs: Runs) -> None:
    result = runs(f"raises in {hook}")
    guilty = HOOKS.index(hook) % 2
    assert result.exit_codes == {guilty: 1, 1 - guilty: int(ExitCode.PEER_LOST)}
    assert all("the planted error" in log for log in result.logs.values())


@pytest.mark.parametrize("how", ["hangs", "holds the lock"])
def test_a_rank_that_hangs_alone_at_the_end_is_reported_and_ended_by_the_teardown_deadline(
    how: str, runs: Runs
) -> None:
    result, folder = runs(how)
    assert result.alive == {}
    verdict = jobs.verdict_in(folder)
    assert (verdict["kind"], verdict["culprits"]) == ("hang", [1])
    assert verdict["elapsed_s"] >= TEARDOWN_S - 1
    assert result.exit_codes[0] == int(ExitCode.HANG)
    assert any("no progress for" in log for log in result.logs.values())
    if how == "hangs":
        assert result.exit_codes[1] == int(ExitCode.HANG)
        assert "on_fit_end" in verdict["operation"]
