"""Rows D1 and P6, with nothing but the strategy: what ``Trainer(strategy=Resilient...())`` brings by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
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
from tests.pairs import kept, kept_rows

STEP, STEPS = 4, 12
STRATEGIES = ("ResilientDDP", "ResilientFSDP", "ResilientModelParallel", "zero2")

# -- a script of a stranger --------------------------------------------------------------------------------------------

# As Lightning's users write it: a shuffled DataLoader, augmentation, two workers. One line of it changes.
SCRIPT = """
import os, signal, sys, time
import lightning.pytorch as pl, torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
import lightning_distplus

class Samples(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        sample = torch.full((4,), float(index))
        return sample + 0.1 * torch.randn(4)

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = None

    def configure_model(self):
        if self.layer is None:
            self.layer = torch.nn.Linear(4, 1)
            if self.device_mesh is not None:
                fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss, rank, step = self.layer(batch).pow(2).mean(), self.trainer.global_rank, self.trainer.global_step
        if step == 7:
            pass  # the fault
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

trainer = pl.Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=3)
trainer.fit(Model(), DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=2))
print("the script goes on")
"""
LINES = {
    "ddp": "ResilientDDP({})",
    "fsdp": "ResilientFSDP({})",
    "fsdp2": "ResilientModelParallel({})",
    "zero2": "ResilientDeepSpeed(stage=2, {})",
}
NAN_ON_RANK_1 = "loss = loss * torch.nan if rank == 1 else loss"
NAN_ON_ALL = "loss = loss * torch.nan"
SIGTERM = "rank == 1 and os.kill(os.getpid(), signal.SIGTERM)"
HANG = "rank == 1 and time.sleep(10**6)"
EXCEPTION = "loss = [][7] if rank == 1 else loss"
KILLED_ONCE = "rank == 1 and os.environ.get('DISTPLUS_ATTEMPT') == '0' and os.kill(os.getpid(), 9)"


def run_script(
    folder: Path, fault: str = "pass", arguments: str = "", *, name: str = "ddp", launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """What a shell shows of ``python train.py``, which starts its second rank by itself.

    No rank outlives the test: the one that is killed at the test's deadline would leave those that it has started.
    """
    script = folder / "train.py"
    with_us = SCRIPT.replace('"ddp"', "lightning_distplus." + LINES[name].format(arguments))
    script.write_text(with_us.replace("pass  # the fault", fault))
    environment = {one: value for one, value in os.environ.items() if one not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, *launcher, str(script)]
    script_runs = subprocess.Popen(
        command, cwd=folder, env={**environment, "DISTPLUS_TRACEBACK": ""}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    with script_runs:
        try:
            shown, _ = script_runs.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script_runs.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, script_runs.returncode, shown)


ENDS = {
    NAN_ON_RANK_1: (ExitCode.DIVERGENCE, "Rank 1 has a loss that is not finite in step 7"),
    SIGTERM: (ExitCode.PREEMPTED, ""),
    HANG: (ExitCode.HANG, "RANK 1 HANGS"),
    EXCEPTION: (ExitCode.PEER_LOST, "RANK 1 FAILED"),
}


# In each commit test_endings runs scripts that hang and that raise.
SCRIPTS = [(NAN_ON_RANK_1, "ddp"), (SIGTERM, "fsdp2")]


@pytest.mark.parametrize(("fault", "name"), kept_rows([*product(ENDS, LINES)], SCRIPTS), ids=lambda one: one[:12])
def test_a_fault_in_a_strangers_script_ends_it_as_the_table_says(fault: str, name: str, tmp_path: Path) -> None:
    ended = run_script(tmp_path, fault, 'timeout={"step": "5s"}', name=name)
    code, says = ENDS[fault]
    assert ended.returncode == code, ended.stdout
    assert says in ended.stdout
    assert "the script goes on" not in ended.stdout
    if fault == SIGTERM:
        (saved,) = tmp_path.glob("lightning_logs/version_*/checkpoints/preempt-step=8.ckpt")
        assert verify(saved).ok
    else:
        (verdict,) = (tmp_path / "distplus").glob("verdict-*.json")
        assert json.loads(verdict.read_text())["culprits"] == [1]


@pytest.mark.soak  # in each commit test_scripts kills a script, and test_installed that of the README
@pytest.mark.parametrize("name", list(LINES))
def test_a_strangers_script_whose_rank_is_killed_goes_on_from_its_last_checkpoint(name: str, tmp_path: Path) -> None:
    launcher = ("-m", "lightning_distplus.cli", "launch", "--nproc", "2")
    ended = run_script(tmp_path, KILLED_ONCE, name=name, launcher=launcher)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("the script goes on") == 2
    assert "restarting from epoch=0-step=5.ckpt (2 steps" in ended.stdout
    assert newest_valid(tmp_path / "lightning_logs" / "version_0" / "checkpoints").name == "epoch=2-step=15.ckpt"


def test_a_script_is_told_in_one_line_what_it_has_is_warned_of_a_nan_on_all_ranks_and_goes_on(tmp_path: Path) -> None:
    ended = run_script(tmp_path, NAN_ON_ALL, 'timeout="5m"')
    assert ended.returncode == 0, ended.stdout
    assert "the script goes on" in ended.stdout
    assert ended.stdout.count("not finite on all 2 ranks") == 1
    assert not list((tmp_path / "distplus").glob("verdict-*"))
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("distplus: ")]
    assert line == (
        "distplus: ResilientDDP on 2 ranks, step deadline 5m, divergence monitor on, SIGTERM saves to "
        "lightning_logs/version_0/checkpoints, data: exact resume (DataLoader), events in distplus"
    )


# -- every strategy ----------------------------------------------------------------------------------------------------


class Faulty(jobs.Model):
    """Its loss is NaN in one step on some ranks; or one rank gets a signal then."""

    def __init__(self, ranks: tuple[int, ...], signals: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.ranks = ranks
        self.signals = signals

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step != STEP:
            return loss
        if self.trainer.global_rank in self.signals:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss * torch.nan if self.trainer.global_rank in self.ranks else loss


def make(name: str, folder: str, *callbacks: Callback, **named: Any) -> pl.Trainer:
    """A Trainer with nothing but a strategy, and a ModelCheckpoint that has a folder."""
    saver = ModelCheckpoint(dirpath=f"{folder}/checkpoints", every_n_train_steps=100)
    settings = {"timeout": "30s", "monitor": True, "max_steps": STEPS, **named}
    return jobs.trainer(name, 2, folder, callbacks=[saver, *callbacks], **settings)


def fit(
    rank: int, name: str, folder: str, ranks: tuple[int, ...], signals: tuple[int, ...] = (), options: Any = None
) -> dict[str, Any]:
    trainer = make(name, folder, **options or {})
    trainer.fit(Faulty(ranks, signals), own_loader(rank))
    finite = all(bool(one.isfinite().all()) for one in trainer.strategy.model.parameters())
    return {"steps": trainer.global_step, "finite": finite, "callbacks": len(trainer.callbacks)}


def ends_with(run: SpawnResult, code: ExitCode) -> None:
    assert run.exit_codes == {0: code, 1: code}, "\n".join(run.logs.values())


@pytest.mark.parametrize("name", kept(STRATEGIES, ("ResilientDDP", "ResilientModelParallel")))
def test_a_nan_on_one_rank_ends_the_run_as_a_divergence(name: str, tmp_path: Path) -> None:
    run = spawn(fit, 2, args=(name, str(tmp_path), (1,)))
    ends_with(run, ExitCode.DIVERGENCE)
    verdict = jobs.verdict_in(tmp_path)
    assert (verdict["kind"], verdict["field"], verdict["culprits"]) == ("divergence", "loss", [1])


@pytest.mark.parametrize("name", kept(STRATEGIES, ("ResilientFSDP", "zero2")))
def test_a_nan_on_all_ranks_is_left_out_and_warned_about(name: str, tmp_path: Path) -> None:
    run = spawn(fit, 2, args=(name, str(tmp_path), (0, 1))).check()
    assert {(found["steps"], found["finite"]) for found in run.results.values()} == {(STEPS, True)}
    assert run.logs[0].count("not finite on all 2 ranks") == 1
    assert not list((tmp_path / "distplus").glob("verdict-*"))


@pytest.mark.parametrize(("name", "asked"), zip(STRATEGIES, ((0,), (1,), (0, 1), (1,)), strict=True))
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
    class Often(jobs.Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * torch.nan if self.trainer.global_step % 2 else loss

    trainer = make("ResilientDDP", folder, max_steps=130)
    trainer.fit(Often(), own_loader(rank, 4 * 130))
    return trainer.global_step


def test_values_that_are_often_not_finite_on_all_ranks_are_warned_about_once_in_100_steps(tmp_path: Path) -> None:
    run = spawn(fit_with_often_nan, 2, args=(str(tmp_path),)).check()
    assert run.results == {0: 130, 1: 130}
    assert run.logs[0].count("not finite on all 2 ranks") == 2


class Changes(Callback):
    """Rank 1 changes a weight, after the full comparison at step 50 has shown what the looks cost."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 60:
            next(module.parameters()).data.view(-1)[3] += 1.0


def fit_with_little_budget(rank: int, folder: str) -> None:
    trainer = make("ResilientDDP", folder, Changes(), monitor=RankDivergenceMonitor(budget=0.001), max_steps=400)
    trainer.fit(jobs.Model(), own_loader(rank, 4 * 400))


def test_a_monitor_above_its_budget_looks_less_often_and_says_within_how_many_steps_it_sees(tmp_path: Path) -> None:
    ends_with(spawn(fit_with_little_budget, 2, args=(str(tmp_path),)), ExitCode.DIVERGENCE)
    plans = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "monitor_plan"]
    first, last = plans[0], plans[-1]
    assert (first["steps_per_pass"], first["steps_per_full_comparison"]) == (1, 50)
    assert last["steps_per_pass"] > 1
    assert last["steps_per_full_comparison"] > 50
    verdict = jobs.verdict_in(tmp_path)
    assert (verdict["field"], verdict["culprits"]) == ("parameters", [0, 1])
    assert 60 <= verdict["global_step"] <= 60 + last["steps_per_pass"]


# -- whose callback ----------------------------------------------------------------------------------------------------


class Sees(Callback):
    """The callbacks of ours that are there, and how each came to be."""

    def __init__(self) -> None:
        self.seen: list[Callback] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
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
