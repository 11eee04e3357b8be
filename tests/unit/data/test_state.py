"""What has changed in the data since a checkpoint: the source, the file, and both sides."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_distplus.data import Source
from lightning_distplus.data.state import first_difference, inventory
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
            r"source 1 \(code\): file 2, 1\.npy: 328 bytes in the checkpoint, 308 in this run$",
        ),
        (
            rewrite("1.npy", np.arange(100, dtype=np.uint16)),
            r"source 1 \(code\): file 2, 1\.npy: content [0-9a-f]{16} in the checkpoint, [0-9a-f]{16} in this run, 328",
        ),
        (widen, r"source 1 \(code\): dtype: 'uint16' in the checkpoint, 'int32' in this run$"),
        (
            lambda folder: (folder / "b" / "0.npy").unlink(),
            r"source 1 \(code\): number of files: 3 in the checkpoint, 2 in this run; 0\.npy \(328 bytes\) is missing",
        ),
        (
            rewrite("3.npy", np.arange(9, dtype=np.uint16)),
            r"number of files: 3 in the checkpoint, 4 in this run; 3\.npy \(146 bytes\) is not in the checkpoint$",
        ),
        (swap, r"file 1, 0\.npy: content .* \(2 of 3 differ\)$"),
        (replace_all, r"file 1, 0\.npy in the checkpoint and new_0\.npy in this run: 328 bytes .* \(3 of 3 differ\)$"),
        (
            lengthen_pair,
            r"source 0 \(.*/a\): file 1, a\.idx: content .*\(2 of 2 differ\)$",
        ),
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


def test_record_of_many_files_is_bounded_and_still_says_where(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:05d}.npy" for number in range(2100)]
    for path in paths:
        np.save(path, np.arange(9, dtype=np.uint16))
    stream = open_source(Source(path=str(tmp_path)), 4)
    before = inventory([stream.contents()])
    assert len(before["sources"][0]["files"]) == 700
    assert len(repr(before)) < 64 * 1024
    np.save(paths[1234], np.arange(8, dtype=np.uint16))
    now = open_source(Source(path=str(tmp_path)), 4).contents()
    expected = "row 412, files 01233.npy .. 01235.npy: 438 bytes in the checkpoint, 436 in this run"
    assert first_difference(before, 0, now) == expected


def test_record_of_another_version_or_of_fewer_sources_says_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(9, dtype=np.uint16))
    now = open_source(Source(path=str(tmp_path)), 4).contents()
    other = inventory([{**now, "facts": {"format": "raw"}}])
    assert first_difference(other, 0, now) == "format: 'raw' in the checkpoint, 'npy' in this run"
    for record in (None, {}, {**other, "version": 2}, inventory([]), inventory([now])):
        assert first_difference(record, 0, now) == ""
