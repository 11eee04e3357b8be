"""Row H4: the launcher that serves the store is killed; no rank is blamed for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from tests.distributed import jobs

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "lightning_distplus.cli", "launch"]
JOB = ["-m", "tests.faults.test_h4_killed_launcher"]


class KillsItsParent(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (3, 0):
            os.kill(os.getppid(), signal.SIGKILL)
            (self.folder / "fired").touch()

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        told = {"type": type(error).__name__, "ranks": getattr(error, "ranks", None), "text": str(error)}
        stage = self.folder / f"stage-{trainer.global_rank}"
        stage.write_text(json.dumps(told))
        stage.rename(self.folder / f"ended-{trainer.global_rank}")


def main(folder: str) -> None:
    strategy = jobs.strategy("ResilientDDP", timeout="120s")
    jobs.fit(strategy, 2, folder, max_steps=10_000, callbacks=[KillsItsParent(Path(folder))])


@pytest.mark.deadline(150)
def test_a_killed_launcher_is_named_and_no_rank_is_blamed(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = ["--nproc", "2", "--max-restarts", "0", "--start", "cold", "--log-dir", str(tmp_path / "logs")]
    with (tmp_path / "launcher.log").open("w") as log:
        launcher = subprocess.Popen(
            [*LAUNCH, *options, *JOB, str(tmp_path)],
            cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    assert launcher.wait(timeout=120) == -signal.SIGKILL, (tmp_path / "launcher.log").read_text()
    files = [tmp_path / f"ended-{rank}" for rank in range(2)]
    end = time.monotonic() + 20
    home = tmp_path / "distplus"
    while not (all(file.exists() for file in files) and list(home.glob("verdict-*.json"))) and time.monotonic() < end:
        time.sleep(0.1)
    assert (tmp_path / "fired").exists()
    for file in files:
        told = json.loads(file.read_text())
        assert (told["type"], told["ranks"]) == ("PeerLost", [-1]), told
        assert "launcher" in told["text"]
    verdicts = [json.loads(path.read_text()) for path in home.glob("verdict-*.json")]
    assert [one["culprits"] for one in verdicts] == [[-1]]
    assert verdicts[0]["lines"][0].startswith("the launcher")


if __name__ == "__main__":
    main(*sys.argv[1:])
