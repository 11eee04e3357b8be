"""Reads the dumps of torch's Flight Recorder, one file per rank, and judges them as a live job is judged."""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_distplus.errors import DistplusError
from lightning_distplus.process import ProcessState
from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.flight_recorder import Recording, read_entries
from lightning_distplus.watchdog.verdict import Verdict, judge

__all__ = ["DumpError", "judge_dumps", "read_dumps"]

_MAJOR = "2"
_RANK = re.compile(r"(\d+)(\.(json|pickle|pkl))?$")
_NEEDED = ("version", "pg_config", "entries")
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "/torch/", "<")


class DumpError(DistplusError, ValueError):
    """A folder or file that holds no dumps of torch's Flight Recorder."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, strings and numbers; a name of a class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}; a dump holds plain values only")


def judge_dumps(folder: Path, on_file: Callable[[int, int], None] | None = None) -> Verdict:
    """Gives the verdict on the job that has left these dumps; see ``read_dumps`` for the arguments and errors."""
    dumps = _load(folder, on_file)
    recordings = _recordings(dumps)
    if not any(recording.unfinished for recording in recordings.values()):
        raise DumpError(
            f"no rank had a call in flight when the {len(dumps)} dumps in {folder} were written; no hang seen"
        )
    ranks = set(recordings).union(*(ranks for one in recordings.values() for ranks in one.groups.values()))
    evidence = {rank: _evidence(rank, recordings.get(rank), dumps.get(rank)) for rank in sorted(ranks)}
    return judge(evidence, "dumps")


def _evidence(rank: int, recording: Recording | None, dump: Mapping[str, Any] | None) -> Evidence:
    if recording is None or dump is None:
        return Evidence(
            rank=rank, host="unknown", pid=0, state=ProcessState.UNKNOWN.value, answers=False, is_recorded_only=True
        )
    standing = next(iter(recording.unfinished), None)
    last = recording.calls[-1] if recording.calls else None
    return Evidence(
        rank=rank,
        host="unknown",
        pid=0,
        state=ProcessState.UNKNOWN.value,
        answers=True,
        operation=f"last call: {last.describe()}" if last else "",
        waits=standing is not None,
        location=_location(dump),
        stands_in=None if standing is None else asdict(standing),
        recording=recording.to_plain(),
        is_recorded_only=True,
    )


def _location(dump: Mapping[str, Any]) -> str | None:
    """Where the rank made its last call; dumps in JSON hold no frames."""
    frames = dump["entries"][-1].get("frames", []) if dump["entries"] else []
    own = (one for one in frames if not any(part in one["filename"] for part in _LIBRARIES))
    return next((f"{one['filename']}:{one['line']}" for one in own), None)


def read_dumps(folder: Path, on_file: Callable[[int, int], None] | None = None) -> dict[int, Recording]:
    """Reads every dump in a folder.

    Args:
        folder: Holds one file per rank, named as torch does: the rank comes last (``nccl_trace_rank_12``), with
            ``.json``, ``.pickle`` or nothing after it. Files without a number at the end are left alone.
        on_file: Is told how many files have been read, of how many.

    Raises:
        DumpError: The folder is none, holds no dump or two of one rank, or a file is not what torch writes.
    """
    return _recordings(_load(folder, on_file))


def _load(folder: Path, on_file: Callable[[int, int], None] | None) -> dict[int, dict[str, Any]]:
    paths = _find(folder)
    dumps = {}
    for number, (rank, path) in enumerate(sorted(paths.items()), 1):
        dumps[rank] = _read(path)
        if on_file is not None:
            on_file(number, len(paths))
    return dumps


def _find(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DumpError(f"{folder} {what}; name the folder that holds one dump per rank")
    paths: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _RANK.search(path.name)
        if match is None or not path.is_file():
            continue
        rank = int(match[1])
        if rank in paths:
            raise DumpError(
                f"{paths[rank].name} and {path.name} in {folder} are both of rank {rank}; "
                "name a folder with the dumps of one incident"
            )
        paths[rank] = path
    if not paths:
        raise DumpError(
            f"{folder} holds no dump of torch's Flight Recorder: no file name ends with a rank, as nccl_trace_rank_0 "
            "does. Torch writes them where TORCH_FR_DUMP_TEMP_FILE says, with TORCH_NCCL_DUMP_ON_TIMEOUT=1"
        )
    return paths


def _read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    dump: dict[str, Any]
    try:
        dump = json.loads(content) if content[:1] == b"{" else _PlainUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise DumpError(f"{path} is no dump of torch's Flight Recorder, or was cut short: {error}") from error
    missing = [name for name in _NEEDED if not isinstance(dump, dict) or name not in dump]
    if missing:
        raise DumpError(f"{path} is no dump of torch's Flight Recorder: it lacks {', '.join(missing)}")
    if str(dump["version"]).partition(".")[0] != _MAJOR:
        raise DumpError(f"{path} has version {dump['version']} of torch's format; this program reads {_MAJOR}.x")
    return dump


def _recordings(dumps: Mapping[int, Mapping[str, Any]]) -> dict[int, Recording]:
    """The dumps as records whose groups have one name each on all ranks."""
    rank = -1
    try:
        members = {rank: _members(dump) for rank, dump in dumps.items()}
        sets: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for groups in members.values():
            for name, ranks in groups.items():
                sets[name].add(tuple(ranks))
        found = {}
        for rank, dump in dumps.items():
            # Groups that were split from one another may have one name and different ranks.
            names = {
                name: name if len(sets[name]) == 1 else f"{name} of ranks {','.join(map(str, ranks))}"
                for name, ranks in members[rank].items()
            }
            found[rank] = _recording(dump, names, {names[name]: ranks for name, ranks in members[rank].items()}, dumps)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, SyntaxError) as error:
        raise DumpError(f"the dump of rank {rank} has an entry that torch does not write: {error!r}") from error
    return found


def _recording(
    dump: Mapping[str, Any], names: Mapping[str, str], groups: dict[str, list[int]], ranks: Collection[int]
) -> Recording:
    for entry in dump["entries"]:
        name, desc = entry["process_group"]
        # Gloo tells the ranks of no group; those of the default group are all.
        groups.setdefault(names.get(name, name), sorted(ranks) if desc == "default_pg" else [])
    entries = [
        {**entry, "process_group": [names.get(entry["process_group"][0], entry["process_group"][0])]}
        for entry in dump["entries"]
    ]
    return Recording(
        calls=read_entries(entries, groups),
        groups=groups,
        roles={names[name]: str(dump["pg_config"][name].get("desc", "")) for name in names},
        enqueued=_numbers(dump, names, "last_enqueued_collective"),
        completed=_numbers(dump, names, "last_completed_collective"),
    )


def _members(dump: Mapping[str, Any]) -> dict[str, list[int]]:
    """The ranks of each group; gloo tells none, so that those count which have entries in it."""
    config = dump["pg_config"]
    groups = {str(name): sorted(ast.literal_eval(str(values["ranks"]))) for name, values in config.items()}
    return {name: ranks for name, ranks in groups.items() if ranks}


def _numbers(dump: Mapping[str, Any], names: Mapping[str, str], field: str) -> dict[str, int]:
    """A number of each group's status; torch numbers the groups of one process in the order of their names."""
    status = dump.get("pg_status") or {}
    known = {str(entry["pg_id"]): entry["process_group"][0] for entry in dump["entries"] if "pg_id" in entry}
    if len(status) == len(names) and all(str(name).isdigit() for name in (*status, *names)):
        known = dict(zip(sorted(status, key=int), sorted(names, key=int), strict=True)) | known
    return {
        names[known[number]]: int(values[field])
        for number, values in status.items()
        if known.get(number) in names and field in values
    }
