"""Row P7: a signal to the launcher at any moment ends the job with 143, a last line and the ledger's."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from lightning_distplus import env
from lightning_distplus.events import EventLog, read_events
from tests.pairs import kept_rows
from tests.processes import start, wait_until

LAUNCH = """
import os, sys, time
from pathlib import Path
from lightning_distplus.cli import launch
folder, moment, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def at(name):  # a signal comes at this very moment
    if name == moment:
        (folder / "fired").touch()
        os.kill(os.getpid(), number)

supervise = launch._supervise

def importing(*arguments):
    at("importing")
    from lightning_distplus.launch import supervisor
    run_attempt = supervisor.run_attempt

    def starting(command, number, *arguments, **named):
        at(f"before attempt {number}")
        return run_attempt(command, number, *arguments, **named)

    supervisor.run_attempt = starting
    return supervise(*arguments)

launch._supervise = importing
if moment == "clock":  # set back by an hour while the first attempt runs
    clock = time.time
    time.time = lambda: clock() + 3600 * (not (folder / "began-0").exists())
sys.exit(launch.main(sys.argv[4:]))
"""


def rank(folder: str, deed: str) -> None:
    """A rank without torch: the first one fails, or waits for the signal."""
    number = env.DISTPLUS_ATTEMPT.integer() or 0
    home = Path(folder, "distplus")
    Path(env.DISTPLUS_HOME_FILE.get() or "").write_text(json.dumps({"home": str(home)}))
    with EventLog(home, 0, attempt=number, run_id=env.DISTPLUS_RUN_ID.get() or "") as events:
        events.write("start")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("\rit runs", flush=True)
    Path(folder, f"began-{number}").touch()
    if deed == "waits":
        time.sleep(600)
    sys.exit(number == 0)


def launch(folder: Path, moment: str, number: int, deed: str) -> subprocess.Popen[str]:
    options = ["--start", "cold", "--log-dir", folder / "logs"]
    job = ["-m", "tests.faults.test_p7_signals_to_the_launcher", folder, deed]
    return start("-c", LAUNCH, folder, moment, str(number), *options, *job)


MOMENTS = ("importing", "before attempt 0", "before attempt 1", "running")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IN_CI = [("importing", signal.SIGINT), ("before attempt 1", signal.SIGINT), ("running", signal.SIGHUP)]
ALL = [*product(MOMENTS, SIGNALS)]
ALL.remove(("running", signal.SIGINT))  # which this rank does not take


@pytest.mark.parametrize(("moment", "number"), kept_rows(ALL, IN_CI))
def test_a_signal_at_any_moment_ends_the_job_as_documented(moment: str, number: signal.Signals, tmp_path: Path) -> None:
    launcher = launch(tmp_path, moment, number, "waits" if moment == "running" else "fails")
    try:
        if moment == "running":
            wait_until((tmp_path / "began-0").exists)
            launcher.send_signal(number)
            (tmp_path / "fired").touch()
        log, _ = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert (tmp_path / "fired").exists()
    assert launcher.returncode == 143, log
    assert "Traceback" not in log
    assert "ends with exit code 143 after attempt" in log
    assert number.name in log
    assert ("next: no checkpoint has been committed yet" in log) == (tmp_path / "began-0").exists()
    ended = [event["exit_code"] for event in read_events(tmp_path / "distplus") if event["kind"] == "launch_end"]
    assert ended == ([143] if (tmp_path / "began-0").exists() else [])
    assert not (tmp_path / "began-1").exists()


def test_a_clock_that_is_set_back_stops_no_restart(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "clock", 0, "fails")
    try:
        log, _ = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, log
    assert (tmp_path / "began-1").exists()
    assert log.count("[0] it runs\n") == 2


if __name__ == "__main__":
    rank(*sys.argv[1:])
