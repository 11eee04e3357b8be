"""Ranks that share the reading read everything once, and find together what one alone would find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.checkpoint import Manifest, catalog, files, gather_alone, verify
from lightning_distplus.checkpoint.catalog import findings_in_share
from lightning_distplus.checkpoint.commit import commit

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
    manifest = commit(target, write, rank=0, gather=gather_alone, info=info, sync=None)
    assert manifest is not None
    for path in target.glob("__*"):
        path.unlink()
    for rank in range(12):
        (finding,) = findings_in_share(target, manifest, rank=rank, num_ranks=12)
        assert finding.file == str(target / f"__{rank}_0.distcp")
