"""Row H2, by ``timeout="auto"``: measured in the first steps on all ranks, and known in a run that resumes."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus import _compat
from lightning_distplus.checkpoint.catalog import read_manifest
from lightning_distplus.errors import ExitCode
from lightning_distplus.events import read_events
from lightning_distplus.testing import SpawnResult, spawn
from lightning_distplus.timeouts import Calibration, Phase, Timeouts
from tests.distributed import jobs
from tests.faults.side_by_side import Runs, made_side_by_side

pytestmark = pytest.mark.deadline(400)  # the first test waits for all that run side by side

FACTOR = 3
FLOORS = dict.fromkeys(Phase, timedelta(seconds=4))
PHASES = ("resume", "setup", "validation", "checkpoint")
FOR_EVER_S = 1000.0
LAST_STEP = 12
Ended = tuple[SpawnResult, Path]


class Pauses(jobs.Model):
    """Rank 1 pauses once in some phases.

    Args:
        phases: In which.
        share: For how long, of the phase's deadline; None: for ever.
        folder: Where it says when a pause has begun.
    """

    def __init__(self, phases: tuple[str, ...], share: float | None, folder: str) -> None:
        super().__init__()
        self.phases, self.share, self.folder = list(phases), share, Path(folder)
        self.paused: set[str] = set()
        self.begins_with: dict[str, float] = {}

    def pause(self, phase: str) -> None:
        if phase not in self.phases or self.trainer.global_rank == 0:
            return
        deadline_s = self.trainer.strategy.phases.deadline.total_seconds()
        assert self.trainer.strategy.phases.current.value == phase
        self.phases.remove(phase)
        self.paused.add(phase)
        (self.folder / "fired").write_text(json.dumps([time.time(), deadline_s]))
        time.sleep(FOR_EVER_S if self.share is None else self.share * deadline_s)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        timeouts = self.trainer.strategy.timeouts  # the first gate reviews them where a phase took long
        self.begins_with = {phase: timeouts.deadline(Phase(phase)).total_seconds() for phase in PHASES}
        self.pause("resume")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.pause("setup")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.pause("validation")
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.pause("checkpoint")


def fit(
    folder: str,
    ckpt_path: str | None,
    max_steps: int,
    phases: tuple[str, ...] = (),
    share: float | None = None,
    name: str = "ResilientDDP",
) -> tuple[set[str], dict[str, float]]:
    """Trains with a validation and a save before each review of the deadlines."""
    strategy = jobs.strategy(name, timeout="auto")
    strategy.measured.calibration = Calibration(factor=FACTOR, floors=FLOORS, gates=3)
    saves = ModelCheckpoint(dirpath=f"{folder}/saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    model, data = Pauses(phases, share, folder), (jobs.loader(400), jobs.loader(8))
    named = {"max_steps": max_steps, "callbacks": [saves], "num_sanity_val_steps": 0, "limit_val_batches": 1}
    jobs.fit(strategy, 2, folder, model, data, ckpt_path, val_check_interval=2, **named)
    return model.paused, model.begins_with


def resumed(
    ckpt_path: Path, folder: Path, phases: tuple[str, ...], share: float | None = None, name: str = "ResilientDDP"
) -> Ended:
    """Rank 1 pauses in some phases, for a share of their deadline, or hangs in one."""
    result = spawn(fit, 2, args=(str(folder), str(ckpt_path), LAST_STEP, phases, share, name), deadline="90s")
    (folder / "ended").write_text(str(time.time()))
    return result, folder


def fit_twice(folder: str, name: str) -> None:
    """The second run measures what the first one cannot: a load."""
    fit(folder, None, 4, name=name)
    fit(folder, f"{folder}/saved/step=4.ckpt", 8, name=name)


def calibrated(folder: Path, name: str = "ResilientDDP") -> Path:
    spawn(fit_twice, 2, args=(str(folder), name), deadline="120s").check()
    return folder / "saved/step=8.ckpt"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated(tmp_path_factory.mktemp("calibrated"))


@pytest.fixture(scope="module")
def ended(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    calls = {
        "slow": lambda folder: resumed(checkpoint, folder, PHASES, 1 / 4),
        "resume": lambda folder: resumed(checkpoint, folder, ("resume",)),
    }
    return made_side_by_side(calls, tmp_path_factory)


def check_hang(phase: str, ended: Ended, checkpoint: Path) -> None:
    result, folder = ended
    fired, deadline_s = json.loads((folder / "fired").read_text())
    assert deadline_s == read_manifest(checkpoint).deadlines_s[phase]
    assert deadline_s < Timeouts().deadline(Phase(phase)).total_seconds() / 10
    verdict = jobs.verdict_in(folder, "hang", [1], [0])
    assert verdict["phase"] == phase
    assert verdict["location"].startswith(f"{__file__}:")
    assert set(result.exit_codes.values()) == {int(ExitCode.HANG)}
    assert deadline_s <= float((folder / "ended").read_text()) - fired < deadline_s + 10


def test_a_hang_in_a_load_ends_at_the_deadline_that_the_run_before_has_measured(ended: Runs, checkpoint: Path) -> None:
    check_hang("resume", ended("resume"), checkpoint)


def test_phases_that_are_slower_than_before_end_nothing(ended: Runs, checkpoint: Path) -> None:
    result, folder = ended("slow")
    result.check()
    found = read_manifest(checkpoint).deadlines_s
    paused, begins_with = result.results[1]
    assert paused == set(PHASES)
    assert begins_with == {phase: found[phase] for phase in PHASES}
    assert not list(folder.glob("distplus/verdict-*"))


@pytest.mark.soak
@pytest.mark.parametrize("name", jobs.STRATEGIES)
@pytest.mark.parametrize("phase", PHASES)
def test_a_hang_in_any_phase_ends_at_its_deadline(phase: str, name: str, tmp_path: Path) -> None:
    for folder in (tmp_path / "before", tmp_path / "after"):
        folder.mkdir()
    checkpoint = calibrated(tmp_path / "before", name)
    check_hang(phase, resumed(checkpoint, tmp_path / "after", (phase,), name=name), checkpoint)


# -- measured in the first steps on all ranks, put on every group, kept in the checkpoint ------------------------------


def fit_and_read(folder: str, max_steps: int, ckpt_path: str | None) -> tuple[float, float]:
    """The deadline of a step, and the time-out of the default group behind the last one."""
    found: list[float] = []

    def read(*_: Any) -> None:
        (group,) = _compat.process_groups()
        found.append(_compat.read_group_timeout(group).total_seconds())

    reads = jobs.At("on_train_batch_end", read)
    options = {"timeout": "auto", "max_steps": max_steps, "callbacks": [reads]}
    trainer = jobs.fit("ResilientDDP", 2, folder, data=jobs.loader(400), ckpt_path=ckpt_path, **options)
    trainer.save_checkpoint(f"{folder}/{max_steps}.ckpt")
    return trainer.strategy.timeouts.step.total_seconds(), found[-1]


def test_auto_measures_the_steps_and_a_resumed_run_knows_from_the_start(tmp_path: Path) -> None:
    before = spawn(fit_and_read, 2, args=(str(tmp_path), 40, None)).check()
    assert before.results[0] == (600.0, 660.0)  # not yet settled: the static default bounds a hang
    after = spawn(fit_and_read, 2, args=(str(tmp_path), 60, None)).check()
    assert after.results == {0: (60.0, 70.0), 1: (60.0, 70.0)}
    again = spawn(fit_and_read, 2, args=(str(tmp_path), 70, str(tmp_path / "60.ckpt"))).check()
    assert again.results[1][0] == 60.0
    settled = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "calibrated"]
    assert {event["deadlines_s"]["step"] for event in settled} == {60.0}
    reasons = [event["reasons"]["step"] for event in settled]
    assert sum("times the longest" in reason for reason in reasons) == 2
    assert sum("from the checkpoint" in reason for reason in reasons) == 2
