"""Digests that are taken while a file is written are those of the file, or there are none."""

from __future__ import annotations

import errno
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import xxhash

from lightning_distplus.checkpoint import files
from lightning_distplus.checkpoint.files import DigestedWrites, digest_file

CONTENT = bytes(range(256)) * 40 + b"the end"  # ten blocks of a thousand bytes, and a part of one


@pytest.fixture(params=[(1000, 256 << 10), (1000, 300), (64 << 20, 256 << 10)], ids=["large parts", "small", "real"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    block_bytes, chunk_bytes = request.param
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(files, "_CHUNK_BYTES", chunk_bytes)
    return int(block_bytes)


@pytest.mark.parametrize("size_bytes", [0, 1, 999, 1000, 1001, 2000, len(CONTENT)])
def test_what_is_written_has_the_digests_of_what_is_read(tmp_path: Path, blocks: int, size_bytes: int) -> None:
    file, content, synced = tmp_path / "file", CONTENT[:size_bytes], []
    writes = DigestedWrites(synced.append)
    with writes.open(file) as stream:
        for start in range(0, size_bytes, 700):
            assert stream.tell() == start
            assert stream.write(content[start : start + 700]) == min(700, size_bytes - start)
    read = digest_file(file, with_blocks=True)
    assert writes.found(tmp_path) == {"file": asdict(read)}
    assert len(synced) == 1
    assert file.read_bytes() == content
    assert read.xxh3_128 == xxhash.xxh3_128_hexdigest(content)
    parts = [content[start : start + blocks] for start in range(0, size_bytes, blocks)]
    expected = [xxhash.xxh3_128_hexdigest(part) for part in parts] if size_bytes > blocks else []
    assert list(read.blocks) == expected
    assert [digest_file(file, block=number).xxh3_128 for number in range(len(expected))] == expected


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "pickle"])
def test_torch_writes_everything_through_the_stream(tmp_path: Path, zipped: bool) -> None:
    state = {"matrix": torch.randn(300, 300), "part": torch.arange(1000)[10:20], "half": torch.zeros(7).bfloat16()}
    writes = DigestedWrites(os.fsync)
    for name in ("first", "second"):
        with writes.open(tmp_path / name) as stream:
            torch.save(state, stream, _use_new_zipfile_serialization=zipped)
        assert torch.equal(torch.load(tmp_path / name)["matrix"], state["matrix"])
    found = writes.found(tmp_path)
    assert found == {name: asdict(digest_file(tmp_path / name)) for name in ("first", "second")}


def test_a_file_has_no_digest_where_its_write_failed_or_something_else_wrote_to_it(tmp_path: Path) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writes, failing = DigestedWrites(os.fsync), DigestedWrites(full)
    with pytest.raises(TypeError), writes.open(tmp_path / "torn") as stream:
        stream.write("no bytes")
    with pytest.raises(OSError, match="No space"), failing.open(tmp_path / "full") as stream:
        stream.write(b"a part")
    for name in ("longer", "gone", "kept"):
        with writes.open(tmp_path / name) as stream:
            stream.write(b"all of it")
            stream.close()  # as torch does
    with (tmp_path / "longer").open("ab") as file:
        file.write(b"more")
    (tmp_path / "gone").unlink()
    assert failing.found(tmp_path) == {}
    assert list(writes.found(tmp_path)) == ["kept"]
    assert writes.found(tmp_path / "elsewhere") == {}
