"""Scrubbing finds rot while nobody looks, and moves what it finds out of the way; it deletes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_distplus import newest_valid, verify
from lightning_distplus.checkpoint.scrubbing import Scrubber

SOON = timedelta(milliseconds=1)
DEADLINE_S = 30.0


def test_a_damaged_checkpoint_goes_into_quarantine_and_the_one_before_is_the_newest(
    save: Callable[..., Any], tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path / f"{step}.ckpt", step)
    told: list[tuple[Path, Path, str]] = []
    found = threading.Event()

    def on_damage(*damage: Any) -> None:
        told.append(damage)
        found.set()

    scrubber = Scrubber(SOON, moves=threading.Lock(), on_damage=on_damage)
    scrubber.watch(tmp_path)
    (tmp_path / "2.ckpt").write_bytes(b"weighty")
    assert found.wait(DEADLINE_S)
    scrubber.stop()
    ((path, kept, damage),) = told
    assert path == tmp_path / "2.ckpt"
    assert not path.exists()
    assert kept.read_bytes() == b"weighty"
    assert "XXH3 digest" in damage
    assert not verify(kept).ok
    assert newest_valid(tmp_path) == tmp_path / "1.ckpt"


def test_what_is_replaced_while_it_is_read_is_not_called_damaged(save: Callable[..., Any], tmp_path: Path) -> None:
    told: list[Any] = []

    class Interrupted(Scrubber):
        def _is_sound(self, path: Path) -> bool:
            changes[path.name]()
            return False

    changes = {
        "1.ckpt": lambda: save(tmp_path / "1.ckpt", 1, b"others"),
        "2.ckpt": lambda: (tmp_path / "2.ckpt").unlink(),
        "3.ckpt": lambda: None,
    }
    for name in changes:
        save(tmp_path / name, int(name[0]))
    scrubber = Interrupted(SOON, moves=threading.Lock(), on_damage=lambda *damage: told.append(damage))
    scrubber.scrub(tmp_path)
    assert told == []
    assert (tmp_path / "1.ckpt").read_bytes() == b"others"
    assert newest_valid(tmp_path) == tmp_path / "3.ckpt"


def test_only_the_newest_are_read_and_a_stop_ends_it_within_a_file(save: Callable[..., Any], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"{step}.ckpt", step)
        (tmp_path / f"{step}.ckpt").write_bytes(b"wEights")
    told: list[Path] = []
    scrubber = Scrubber(
        SOON, moves=threading.Lock(), on_damage=lambda path, *_: told.append(path), newest=2, bytes_per_s=1e6
    )
    scrubber.scrub(tmp_path)
    assert told == [tmp_path / "3.ckpt", tmp_path / "2.ckpt"]
    slow = Scrubber(SOON, moves=threading.Lock(), on_damage=lambda *_: None, bytes_per_s=1e-3)
    slow.watch(tmp_path)
    slow.stop()
    assert (tmp_path / "1.ckpt").exists()
