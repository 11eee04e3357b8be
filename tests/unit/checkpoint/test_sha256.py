"""SHA-256 digests beside XXH3: what somebody has changed on purpose, XXH3 digests included, is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus import ResilientDDP, newest_valid, verify
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.copies import Copies
from lightning_distplus.checkpoint.digests import bytes_digest
from lightning_distplus.checkpoint.layout import MANIFEST, MARKER, meta_folder
from lightning_distplus.cli.verify import main as distplus_verify


def forge(path: Path, file: Path, content: bytes) -> None:
    """Puts other bytes into a file, and their XXH3 digest into manifest and marker."""
    file.write_bytes(content)
    meta = meta_folder(path)
    document: dict[str, Any] = json.loads((meta / MANIFEST).read_text())
    for entry in document["files"]:
        if entry["path"] == file.name:
            entry["xxh3_128"] = bytes_digest(content)
    text = json.dumps(document)
    (meta / MANIFEST).write_text(text)
    (meta / MARKER).write_text(json.dumps({"version": 1, "manifest_xxh3_128": bytes_digest(text.encode())}))


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_file_that_was_forged_together_with_its_xxh3_digest_is_found(
    save: Callable[..., Any], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "1.ckpt"
    save(path, 1, kind=kind, with_sha256=True)
    assert all(len(entry.sha256) == 64 for entry in read_manifest(path).files)
    assert verify(path).ok
    copies = Copies(f"file://{tmp_path}/durable")
    copies.put(path)
    fetched = copies.fetch_newest(tmp_path / "other")
    assert fetched is not None
    assert read_manifest(fetched) == read_manifest(path)
    forge(path, path if kind == "file" else path / "model.bin", b"forgery")
    assert distplus_verify([str(tmp_path)]) == 1
    assert "SHA-256 digest" in capsys.readouterr().out
    assert newest_valid(tmp_path) is None
    copies.put(path)
    assert copies.fetch_newest(tmp_path / "third") is None


def test_without_it_only_accidents_are_found(save: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "1.ckpt"
    save(path, 1)
    assert "sha256" not in (meta_folder(path) / MANIFEST).read_text()
    forge(path, path, b"forgery")
    assert verify(path).ok


def test_another_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="digest is 'md5'"):
        ResilientDDP(digest="md5")
