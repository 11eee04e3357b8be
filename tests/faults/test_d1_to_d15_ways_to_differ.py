"""Rows D1 to D15: every way to differ, on every strategy: named with both values by all ranks, before damage."""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus import RankDivergenceMonitor, _compat
from lightning_distplus.errors import DivergenceError, PreflightError
from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.divergences import DIVERGENCES, Run, own_loader

SEEDS = range(20)
ROWS = sorted({one.row for one in DIVERGENCES.values()}, key=lambda row: int(row[1:]))
SOON_S = 20.0  # before any deadline of the run


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run in which a rank comes to differ."""

    name: str
    size: int = 2
    guilty: int = 1
    step: int = 3
    strategy: str = "ResilientDDP"

    @classmethod
    def draw(cls, row: str, seed: int) -> Case:
        """Which of the row's ways, on how many ranks, where and when; the same seed is the same run."""
        names = [name for name, one in DIVERGENCES.items() if one.row == row]
        name = names[seed % len(names)]
        rng = random.Random(f"{row}-{seed}")
        fault = DIVERGENCES[name]
        size = rng.randint(2, 4)
        return cls(
            name=name, size=size, guilty=rng.randrange(size), step=rng.randint(2, 5),
            strategy=fault.strategies[seed // len(names) % len(fault.strategies)],
        )  # fmt: skip

    @property
    def blamed(self) -> list[int]:
        everybody = list(range(self.size))
        blame = DIVERGENCES[self.name].blame
        if blame == "odd":
            return [self.guilty] if self.size > 2 else everybody
        if blame == "pair":
            return sorted({self.guilty, (self.guilty + 1) % self.size})
        return [self.guilty] if blame == "guilty" else []


def make(rank: int, case: Case, folder: str) -> tuple[Run, Any]:
    """The run of one rank, with the fault in it, and its Trainer."""
    run = Run(rank=rank, size=case.size, guilty=case.guilty, step=case.step)
    DIVERGENCES[case.name].plant(run)
    run.data = run.data or {"train_dataloaders": own_loader(rank)}
    name, options = case.strategy, dict(run.strategy)
    if "DDP" in name:
        options |= run.ddp
    if name != "DDPStrategy":
        options["timeout"] = "30s"
    arguments = {"max_steps": 9, **run.trainer, "callbacks": [*run.callbacks, RankDivergenceMonitor(**run.monitor)]}
    return run, jobs.trainer(name, case.size, folder, **options, **arguments)


def train(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """What this rank has raised, how soon, after how many collectives.

    What differs from the start is found by the preflight of a Resilient strategy, on any other one by the monitor.
    """
    run, trainer = make(rank, case, folder)
    found: dict[str, Any] = {"field": "", "steps": None}
    try:
        trainer.fit(run.module, **run.data)
        found["steps"] = trainer.global_step
    except DivergenceError as error:
        found |= {"field": error.field, "ranks": error.ranks, "values": error.values, "message": str(error)}
        found |= {"begun": _compat.num_collectives() - run.collectives, "after_s": time.time() - run.planted_at}
    except PreflightError as error:
        found |= of_preflight(str(error).partition("  here: ")[0])
    return {**found, "is_planted": run.is_planted}


def of_preflight(message: str) -> dict[str, Any]:
    """Field, ranks and values, as the first finding has them; the value of a majority stands at -1."""
    subject = re.match(r"(?:\w+: |The )(.+) differs on (?:the ranks|rank (\d+))\.\n  seen: (.+)", message)
    assert subject is not None, message
    field, rank, seen = subject.groups()
    sides = re.findall(r"(?:rank (\d+) \(.+?\)|the other \d+ ranks): ([^;]+)", seen)
    values = {int(one or -1): value for one, value in sides}
    return {"field": field, "ranks": [int(rank)] if rank else sorted(values), "values": values, "message": message}


def without_teller(message: str) -> str:
    """Whoever hears of an error adds by whom."""
    return message.partition(" (Told by rank ")[0]


def require_named(case: Case, folder: Path) -> None:
    """All ranks raise the same error with the value of each, or come to one agreement."""
    fault = DIVERGENCES[case.name]
    run = spawn(train, case.size, args=(case, str(folder)), deadline="90s").check()
    first = run.results[case.guilty]
    for found in run.results.values():
        assert (found["field"], found["steps"]) == (first["field"], first["steps"]), (case, run.results)
        assert found["field"].startswith(fault.field), (case, found)
        if not fault.field:
            assert found["field"] == "", (case, found)
            continue
        assert found["ranks"] == case.blamed, (case, found)
        assert found["values"] == first["values"]
        assert without_teller(found["message"]) == without_teller(first["message"])
        assert len(found["message"].splitlines()) <= 15
        assert fault.says in found["message"], (case, found)
        if fault.blame in ("odd", "pair"):
            assert len(found["values"]) > 1, "both sides are shown"
        if fault.blame == "odd":
            assert found["values"][case.guilty] not in [found["values"].get(r) for r in run.results if r != case.guilty]
        if found["is_planted"]:
            assert found["after_s"] < SOON_S
        if found["is_planted"] and fault.is_before:
            assert found["begun"] == 0, (case, found)


# Each way on one strategy, the strategies in turn; of copies, those which sharded strategies have are among them.
CHOSEN = {name: one.strategies[number % len(one.strategies)] for number, (name, one) in enumerate(DIVERGENCES.items())}
CHOSEN |= {"bit_is_flipped": "zero2", "buffer_drifts": "ResilientFSDP", "operation_differs": "DDPStrategy"}
CHOSEN["call_is_made_alone"] = "DDPStrategy"  # and a barrier under a strategy of ours


@pytest.mark.parametrize(("name", "strategy"), CHOSEN.items())
def test_whoever_differs_is_named_by_all_ranks_with_both_values(name: str, strategy: str, tmp_path: Path) -> None:
    require_named(Case(name=name, strategy=strategy), tmp_path)


def train_with_what_may_differ(rank: int, folder: str) -> int:
    module = jobs.Model(seed=rank)
    module.save_hyperparameters({"batch_size": 4 + rank, "name": "a"})
    trainer = jobs.trainer("ResilientDDP", 2, folder, callbacks=[RankDivergenceMonitor()], max_steps=2)
    trainer.fit(module, own_loader(rank))
    return trainer.global_step


def test_initial_weights_and_hyperparameters_that_differ_stand_in_every_ledger_and_end_nothing(tmp_path: Path) -> None:
    assert spawn(train_with_what_may_differ, 2, args=(str(tmp_path),), deadline="40s").check().results == {0: 2, 1: 2}
    told = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "difference"]
    for rank in range(2):
        weights, size = (event for event in told if event["rank"] == rank)
        assert (weights["field"], size["field"]) == ("initial_weights", "hyperparameters.batch_size of the module")
        assert all(value.startswith("net.0.weight: ") for value in weights["values"].values())
        assert size["values"] == {"0": 4, "1": 5}


def resume(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1 goes on from another checkpoint than rank 0."""
    for steps in (2, 4):
        trainer = jobs.fit("DDPStrategy", 2, folder, data=own_loader(rank), max_steps=steps)
        trainer.save_checkpoint(f"{folder}/{steps}.ckpt")
    trainer = jobs.trainer("DDPStrategy", 2, folder, callbacks=[RankDivergenceMonitor()], max_steps=6)
    try:
        trainer.fit(jobs.Model(), own_loader(rank), ckpt_path=f"{folder}/{2 + 2 * rank}.ckpt")
    except DivergenceError as error:
        return {"field": error.field, "values": error.values, "steps": trainer.global_step}
    return {"field": "nothing was raised"}


def test_ranks_never_train_on_from_different_checkpoints(tmp_path: Path) -> None:
    """The monitor compares what was restored; a Resilient strategy takes what rank 0 has chosen (row C7)."""
    for rank, found in spawn(resume, 2, args=(str(tmp_path),), deadline="60s").check().results.items():
        assert found == {"field": "global_step", "values": {0: 2, 1: 4}, "steps": 2 + 2 * rank}


# -- the list of the 43 ------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]


def test_each_of_the_43_faults_is_in_the_list_with_what_plants_it() -> None:
    page = (TESTS.parent / "docs" / "evidence" / "divergence-faults.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 44))
    names = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    for number, *_, planted in rows:
        for name in re.findall(r"`(\w+)`", planted):
            assert name in names | set(DIVERGENCES), number
            if name in DIVERGENCES:
                assert DIVERGENCES[name].number == int(number)
    numbers = {one.number for one in DIVERGENCES.values() if one.number}
    assert numbers <= {int(row[0]) for row in rows if "test_" not in row[-1] or "`, `" in row[-1]}


@pytest.mark.soak
@pytest.mark.deadline(120)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_differs_is_named_on_any_strategy_and_size(row: str, seed: int, tmp_path: Path) -> None:
    case = Case.draw(row, seed)
    print(case)
    require_named(case, tmp_path)
