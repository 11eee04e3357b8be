"""Rows D1 and P6, with nothing but the strategy: what ``Trainer(strategy=Resilient...())`` brings by itself."""

from __future__ import annotations

import json
import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_distplus import PreemptionHandler, RankDivergenceMonitor, newest_valid, verify
from lightning_distplus.errors import ExitCode
from lightning_distplus.events import read_events
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs
from tests.faults.divergences import own_loader
from tests.faults.strangers import EXCEPTION, HANG, LINES, NAN, run_script, script_of
from tests.pairs import kept, kept_rows
from tests.processes import LAUNCH

STEP, STEPS = 4, 12
STRATEGIES = ("ResilientDDP", "ResilientFSDP", "ResilientModelParallel", "zero2")

# -- a script of a stranger --------------------------------------------------------------------------------------------

SIGTERM = "rank == 1 and os.kill(os.getpid(), signal.SIGTERM)"
KILLED_ONCE = "rank == 1 and os.environ.get('DISTPLUS_ATTEMPT') == '0' and os.kill(os.getpid(), 9)"
ENDS = {
    NAN: (ExitCode.DIVERGENCE, "Rank 1 has a loss that is not finite in step 7"),
    SIGTERM: (ExitCode.PREEMPTED, ""),
    HANG: (ExitCode.HANG, "RANK 1 HANGS"),
    EXCEPTION: (ExitCode.PEER_LOST, "RANK 1 FAILED"),
}


# In each commit test_h1_h2_last_lines runs scripts that hang and that raise.
SCRIPTS = [(NAN, "ddp"), (SIGTERM, "fsdp2")]


@pytest.mark.parametrize(("fault", "name"), kept_rows([*product(ENDS, LINES)], SCRIPTS), ids=lambda one: one[:12])
def test_a_fault_in_a_strangers_script_ends_it_as_the_table_says(fault: str, name: str, tmp_path: Path) -> None:
    ended = run_script(tmp_path, script_of(fault, 'timeout={"step": "5s"}', name))
    code, says = ENDS[fault]
    assert ended.returncode == code, ended.stdout
    assert says in ended.stdout
    assert "the script goes on" not in ended.stdout
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("distplus: ")]
    assert line == (
        f"distplus: {LINES[name].partition('(')[0]} on 2 ranks, step deadline 5s, divergence monitor on, SIGTERM saves "
        "to lightning_logs/version_0/checkpoints, data: exact resume (DataLoader), events in distplus"
    )
    if fault == SIGTERM:
        (saved,) = tmp_path.glob("lightning_logs/version_*/checkpoints/preempt-step=8.ckpt")
        assert verify(saved).ok
        assert f'the same command with ckpt_path="{saved}" goes on' in ended.stdout  # "auto" does not look there
    else:
        (verdict,) = (tmp_path / "distplus").glob("verdict-*.json")
        assert json.loads(verdict.read_text())["culprits"] == [1]


@pytest.mark.soak  # in each commit test_p4_p8_scripts kills a script, and test_installed that of the README
@pytest.mark.parametrize("name", list(LINES))
def test_a_strangers_script_whose_rank_is_killed_goes_on_from_its_last_checkpoint(name: str, tmp_path: Path) -> None:
    ended = run_script(tmp_path, script_of(KILLED_ONCE, name=name), *LAUNCH, "--nproc", "2")
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("the script goes on") == 2
    assert "restarting from epoch=0-step=5.ckpt (2 steps" in ended.stdout
    assert newest_valid(tmp_path / "lightning_logs" / "version_0" / "checkpoints").name == "epoch=2-step=15.ckpt"


# -- every strategy ----------------------------------------------------------------------------------------------------


def make(name: str, folder: str, *callbacks: Callback, **named: Any) -> pl.Trainer:
    """A Trainer with nothing but a strategy, and a ModelCheckpoint that has a folder."""
    saver = ModelCheckpoint(dirpath=f"{folder}/checkpoints", every_n_train_steps=100)
    settings = {"timeout": "30s", "monitor": True, "max_steps": STEPS, **named}
    return jobs.trainer(name, 2, folder, callbacks=[saver, *callbacks], **settings)


def fit(
    rank: int, name: str, folder: str, ranks: tuple[int, ...], signals: tuple[int, ...] = (), options: Any = None
) -> dict[str, Any]:
    """The loss is NaN in one step on some ranks; some get a signal then."""

    def strike(module: Any, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
        is_due = module.trainer.global_step == STEP
        if is_due and rank in signals:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss * torch.nan if is_due and rank in ranks else loss

    trainer = make(name, folder, **options or {})
    trainer.fit(jobs.Model(change=strike), own_loader(rank))
    finite = all(bool(one.isfinite().all()) for one in trainer.strategy.model.parameters())
    return {"steps": trainer.global_step, "finite": finite}


def ends_with(run: SpawnResult, code: ExitCode) -> None:
    assert run.exit_codes == {0: code, 1: code}, "\n".join(run.logs.values())


@pytest.mark.parametrize("name", kept(STRATEGIES, ("ResilientFSDP", "zero2")))
def test_a_nan_on_all_ranks_is_left_out_and_warned_about(name: str, tmp_path: Path) -> None:
    run = spawn(fit, 2, args=(name, str(tmp_path), (0, 1))).check()
    assert {(found["steps"], found["finite"]) for found in run.results.values()} == {(STEPS, True)}
    assert run.logs[0].count("not finite on all 2 ranks") == 1
    assert not list((tmp_path / "distplus").glob("verdict-*"))


ASKED = [*zip(STRATEGIES, ((0,), (1,), (0, 1), (1,)), strict=True)]


@pytest.mark.parametrize(("name", "asked"), kept_rows(ASKED, ASKED[1:3]))
def test_without_a_handler_a_sigterm_ends_all_ranks_with_143_and_nothing_saved(
    name: str, asked: tuple[int, ...], tmp_path: Path
) -> None:
    run = spawn(fit, 2, args=(name, str(tmp_path), (), asked, {"preemption": False}))
    ends_with(run, ExitCode.PREEMPTED)
    assert not list(tmp_path.glob("checkpoints/*.ckpt"))
    for log in run.logs.values():
        assert f"ends at step {STEP + 1}, asked for by SIGTERM; nothing was saved" in log
    ended = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "failed"]
    assert {event["exit_code"] for event in ended} == {ExitCode.PREEMPTED}


def fit_with_often_nan(rank: int, folder: str) -> int:
    model = jobs.Model(change=lambda module, loss, _: loss * torch.nan if module.trainer.global_step % 2 else loss)
    trainer = make("ResilientDDP", folder, max_steps=130)
    trainer.fit(model, own_loader(rank, 4 * 130))
    return trainer.global_step


def test_values_that_are_often_not_finite_on_all_ranks_are_warned_about_once_in_100_steps(tmp_path: Path) -> None:
    run = spawn(fit_with_often_nan, 2, args=(str(tmp_path),)).check()
    assert run.results == {0: 130, 1: 130}
    assert run.logs[0].count("not finite on all 2 ranks") == 2


def fit_with_little_budget(rank: int, folder: str) -> None:
    """Rank 1 changes a weight, after the full comparison at step 50 has shown what the looks cost."""

    def change(trainer: Any, module: Any, *_: Any) -> None:
        next(module.parameters()).data.view(-1)[3] += 1.0

    changes = jobs.At("on_train_batch_start", change, rank=1, step=60)
    trainer = make("ResilientDDP", folder, changes, monitor=RankDivergenceMonitor(budget=0.001), max_steps=400)
    trainer.fit(jobs.Model(), own_loader(rank, 4 * 400))


def test_a_monitor_above_its_budget_looks_less_often_and_says_within_how_many_steps_it_sees(tmp_path: Path) -> None:
    ends_with(spawn(fit_with_little_budget, 2, args=(str(tmp_path),)), ExitCode.DIVERGENCE)
    plans = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "monitor_plan"]
    first, last = plans[0], plans[-1]
    assert (first["steps_per_pass"], first["steps_per_full_comparison"]) == (1, 50)
    assert last["steps_per_pass"] > 1
    assert last["steps_per_full_comparison"] > 50
    verdict = jobs.verdict_in(tmp_path, "divergence", [0, 1])
    assert verdict["field"] == "parameters"
    assert 60 <= verdict["global_step"] <= 60 + last["steps_per_pass"]


# -- whose callback ----------------------------------------------------------------------------------------------------


class Sees(jobs.At):
    """The callbacks of ours that are there, and how each came to be."""

    def __init__(self) -> None:
        super().__init__("on_train_start", self.see)
        self.seen: list[Callback] = []

    def see(self, trainer: Any, module: Any) -> None:
        self.seen = [one for one in trainer.callbacks if isinstance(one, (PreemptionHandler, RankDivergenceMonitor))]


def callbacks_of_a_fit(folder: str, *users: Callback, **options: Any) -> list[Callback]:
    sees = Sees()
    trainer = make("ResilientDDP", folder, sees, *users, max_steps=1, **options)
    before = {id(one) for one in trainer.callbacks}
    trainer.fit(jobs.Model(), own_loader(trainer.global_rank))
    assert {id(one) for one in trainer.callbacks} == before, "what a strategy brings leaves with the run"
    return sees.seen


def callbacks_of_barebones(folder: str) -> list[Callback]:
    """Such a Trainer takes no argument that asks for a feature, not even to leave it out."""
    sees = Sees()
    strategy = jobs.strategy("ResilientDDP", monitor=True)
    named = {"accelerator": "cpu", "devices": 2, "default_root_dir": folder, "use_distributed_sampler": False}
    trainer = pl.Trainer(strategy=strategy, barebones=True, max_steps=1, callbacks=[sees], **named)
    trainer.fit(jobs.Model(), own_loader(trainer.global_rank))
    return sees.seen


def see_whose(folder: str) -> dict[str, Any]:
    handler, monitor = PreemptionHandler(keep=2), RankDivergenceMonitor(every_n_steps=2)
    users = [PreemptionHandler(keep=3), RankDivergenceMonitor(every_n_steps=3)]
    taken = callbacks_of_a_fit(folder, preemption=handler, monitor=monitor)
    kept = callbacks_of_a_fit(folder, *users, preemption=handler, monitor=monitor)
    return {
        "by default": sorted(type(one).__name__ for one in callbacks_of_a_fit(folder)),
        "instances": {id(one) for one in taken} == {id(handler), id(monitor)},
        "the user's": {id(one) for one in kept} == {id(one) for one in users},
        "none": callbacks_of_a_fit(folder, preemption=False, monitor=False),
        "barebones": callbacks_of_barebones(folder),
    }


def test_a_users_callback_wins_an_instance_is_taken_and_false_leaves_it_out(tmp_path: Path) -> None:
    (found, other) = spawn(see_whose, 2, args=(str(tmp_path),)).check().results.values()
    assert found == other
    assert found == {
        "by default": ["PreemptionHandler", "RankDivergenceMonitor"],
        "instances": True,
        "the user's": True,
        "none": [],
        "barebones": [],
    }


def see_one_rank(folder: str) -> list[str]:
    sees = Sees()
    jobs.fit("ResilientDDP", 1, folder, monitor=True, max_steps=1, callbacks=[sees])
    return [type(one).__name__ for one in sees.seen]


def test_one_rank_has_nothing_to_compare_and_stops_when_asked(tmp_path: Path) -> None:
    assert spawn(see_one_rank, 1, args=(str(tmp_path),)).check().results == {0: ["PreemptionHandler"]}


def save_and_resume(rank: int, folder: str, saves_with: dict[str, Any], resumes_with: dict[str, Any]) -> int:
    path = f"{folder}/saved.ckpt"
    trainer = make("ResilientDDP", folder, **saves_with, max_steps=2)
    trainer.fit(jobs.Model(), own_loader(rank))
    trainer.save_checkpoint(path)
    trainer = make("ResilientDDP", folder, **resumes_with, max_steps=4)
    trainer.fit(jobs.Model(), own_loader(rank), ckpt_path=path)
    return trainer.global_step


@pytest.mark.parametrize("is_saved_with", [True, False])
def test_a_checkpoint_with_or_without_their_state_is_resumed(is_saved_with: bool, tmp_path: Path) -> None:
    on, off = {"monitor": True}, {"monitor": False, "preemption": False}
    args = (str(tmp_path), *((on, off) if is_saved_with else (off, on)))
    assert spawn(save_and_resume, 2, args=args).check().results == {0: 4, 1: 4}
