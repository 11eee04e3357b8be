"""Sources: what a user names, which format it has, and how it is opened."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import glob
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_distplus.data.flat import NpyTokens, RawTokens
from lightning_distplus.data.litpacked import LitPackedTokens, is_lit_packed
from lightning_distplus.data.stream import INTEGERS, TokenStream
from lightning_distplus.data.tokens import MegatronTokens, megatron_pair

__all__ = ["Source", "SourceFormat", "detect", "open_source"]

_MAX_LOOKED_AT = 64  # files of a folder
_REMOVED = ("ds", "litdata", "arrow", "parquet")
_INSTEAD = (
    "read it by its own library, as a data set or iterable of ResumableDataModule, or write a Megatron pair of its "
    "text by `distplus prepare`"
)
SourceFormat = Literal["auto", "megatron", "litpkds", "raw", "npy"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of a mixture."""

    path: str
    """A file, a folder, or the beginning of file names, as the format has it."""
    weight: float = 1.0
    """Share of the samples, relative to the other sources."""
    name: str | None = None
    """Shown in messages; the path by default."""
    format: SourceFormat = "auto"
    """What is at the path; "auto" looks."""
    dtype: str | None = None
    """Type of a token where the files do not say it (raw), for example "uint16"."""
    split: tuple[float, float] = (0.0, 1.0)
    """The share that is read, from and to: (0.0, 0.99) to train and (0.99, 1.0) to validate have no token in common."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", tuple(self.split))
        if self.format in _REMOVED:
            what = f"format of source {self.path} is {self.format!r}"
            raise ValueError(f"{what}, which is not read in place: {_INSTEAD}.")
        if self.format not in _OPENERS and self.format != "auto":
            raise ValueError(f"format of source {self.path} is {self.format!r}; it is auto, {', '.join(_OPENERS)}.")
        if self.dtype is not None and self.dtype not in INTEGERS:
            raise ValueError(f"dtype of source {self.path} is {self.dtype!r}; it is one of {', '.join(INTEGERS)}.")

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name or self.path


def open_source(source: Source, seq_len: int) -> TokenStream:
    """Opens and checks a source.

    Raises:
        ValueError: It is missing, damaged or ambiguous, or is not what ``format`` and ``dtype`` say.
    """
    format_ = detect(source.path) if source.format == "auto" else source.format
    stream = _OPENERS[format_](source, seq_len)
    if source.dtype is not None and np.dtype(source.dtype).type is not stream.dtype:
        raise ValueError(
            f"{source.path} ({format_}) holds {np.dtype(stream.dtype).name}, and the source says dtype="
            f"{source.dtype!r}. Leave dtype out: this format says it by itself."
        )
    return stream


def detect(path: str) -> str:
    """The format of what is at ``path``.

    Raises:
        ValueError: It could be more than one, or nothing that is known.
    """
    found = {name for name, looks in _LOOKS.items() if looks(Path(path))}
    if "megatron" in found and Path(path).suffix in (".bin", ".idx"):
        return "megatron"  # the pair is named by one of its files
    if len(found) > 1:
        raise ValueError(
            f"{path} is ambiguous: it could be {' or '.join(sorted(found))}. Say format=..., or name a narrower path."
        )
    if found:
        return found.pop()
    if Path(path).exists():
        inside = sorted(one.name for one in Path(path).iterdir())[:3] if Path(path).is_dir() else []
        holds = f" (it holds {', '.join(inside) or 'nothing'})" if Path(path).is_dir() else ""
        raise ValueError(
            f"{path}{holds} is in no format that is known by its look: {', '.join(_OPENERS)}. Name it "
            f"with format=..., or {_INSTEAD}."
        )
    return "megatron"  # and its reader names the file that is missing


def _files(path: Path, suffix: str) -> list[Path]:
    """The file itself, or the visible files of a folder with that suffix."""
    if path.is_file():
        return [path]
    return _visible(path, f"*{suffix}") if path.is_dir() else []


def _packed_files(path: Path) -> list[Path]:
    """A folder's files, or those whose names begin with the last part of the path, as in TinyLlama's train_slim*."""
    if path.is_file() or path.is_dir():
        return _files(path, ".bin")
    return _visible(path.parent, f"{glob.escape(path.name)}*.bin") if path.parent.is_dir() else []


def _visible(folder: Path, pattern: str) -> list[Path]:
    return sorted(one for one in folder.glob(pattern) if one.is_file() and not one.name.startswith("."))


def _required(source: Source, suffix: str) -> list[Path]:
    if files := _files(Path(source.path), suffix):
        return files
    raise ValueError(f"{source.path} is no file, and no folder with files *{suffix} (format {source.format}).")


def _looks_megatron(path: Path) -> bool:
    return megatron_pair(path)[1].is_file()


def _looks_packed(path: Path) -> bool:
    return any(map(is_lit_packed, _packed_files(path)[:_MAX_LOOKED_AT]))


def _looks_raw(path: Path) -> bool:
    alone = [one for one in _files(path, ".bin") if one.suffix == ".bin" and not one.with_suffix(".idx").exists()]
    return bool(alone) and not _looks_packed(path) and not _is_litdata(path)


def _looks_like(suffix: str) -> Callable[[Path], bool]:
    return lambda path: any(one.suffix == suffix for one in _files(path, suffix))


def _is_litdata(path: Path) -> bool:
    """Whether a folder has an index like litdata's: its chunks end in .bin, and are not raw."""
    index = path / "index.json"
    return index.is_file() and b'"chunks"' in index.read_bytes()[:4096]


def _open_packed(source: Source, seq_len: int) -> TokenStream:
    return LitPackedTokens(_packed_files(Path(source.path)), seq_len, name=source.path, split=source.split)


def _open_raw(source: Source, seq_len: int) -> TokenStream:
    files = _required(source, ".bin")
    return RawTokens(files, seq_len, dtype=source.dtype, name=source.path, split=source.split)


_LOOKS: dict[str, Callable[[Path], bool]] = {
    "megatron": _looks_megatron,
    "litpkds": _looks_packed,
    "raw": _looks_raw,
    "npy": _looks_like(".npy"),
}

_OPENERS: dict[str, Callable[[Source, int], TokenStream]] = {
    "megatron": lambda source, seq_len: MegatronTokens(source.path, seq_len, split=source.split),
    "litpkds": _open_packed,
    "raw": _open_raw,
    "npy": lambda source, seq_len: NpyTokens(_required(source, ".npy"), seq_len, name=source.path, split=source.split),
}
