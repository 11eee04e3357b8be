"""SIGKILL at random moments of a run that saves at every step: the newest checkpoint is what was in memory then."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_distplus import newest_valid, verify
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs

LONGEST_S = 0.25  # a save of the small model takes 5 to 50 ms


class DigestsAndKills(Callback):
    """Writes the digest of the live state of every step to a file, and kills ranks a moment after step 2."""

    def __init__(self, folder: str, kills: dict[int, float]) -> None:
        self.folder, self.kills = Path(folder), kills

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        delay_s = self.kills.get(trainer.global_rank)
        if delay_s is not None and trainer.global_step == 2:
            kill = threading.Timer(delay_s, os.kill, args=(os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with (self.folder / f"digests-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([trainer.global_step, weights_digest(module)]) + "\n")


def arguments_of(name: str) -> dict[str, Any]:
    return {"stage": 2} if "DeepSpeed" in name else {}


def save_at_every_step(name: str, folder: str, kills: dict[int, float], is_behind: bool) -> None:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
    trainer = jobs.trainer(
        jobs.strategy(name, async_save=is_behind, **arguments_of(name)),
        2,
        folder,
        max_steps=100_000,
        callbacks=[DigestsAndKills(folder, kills), saver],
        enable_checkpointing=True,
    )
    trainer.fit(jobs.Model(), jobs.loader())


class Loaded(Callback):
    """The digest of what a checkpoint has put into memory."""

    def __init__(self) -> None:
        self.digest = ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.digest = weights_digest(module)


def load(name: str, path: str, folder: str, step: int) -> str:
    loaded = Loaded()
    trainer = jobs.trainer(jobs.strategy(name, **arguments_of(name)), 2, folder, max_steps=step + 1, callbacks=[loaded])
    trainer.fit(jobs.Model(), jobs.loader(), ckpt_path=path)
    return loaded.digest


def kill_and_load(name: str, folder: Path, number: int, *, is_behind: bool = False) -> str:
    """Kills one rank or both at a moment that ``number`` decides; the name of what was torn at that moment."""
    folder.mkdir()
    moment = random.Random(number)
    delay_s = moment.uniform(0.0, LONGEST_S)
    victims = moment.choice([[0], [1], [0, 1]])
    run = spawn(
        save_at_every_step, 2, args=(name, str(folder), dict.fromkeys(victims, delay_s), is_behind), deadline="50s"
    )
    assert run.alive == {}
    assert {run.exit_codes[rank] for rank in victims} == {-signal.SIGKILL}
    newest = newest_valid(folder)
    assert newest is not None
    assert verify(newest).ok
    step = read_manifest(newest).global_step
    assert step >= 2
    loads = spawn(load, 2, args=(name, str(newest), str(folder), step), deadline="50s").check()
    for rank, digest in loads.results.items():
        lines = (folder / f"digests-{rank}.jsonl").read_text().splitlines()
        live = dict(json.loads(line) for line in lines if line.endswith("]"))
        assert digest == live[step]
    stages = [path.name for path in (folder / ".distplus").iterdir() if ".stage-" in path.name]
    return stages[0] if stages else ""


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_killed_while_saving_the_newest_checkpoint_is_the_live_state_of_its_step(name: str, tmp_path: Path) -> None:
    kill_and_load(name, tmp_path / "run", number=jobs.STRATEGIES.index(name))


@pytest.mark.soak
@pytest.mark.deadline(3000)
@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_fifty_kills_while_saving(name: str, is_behind: bool, tmp_path: Path) -> None:
    torn = [kill_and_load(name, tmp_path / str(number), number, is_behind=is_behind) for number in range(50)]
    print(f"{name}: {sum(map(bool, torn))} of {len(torn)} kills left a torn save")
    assert any(torn)  # some of the kills struck in the middle of a save
