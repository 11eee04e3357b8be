"""Row H11: a rank that works alone at the end finishes; one that hangs or raises there is heard by all."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import SpawnResult, spawn
from lightning_distplus.testing.faults import Fault, commit
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, side_by_side
from tests.pairs import kept

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

DEADLINE_S = 1.5
TEARDOWN_S = 5.0


def raise_planted() -> None:
    raise RuntimeError("the planted error")


DEEDS: dict[str, Callable[[], object]] = {
    "works": lambda: time.sleep(3 * DEADLINE_S),
    "hangs": lambda: time.sleep(1000),
    "holds the lock": lambda: commit(Fault(kind="hang_gil", rank=1, step=0), None, None),
    "raises": raise_planted,
}


def run(deed: str, name: str, hook: str, rank: int, folder: str) -> None:
    """One rank does something in one of the last hooks."""

    def begin(*_: Any, **__: Any) -> None:
        Path(folder, "begun").touch()
        DEEDS[deed]()

    timeouts = {"step": DEADLINE_S, "validation": DEADLINE_S, "setup": "60s", "report_after": 1.0}
    if deed in ("hangs", "holds the lock"):
        timeouts["teardown"] = TEARDOWN_S
    named = {"max_steps": 4, "limit_test_batches": 2, "limit_predict_batches": 2, "timeout": timeouts}
    trainer = jobs.trainer(name, 2, folder, callbacks=[jobs.At(hook, begin, rank=rank)], **named)
    {"on_test_end": trainer.test, "on_predict_end": trainer.predict}.get(hook, trainer.fit)(jobs.Model(), jobs.loader())


def ended(*what: Any, folder: Path, mode: Any = "forkserver") -> tuple[SpawnResult, Path]:
    result = spawn(run, 2, args=(*what, str(folder)), mode=mode, deadline="60s")
    assert (folder / "begun").exists(), result.logs
    return result, folder


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
GUILTY = {"on_train_end": 0, "on_fit_end": 1, "teardown": 0}
CALLS: dict[str, Callable[..., tuple[SpawnResult, Path]]] = {
    **{what: partial(ended, "works", *WORK[what]) for what in WORK},
    **{what: partial(ended, "works", *WORK[what], mode=what) for what in ("torchrun", "lightning")},
    **{f"raises in {hook}": partial(ended, "raises", "ResilientDDP", hook, rank) for hook, rank in GUILTY.items()},
    **{how: partial(ended, how, "ResilientDDP", "on_fit_end", 1) for how in ("hangs", "holds the lock")},
}
SELDOM = ("DDP, on_test_end", "lightning", "raises in on_fit_end")
runs = side_by_side(
    {what: lambda folder, call=call: call(folder=folder) for what, call in CALLS.items()},
    [what for what in CALLS if what not in SELDOM],
)


@pytest.mark.parametrize("what", kept([*WORK], [what for what in WORK if what not in SELDOM]))
def test_a_rank_that_works_alone_at_the_end_finishes_and_nobody_is_blamed(what: str, runs: Runs) -> None:
    result, _ = runs(what)
    assert not any("RANK " in log or "ends alone" in log for log in result.check().logs.values())


@pytest.mark.parametrize("hook", kept([*GUILTY], ["on_train_end", "teardown"]))
def test_an_error_in_the_last_hooks_of_one_rank_ends_all_and_each_shows_it(hook: str, runs: Runs) -> None:
    result, _ = runs(f"raises in {hook}")
    assert result.exit_codes == {GUILTY[hook]: 1, 1 - GUILTY[hook]: int(ExitCode.PEER_LOST)}
    assert all("the planted error" in log for log in result.logs.values())


@pytest.mark.parametrize("how", ["hangs", "holds the lock"])
def test_a_rank_that_hangs_alone_at_the_end_is_reported_and_ended_by_the_teardown_deadline(
    how: str, runs: Runs
) -> None:
    result, folder = runs(how)
    assert result.alive == {}
    verdict = jobs.verdict_in(folder, "hang", [1])
    assert verdict["elapsed_s"] >= TEARDOWN_S - 1
    assert result.exit_codes[0] == int(ExitCode.HANG)
    assert any("no progress for" in log for log in result.logs.values())
    if how == "hangs":
        assert result.exit_codes[1] == int(ExitCode.HANG)
        assert "on_fit_end" in verdict["operation"]
