from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from lightning_distplus.events import EventLog
from lightning_distplus.watchdog.verdict import describe_next
from lightning_distplus.world import LAUNCHER
from tests.processes import run_source


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("PeerLost('gone', [1])", 171), ("HangDetected('hangs', [1])", 170), ("DivergenceError('differ')", 172),
        ("PreflightError('wrong')", 173), ("CheckpointCorrupt('torn')", 1), ("Preempted()", 143),
    ],
)  # fmt: skip
def test_a_process_ends_with_the_code_of_its_error_and_shows_it(error: str, code: int) -> None:
    ended = run_source(f"""
        import atexit, sys
        from lightning_distplus.errors import install_exit_codes
        from lightning_distplus.errors import *
        atexit.register(print, "ended in order")
        install_exit_codes()
        hook = sys.excepthook
        install_exit_codes()
        assert sys.excepthook is hook
        raise {error}
    """)
    assert ended.returncode == code
    assert ended.stdout == "ended in order\n"
    name = error.partition("(")[0]
    assert ended.stderr.count(f"lightning_distplus.errors.{name}: ") == (name != "Preempted")


def test_what_was_written_to_a_file_in_a_cycle_is_there(tmp_path: Path) -> None:
    ended = run_source(f"""
        from lightning_distplus.errors import install_exit_codes
        from lightning_distplus.errors import PeerLost
        class Journal: pass
        journal = Journal()
        journal.itself, journal.file = journal, open({str(tmp_path / "journal")!r}, "w")
        journal.file.write("the last line")
        install_exit_codes()
        raise PeerLost("gone")
    """)
    assert ended.returncode == 171
    assert (tmp_path / "journal").read_text() == "the last line"


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [("PeerLost('gone')", 171, "PeerLost: gone"), ("LookupError('lost')", 1, "LookupError: lost")],
)
def test_a_sigterm_while_the_interpreter_ends_does_not_take_the_place_of_the_code(
    error: str, code: int, says: str
) -> None:
    ended = run_source(f"""
        import atexit, os, signal
        from lightning_distplus.errors import install_exit_codes
        from lightning_distplus.errors import PeerLost
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
        install_exit_codes()
        raise {error}
    """)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.rstrip().endswith(says)


def test_a_hook_that_the_user_has_set_is_still_called() -> None:
    ended = run_source("""
        import sys
        from lightning_distplus.errors import install_exit_codes
        from lightning_distplus.errors import PeerLost
        sys.excepthook = lambda kind, error, trace: print("mine:", kind.__name__, error, trace.tb_lineno)
        install_exit_codes()
        raise PeerLost("gone")
    """)
    assert (ended.returncode, ended.stderr) == (171, "")
    assert ended.stdout.startswith("mine: PeerLost gone ")


@pytest.mark.parametrize(
    ("typed", "how"),
    [
        ("distplus launch --nproc 2 -- fit --config x.yaml", "the same command goes on"),
        ("distplus launch -- fit --ckpt_path import.ckpt", "the same command with --ckpt_path auto goes on"),
        ("distplus launch --nproc 2 train.py", 'the same command with fit(..., ckpt_path="auto") goes on'),
        ("distplus fit", "the same command with --ckpt_path auto goes on"),
        ("train.py", 'the same command with fit(..., ckpt_path="auto") goes on'),
    ],
)
def test_the_command_that_goes_on_is_that_of_who_has_started_it(
    typed: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", typed.split())
    with EventLog(tmp_path, 0, run_id="a") as log:
        log.write("saved", path="a.ckpt", global_step=50)
    assert describe_next(tmp_path, "a", 70, time.time()).startswith(how)


def test_what_goes_on_is_the_checkpoint_of_the_ranks_whatever_the_launcher_has_written(tmp_path: Path) -> None:
    for rank, kind, fields in ((0, "saved", {"path": "a.ckpt", "global_step": 50}), (LAUNCHER, "restart", {})):
        with EventLog(tmp_path, rank, run_id="a") as log:
            log.write(kind, **fields)
    assert "goes on from a.ckpt (step 50; 20 steps" in describe_next(tmp_path, "a", 70, time.time())


@pytest.mark.parametrize(
    ("typed", "how"),
    [
        ("train.py", 'with fit(..., ckpt_path="{}") goes on ('),
        ("distplus fit", "with --ckpt_path {} goes on ("),
        ("distplus launch -- fit --config x.yaml", "with --ckpt_path {} goes on ("),
    ],
)
def test_a_checkpoint_that_auto_does_not_look_for_is_named_by_its_path(
    typed: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a ModelCheckpoint without a folder saves below the logger's version, or the run began from an import."""
    monkeypatch.setattr(sys, "argv", typed.split())
    for run_id, path in (("a", "runs/checkpoints/x.ckpt"), ("b", "lightning_logs/version_0/checkpoints/x.ckpt")):
        with EventLog(tmp_path, 0, run_id=run_id) as log:
            log.write("start", auto_folder="runs/checkpoints")
            log.write("saved", path=path, global_step=50)
    assert how.format("runs/checkpoints/x.ckpt") not in describe_next(tmp_path, "a", 70, time.time())
    assert how.format(path) in describe_next(tmp_path, "b", 70, time.time())


def test_a_run_that_was_refused_its_checkpoint_is_told_neither_to_begin_anew_nor_that_it_goes_on(
    tmp_path: Path,
) -> None:
    for phase, what in (("resume", "loads the same checkpoint again"), ("step", "starts at the beginning")):
        assert f"the same command {what}" in describe_next(tmp_path, "a", 0, time.time(), phase=phase)
    with EventLog(tmp_path, 0, run_id="a") as log:  # it was read, and fits neither model nor data
        log.write("loaded", path="a.ckpt", global_step=20)
    assert "loads the same checkpoint again" in describe_next(tmp_path, "a", 0, time.time(), phase="resume")
