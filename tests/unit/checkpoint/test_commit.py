from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.checkpoint import Manifest, newest_valid, read_manifest, verify
from lightning_distplus.checkpoint.catalog import whole_one_of
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.checkpoint.files import leftovers_of
from lightning_distplus.errors import ExitCode, PeerMissing, SaveFailed
from tests.pairs import kept

NUM_POLLS = 100_000
INFO = Manifest(global_step=5, epoch=1, strategy="resilient_fsdp", data={"consumed_samples": 40}, packages={})


def refuse_to_exchange(event: str, _: Any) -> None:
    if event == "distplus.exchange":
        raise OSError(errno.EINVAL, "not on NFS")


def names_in(folder: Path) -> set[str]:
    return {child.name for child in folder.iterdir()}


def shard_writer(rank: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.mkdir(exist_ok=True)
        for index in range(3):
            (path / f"shard{rank}-{index}.bin").write_bytes(bytes([rank]) * (10 + rank + index))

    return write


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_directory_written_by_all_ranks_is_committed_once(tmp_path: Path, as_ranks: Any, world_size: int) -> None:
    target = tmp_path / "new" / "step=5.ckpt"
    ranks = as_ranks(
        world_size, lambda rank, gather: commit(target, shard_writer(rank), INFO, rank=rank, gather=gather)
    )
    assert not ranks.errors
    manifest = ranks.results.pop(0)
    expected_paths = [f"shard{r}-{i}.bin" for r in range(world_size) for i in range(3)]
    assert set(ranks.results.values()) <= {None}
    assert read_manifest(target) == manifest
    assert [entry.path for entry in manifest.files] == expected_paths
    assert (manifest.global_step, manifest.epoch, manifest.world_size) == (5, 1, world_size)
    assert (manifest.strategy, manifest.data) == ("resilient_fsdp", {"consumed_samples": 40})
    assert abs(manifest.committed_at - time.time()) < 60
    assert newest_valid(target.parent) == target
    assert names_in(target.parent / ".distplus") == set()


def test_file_that_only_rank_0_writes_is_committed(tmp_path: Path, as_ranks: Any) -> None:
    target = tmp_path / "step=5.ckpt"

    def save(rank: int, gather: Any) -> object:
        write = (lambda path: path.write_bytes(b"all")) if rank == 0 else (lambda path: None)
        return commit(target, write, INFO, rank=rank, gather=gather)

    ranks = as_ranks(3, save)
    assert not ranks.errors
    assert verify(target).ok
    assert names_in(tmp_path) == {"step=5.ckpt", ".distplus"}
    assert names_in(tmp_path / ".distplus") == {"step=5.ckpt"}
    assert names_in(tmp_path / ".distplus" / "step=5.ckpt") == {"manifest.json", "commit"}


def test_rank_0s_target_holds_for_all_ranks(tmp_path: Path, as_ranks: Any) -> None:
    ranks = as_ranks(
        2,
        lambda rank, gather: commit(
            tmp_path / f"loss=0.{rank}.ckpt", shard_writer(rank), rank=rank, gather=gather, info=INFO
        ),
    )
    assert not ranks.errors
    assert names_in(tmp_path) == {"loss=0.0.ckpt", ".distplus"}
    assert len(ranks.results[0].files) == 6


@pytest.mark.parametrize("guilty", [0, 1, 2])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_failing_rank_is_named_on_all_ranks_and_the_previous_checkpoint_stays(
    tmp_path: Path, as_ranks: Any, save: Any, content_of: Any, guilty: int, kind: str
) -> None:
    target = tmp_path / "last.ckpt"
    save(target, step=4, content=b"old", kind=kind)

    def failing_save(rank: int, gather: Any) -> object:
        def write(path: Path) -> None:
            shard_writer(rank)(path)
            if rank == guilty:
                raise OSError(28, "No space left on device")

        return commit(target, write, INFO, rank=rank, gather=gather)

    ranks = as_ranks(3, failing_save)
    assert not ranks.results
    assert len({str(error) for error in ranks.errors.values()}) == 1
    for rank, error in ranks.errors.items():
        assert isinstance(error, SaveFailed)
        assert error.ranks == [guilty]
        assert f"rank {guilty} failed first, in phase 'write', with OSError: [Errno 28]" in str(error)
        assert isinstance(error.__cause__, OSError) == (rank == guilty)
        assert error.exit_code == (ExitCode.FAILED if rank == guilty else ExitCode.PEER_LOST)
    assert newest_valid(tmp_path) == target
    assert content_of(target) == b"old"
    assert names_in(tmp_path) == {"last.ckpt", ".distplus"}
    assert names_in(tmp_path / ".distplus") <= {"last.ckpt"}


def test_first_of_several_failing_ranks_is_named(tmp_path: Path, as_ranks: Any) -> None:
    def save(rank: int, gather: Any) -> object:
        def write(path: Path) -> None:
            time.sleep(0.2 * (rank != 1))
            raise ValueError(f"told by rank {rank}")

        return commit(tmp_path / "x.ckpt", write, INFO, rank=rank, gather=gather)

    ranks = as_ranks(2, save)
    assert "rank 1 failed first, in phase 'write', with ValueError: told by rank 1" in str(ranks.errors[0])
    assert ranks.errors[0].ranks == [0, 1]
    assert str(ranks.errors[0].__cause__) == "told by rank 0"


def test_save_that_leaves_no_file_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(SaveFailed, match="left no file"):
        commit(tmp_path / "x.ckpt", lambda path: None, INFO)
    assert newest_valid(tmp_path) is None


def test_files_that_rank_0_cannot_see_are_refused(tmp_path: Path, as_ranks: Any) -> None:
    late = tmp_path / "late"

    def save(rank: int, gather: Any) -> object:
        def gather_and_write(name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
            values: list[dict[str, Any]] = gather(name, value)
            if rank == 1 and name == "checkpoint list":  # appears only for rank 1, after rank 0 has listed
                next(tmp_path.glob(".distplus/*.stage-*/x.ckpt")).joinpath("alien.bin").write_bytes(b"1")
                late.touch()
            return values

        return commit(tmp_path / "x.ckpt", shard_writer(rank), INFO, rank=rank, gather=gather_and_write)

    ranks = as_ranks(2, save)
    assert late.exists()
    assert "sees alien.bin" in str(ranks.errors[0])
    assert 1 in ranks.errors[1].ranks
    assert newest_valid(tmp_path) is None


def test_file_that_still_grows_is_refused(tmp_path: Path) -> None:
    def grow(name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
        if name == "checkpoint list":
            with next(tmp_path.glob(".distplus/*.stage-*/x.ckpt")).open("ab") as file:
                file.write(b"more")
        return [value]

    with pytest.raises(SaveFailed, match="had 4 bytes when the save ended on all ranks and has 8 bytes now"):
        commit(tmp_path / "x.ckpt", lambda path: path.write_bytes(b"part"), INFO, gather=grow)
    assert newest_valid(tmp_path) is None


def test_lost_peer_ends_the_commit_without_a_checkpoint(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "x.ckpt", step=1, content=b"old")

    def lonely(name: str, value: dict[str, Any], /) -> list[dict[str, Any]]:
        if name == "checkpoint digest":
            raise PeerMissing("rank 1 did not answer", ranks=[1])
        return [value]

    with pytest.raises(PeerMissing):
        commit(tmp_path / "x.ckpt", lambda path: path.write_bytes(b"new"), INFO, gather=lonely)
    assert (tmp_path / "x.ckpt").read_bytes() == b"old"
    assert newest_valid(tmp_path) == tmp_path / "x.ckpt"
    assert names_in(tmp_path / ".distplus") == {"x.ckpt"}


def test_interrupt_during_the_save_stays_an_interrupt_and_reaches_the_others(tmp_path: Path, as_ranks: Any) -> None:
    def save(rank: int, gather: Any) -> object:
        def write(path: Path) -> None:
            if rank == 1:
                raise KeyboardInterrupt

        return commit(tmp_path / "x.ckpt", write, INFO, rank=rank, gather=gather)

    ranks = as_ranks(2, save)
    assert isinstance(ranks.errors[1], KeyboardInterrupt)
    assert "KeyboardInterrupt" in str(ranks.errors[0])


@pytest.mark.parametrize("new", ["file", "directory"])
@pytest.mark.parametrize("old", ["file", "directory", "legacy file", "legacy directory", "link", "removed by hand"])
def test_any_existing_target_is_replaced(tmp_path: Path, save: Any, content_of: Any, old: str, new: str) -> None:
    target = tmp_path / "last.ckpt"
    if old == "legacy file":
        target.write_bytes(b"legacy")
    elif old == "legacy directory":
        target.mkdir()
        (target / "model.bin").write_bytes(b"legacy")
    elif old == "link":
        save(tmp_path / "step=1.ckpt", step=1, content=b"linked")
        target.symlink_to("step=1.ckpt")
    else:
        save(target, step=1, content=b"old", kind="file" if old == "removed by hand" else old)
    if old == "removed by hand":
        target.unlink()
    for step in (2, 3):
        save(target, step=step, content=b"new%d" % step, kind=new)
        assert newest_valid(tmp_path) == target
        assert not target.is_symlink()
        assert content_of(target) == b"new%d" % step
        assert names_in(tmp_path) == {"last.ckpt", ".distplus"} | ({"step=1.ckpt"} if old == "link" else set())
        assert names_in(tmp_path / ".distplus") <= {"last.ckpt", "step=1.ckpt"}
    if old == "link":
        assert verify(tmp_path / "step=1.ckpt").ok


def test_target_folder_that_is_a_file_fails_on_all_ranks(tmp_path: Path, as_ranks: Any) -> None:
    (tmp_path / "folder").write_bytes(b"")
    target = tmp_path / "folder" / "x.ckpt"
    ranks = as_ranks(2, lambda rank, gather: commit(target, shard_writer(rank), INFO, rank=rank, gather=gather))
    assert [type(error) for error in ranks.errors.values()] == [SaveFailed, SaveFailed]
    assert "in phase 'begin', with NotADirectoryError" in str(ranks.errors[1])


def test_full_disk_fails_on_all_ranks_and_leaves_the_old_one(
    tmp_path: Path, as_ranks: Any, save: Any, in_child: Any
) -> None:
    target = tmp_path / "last.ckpt"
    save(target, step=1, content=b"old", kind="directory")

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        def write(path: Path) -> None:
            path.mkdir(exist_ok=True)
            (path / "large.bin").write_bytes(bytes(40_000))

        def failing_save(rank: int, gather: Any) -> object:
            return commit(target, write if rank == 0 else shard_writer(rank), INFO, rank=rank, gather=gather)

        ranks = as_ranks(2, failing_save)
        assert [type(ranks.errors[rank]) for rank in range(2)] == [SaveFailed, SaveFailed]
        assert "rank 0 failed first, in phase 'write', with OSError: [Errno 27] File too large" in str(ranks.errors[1])

    assert in_child(child) == 0
    assert newest_valid(tmp_path) == target
    assert (target / "model.bin").read_bytes() == b"old"
    assert names_in(tmp_path / ".distplus") == set()


TRANSITIONS = [
    ("file", "file"),
    ("directory", "directory"),
    ("file", "directory"),
    ("directory", "file"),
    (None, "file"),
    (None, "directory"),
]


@pytest.mark.parametrize(
    "change",
    kept(
        [*((*kinds, 9) for kinds in TRANSITIONS), ("file", "file", 7), ("directory", "directory", 7)],
        [("file", "file", 9), ("directory", "directory", 7), ("directory", "file", 9), (None, "directory", 9)],
    ),
)
def test_kill_before_any_change_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, save: Any, content_of: Any, in_child: Any, at_change: Any, change: tuple[str | None, str, int]
) -> None:
    old, new, new_step = change
    target = tmp_path / "last.ckpt"
    seen: set[bytes | None] = set()
    save(tmp_path / "warm-up" / "x.ckpt", step=0, content=b"x", kind=new)
    for index in range(200):
        folder = tmp_path / str(index)
        target = folder / "last.ckpt"
        folder.mkdir()
        if old is not None:
            save(target, step=8, content=b"old", kind=old)

        def child(index: int = index, target: Path = target) -> None:
            at_change(index, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            save(target, step=new_step, content=b"new", kind=new)

        status = in_child(child)
        found = newest_valid(folder)
        seen.add(content_of(found) if found else None)
        assert found or old is None, f"nothing is left after a kill before change {index}"
        if old is not None:
            assert verify(target).ok, f"after a kill before change {index}: {verify(target)}"
            seen.add(content_of(target))
        assert names_in(folder) <= {"last.ckpt", ".distplus"}
        if status == 0:
            break
        assert status == -signal.SIGKILL
        # The next run resumes and saves under the same name: what the killed one has written is in quarantine.
        save(target, step=10, content=b"next", kind=new)
        assert newest_valid(folder) == target
        assert content_of(target) == b"next"
        kept = {path.name for role in ("removed", "torn") for path in folder.glob(f".distplus/*.{role}-*")}
        assert names_in(folder / ".distplus") <= {"last.ckpt"} | kept
    assert status == 0
    assert index > 10
    assert seen == {b"old" if old else None, b"new"}


@pytest.mark.parametrize(
    "change",
    kept(
        [*((*kinds, exchanges) for kinds in TRANSITIONS for exchanges in (True, False))],
        [
            ("file", "file", True),
            ("directory", "directory", True),
            ("directory", "directory", False),
            (None, "file", True),
        ],
    ),
)
def test_error_at_any_change_raises_and_puts_the_old_checkpoint_back(
    tmp_path: Path, save: Any, content_of: Any, in_child: Any, at_change: Any, change: tuple[str | None, str, bool]
) -> None:
    old, new, exchanges = change
    save(tmp_path / "warm-up" / "x.ckpt", step=0, content=b"x", kind=new)
    outcomes = {"failed": 0, "saved": 0}
    for index in range(200):
        folder = tmp_path / str(index)
        target = folder / "last.ckpt"
        folder.mkdir()
        if old is not None:
            save(target, step=8, content=b"old", kind=old)

        def child(index: int = index, target: Path = target, folder: Path = folder) -> None:
            def refuse(event: str) -> None:
                (tmp_path / f"fired-{index}").symlink_to(event)
                raise OSError(5, f"planted at {event}")

            if not exchanges:
                sys.addaudithook(refuse_to_exchange)
            at_change(index, refuse)
            try:
                save(target, step=9, content=b"new", kind=new)
            except SaveFailed as error:
                (tmp_path / f"failed-{index}").write_text(str(error))

        assert in_child(child) == 0
        if not (tmp_path / f"fired-{index}").is_symlink():
            break
        failed = (tmp_path / f"failed-{index}").exists()
        assert not failed or "planted at" in (tmp_path / f"failed-{index}").read_text()
        outcomes["failed" if failed else "saved"] += 1
        expected = (target if old else None) if failed else target
        assert newest_valid(folder) == expected
        if expected is not None:
            assert content_of(target) == (b"old" if failed else b"new")
        assert not (failed and leftovers_of(target, "stage", "aside", "draft"))
    assert outcomes["failed"] > 5  # and an error while the stage is cleared after the commit is not a failed save


def test_file_system_without_hard_links_gets_a_copy(tmp_path: Path, save: Any, content_of: Any, in_child: Any) -> None:
    target = tmp_path / "last.ckpt"
    save(target, step=1, content=b"old")

    def child() -> None:
        def hook(event: str, args: Any) -> None:
            if event == "os.link":
                raise OSError(errno.EPERM, "no hard links here")
            if event == "os.rename" and str(args[0]).endswith(".distplus/last.ckpt"):
                os.kill(os.getpid(), signal.SIGKILL)  # the new file lies beside the old one's manifest

        sys.addaudithook(hook)
        save(target, step=2, content=b"new")

    assert in_child(child) == -signal.SIGKILL
    assert not verify(target).ok
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.parent.name.startswith("last.ckpt.aside-")
    assert content_of(found) == b"new"
    assert found.stat().st_nlink == 1


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_observer_meets_a_whole_checkpoint_at_every_instant(tmp_path: Path, save: Any, kind: str) -> None:
    target = tmp_path / "last.ckpt"
    save(target, step=0, content=b"weights", kind=kind)
    (tmp_path / "go on").touch()
    pid = os.fork()
    if pid == 0:
        try:
            for step in itertools.count(1):
                save(target, step=step, content=b"weight%d" % (step % 10), kind=kind)
                if not (tmp_path / "go on").exists():
                    os._exit(0)
        finally:
            os._exit(1)
    steps, deadline = [0], time.monotonic() + 120.0
    try:
        for poll in itertools.count():
            if poll >= NUM_POLLS and len(set(steps)) > 20:  # a slow disk gives it fewer saves in as many looks
                break
            assert time.monotonic() < deadline, "it was replaced while it was looked at"
            assert os.path.lexists(target)
            if poll % 100 == 0:
                report = verify(target)
                assert report.ok, report
                assert report.manifest is not None
                steps.append(report.manifest.global_step)
        (tmp_path / "go on").unlink()
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    assert status == 0
    assert steps == sorted(steps)


def test_a_link_is_replaced_by_a_file_where_names_cannot_be_exchanged(tmp_path: Path, save: Any, in_child: Any) -> None:
    target = tmp_path / "last.ckpt"
    save(tmp_path / "step=1.ckpt", step=1)
    target.symlink_to("step=1.ckpt")

    def child() -> None:
        sys.addaudithook(refuse_to_exchange)
        save(target, step=2)

    assert in_child(child) == 0
    assert newest_valid(tmp_path) == target
    assert verify(target).ok
    assert not target.is_symlink()


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_target_that_somebody_removes_meanwhile_is_committed_or_the_save_has_failed(
    tmp_path: Path, save: Any, in_child: Any, at_change: Any, exchanges: bool
) -> None:
    for index in range(200):
        target = tmp_path / str(index) / "last.ckpt"
        save(target, step=1)

        def child(index: int = index, target: Path = target) -> None:
            if not exchanges:
                sys.addaudithook(refuse_to_exchange)
            at_change(index, lambda _: target.unlink())
            try:
                save(target, step=2)
            except SaveFailed:
                assert not target.exists()
                os._exit(1)

        status = in_child(child)
        assert status == 1 or not target.exists() or (verify(target).ok and read_manifest(target).global_step == 2)
        if target.exists() and index > 10:
            break
    assert index < 100


@pytest.mark.parametrize("change", kept(TRANSITIONS[:4], [("directory", "directory"), ("file", "file")]))
def test_kill_where_names_cannot_be_exchanged_leaves_one_that_is_found_by_its_path(
    tmp_path: Path, save: Any, content_of: Any, in_child: Any, at_change: Any, change: tuple[str, str]
) -> None:
    old, new = change
    num_absent = 0
    for index in range(200):
        target = tmp_path / str(index) / "last.ckpt"
        save(target, step=8, content=b"old", kind=old)

        def child(index: int = index, target: Path = target) -> None:
            at_change(index, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            sys.addaudithook(refuse_to_exchange)
            save(target, step=9, content=b"new", kind=new)

        status = in_child(child)
        found, newest = whole_one_of(target), newest_valid(target.parent)
        assert newest is not None
        assert verify(found).ok
        assert content_of(found) in (b"old", b"new")
        num_absent += not target.exists()
        if status == 0:
            break
        save(target, step=10, content=b"next", kind=new)
        assert content_of(target) == b"next"
        kept = [path for path in (target.parent / ".distplus").glob("*.torn-*/last.ckpt") if verify(path).ok]
        assert kept or found == target, "what had no successor is not deleted"
    assert status == 0
    assert num_absent == ("directory" in (old, new))
