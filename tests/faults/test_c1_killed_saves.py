"""SIGKILL at random moments of a run that saves at every step: the newest checkpoint is what was in memory then.

Row C1.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_distplus import newest_valid, verify
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs

ENGINES = [*jobs.STRATEGIES[:3], "zero1", "zero2", "zero3"]
CHAIN = 10  # kills of one soak test
KILLED_SAVE = 3  # of an attempt: the first ones take longer than those to come
WAIT_THEN_KILL = "read -r delay && sleep $delay && kill -9 $(cat {pids})"


@dataclass(frozen=True)
class Moment:
    """When who is killed: after this share of the time that the save before took, 0 at the begin of a save."""

    ranks: tuple[int, ...]
    share: float

    @classmethod
    def drawn(cls, chance: random.Random) -> Moment:
        return cls(chance.choice(((0,), (1,), (0, 1))), chance.uniform(0.0, 1.3))


class Diary(Callback):
    """Writes down what a checkpoint has put into memory, and what is in memory at each step, and kills ranks."""

    def __init__(self, file: str, moment: Moment | None) -> None:
        self.file, self.moment = Path(file), moment
        self.num_saves = 0
        self.began_at = self.save_s = 0.0

    def note(self, kind: str, trainer: Any, module: Any) -> None:
        states = enumerate(trainer.optimizers[0].state.values())
        moments = {str(number): dict(sorted(state.items())) for number, state in states}
        self.write(trainer, [kind, trainer.global_step, weights_digest(module), weights_digest(moments)])

    def write(self, trainer: Any, line: list[Any]) -> None:
        with self.file.with_suffix(f".{trainer.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.note("loaded", trainer, module)
        self.file.with_suffix(f".{trainer.global_rank}-pid").write_text(f"{os.getpid()}\n")
        if self.moment is not None and trainer.global_rank == self.moment.ranks[0]:
            # Another process kills, all of them at once: no lock of this one decides which instants there are.
            pids = [shlex.quote(str(self.file.with_suffix(f".{rank}-pid"))) for rank in self.moment.ranks]
            script = WAIT_THEN_KILL.format(pids=" ".join(pids))
            self.killer = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.save_s = time.monotonic() - self.began_at
        self.write(trainer, ["saved", trainer.global_step])

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Before the callbacks that save."""
        self.note("live", trainer, module)
        self.num_saves += 1
        is_due = self.moment is not None and self.num_saves == KILLED_SAVE
        if is_due and trainer.global_rank == self.moment.ranks[0]:
            self.killer.stdin.write(f"{self.moment.share * self.save_s:.6f}\n".encode())
            self.killer.stdin.flush()
        self.began_at = time.monotonic()


def save_at_every_step(
    name: str, folder: str, diary: str, newest: str | None, moment: Moment | None, is_behind: bool
) -> None:
    """One attempt, which loads the newest checkpoint; one that nobody kills ends after a step."""
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
    max_steps = 100_000 if moment else read_manifest(newest).global_step + 1
    strategy = jobs.strategy(name, async_save=is_behind)
    jobs.fit(strategy, 2, folder, ckpt_path=newest, max_steps=max_steps, callbacks=[Diary(diary, moment), saver])


def lines_of(diary: Path, rank: int) -> list[Any]:
    lines = diary.with_suffix(f".{rank}").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("]")]  # a kill may tear the last one


def left_in(folder: Path, *roles: str) -> list[Path]:
    """What killed saves have left: in its place ("stage"), or in quarantine ("torn")."""
    return [path for path in (folder / ".distplus").iterdir() if any(f".{role}-" in path.name for role in roles)]


def num_written(folder: Path) -> int:
    """How many of them hold something of a checkpoint."""
    return sum(any(one.name != ".distplus" for one in path.iterdir()) for path in left_in(folder, "stage", "torn"))


def kill_and_load(name: str, folder: Path, moments: list[Moment], *, is_behind: bool = False) -> int:
    """Kills one attempt after the other, each of which loads what the one before has left.

    Returns:
        How many kills struck in the middle of a save: between two steps, or while one was written behind.
    """
    folder.mkdir()
    live: dict[tuple[int, int], Any] = {}  # by rank and step, as of the last attempt that was there
    stages: set[Path] = set()
    newest, step, num_kept, num_amid = None, 0, 0, 0
    for number, moment in enumerate([*moments, None]):
        diary = folder / f"diary-{number}"
        arguments = (name, str(folder), str(diary), newest and str(newest), moment, is_behind)
        run = spawn(save_at_every_step, 2, args=arguments, deadline="60s")
        if moment is None:
            run.check()
        else:
            assert run.alive == {}, "\n".join(run.logs.values())
            codes = {run.exit_codes[rank] for rank in moment.ranks}
            assert codes == {-signal.SIGKILL}, "\n".join(run.logs.values())
        is_amid = not stages.issuperset(left_in(folder, "stage"))
        stages.update(left_in(folder, "stage"))
        for rank in (0, 1):
            (_, *loaded), *lines = lines_of(diary, rank)
            if newest is not None:
                assert loaded == [step, *live[rank, step]], (number, rank)
            live.update({(rank, at): digests for kind, at, *digests in lines if kind == "live"})
            is_amid |= moment is not None and rank in moment.ranks and lines[-1][0] == "live"
        newest = newest_valid(folder)
        assert newest is not None
        assert verify(newest).ok
        previous_step, step = step, read_manifest(newest).global_step
        assert step >= previous_step + (2 if moment else 1)  # two saves of each attempt were done, and none is lost
        assert num_written(folder) >= num_kept  # set aside, never deleted
        num_kept = num_written(folder)
        num_amid += is_amid
    return num_amid


@pytest.mark.parametrize("name", [*jobs.STRATEGIES[:3], "zero2"])
def test_killed_while_saving_the_newest_checkpoint_is_the_live_state_of_its_step(name: str, tmp_path: Path) -> None:
    kill_and_load(name, tmp_path / "run", [Moment.drawn(random.Random(name))])


@pytest.mark.soak
@pytest.mark.deadline(600)
@pytest.mark.parametrize("chain", range(50 // CHAIN))
@pytest.mark.parametrize("is_behind", [False, True], ids=["at once", "behind"])
@pytest.mark.parametrize("name", ENGINES)
def test_fifty_kills_while_saving(name: str, is_behind: bool, chain: int, tmp_path: Path) -> None:
    chance = random.Random(f"{name} {is_behind} {chain}")
    num_amid = kill_and_load(name, tmp_path / "run", [Moment.drawn(chance) for _ in range(CHAIN)], is_behind=is_behind)
    print(f"soak: {name}, behind {is_behind}, chain {chain}: {CHAIN} kills survived, {num_amid} amid a save")
    assert num_amid  # some of the kills struck in the middle of a save
