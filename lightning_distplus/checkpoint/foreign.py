"""Checkpoints without a manifest: what can be found out about them before anything is loaded."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from lightning_distplus.checkpoint.catalog import FileFinding
from lightning_distplus.checkpoint.files import list_files

__all__ = ["check_unmanifested"]

_PICKLE = b"\x80"  # how torch's format before 1.6 begins
_DIRECTORY_SIGNS = ("meta.pt", ".metadata", "latest")  # Lightning's sharded folders, torch's, DeepSpeed's


def check_unmanifested(path: Path) -> tuple[FileFinding, ...]:
    """What is wrong with a checkpoint that nobody has committed; nothing, as far as that can be told.

    torch writes zip files with a CRC of each member and never reads it back (pytorch issue 126952): it is read here.
    A file whose members all have the CRC 0 was written without (``torch.serialization.set_crc32_options``).
    """
    if path.is_dir():
        if not any((path / sign).exists() for sign in _DIRECTORY_SIGNS):
            return (FileFinding(str(path), f"a folder with {' or '.join(_DIRECTORY_SIGNS)}", "none of them"),)
        archives = (path / name for name in list_files(path) if name.endswith(".pt"))
        findings = [_check_archive(file) for file in archives]
    else:
        findings = [_check_archive(path)]
    return tuple(finding for finding in findings if finding is not None)


def _check_archive(file: Path) -> FileFinding | None:
    try:
        with file.open("rb") as stream:
            head = stream.read(1)
        if not head:
            return FileFinding(str(file), "a checkpoint", "an empty file")
        if head == _PICKLE:
            return None
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip() if any(member.CRC for member in archive.infolist()) else None
    except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError) as error:
        return FileFinding(str(file), "a whole zip file, as torch.save writes it", f"{type(error).__name__} ({error})")
    return None if bad is None else FileFinding(str(file), f"the CRC of its member {bad}", "another CRC")
