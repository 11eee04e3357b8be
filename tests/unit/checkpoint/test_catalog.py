"""Which checkpoint is the newest, and whole; what is removed and linked; what ranks read, and a job has saved."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.checkpoint import (
    CheckpointState,
    Manifest,
    catalog,
    files,
    info_like,
    is_last_valid,
    newest_valid,
    read_manifest,
    remove,
    state,
    verify,
    verify_or_raise,
)
from lightning_distplus.checkpoint.catalog import (
    JobSaves,
    committed_in,
    findings_in_share,
    link,
    look,
    num_fits,
)
from lightning_distplus.checkpoint.commit import commit
from lightning_distplus.checkpoint.files import in_role
from lightning_distplus.errors import CheckpointCorrupt
from lightning_distplus.events import EventLog
from lightning_distplus.process import start_time
from tests.unit.checkpoint.conftest import saved

KINDS = ["file", "directory"]


def data_file(path: Path) -> Path:
    return path if path.is_file() else path / "model.bin"


def meta(path: Path) -> Path:
    return path / ".distplus" if path.is_dir() else path.parent / ".distplus" / path.name


def flip_bit(path: Path) -> None:
    content = bytearray(data_file(path).read_bytes())
    content[len(content) // 2] ^= 4
    data_file(path).write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(data_file(path), 3)


def lengthen(path: Path) -> None:
    with data_file(path).open("ab") as file:
        file.write(b"more")


def lose_marker(path: Path) -> None:
    (meta(path) / "commit").unlink()


def spoil_marker(path: Path) -> None:
    (meta(path) / "commit").write_bytes(b"{")


def tamper_with_manifest(path: Path) -> None:
    document = json.loads((meta(path) / "manifest.json").read_bytes())
    document["global_step"] = 1000
    (meta(path) / "manifest.json").write_text(json.dumps(document))


def raise_manifest_version(path: Path) -> None:
    document = json.loads((meta(path) / "manifest.json").read_bytes())
    document["version"] = 9
    (meta(path) / "manifest.json").write_text(json.dumps(document))


def lose_manifest(path: Path) -> None:
    (meta(path) / "manifest.json").unlink()


def make_manifest_unreadable(path: Path) -> None:
    lose_manifest(path)
    (meta(path) / "manifest.json").symlink_to("manifest.json")


DAMAGES: list[tuple[Callable[[Path], None], str, CheckpointState, str]] = [
    (flip_bit, "full", CheckpointState.COMMITTED, "expected XXH3 digest [0-9a-f]{32}, found [0-9a-f]{32}"),
    (truncate, "size", CheckpointState.COMMITTED, "expected 7 bytes, found 3 bytes"),
    (lengthen, "size", CheckpointState.COMMITTED, "expected 7 bytes, found 11 bytes"),
    (lose_marker, "size", CheckpointState.TORN, "commit: expected a marker .*, found none"),
    (spoil_marker, "size", CheckpointState.TORN, "commit: expected a marker .*, found a file that is not JSON"),
    (tamper_with_manifest, "size", CheckpointState.TORN, "commit: expected a marker for the manifest .*, found"),
    (raise_manifest_version, "size", CheckpointState.TORN, "has manifest version 9; this release reads version 1"),
    (lose_manifest, "size", CheckpointState.TORN, "manifest.json: expected a readable manifest"),
    (make_manifest_unreadable, "size", CheckpointState.TORN, "manifest.json: expected a readable manifest"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("damage", "mode", "expected_state", "text"), DAMAGES, ids=[damage[0].__name__ for damage in DAMAGES]
)
def test_damaged_checkpoint_is_passed_over_with_one_warning(
    tmp_path: Path,
    save: Any,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    damage: Callable[[Path], None],
    mode: Any,
    expected_state: CheckpointState,
    text: str,
) -> None:
    old, new = tmp_path / "step=1.ckpt", tmp_path / "step=2.ckpt"
    save(old, step=1, kind=kind)
    save(new, step=2, kind=kind)
    assert newest_valid(tmp_path, verify=mode) == new
    damage(new)
    assert state(new) is expected_state
    assert not verify(new, mode).ok
    with pytest.raises(CheckpointCorrupt, match=text):
        verify_or_raise(new, mode)
    with caplog.at_level(logging.WARNING):
        assert newest_valid(tmp_path, verify=mode) == old
    assert len(caplog.records) == 1
    assert str(new) in caplog.text
    assert "expected" in caplog.text


def test_missing_and_swapped_files_of_a_directory_are_named(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "x.ckpt"
    save(path, step=1, kind="directory")
    (path / "model.bin").rename(path / "temporary")
    (path / "optimizer" / "state.bin").rename(path / "model.bin")
    (path / "temporary").rename(path / "optimizer" / "state.bin")
    assert verify(path, "size").ok
    assert [Path(finding.file).name for finding in verify(path).findings] == ["model.bin", "state.bin"]
    (path / "model.bin").unlink()
    (finding,) = verify(path, "size").findings
    assert (Path(finding.file).name, finding.expected, finding.found) == ("model.bin", "7 bytes", "no file")


def test_file_in_place_of_a_directory_is_found(tmp_path: Path, save: Any) -> None:
    path = tmp_path / "x.ckpt"
    save(path, step=1, kind="directory")
    (path / "optimizer" / "state.bin").unlink()
    (path / "optimizer" / "state.bin").mkdir()
    assert not verify(path, "size").ok


def test_newest_is_by_step_then_commit_time_and_never_by_name_or_file_time(tmp_path: Path, save: Any) -> None:
    for name, step in (("z.ckpt", 5), ("epoch=9-step=9999.ckpt", 7), ("a", 10), ("b.ckpt", 10), ("c.ckpt", 9)):
        save(tmp_path / name, step=step)
    os.utime(tmp_path / "z.ckpt", (2e9, 2e9))
    assert newest_valid(tmp_path) == tmp_path / "b.ckpt"
    remove(tmp_path / "b.ckpt")
    assert newest_valid(tmp_path) == tmp_path / "a"


def save_line(save: Any, folder: Path, *names_and_steps: tuple[str, int], after: Path | None = None) -> Path:
    """Saves checkpoints of which each names the one before it."""
    for name, step in names_and_steps:
        parent = None if after is None else look(after).reference
        save(folder / name, step=step, parent=parent)
        after = folder / name
    assert after is not None
    return after


def test_line_of_the_newest_commit_wins_over_a_higher_step_and_one_warning_names_both(
    tmp_path: Path, save: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = save_line(save, tmp_path, ("8.ckpt", 8))
    save_line(save, tmp_path, ("16.ckpt", 16), ("20.ckpt", 20), after=first)
    assert newest_valid(tmp_path) == tmp_path / "20.ckpt"
    assert not caplog.records
    save_line(save, tmp_path, ("10.ckpt", 10), ("12.ckpt", 12), after=first)
    assert newest_valid(tmp_path) == tmp_path / "12.ckpt"
    (warning,) = caplog.messages
    assert "12.ckpt (step 12)" in warning
    assert "20.ckpt (step 20)" in warning
    flip_bit(tmp_path / "12.ckpt")
    assert newest_valid(tmp_path) == tmp_path / "10.ckpt"
    assert newest_valid(tmp_path, but=[tmp_path / "10.ckpt", tmp_path / "12.ckpt"]) == first
    assert [report.path.stem for report in committed_in(tmp_path)] == ["12", "10", "8", "20", "16"]
    lose_marker(tmp_path / "20.ckpt")
    caplog.clear()
    assert newest_valid(tmp_path) == tmp_path / "10.ckpt"
    assert f"{tmp_path / '20.ckpt'} is passed over" in caplog.text, "nobody knows its line: it might be the newest"


def test_run_that_began_anew_is_a_line_of_its_own(tmp_path: Path, save: Any, caplog: pytest.LogCaptureFixture) -> None:
    save_line(save, tmp_path, ("10.ckpt", 10), ("20.ckpt", 20))
    save(tmp_path / "2.ckpt", step=2)
    assert newest_valid(tmp_path) == tmp_path / "2.ckpt"
    assert "20.ckpt (step 20) is on a line that was left" in caplog.text


def test_no_checkpoint_is_older_than_what_it_follows_nor_newer_than_what_it_is_a_copy_of(
    tmp_path: Path, save: Any
) -> None:
    save(tmp_path / "8.ckpt", step=8, not_before=time.time() + 3600)  # by a clock that was an hour ahead
    first = read_manifest(tmp_path / "8.ckpt").committed_at
    save(tmp_path / "10.ckpt", step=10, parent=look(tmp_path / "8.ckpt").reference, not_before=first)
    assert first < read_manifest(tmp_path / "10.ckpt").committed_at < first + 1
    info = info_like(tmp_path / "8.ckpt")
    commit(tmp_path / "8-whole.ckpt", lambda path: path.touch(), info)
    assert newest_valid(tmp_path) == tmp_path / "10.ckpt"
    remove(tmp_path / "10.ckpt")
    assert newest_valid(tmp_path) == tmp_path / "8.ckpt"


def test_folder_that_is_missing_or_holds_none_has_no_newest(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "missing") is None
    assert newest_valid(tmp_path) is None
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        newest_valid(tmp_path / "file")
    with pytest.raises(ValueError, match="'full' or 'size'"):
        newest_valid(tmp_path, verify="quick")  # type: ignore[arg-type]


def test_unmanifested_checkpoints_are_told_apart_and_never_returned(
    tmp_path: Path, save: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "legacy.ckpt").write_bytes(b"weights")
    (tmp_path / "legacy-folder.ckpt").mkdir()
    save(tmp_path / "inner" / "x.ckpt", step=1)
    assert newest_valid(tmp_path) is None
    assert not caplog.records
    assert state(tmp_path / "legacy.ckpt") is CheckpointState.UNMANIFESTED
    assert state(tmp_path / "legacy-folder.ckpt") is CheckpointState.UNMANIFESTED
    assert state(tmp_path / "none.ckpt") is CheckpointState.MISSING
    with pytest.raises(CheckpointCorrupt, match=r"is unmanifested .*not saved through a Resilient strategy"):
        verify_or_raise(tmp_path / "legacy.ckpt")
    with pytest.raises(CheckpointCorrupt, match="no readable manifest"):
        read_manifest(tmp_path / "legacy.ckpt")


def test_looking_changes_nothing(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "x.ckpt", step=1, kind="directory")
    save(tmp_path / "y.ckpt", step=2)
    lose_marker(tmp_path / "y.ckpt")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert newest_valid(tmp_path) == tmp_path / "x.ckpt"
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_link_has_the_manifest_of_what_it_points_to(tmp_path: Path, save: Any) -> None:
    for kind in KINDS:
        path, link = tmp_path / f"{kind}.ckpt", tmp_path / f"last-{kind}.ckpt"
        save(path, step=1, kind=kind)
        link.symlink_to(path.name)
        assert verify(link).ok
        assert read_manifest(link) == read_manifest(path)
        assert newest_valid(tmp_path) == path
        remove(link)
        assert verify(path).ok


def test_broken_and_circular_links_are_no_checkpoints(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "x.ckpt", step=1)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to(tmp_path.parent / "gone")
    assert newest_valid(tmp_path) == tmp_path / "x.ckpt"
    assert state(tmp_path / "loop") is CheckpointState.MISSING
    assert state(tmp_path / "broken") is CheckpointState.MISSING


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_moved_with_its_meta_stays_valid(tmp_path: Path, save: Any, kind: str) -> None:
    path = tmp_path / "here" / "x.ckpt"
    save(path, step=1, kind=kind)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert newest_valid(tmp_path / "there") == tmp_path / "there" / "x.ckpt"


@pytest.mark.parametrize("kind", KINDS)
def test_aside_is_returned_only_while_its_successor_is_not_valid(tmp_path: Path, save: Any, kind: str) -> None:
    save(tmp_path / "last.ckpt", step=9, content=b"old", kind=kind)
    aside = tmp_path / ".distplus" / "last.ckpt.aside-0123abcd"
    shutil.copytree(tmp_path, aside, ignore=shutil.ignore_patterns("*.aside-*"))
    save(tmp_path / "kept", step=1)
    shutil.copytree(aside, tmp_path / "spare")
    save(tmp_path / "last.ckpt", step=8, content=b"new", kind=kind)
    assert not aside.exists()
    shutil.move(tmp_path / "spare", aside)
    assert newest_valid(tmp_path) == tmp_path / "last.ckpt"
    flip_bit(tmp_path / "last.ckpt")
    assert newest_valid(tmp_path) == aside / "last.ckpt"
    assert verify(aside / "last.ckpt").ok
    remove(aside / "last.ckpt")
    assert not aside.exists()
    assert newest_valid(tmp_path) == tmp_path / "kept"


@pytest.mark.parametrize("kind", KINDS)
def test_remove_takes_payload_meta_and_asides_and_nothing_else(tmp_path: Path, save: Any, kind: str) -> None:
    save(tmp_path / "x.ckpt", step=2, kind=kind)
    save(tmp_path / "x", step=1, kind=kind)
    shutil.copytree(tmp_path / ".distplus", tmp_path / ".distplus" / "x.ckpt.aside-00000000", dirs_exist_ok=True)
    remove(tmp_path / "x.ckpt")
    remove(tmp_path / "x.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"x", ".distplus"}
    assert {path.name for path in (tmp_path / ".distplus").iterdir()} <= {"x"}
    assert newest_valid(tmp_path) == tmp_path / "x"


@pytest.mark.parametrize("kind", KINDS)
def test_removing_races_end_quietly(tmp_path: Path, save: Any, kind: str) -> None:
    errors: list[BaseException] = []

    def remove_all() -> None:
        try:
            for index in range(20):
                remove(tmp_path / f"{index}.ckpt")
                newest_valid(tmp_path)
        except BaseException as error:
            errors.append(error)

    for index in range(20):
        save(tmp_path / f"{index}.ckpt", step=index, kind=kind)
    threads = [threading.Thread(target=remove_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert newest_valid(tmp_path) is None
    assert {path.name for path in tmp_path.iterdir()} == {".distplus"}


def test_killed_removal_leaves_no_half_checkpoint(tmp_path: Path, save: Any, in_child: Any, at_change: Any) -> None:
    for kind in KINDS:
        for index in range(20):
            path = tmp_path / f"{kind}{index}" / "x.ckpt"
            save(path, step=1, kind=kind)

            def child(index: int = index, path: Path = path) -> None:
                at_change(index, lambda _: os.kill(os.getpid(), signal.SIGKILL))
                remove(path)

            status = in_child(child)
            assert state(path) in (CheckpointState.COMMITTED, CheckpointState.MISSING)
            assert newest_valid(path.parent) in (path, None)
            if status == 0:
                break
        assert status == 0
        assert index > 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_field_of_a_manifest_is_refused(tmp_path: Path, save: Any, kind: str) -> None:
    path = tmp_path / "x.ckpt"
    save(path, step=1, kind=kind)
    file = meta(path) / "manifest.json"
    original = file.read_bytes()
    fields = [(key,) for key in json.loads(original)] + [("files", 0, key) for key in json.loads(original)["files"][0]]
    for field in fields:
        for change in (lambda value: [value], lambda value: f"{value}0", None):
            document = json.loads(original)
            place = document
            for key in field[:-1]:
                place = place[key]
            if change is None:
                del place[field[-1]]
            else:
                place[field[-1]] = change(place[field[-1]])
            file.write_text(json.dumps(document, indent=2))
            assert state(path) is CheckpointState.TORN, field
            with pytest.raises(CheckpointCorrupt, match=r"expected|manifest version"):
                verify_or_raise(path)
    file.write_bytes(original)
    assert verify(path).ok


# -- removed and linked while others save, remove and link (row C5) ----------------------------------------------------


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
        info = Manifest(global_step=2, epoch=0, strategy="x", packages={})
        commit(path, lambda stage: die(stage.parent), info, sync=None)

    assert in_child(child) == -signal.SIGKILL
    (stage,) = (tmp_path / ".distplus").glob("*.stage-*")
    living = stage.with_name("x.ckpt.stage-00000000")
    (living / ".distplus").mkdir(parents=True)
    owner = json.loads((stage / ".distplus" / "owner.json").read_bytes())
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


# -- ranks that share the reading find together what one alone would find ----------------------------------------------


BLOCK_BYTES = 1000


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, catalog):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("lightning_distplus.checkpoint.manifest.BLOCK_BYTES", BLOCK_BYTES)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("kind", "num_ranks"), [("file", 1), ("directory", 2), ("file", 3), ("directory", 50)])
def test_every_byte_is_read_by_exactly_one_rank(
    save: Callable[..., Any], tmp_path: Path, kind: str, num_ranks: int
) -> None:
    content = bytes(range(256)) * 40 + b"the end"  # ten blocks and a part of one
    target = tmp_path / "a.ckpt"
    manifest = save(target, 1, content, kind)
    assert all(len(entry.blocks_64_mib) == 11 for entry in manifest.files)

    def found() -> list[int]:
        return [len(findings_in_share(target, manifest, rank=rank, num_ranks=num_ranks)) for rank in range(num_ranks)]

    assert sum(found()) == 0
    damaged = target if kind == "file" else target / "model.bin"
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 5500, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 4
        damaged.write_bytes(changed)
        assert sum(found()) == 1
        assert not verify(target).ok
    damaged.unlink()
    assert sum(found()) == 11
    assert findings_in_share(target, manifest, rank=0, num_ranks=1)[0].found == "no file"


def test_a_rank_reads_the_shard_that_has_its_number(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        for rank in range(12):
            (folder / f"__{rank}_0.distcp").write_bytes(bytes(1000 + rank))
        (folder / ".metadata").write_bytes(bytes(90))

    target = tmp_path / "a.ckpt"
    info = Manifest(global_step=1, epoch=0, strategy="resilient_fsdp")
    manifest = commit(target, write, info, sync=None)
    assert manifest is not None
    for path in target.glob("__*"):
        path.unlink()
    for rank in range(12):
        (finding,) = findings_in_share(target, manifest, rank=rank, num_ranks=12)
        assert finding.file == str(target / f"__{rank}_0.distcp")


# -- what a job has saved, told by the ledger --------------------------------------------------------------------------


def attempt(home: Path, number: int, *fits: list[Path], run_id: str = "job", rank: int = 0) -> None:
    """What the process of a rank writes: the begin of each fit, and the checkpoints that it has saved."""
    with EventLog(home, rank, attempt=number, run_id=run_id) as events:
        events.write("start", function="validate")
        for paths in fits:
            events.write("start", function="fit")
            for path in paths:
                events.write("saved", path=str(path), global_step=1)


def newest(home: Path, number: int | None = None) -> Path | None:
    return JobSaves.of_fit(home, "job", number).newest_valid()


def test_the_newest_valid_checkpoint_of_the_job_is_found_in_all_its_folders(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a" / "1.ckpt", 1), saved(tmp_path / "b" / "2.ckpt", 2)
    attempt(tmp_path, 0, [first, second])
    assert newest(tmp_path) == second
    second.write_bytes(b"torn")
    assert newest(tmp_path) == first
    first.write_bytes(b"torn")
    with pytest.raises(CheckpointCorrupt, match=r"2 checkpoint\(s\) \(1.ckpt, 2.ckpt\).*none of them sound.*distplus"):
        newest(tmp_path)
    first.unlink()
    second.unlink()
    assert newest(tmp_path) is None


def test_a_checkpoint_that_nobody_has_lived_to_note_counts(tmp_path: Path) -> None:
    attempt(tmp_path, 0, [saved(tmp_path / "1.ckpt", 1)])
    unnoted = saved(tmp_path / "2.ckpt", 2)
    assert newest(tmp_path) == unnoted


def test_other_jobs_do_not_count(tmp_path: Path) -> None:
    older = saved(tmp_path / "9.ckpt", 9)
    attempt(tmp_path, 0, [older], run_id="other")
    assert newest(tmp_path) is None
    time.sleep(0.01)
    attempt(tmp_path, 0, [])
    assert newest(tmp_path) is None
    attempt(tmp_path, 0, [saved(tmp_path / "1.ckpt", 1)])
    assert newest(tmp_path) == tmp_path / "1.ckpt"
    assert JobSaves.of_fit(tmp_path, "job").passed_over(tmp_path) == [older]


def test_each_fit_of_a_script_has_its_own_checkpoints(tmp_path: Path) -> None:
    one, two, three = (saved(tmp_path / f"{step}.ckpt", step) for step in (1, 2, 3))
    attempt(tmp_path, 0, [one], [two])
    attempt(tmp_path, 1, [], [three])
    assert [newest(tmp_path, number) for number in (1, 2, 3)] == [one, three, None]
    assert newest(tmp_path) == three
    assert [num_fits(tmp_path, "job", number, 0) for number in (0, 1, 2)] == [2, 2, 0]
    assert num_fits(tmp_path, "job", 0, rank=1) == 0


def test_a_run_that_was_stopped_before_a_save_and_a_remote_save_name_no_checkpoint_here(
    tmp_path: Path, save: Any
) -> None:
    with EventLog(tmp_path, 0, run_id="job") as events:
        events.write("start", function="fit")
        events.write("preempted", path=None)
        events.write("saved", path="s3://bucket/1.ckpt")
    assert JobSaves.of_fit(tmp_path, "job").paths == ()
