from __future__ import annotations

import json
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lightning_distplus import events
from lightning_distplus.events import EventLog, InHand, SampleNote, ledger_files, read_events
from lightning_distplus.world import LAUNCHER


def test_event_is_one_line_with_time_run_rank_attempt_and_sequence_number(tmp_path: Path) -> None:
    with EventLog(tmp_path / "distplus", 3, attempt=2, run_id="a") as log:
        log.write("start", world_size=4)
        log.write("note", text="two\nlines", path=tmp_path)
    lines = (tmp_path / "distplus" / "events-rank00003.jsonl").read_text().splitlines()
    assert len(lines) == 2
    first, second = map(json.loads, lines)
    assert first.pop("time") <= second.pop("time") <= time.time()
    assert first == {"run_id": "a", "rank": 3, "attempt": 2, "seq": 0, "kind": "start", "world_size": 4}
    assert first.pop("world_size") == 4
    assert second == {**first, "seq": 1, "kind": "note", "text": "two\nlines", "path": str(tmp_path)}


def test_runs_that_share_a_folder_are_told_apart_and_a_ledger_without_ids_is_still_read(tmp_path: Path) -> None:
    for run_id in ("a", "b"):
        with EventLog(tmp_path, 0, run_id=run_id) as log:
            log.write("start")
    with (tmp_path / "events-rank00000.jsonl").open("a") as file:
        file.write('{"time": 0.0, "rank": 0, "attempt": 0, "seq": 0, "kind": "start"}\n')
    assert [event["run_id"] for event in read_events(tmp_path)] == ["", "a", "b"]
    assert [event["run_id"] for event in read_events(tmp_path, run_id="b")] == ["b"]


def test_events_of_all_ranks_are_read_in_order_of_time(tmp_path: Path) -> None:
    logs = [EventLog(tmp_path, rank) for rank in range(3)]
    for step in range(4):
        for log in logs:
            log.write("step", step=step)
    for log in logs:
        log.close()
    events = read_events(tmp_path)
    assert [event["step"] for event in events] == [step for step in range(4) for _ in range(3)]
    assert read_events(tmp_path / "missing") == []


def test_field_that_the_ledger_sets_is_refused(tmp_path: Path) -> None:
    with EventLog(tmp_path, 0) as log, pytest.raises(ValueError, match=r"\['rank', 'time'\]"):
        log.write("x", time=1, rank=2)


def test_no_file_before_the_first_event(tmp_path: Path) -> None:
    with EventLog(tmp_path / "distplus", 0):
        pass
    assert not (tmp_path / "distplus").exists()


def test_torn_last_line_is_left_out_and_does_not_swallow_the_next_event(tmp_path: Path) -> None:
    with EventLog(tmp_path, 0) as log:
        log.write("whole")
        log.write("torn", text="long enough to cut")
    os.truncate(log.path, log.path.stat().st_size - 9)
    assert [event["kind"] for event in read_events(tmp_path)] == ["whole"]
    with EventLog(tmp_path, 0, attempt=1) as log:
        log.write("after the restart")
    assert [event["kind"] for event in read_events(tmp_path)] == ["whole", "after the restart"]


def test_lines_that_are_no_events_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "events-rank00000.jsonl").write_bytes(b'3\n{"kind": "x"}\n\xff\xfe\n\nnull\n')
    assert read_events(tmp_path) == []


def test_threads_share_a_log_without_mixing_lines(tmp_path: Path) -> None:
    with EventLog(tmp_path, 0) as log:
        threads = [
            threading.Thread(target=lambda: [log.write("x", text="y" * 500) for _ in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    lines = log.path.read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == list(range(400))


def test_directory_that_cannot_be_made_costs_one_warning_and_the_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "distplus").write_bytes(b"")
    with EventLog(tmp_path / "distplus", 7) as log, caplog.at_level(logging.WARNING):
        log.write("lost")
        log.write("lost too")
        assert len(caplog.records) == 1
        assert "rank 7" in caplog.text
        (tmp_path / "distplus").unlink()
        log.write("written")
    (event,) = read_events(tmp_path / "distplus")
    assert (event["kind"], event["seq"], event["num_lost"]) == ("written", 2, 2)


def test_full_disk_loses_events_and_nothing_else(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(20)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            with EventLog(tmp_path, 0) as log:
                log.write("first", text="x" * 100)
                resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
                log.write("cut in the middle", text="x" * 100)
                log.write("refused")
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                log.write("last")
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    first, last = read_events(tmp_path)
    assert (first["kind"], last["kind"], last["num_lost"]) == ("first", "last", 2)


def test_killed_writer_leaves_only_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom lightning_distplus.events import EventLog\n"
        "log = EventLog(sys.argv[1], 0)\nprint('ready', flush=True)\n"
        "while True:\n    log.write('x', text='y' * 200)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
    finally:
        process.kill()
        process.communicate(timeout=20)
    content = (tmp_path / "events-rank00000.jsonl").read_bytes()
    events = read_events(tmp_path)
    assert len(events) >= len(content.splitlines()) - 1 > 0
    assert [event["seq"] for event in events] == list(range(len(events)))


def test_a_large_ledger_is_rotated_and_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_BYTES", 500)
    with EventLog(tmp_path, 3) as log:
        for _ in range(12):
            log.write("x", text="y" * 200)
    with EventLog(tmp_path, LAUNCHER) as log:
        log.write("launch_end")
    files = [file.name for file in ledger_files(tmp_path, has_launcher=False)]
    assert files == [f"events-rank00003.{number}.jsonl" for number in (4, 3, 2, 1)]  # the next event opens a new one
    assert len(ledger_files(tmp_path)) == len(files) + 1
    assert [event["seq"] for event in read_events(tmp_path) if event["rank"] == 3] == [*range(4, 12)]


# -- samples in hand ---------------------------------------------------------------------------------------------------


@pytest.fixture
def second_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTPLUS_IN_HAND", "")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")


def note(ids: list[int], width: int = 0) -> None:
    mine = SampleNote()
    mine.write(struct.pack(f"<{len(ids)}q", *ids), width)
    mine.close()


@pytest.mark.usefixtures("second_of_two_ranks")
def test_the_launcher_reads_what_a_rank_noted_last_until_the_next_attempt() -> None:
    launcher = InHand(2)
    launcher.forget()
    assert launcher.read() == {}
    note([3, 1, 4])
    note([7, 2])
    assert launcher.read() == {5: [7, 2]}
    note([0, 9, 1, 8], width=2)
    assert launcher.read() == {5: [[0, 9], [1, 8]]}
    launcher.forget()
    assert launcher.read() == {}
    launcher.close()


@pytest.mark.usefixtures("second_of_two_ranks")
def test_a_note_that_was_torn_by_a_kill_is_none() -> None:
    launcher = InHand(2)
    launcher.forget()
    note([3, 1, 4])
    with Path(os.environ["DISTPLUS_IN_HAND"]).open("r+b") as memory:
        memory.seek((1 << 20) + 16)
        memory.write(b"\xff")
    assert launcher.read() == {}
    launcher.close()


@pytest.mark.usefixtures("second_of_two_ranks")
def test_without_a_launcher_nothing_is_written() -> None:
    note([3])
    os.environ["DISTPLUS_IN_HAND"] = "/proc/self/fd/9999"
    note([3])
