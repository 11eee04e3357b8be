"""The manifest: what a committed checkpoint consists of, as a readable JSON file (docs/reference/manifest.md).

Fields that this release does not know are ignored, so that a later one can add one without a new version.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any

from lightning_distplus.checkpoint.files import BLOCK_BYTES
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch

VERSION = 1

_DIGEST = re.compile(r"[0-9a-f]{32}")
_FINGERPRINT = re.compile(r"\w+ \d+ (v2:)?[0-9a-f]{32}")
_RECORDED_PACKAGES = ("lightning-distplus", "lightning", "torch", "deepspeed")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: posix path relative to the checkpoint, size, and XXH3 128-bit digest in hex."""

    path: str
    size_bytes: int
    xxh3_128: str
    blocks_64_mib: tuple[str, ...] = ()
    """The digests of its blocks, where it has more than one."""


@cache
def installed_packages() -> dict[str, str]:
    """Versions of the packages that decide how a checkpoint is written; those not installed are left out.

    They are looked up once: that takes milliseconds, for which training would wait at each save.
    """
    versions: dict[str, str] = {}
    for name in _RECORDED_PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one checkpoint holds, as docs/reference/manifest.md describes it.

    Before the commit, which adds the files, the tensors, the number of ranks and the time, it is what a save tells of
    its run.
    """

    global_step: int
    epoch: int
    strategy: str
    world_size: int = 1
    files: tuple[FileEntry, ...] = ()
    committed_at: float = 0.0
    packages: dict[str, str] = field(default_factory=installed_packages)
    data: dict[str, Any] | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    configuration: str | None = None  # a digest of it, in those of 0.2.0
    deadlines_s: dict[str, float] = field(default_factory=dict)
    parent: dict[str, str] | None = None
    tensors: dict[str, str] | None = None
    version: int = VERSION

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size_bytes for entry in self.files)

    def to_json(self) -> str:
        """The manifest as text.

        Raises:
            ValueError, TypeError: ``data`` holds something that JSON cannot express.
        """
        fields = asdict(self)
        files = [{name: value for name, value in file.items() if value not in ((), "")} for file in fields.pop("files")]
        tensors = fields.pop("tensors")
        ordered = {"version": fields.pop("version"), **fields, "files": files, "tensors": tensors}
        return json.dumps(ordered, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the manifest") -> Manifest:
        """Reads what `to_json` wrote; ``source`` is the file's name, for error messages.

        Raises:
            CheckpointCorrupt: The text is not JSON, or a field is missing or malformed; the message names it.
            CheckpointMismatch: The manifest has another version.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise CheckpointCorrupt(f"{source}: expected a JSON document, found {error}. {_REMEDY}") from error
        if not isinstance(document, dict):
            raise CheckpointCorrupt(f"{source}: expected a JSON object, found a {type(document).__name__}. {_REMEDY}")
        version = _take(document, source, "version", "a positive integer", partial(_is_integer, least=1))
        if version != VERSION:
            raise CheckpointMismatch(
                f"{source}: the checkpoint has manifest version {version}; this release reads version {VERSION}. "
                "Load it with the release of lightning-distplus that wrote it."
            )
        # Early manifests have not all of the fields.
        document = {"layout": {}, "deadlines_s": {}, "configuration": None, "parent": None, "tensors": None, **document}
        fields = {name: _take(document, source, name, *rule) for name, rule in _FIELDS.items()}
        fields["committed_at"] = float(fields["committed_at"])
        return cls(**fields, files=_take_files(document, source))


# -- what a field may be -----------------------------------------------------------------------------------------------

_REMEDY = "Restore the file from a copy, or resume from another checkpoint."


def _take(document: dict[str, Any], where: str, name: str, rule: str, accept: Callable[[Any], bool]) -> Any:
    if name not in document:
        raise CheckpointCorrupt(f"{where}: field '{name}': expected {rule}, found nothing. {_REMEDY}")
    value = document[name]
    if not accept(value):
        raise CheckpointCorrupt(f"{where}: field '{name}': expected {rule}, found {value!r:.200}. {_REMEDY}")
    return value


def _take_files(document: dict[str, Any], source: str) -> tuple[FileEntry, ...]:
    items = _take(document, source, "files", "a list of at least one file", lambda v: isinstance(v, list) and v != [])
    entries: dict[str, FileEntry] = {}
    for index, item in enumerate(items):
        where = f"{source}: files[{index}]"
        if not isinstance(item, dict):
            raise CheckpointCorrupt(f"{where}: expected an object, found {item!r:.200}. {_REMEDY}")
        path = _take(item, where, "path", "a relative posix path inside the checkpoint", _is_inner_path)
        if path in entries:
            raise CheckpointCorrupt(f"{where}: field 'path': expected each file once, found {path!r} again. {_REMEDY}")
        size_bytes = _take(item, where, "size_bytes", "an integer >= 0", _is_integer)
        digest = _take(item, where, "xxh3_128", "32 lower-case hex digits", _is_digest)
        num_blocks = -(-size_bytes // BLOCK_BYTES)
        rule, accept = f"a list of {num_blocks} digests", partial(_are_digests, numbers=(0, num_blocks))
        blocks = _take({"blocks_64_mib": [], **item}, where, "blocks_64_mib", rule, accept)
        entries[path] = FileEntry(path, size_bytes, digest, tuple(blocks))
    return tuple(entries.values())


def _is_integer(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is(str), value.values()))


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _are_digests(value: Any, numbers: tuple[int, int]) -> bool:
    return isinstance(value, list) and len(value) in numbers and all(map(_is_digest, value))


def _is_inner_path(value: Any) -> bool:
    if not isinstance(value, str) or not value or "\0" in value:
        return False
    path = PurePosixPath(value)
    return not path.is_absolute() and ".." not in path.parts and path.as_posix() == value and value != "."


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "global_step": ("an integer >= 0", _is_integer),
    "epoch": ("an integer >= 0", _is_integer),
    "world_size": ("an integer >= 1", partial(_is_integer, least=1)),
    "strategy": ("a string", _is(str)),
    "committed_at": ("unix seconds, finite and >= 0", _is_time),
    "packages": ("an object of strings", _is_text_map),
    "data": ("an object or null", _is(dict, type(None))),
    "layout": ("an object", _is(dict)),
    "configuration": ("a string or null", _is(str, type(None))),
    "deadlines_s": (
        "an object of seconds",
        lambda v: isinstance(v, dict) and all(_is_time(s) and s > 0 for s in v.values()),
    ),
    "parent": (
        "null or an object with path and digest",
        lambda v: v is None or (_is_text_map(v) and "path" in v and _is_digest(v.get("manifest_xxh3_128"))),
    ),
    "tensors": (
        "null or an object of fingerprints",
        lambda v: v is None or (_is_text_map(v) and all(map(_FINGERPRINT.fullmatch, v.values()))),
    ),
}
"""All but the files: what each field has to be, in words and as a test."""
