from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from lightning_distplus.events import InHand, SampleNote
from lightning_distplus.process import introduce_starter, launcher_has_ended, starter_has_ended


@pytest.fixture(autouse=True)
def second_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTPLUS_IN_HAND", "")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")


def note(ids: list[int], width: int = 0) -> None:
    mine = SampleNote()
    mine.write(struct.pack(f"<{len(ids)}q", *ids), width)
    mine.close()


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


def test_a_note_that_was_torn_by_a_kill_is_none() -> None:
    launcher = InHand(2)
    launcher.forget()
    note([3, 1, 4])
    with Path(os.environ["DISTPLUS_IN_HAND"]).open("r+b") as memory:
        memory.seek((1 << 20) + 16)
        memory.write(b"\xff")
    assert launcher.read() == {}
    launcher.close()


def test_without_a_launcher_nothing_is_written() -> None:
    note([3])
    os.environ["DISTPLUS_IN_HAND"] = "/proc/self/fd/9999"
    note([3])


def test_a_rank_knows_whether_its_launcher_has_ended() -> None:
    assert not launcher_has_ended()  # nobody has started it
    launcher = InHand(2)
    assert not launcher_has_ended()
    launcher.close()
    assert not launcher_has_ended()  # its process is there
    os.environ["DISTPLUS_IN_HAND"] = "/proc/4194305/fd/3"  # no number of a process is as high
    assert launcher_has_ended()


def test_a_job_knows_whether_its_starter_has_ended_and_one_of_a_launcher_does_not_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTPLUS_STARTER", "")
    assert not starter_has_ended("")
    introduce_starter()
    mine = os.environ["DISTPLUS_STARTER"]
    assert not starter_has_ended(mine)
    gone = f"{os.getpid()}:1"  # the number was another process's before
    assert not starter_has_ended(gone)
    os.environ["DISTPLUS_STARTER"] = gone
    assert starter_has_ended(gone)
    assert not starter_has_ended("of torchrun")
    assert not starter_has_ended("")
