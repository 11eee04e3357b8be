"""What has changed in the data since a checkpoint: the source, the file, and both sides."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_distplus.data import Source, TokenDataModule
from lightning_distplus.data.token_datamodule import first_difference, inventory, rewritten
from lightning_distplus.data.token_files import open_source
from lightning_distplus.errors import DatasetMismatch
from tests.distributed.resume_jobs import SampleDiary, quiet_trainer, token_data, write_tokens

FILES = "lightning_distplus_files"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pair `a`, a folder `b` of three files, and a checkpoint of a run on both."""
    folder = tmp_path_factory.mktemp("inventory")
    write_tokens(folder / "a", 801)
    (folder / "b").mkdir()
    for number in range(3):
        np.save(folder / "b" / f"{number}.npy", np.arange(100, dtype=np.uint16) + 100 * number)
    run(folder, max_steps=3).trainer.save_checkpoint(folder / "saved.ckpt")
    return folder


def run(folder: Path, *, max_steps: int, load: Path | None = None, second: str = "b", **arguments: Any) -> SampleDiary:
    sources = [Source(path=str(folder / "a"), weight=3), Source(path=str(folder / second), name="code", **arguments)]
    model = SampleDiary()
    quiet_trainer(max_steps=max_steps, max_epochs=-1).fit(model, token_data(sources=sources), ckpt_path=load)
    return model


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def rewrite(name: str, tokens: Any) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / "b" / name, tokens)


def widen(folder: Path) -> None:
    for path in (folder / "b").iterdir():
        np.save(path, np.load(path).astype(np.int32))


def lengthen_pair(folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        (folder / "a").with_suffix(suffix).unlink()
    write_tokens(folder / "a", 803)


def swap(folder: Path) -> None:
    (folder / "b" / "0.npy").rename(folder / "b" / "x")
    (folder / "b" / "2.npy").rename(folder / "b" / "0.npy")
    (folder / "b" / "x").rename(folder / "b" / "2.npy")


def replace_all(folder: Path) -> None:
    for number in range(3):
        (folder / "b" / f"{number}.npy").unlink()
        np.save(folder / "b" / f"new_{number}.npy", np.full(90, number, dtype=np.uint16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            rewrite("1.npy", np.arange(90, dtype=np.uint16)),
            r"source 1 \(code\): file 2, 1\.npy: bytes: 328 in the checkpoint, 308 in this run$",
        ),
        (
            rewrite("1.npy", np.arange(100, dtype=np.uint16)),
            r"source 1 \(code\): file 2, 1\.npy: content: '[0-9a-f]{16}' in the checkpoint, '[0-9a-f]{16}' in this",
        ),
        (widen, r"source 1 \(code\): dtype: 'uint16' in the checkpoint, 'int32' in this run$"),
        (
            lambda folder: (folder / "b" / "0.npy").unlink(),
            r"source 1 \(code\): number of files: 3 in the checkpoint, 2 in this run$",
        ),
        (swap, r"file 1, 0\.npy: content: .* in this run$"),
        (replace_all, r"file 1, new_0\.npy: bytes: 328 in the checkpoint, 308 in this run$"),
        (lengthen_pair, r"source 0 \(.*/a\): file 1, a\.idx: content: .* in this run$"),
    ],
)
def test_what_has_changed_is_named_with_both_sides(
    change: Callable[[Path], None], message: str, copy: Path, saved: Path
) -> None:
    change(copy)
    with pytest.raises(DatasetMismatch) as error:
        run(copy, max_steps=6, load=saved / "saved.ckpt")
    lines = str(error.value).splitlines()
    assert any(re.search(message, line) for line in lines), lines
    assert any("fingerprint: '" in line for line in lines)


def test_another_share_column_or_format_is_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetMismatch, match=r"\(code\): split: None in the checkpoint, \[0\.0, 0\.5\] in this run"):
        run(saved, max_steps=6, load=saved / "saved.ckpt", split=(0.0, 0.5))
    shutil.copy(saved / "a.bin", saved / "raw.bin")
    with pytest.raises(DatasetMismatch, match=r"\(code\): format: 'npy' in the checkpoint, 'raw' in this run"):
        run(saved, max_steps=6, load=saved / "saved.ckpt", second="raw.bin", dtype="uint16")


def test_moved_files_and_a_checkpoint_without_the_record_go_on(copy: Path, saved: Path) -> None:
    moved = copy.rename(copy.with_name("moved"))
    (moved / "b" / "1.npy").rename(moved / "b" / "1b.npy")
    assert min(run(moved, max_steps=6, load=saved / "saved.ckpt").steps) == 3
    checkpoint = torch.load(saved / "saved.ckpt", weights_only=True)
    del checkpoint[FILES]
    torch.save(checkpoint, moved / "old.ckpt")
    assert min(run(moved, max_steps=6, load=moved / "old.ckpt").steps) == 3
    widen(moved)
    with pytest.raises(DatasetMismatch, match=r"source 1 \(code\): fingerprint: '") as error:
        run(moved, max_steps=6, load=moved / "old.ckpt")
    assert "dtype" not in str(error.value)


def test_state_and_record_of_a_mixture_are_together_smaller_than_1_kb(saved: Path) -> None:
    checkpoint = torch.load(saved / "saved.ckpt", weights_only=True)
    state, record = checkpoint["TokenDataModule"], checkpoint[FILES]
    assert [one["num_files"] for one in record["sources"]] == [2, 3]
    assert len(repr(state)) + len(repr(record)) < 1000
    torch.save(record, stream := io.BytesIO())
    stream.seek(0)
    assert torch.load(stream, weights_only=True) == record


def test_record_of_many_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_distplus.data.token_files._MAX_ROWS", 2)
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.arange(9, dtype=np.uint16))
    before = inventory([open_source(Source(path=str(tmp_path)), 4).contents()])
    assert before["sources"][0]["files"] == []
    (tmp_path / "1.npy").unlink()
    now = open_source(Source(path=str(tmp_path)), 4).contents()
    assert first_difference(before, 0, now) == "number of files: 3 in the checkpoint, 2 in this run"
    assert rewritten(before, 0, now) == ""


def test_record_of_another_version_or_of_fewer_sources_says_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(9, dtype=np.uint16))
    now = open_source(Source(path=str(tmp_path)), 4).contents()
    other = inventory([{**now, "facts": {"format": "raw"}}])
    assert first_difference(other, 0, now) == "format: 'raw' in the checkpoint, 'npy' in this run"
    for record in (None, {}, {**other, "version": 3}, inventory([]), inventory([now])):
        assert first_difference(record, 0, now) == ""


LARGE = 17 * 2**20  # bytes: above 16 MiB a file enters the fingerprint by samples


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small file, a large one and a checkpoint of a run on both."""
    folder = tmp_path_factory.mktemp("large")
    for name, size in (("large.bin", LARGE), ("small.bin", 4096)):
        (folder / name).write_bytes(np.arange(size // 2, dtype=np.uint16).tobytes())
        os.utime(folder / name, (1_700_000_000, 1_700_000_000))
    run_large(folder, max_steps=2).trainer.save_checkpoint(folder / "saved.ckpt")
    return folder


def run_large(folder: Path, *, max_steps: int, load: Path | None = None) -> SampleDiary:
    sources = [Source(path=str(folder / f"{name}.bin"), dtype="uint16") for name in ("large", "small")]
    model = SampleDiary()
    data = TokenDataModule(sources, seq_len=512, micro_batch_size=2)
    quiet_trainer(max_steps=max_steps, max_epochs=-1).fit(model, data, ckpt_path=load)
    return model


def change_in_place(path: Path, place: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(b"other")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith("lightning_distplus.data")]


@pytest.mark.parametrize("keeps_time", [False, True])
def test_change_within_a_large_file_is_told_by_its_time_with_what_was_compared(
    large: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, keeps_time: bool
) -> None:
    folder = Path(shutil.copytree(large, tmp_path / "copy"))
    change_in_place(folder / "large.bin", LARGE // 2 + 12_345)  # between two samples
    if keeps_time:
        os.utime(folder / "large.bin", (1_700_000_000, 1_700_000_000))
    assert min(run_large(folder, max_steps=4, load=large / "saved.ckpt").steps) == 2
    found = [one for one in warnings_of(caplog) if "large.bin" in one]
    if keeps_time:
        assert not found
        return
    (text,) = found
    assert re.fullmatch(
        r"source 0 \(.*large\.bin\): file 1, large\.bin was modified at 20\S+ \S+ UTC, and at 2023-11-14 22:13:20 UTC "
        r"when the checkpoint was written: its size \(17825792 bytes\) and the samples of its content "
        r"have not changed; the rest was not compared",
        text,
    ), text


def test_file_that_is_compared_as_a_whole_may_have_any_time(
    large: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(large, tmp_path / "copy"))
    os.utime(folder / "small.bin", (1_600_000_000, 1_600_000_000))
    assert min(run_large(folder, max_steps=4, load=large / "saved.ckpt").steps) == 2
    assert not [one for one in warnings_of(caplog) if "modified" in one]


def test_change_of_what_is_sampled_is_refused_as_before(large: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(large, tmp_path / "copy"))
    change_in_place(folder / "large.bin", 100)
    with pytest.raises(DatasetMismatch, match=r"file 1, large\.bin: content: '[0-9a-f]{16}' in the checkpoint"):
        run_large(folder, max_steps=4, load=large / "saved.ckpt")


def test_record_of_version_1_is_read(large: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = torch.load(large / "saved.ckpt", weights_only=True)
    record = checkpoint[FILES]
    assert record["version"] == 2
    for source in record["sources"]:
        source["files"] = [row[:3] for row in source["files"]]
    record["version"] = 1
    torch.save(checkpoint, tmp_path / "old.ckpt")
    folder = Path(shutil.copytree(large, tmp_path / "copy"))
    os.utime(folder / "large.bin", (1_600_000_000, 1_600_000_000))
    assert min(run_large(folder, max_steps=4, load=tmp_path / "old.ckpt").steps) == 2
    assert not [one for one in warnings_of(caplog) if "modified" in one]
    change_in_place(folder / "large.bin", 100)
    with pytest.raises(DatasetMismatch, match=r"file 1, large\.bin: content: '[0-9a-f]{16}' in the checkpoint"):
        run_large(folder, max_steps=4, load=tmp_path / "old.ckpt")


def test_rewritten_file_of_a_folder_is_told_also_where_it_is_not_looked_into(tmp_path: Path) -> None:
    for number in range(70):
        (tmp_path / f"{number:02d}.bin").write_bytes(bytes(300_000))
    source = Source(path=str(tmp_path), dtype="uint16")
    before = inventory([open_source(source, 4).contents()])
    rows = before["sources"][0]["files"]
    looked_into, skipped = (next(row for row in rows[1:] if bool(row[2]) is has_digest) for has_digest in (True, False))
    for row, compared in ((looked_into, r"and the samples of its content have"), (skipped, "has")):
        os.utime(tmp_path / row[0], (1_700_000_000, 1_700_000_000))
        text = rewritten(before, 0, open_source(source, 4).contents())
        number = rows.index(row) + 1
        assert text.startswith(f"file {number}, {row[0]} was modified at 2023-11-14 22:13:20 UTC, and at "), text
        assert text.endswith(f"its size (300000 bytes) {compared} not changed; the rest was not compared"), text
        os.utime(tmp_path / row[0], ns=(row[3], row[3]))
