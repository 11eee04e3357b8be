"""What is removed and linked while others save, remove and link (row C5)."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.checkpoint import is_last_valid, newest_valid, verify
from lightning_distplus.checkpoint.catalog import link
from lightning_distplus.checkpoint.files import in_role

KINDS = ["file", "directory"]


def data_file(path: Path) -> Path:
    return path if path.is_file() else path / "model.bin"


def test_the_last_valid_one_is_told_from_one_among_several(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.ckpt", step=1)
    assert is_last_valid(tmp_path / "a.ckpt")
    save(tmp_path / "b.ckpt", step=2)
    assert not is_last_valid(tmp_path / "a.ckpt")
    os.truncate(tmp_path / "b.ckpt", 2)
    assert is_last_valid(tmp_path / "a.ckpt")
    assert not is_last_valid(tmp_path / "b.ckpt")
    (tmp_path / "c.ckpt").symlink_to("a.ckpt")
    assert is_last_valid(tmp_path / "a.ckpt")
    assert not is_last_valid(tmp_path / "c.ckpt")
    assert not is_last_valid(tmp_path / "none")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_save_is_kept_by_the_next_one_and_a_living_one_is_left_alone(
    tmp_path: Path, save: Any, in_child: Any, kind: str
) -> None:
    path = tmp_path / "x.ckpt"
    save(path, step=1, kind=kind)

    def die(folder: Path) -> None:
        (folder / "half").write_bytes(b"torn")
        os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        from lightning_distplus.checkpoint import Manifest, gather_alone
        from lightning_distplus.checkpoint.commit import commit

        info = Manifest(global_step=2, epoch=0, strategy="x", packages={})
        commit(path, lambda stage: die(stage.parent), rank=0, gather=gather_alone, info=info, sync=None)

    assert in_child(child) == -signal.SIGKILL
    (stage,) = (tmp_path / ".distplus").glob("*.stage-*")
    living = stage.with_name("x.ckpt.stage-00000000")
    (living / ".distplus").mkdir(parents=True)
    owner = json.loads((stage / ".distplus" / "owner.json").read_bytes())
    from lightning_distplus.process import start_time

    owner.update(pid=os.getpid(), started=start_time(os.getpid()))
    (living / ".distplus" / "owner.json").write_text(json.dumps(owner))
    save(path, step=3, kind=kind)
    (kept,) = in_role(tmp_path, "torn")
    assert (kept / "half").read_bytes() == b"torn"
    assert not stage.exists()
    assert living.exists()
    assert newest_valid(tmp_path) == path


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_that_is_overwritten_is_kept(tmp_path: Path, save: Any, kind: str) -> None:
    path = tmp_path / "x.ckpt"
    save(path, step=1, kind=kind)
    os.truncate(data_file(path), 2)
    save(path, step=2, kind=kind)
    (kept,) = in_role(tmp_path, "torn")
    damaged = data_file(kept / "x.ckpt")
    assert damaged.stat().st_size == 2
    assert [str(one) for one in verify(kept / "x.ckpt").findings] == [f"{damaged}: expected 7 bytes, found 2 bytes"]
    assert newest_valid(tmp_path) == path
    assert verify(path).ok
    kept.rename(path.parent / ".distplus" / "x.ckpt.aside-00000000")  # as a save leaves it that is killed now
    save(path, step=3, kind=kind)
    assert [data_file(one / "x.ckpt").stat().st_size for one in in_role(tmp_path, "torn")] == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_is_swapped_in_one_step_and_never_points_to_nothing(
    tmp_path: Path, save: Any, kind: str, in_child: Any, at_change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    last = tmp_path / "last.ckpt"
    for step in (1, 2):
        save(tmp_path / f"{step}.ckpt", step=step, kind=kind)
    save(last, step=0, kind=kind)
    link(tmp_path / "1.ckpt", last)
    assert last.readlink() == Path("1.ckpt")
    assert verify(last).ok
    link(tmp_path / "3.ckpt", last)
    assert last.readlink() == Path("1.ckpt")
    assert "is not there" in caplog.text
    for index in range(20):

        def child(index: int = index) -> None:
            at_change(index, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            link(tmp_path / "2.ckpt", last)

        status = in_child(child)
        assert verify(last).ok
        if status == 0:
            break
    assert status == 0
    assert index > 1
    assert last.readlink() == Path("2.ckpt")
    assert newest_valid(tmp_path) == tmp_path / "2.ckpt"
