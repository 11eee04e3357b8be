"""The moves that put a finished stage in its target's place; a kill between any two leaves one of them valid."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from lightning_distplus.checkpoint.digests import bytes_digest
from lightning_distplus.checkpoint.files import (
    Sync,
    discard,
    list_folders,
    remove_tree,
    second_name,
    sync_folder,
    write_file,
)
from lightning_distplus.checkpoint.layout import (
    MANIFEST,
    MARKER,
    META,
    PREPARED_MARKER,
    Stage,
    leftovers_of,
    meta_folder,
    trash_for,
)
from lightning_distplus.checkpoint.manifest import Manifest
from lightning_distplus.checkpoint.torn import set_torn_aside

__all__ = ["publish"]

logger = logging.getLogger(__name__)


def publish(stage: Stage, manifest: Manifest, *, sync: Sync | None) -> None:
    """Makes the payload of ``stage`` the committed checkpoint at its target.

    Args:
        stage: A finished save whose files are on the disk.
        manifest: Its manifest.
        sync: Forces every move to the disk before the next one; None: nobody does.

    Raises:
        OSError: The checkpoint is not committed, and what was at the target is there again.
    """
    is_directory = stage.payload.is_dir()
    _prepare(stage, manifest, is_directory, sync)
    try:
        _set_aside(stage, sync)
        _move_in(stage, is_directory, sync)
        _mark(stage, is_directory, sync)
    except BaseException:
        _put_back(stage, is_directory, sync)
        raise
    _clear(stage)


def _prepare(stage: Stage, manifest: Manifest, is_directory: bool, sync: Sync | None) -> None:
    # The marker is written here, under another name, so that the last step is a rename and needs no space.
    meta = meta_folder(stage.payload, is_directory=is_directory)
    meta.mkdir(parents=True, exist_ok=True)
    content = manifest.to_json().encode()
    marker = json.dumps({"version": 1, "manifest_xxh3_128": bytes_digest(content)}) + "\n"
    write_file(meta / MANIFEST, content, sync=sync)
    write_file(meta / PREPARED_MARKER, marker.encode(), sync=sync)
    for folder in (*list_folders(stage.payload), meta, stage.folder, stage.folder.parent, stage.target.parent):
        sync_folder(folder, sync=sync)


def _set_aside(stage: Stage, sync: Sync | None) -> None:
    target = stage.target
    if target.is_symlink() or not target.exists():
        return  # what a link points to stays where it is
    if target.is_dir():
        stage.aside.mkdir()
        target.rename(stage.aside_payload)
    else:
        # A file and its meta folder cannot move in one step: a second, complete checkpoint comes into being by one.
        stage.draft.mkdir()
        _lay_file(target, stage.draft / target.name, sync)
        stage.draft.rename(stage.aside)
    for folder in (stage.aside, stage.aside.parent, target.parent):
        sync_folder(folder, sync=sync)


def _move_in(stage: Stage, is_directory: bool, sync: Sync | None) -> None:
    target = stage.target
    beside = meta_folder(target, is_directory=False)
    discard(beside / MARKER)
    if is_directory:
        discard(target)  # a file or a link, of which a file now lies aside
        remove_tree(beside)
    else:
        beside.mkdir(parents=True, exist_ok=True)
        source = meta_folder(stage.payload, is_directory=False)
        (source / MANIFEST).replace(beside / MANIFEST)
        (source / PREPARED_MARKER).replace(beside / PREPARED_MARKER)
        sync_folder(beside, sync=sync)
    stage.payload.replace(target)
    sync_folder(target.parent, sync=sync)
    sync_folder(target.parent / META, sync=sync)


def _mark(stage: Stage, is_directory: bool, sync: Sync | None) -> None:
    meta = meta_folder(stage.target, is_directory=is_directory)
    (meta / PREPARED_MARKER).replace(meta / MARKER)
    sync_folder(meta, sync=sync)


def _put_back(stage: Stage, is_directory: bool, sync: Sync | None) -> None:
    try:
        if not os.path.lexists(stage.payload) and os.path.lexists(stage.target):
            discard(meta_folder(stage.target, is_directory=is_directory) / MARKER)
            stage.target.rename(stage.payload)
        old = stage.aside_payload
        if old.is_dir():
            old.rename(stage.target)
        elif old.is_file():
            _lay_file(old, stage.target, sync)
        remove_tree(stage.draft)
        remove_tree(stage.aside)
    except OSError as error:
        logger.warning(
            "%s cannot be put back (%s). The checkpoint that was there lies at %s and is found there on resume.",
            stage.target,
            error,
            stage.aside_payload,
        )


def _clear(stage: Stage) -> None:
    """Clears away what saves of a committed target have left; an error here does not undo the commit."""
    target = stage.target
    try:
        set_torn_aside(target)
        for folder in (stage.folder, *leftovers_of(target, "aside", "draft", "universal")):
            trash = trash_for(target.parent, target.name)
            folder.rename(trash)  # at once, so that no reader meets half an aside
            remove_tree(trash)
    except OSError as error:
        logger.warning("%s is committed; what earlier saves of it left cannot be deleted (%s).", target, error)


def _lay_file(source: Path, destination: Path, sync: Sync | None) -> None:
    """Makes ``destination`` a single-file checkpoint equal to ``source``; its marker goes first and comes last."""
    old, new = meta_folder(source, is_directory=False), meta_folder(destination, is_directory=False)
    discard(new / MARKER)
    discard(destination)
    second_name(source, destination, sync=sync)
    new.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, MARKER):
        if (old / name).is_file():
            write_file(new / name, (old / name).read_bytes(), sync=sync)
    for folder in (new, new.parent, destination.parent):
        sync_folder(folder, sync=sync)
