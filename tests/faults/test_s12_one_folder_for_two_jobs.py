"""Row S12: two jobs below ``distplus launch`` that share ``default_root_dir`` keep their verdicts and codes apart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.events import read_events
from tests.distributed import jobs
from tests.processes import LAUNCH, start, wait_until

DEADLINE_S = 2.0


def main(folder: str, how: str) -> None:
    """Rank 1 of one job hangs; rank 0 of the other one raises after the verdict on that hang."""
    place = Path(folder)

    def hang(*_: Any) -> None:
        # Its peer job has started, so that nothing but its name keeps what happens now apart from that job.
        wait_until((place / "raises-trains").exists)
        (place / "hangs-fired").touch()
        time.sleep(600)

    def fail(*_: Any) -> None:
        (place / "raises-trains").touch()
        wait_until(lambda: any((place / "distplus").glob("verdict-hang-*.json")))
        raise ValueError("planted")

    ends = jobs.At("on_train_batch_start", hang if how == "hangs" else fail, rank=int(how == "hangs"), step=3)
    step = DEADLINE_S if how == "hangs" else "120s"
    on_verdict = f"cat > {folder}/told-{how}.json"  # which the ranks tell their launcher
    strategy = jobs.strategy("ResilientDDP", timeout={"step": step, "setup": "120s"}, on_verdict=on_verdict)
    jobs.fit(strategy, 2, folder, max_steps=8, callbacks=[ends])


def launch(folder: Path, how: str) -> subprocess.Popen[str]:
    options = ["--nproc", "2", "--max-restarts", "0", "--log-dir", folder / "logs" / how]
    return start(*LAUNCH, *options, "-m", "tests.faults.test_s12_one_folder_for_two_jobs", folder, how)


@pytest.mark.deadline(200)
def test_each_job_has_its_own_verdict_exit_code_and_ledger(tmp_path: Path) -> None:
    launchers = {how: launch(tmp_path, how) for how in ("hangs", "raises")}
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
        shown, _ = start(*LAUNCH[:2], "report", tmp_path, "--run-id", run_id).communicate(timeout=100)
        headlines = [line for line in shown.splitlines() if line.startswith("RANK ")]  # what came last, and the verdict
        assert len(headlines) == 2
        assert all(one.startswith({"hang": "RANK 1 HANGS", "exception": "RANK 0 FAILED"}[kind]) for one in headlines)


if __name__ == "__main__":
    main(*sys.argv[1:])
