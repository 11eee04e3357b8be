"""Where the parts of a checkpoint lie on a disk.

```text
checkpoints/
|-- step=10.ckpt/                        a directory checkpoint
|   |-- __0_0.distcp ...
|   `-- .distplus/{manifest.json,commit}
|-- step=20.ckpt                         a single-file checkpoint
`-- .distplus/
    |-- step=20.ckpt/{manifest.json,commit}
    |-- step=30.ckpt.stage-1f0c22d9/     a save in progress: the payload under its own name, with its meta folder
    |-- step=10.ckpt.aside-77aa01be/     what a save replaces, complete and loadable until the new one is committed
    |-- step=20.ckpt.draft-77aa01be/     an aside that is being built
    |-- step=5.ckpt.removed-0be1d3f2/    on its way out
    |-- step=10.ckpt.universal-5e0f1a2b/ the same for another number of ranks (DeepSpeed); goes when step=10.ckpt goes
    `-- step=30.ckpt.torn-93c5d001/      in quarantine: a save that was killed, or a damaged checkpoint; never loaded
```

Nothing of ours lies outside ``.distplus``, so that no pattern that looks for checkpoints by name can find it.
The stage, the aside and the target lie on one file system: every move is a rename.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MANIFEST",
    "MARKER",
    "META",
    "PREPARED_MARKER",
    "Stage",
    "asides_in",
    "is_aside",
    "leftovers_of",
    "meta_folder",
    "new_nonce",
    "quarantine_for",
    "quarantined_in",
    "trash_for",
    "trash_in",
    "universal_for",
]

META = ".distplus"
MANIFEST = "manifest.json"
MARKER = "commit"
PREPARED_MARKER = "commit.prepared"

_WORK_FOLDER = re.compile(r"(?P<name>.+)\.(?P<role>stage|aside|draft|removed|torn|universal)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Stage:
    """The places that one save of ``target`` uses; ``nonce`` tells it from other saves of the same target."""

    target: Path
    nonce: str

    @property
    def folder(self) -> Path:
        """Holds the payload until it is moved to the target."""
        return self._work_folder("stage")

    @property
    def payload(self) -> Path:
        """What the save writes: a file or a directory, under the target's own name."""
        return self.folder / self.target.name

    @property
    def aside(self) -> Path:
        """Holds what the target was before, from just before it is replaced until the new one is committed."""
        return self._work_folder("aside")

    @property
    def aside_payload(self) -> Path:
        """The previous checkpoint, loadable where it is."""
        return self.aside / self.target.name

    @property
    def draft(self) -> Path:
        """Where an aside is built that cannot come into being by one rename."""
        return self._work_folder("draft")

    def _work_folder(self, role: str) -> Path:
        return self.target.parent / META / f"{self.target.name}.{role}-{self.nonce}"


def meta_folder(path: Path, *, is_directory: bool | None = None) -> Path:
    """The folder of manifest and marker of the checkpoint at ``path``.

    Args:
        path: The checkpoint.
        is_directory: Its kind; by default, what lies at ``path`` now.
    """
    if path.is_dir() if is_directory is None else is_directory:
        return path / META
    return path.parent / META / path.name


def new_nonce() -> str:
    """Eight random hex digits."""
    return secrets.token_hex(4)


def asides_in(directory: Path) -> Iterator[tuple[Path, Path]]:
    """Pairs of a checkpoint that was moved aside and the target that it was moved from."""
    for folder, name, role in _work_folders(directory):
        if role == "aside":
            yield folder / name, directory / name


def is_aside(path: Path) -> bool:
    """Whether ``path`` is a checkpoint that was moved aside."""
    match = _WORK_FOLDER.fullmatch(path.parent.name)
    return path.parent.parent.name == META and match is not None and match["role"] == "aside"


def leftovers_of(target: Path, *roles: str) -> list[Path]:
    """What lies beside ``target`` in these roles: "stage", "draft", "aside", "universal"."""
    return [folder for folder, name, role in _work_folders(target.parent) if name == target.name and role in roles]


def quarantine_for(target: Path) -> Path:
    """A fresh folder in which a bad checkpoint called like ``target``, or a torn save of it, is kept."""
    return target.parent / META / f"{target.name}.torn-{new_nonce()}"


def quarantined_in(directory: Path) -> list[Path]:
    """Everything in ``directory`` that is in quarantine."""
    return [folder for folder, _, role in _work_folders(directory) if role == "torn"]


def universal_for(target: Path) -> Path:
    """A fresh folder for a copy of ``target`` that another number of ranks can read."""
    return target.parent / META / f"{target.name}.universal-{new_nonce()}"


def trash_for(directory: Path, name: str) -> Path:
    """A fresh place in ``directory`` to which something is moved before it is deleted file by file."""
    return directory / META / f"{name}.removed-{new_nonce()}"


def trash_in(directory: Path) -> list[Path]:
    """Everything in ``directory`` whose deletion was begun, by whomever."""
    return [folder for folder, _, role in _work_folders(directory) if role == "removed"]


def _work_folders(directory: Path) -> Iterator[tuple[Path, str, str]]:
    try:
        folders = sorted((directory / META).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for folder in folders:
        if match := _WORK_FOLDER.fullmatch(folder.name):
            yield folder, match["name"], match["role"]
