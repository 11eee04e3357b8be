"""How far a save or a load of this process is, by the system's own count of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_distplus.watchdog import transfer
from lightning_distplus.watchdog.transfer import Transfer


def write(path: Path, megabytes: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(megabytes):
            file.write(bytes(1_000_000))


def read_half(path: Path) -> None:
    with path.open("rb") as file:
        file.read(path.stat().st_size // 2)
    raise OSError("half of it")


def test_the_bytes_of_a_save_are_counted_and_those_of_the_last_one_are_the_total(tmp_path: Path) -> None:
    moving = Transfer()
    assert moving.progress() is None
    with moving.of("save"):
        write(tmp_path / "first", 12)
        first = moving.progress()
    assert first is not None
    assert (first.unit, first.whole, first.total, first.is_motion) == ("MB", "the save", None, True)
    assert 12 <= first.done < 20
    assert moving.progress() is None
    with moving.of("save"):
        write(tmp_path / "second", 6)
        second = moving.progress()
    assert second is not None
    assert second.done < first.done <= (second.total or 0) < 20


def test_a_load_counts_what_is_read_and_one_that_fails_is_no_measure(tmp_path: Path) -> None:
    moving, file = Transfer(), tmp_path / "file"
    write(file, 8)
    with pytest.raises(OSError, match="half"), moving.of("load"):
        read_half(file)
    with moving.of("load"):
        assert len(file.read_bytes()) == 8_000_000
        found = moving.progress()
    assert found is not None
    assert (found.whole, found.total) == ("the load", None)
    assert found.done >= 8


def test_one_that_does_not_move_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moving = Transfer()
    with moving.of("save"):
        write(tmp_path / "file", 1)
        assert moving.progress() is not None
        monkeypatch.setattr(transfer, "_STALLED_S", -1.0)
        assert moving.progress() is None
