"""Row S12: two jobs below ``distplus launch`` that share ``default_root_dir`` keep their verdicts and codes apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_distplus.events import read_events
from tests.distributed import jobs

ROOT = Path(__file__).parents[2]
DEADLINE_S = 2.0
LAUNCH = [sys.executable, "-m", "lightning_distplus.cli", "launch"]
JOB = ["-m", "tests.faults.test_s12_one_folder_for_two_jobs"]


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not is_so() and time.monotonic() < end:
        time.sleep(0.05)


class Ends(Callback):
    """Rank 1 of one job hangs; rank 0 of the other one raises after the verdict on that hang."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder = how, folder

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank, self.how) == (3, 1, "hangs"):
            # Its peer job has started, so that nothing but its name keeps what happens now apart from that job.
            wait_until((self.folder / "raises-trains").exists)
            (self.folder / "hangs-fired").touch()
            time.sleep(600)
        if (trainer.global_step, trainer.global_rank, self.how) == (3, 0, "raises"):
            (self.folder / "raises-trains").touch()
            wait_until(lambda: any((self.folder / "distplus").glob("verdict-hang-*.json")))
            raise ValueError("planted")


def main(folder: str, how: str) -> None:
    step = DEADLINE_S if how == "hangs" else "120s"
    on_verdict = f"cat > {folder}/told-{how}.json"  # which the ranks tell their launcher
    strategy = jobs.strategy("ResilientDDP", timeout={"step": step, "setup": "120s"}, on_verdict=on_verdict)
    jobs.fit(strategy, 2, folder, max_steps=8, callbacks=[Ends(how, Path(folder))])


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = ["--nproc", "2", "--max-restarts", "0", "--log-dir", str(folder / "logs" / how)]
    return subprocess.Popen(
        [*LAUNCH, *options, *JOB, str(folder), how],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.deadline(200)
def test_each_job_has_its_own_verdict_exit_code_and_ledger(tmp_path: Path) -> None:
    launchers = {how: start(tmp_path, how) for how in ("hangs", "raises")}
    try:
        texts = {how: one.communicate(timeout=180)[0] for how, one in launchers.items()}
    finally:
        for one in launchers.values():
            one.kill()
    assert (tmp_path / "hangs-fired").exists()
    assert {how: one.returncode for how, one in launchers.items()} == {"hangs": 170, "raises": 1}, texts
    last = [line for line in texts["raises"].splitlines() if line.startswith("distplus launch: ")][-2]
    assert ": rank 0, exit code 1 (failed)" in last
    verdicts = [json.loads(path.read_text()) for path in (tmp_path / "distplus").glob("verdict-*.json")]
    runs = {one["kind"]: one["run_id"] for one in verdicts}
    assert sorted((one["kind"], one["culprits"]) for one in verdicts) == [("exception", [0]), ("hang", [1])]
    assert len(set(runs.values())) == 2
    told = {how: json.loads((tmp_path / f"told-{how}.json").read_text()) for how in launchers}
    assert {how: (one["kind"], one["run_id"]) for how, one in told.items()} == {
        "hangs": ("hang", runs["hang"]),
        "raises": ("exception", runs["exception"]),
    }
    assert told["hangs"]["text"].startswith("RANK 1 HANGS")
    ends = {
        one["run_id"]: one["exit_code"] for one in read_events(tmp_path / "distplus") if one["kind"] == "launch_end"
    }
    assert ends == {runs["hang"]: 170, runs["exception"]: 1}
    for kind, run_id in runs.items():
        events = read_events(tmp_path / "distplus", run_id=run_id)
        assert {one["rank"] for one in events if one["kind"] == "start"} == {0, 1}
        shown = subprocess.run(
            [sys.executable, "-m", "lightning_distplus.cli", "report", str(tmp_path), "--run-id", run_id],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        headlines = [line for line in shown.splitlines() if line.startswith("RANK ")]  # what came last, and the verdict
        assert len(headlines) == 2
        assert all(one.startswith({"hang": "RANK 1 HANGS", "exception": "RANK 0 FAILED"}[kind]) for one in headlines)


if __name__ == "__main__":
    main(*sys.argv[1:])
