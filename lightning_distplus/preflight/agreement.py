"""The comparison of all ranks before the first step, and what their checks have found as one list."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_distplus.control import ControlPlane
from lightning_distplus.majority import odd_ranks
from lightning_distplus.preflight.check import Facts, Finding, Settings, Status
from lightning_distplus.preflight.host import versions
from lightning_distplus.world import name_ranks

_WHOLE_BYTES = 64 << 20
_ROWS = 1024
_DEPTH = 8


def content_of(dataset: Any) -> str | None:
    """16 hex digits, the same on every rank that has the same data; None for a data set of a kind of its own.

    A data set may tell its own: ``fingerprint``, a method or a text; Hugging Face's have ``_fingerprint``. Tensors and
    arrays are read, up to 64 MiB in whole, above that 1,024 rows; so are lists of numbers, texts, tensors and arrays.
    Nothing else is read: ``__getitem__`` might open a file that must not be open when workers are forked.
    """
    digest = xxhash.xxh64()
    try:
        for part in _parts(dataset, _DEPTH):
            digest.update(part)
    except _OfItsOwnKindError:
        return None
    return digest.hexdigest()


class _OfItsOwnKindError(Exception):
    pass


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    if depth == 0:
        raise _OfItsOwnKindError
    told = getattr(value, "fingerprint", None) or getattr(value, "_fingerprint", None)
    told = told() if callable(told) else told
    if isinstance(told, (str, int)):
        yield str(told).encode()
    elif isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object):
        yield from _rows(value)
    elif isinstance(value, (str, bytes, int, float, bool, type(None), np.generic)):
        yield repr(value).encode()
    elif isinstance(value, TensorDataset):
        yield from _parts(list(value.tensors), depth - 1)
    elif isinstance(value, ConcatDataset):
        yield from _parts(list(value.datasets), depth - 1)
    elif isinstance(value, Subset):
        yield from _parts(np.asarray(value.indices), depth - 1)
        yield from _parts(value.dataset, depth - 1)
    elif type(value) in (list, tuple):
        yield f"{len(value)} items".encode()
        for index in _spread(len(value)):
            yield from _parts(value[index], depth - 1)
    elif type(value) is dict:
        yield from _parts([part for item in value.items() for part in item], depth - 1)
    else:
        raise _OfItsOwnKindError


def _rows(value: Any) -> Iterator[bytes]:
    """Type and shape, and the bytes of all rows, or of some."""
    yield f"{value.dtype} {tuple(value.shape)}".encode()
    if value.ndim and value.nbytes > _WHOLE_BYTES:
        value = value[_spread(len(value))]
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        value = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    yield np.ascontiguousarray(value).tobytes()


def _spread(count: int) -> list[int]:
    """Up to 1,024 places from the first to the last."""
    if count <= _ROWS:
        return list(range(count))
    return [place * (count - 1) // (_ROWS - 1) for place in range(_ROWS)]


# -- what all ranks must agree on, and which rank is the odd one -------------------------------------------------------

Statement = Mapping[str, str]
"""What one rank states: values by name. The name is ``check`` or ``check.field``."""
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "PYTORCH_CUDA_ALLOC_CONF")
_OF_A_HOST = ("_IFNAME", "_DEBUG", "_FILE", "_HCA", "_NAME_PREFIX", "_GID_INDEX")
_SHOWN_RANKS = 8
_MANY = 200


_REMEDIES = {
    "versions": "Install the same versions on every node, in the same environment",
    "revision": "Check out the same revision on every node, or start all of them from one shared folder",
    "trainer": "Start every node with the same configuration",
    "model": "Build the same model on every rank; a layer that depends on the rank or on local files differs",
    "seed": "Call seed_everything with the same number on every rank",
    "variables": "Export the variable in the same way on every node",
    "data": "Give every rank the same data set; the sampler cuts it, and a shorter one ends a rank too early",
}
_NAMES = {"versions": "The version of {}", "revision": "The git revision", "seed": "The seed", "variables": "{}"}
AGREEMENT_CHECKS = (*_REMEDIES, "devices")
"""The names of what is compared."""


def state_of_process(facts: Facts) -> dict[str, str]:
    """What this process says of itself: versions, revision, seed and the variables of the communication libraries."""
    found = {f"versions.{name}": version for name, version in versions().items()}
    found["revision"] = revision(facts.folder)
    found["seed"] = facts.variables.get("PL_GLOBAL_SEED", "unset")
    for name, value in facts.variables.items():
        if name.startswith(_PREFIXES):
            found[f"variables.{name}"] = value
    return found


def revision(folder: Path) -> str:
    """The git revision that is checked out around a folder, or ``"none"``; read from its files."""
    for parent in (folder.absolute(), *folder.absolute().parents):
        git = parent / ".git"
        if git.is_file():  # a worktree names its folder
            git = Path(git.read_text().removeprefix("gitdir:").strip())
        head = git / "HEAD"
        if head.is_file():
            text = head.read_text().strip()
            return _resolved(git, text.removeprefix("ref:").strip()) if text.startswith("ref:") else text
    return "none"


def _resolved(git: Path, name: str) -> str:
    common = git / "commondir"
    home = git / common.read_text().strip() if common.is_file() else git
    if (home / name).is_file():
        return (home / name).read_text().strip()
    packed = home / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), name)


def disagreements(
    plane: ControlPlane, mine: Statement, deadline: timedelta, settings: Settings, *, device: str = ""
) -> list[Finding]:
    """Compares what all ranks state; all of them call it, and all get the same findings.

    Digests meet first. Only where they differ do the ranks tell each other everything.

    Args:
        plane: The control plane.
        mine: What this rank states.
        deadline: How long to wait for the slowest rank.
        settings: Which checks are off, or warnings; that of rank 0 counts.
        device: What no other rank may have too, for example a GPU by its unique name; "" for a CPU.
    """
    digest = hashlib.sha256(json.dumps(dict(mine), sort_keys=True).encode()).hexdigest()
    short = plane.gather_json("agreement", {"digest": digest, "device": device, "off": dict(settings)}, deadline)
    wishes: Settings = short[0]["off"]
    findings = list(_shared_devices([item["device"] for item in short], plane.describe_rank))
    if len({item["digest"] for item in short}) > 1:
        findings += compare(plane.gather_json("statements", dict(mine), deadline), plane.describe_rank)
    return [one for finding in findings if (one := finding.under(wishes.get(finding.check))) is not None]


def _shared_devices(devices: Sequence[str], name: Callable[[int], str]) -> Iterator[Finding]:
    holders = defaultdict(list)
    for rank, device in enumerate(devices):
        if device:
            holders[device].append(rank)
    for device, ranks in holders.items():
        if len(ranks) > 1:
            yield Finding.error(
                f"{len(ranks)} ranks use one GPU: {', '.join(map(name, ranks[:_SHOWN_RANKS]))}.",
                detail=f"GPU {device}",
                remedy="Show each process all GPUs of its node, and let LOCAL_RANK choose; or start fewer processes",
                check="devices",
            )


def compare(statements: Sequence[Statement], name: Callable[[int], str] = str) -> Iterator[Finding]:
    """The fields in which the ranks' statements differ, in the order of the first statement.

    Args:
        statements: In the order of the ranks.
        name: How a rank is called in a message.
    """
    fields = dict.fromkeys(field for statement in statements for field in statement)
    for field in fields:
        values = [statement.get(field, "unset") for statement in statements]
        if len(set(values)) > 1:
            yield _difference(field, values, name)


def _difference(field: str, values: Sequence[str], name: Callable[[int], str]) -> Finding:
    check, _, part = field.partition(".")
    odd, right = odd_ranks(dict(enumerate(values)))
    common = None if right is None else values[right]
    told = "; ".join(f"{name(rank)}: {_short(values[rank])}" for rank in odd[:_SHOWN_RANKS])
    more = f"; and {len(odd) - _SHOWN_RANKS} more" if len(odd) > _SHOWN_RANKS else ""
    others = "" if common is None else f"; the other {len(values) - len(odd)} ranks: {_short(common)}"
    who = "the ranks" if common is None else f"rank {', '.join(map(str, odd[:_SHOWN_RANKS]))}"
    # A seed for each rank is a style of its own; one rank that differs from all others is a mistake.
    is_legal = part.endswith(_OF_A_HOST) or (check == "seed" and common is None)
    return Finding(
        check=check,
        status=Status.WARNING if is_legal else Status.ERROR,
        subject=f"{_NAMES.get(check, f'{check.capitalize()}: {{}}').format(part)} differs on {who}.",
        detail=f"{told}{more}{others}",
        remedy=_REMEDIES[check],
    )


def _short(value: str) -> str:
    return value if len(value) <= _MANY else f"{value[:_MANY]}..."


# -- the findings of all ranks -----------------------------------------------------------------------------------------


def gathered(plane: ControlPlane, mine: Iterable[Finding], deadline: timedelta) -> list[Finding]:
    """What all ranks have found; all of them call it, and all get the same list."""
    return merged(plane.gather_json("findings", as_message(plane.world.host, mine), deadline))


def spans_hosts(plane: ControlPlane) -> bool:
    """Whether ranks run on other hosts than this one; one rank of another node is asked for."""
    world = plane.world
    other = 0 if world.node_rank > 0 else world.size - 1
    return world.num_nodes > 1 and plane.peers_of([other])[other].host != world.host


def as_message(host: str, findings: Iterable[Finding]) -> dict[str, Any]:
    """What one rank tells the others."""
    return {"host": host, "findings": [finding.to_dict() for finding in findings]}


def merged(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """One finding for what several ranks say alike, with the host of the lowest one and the other ranks."""
    found: dict[tuple[str, str], Finding] = {}
    others: dict[tuple[str, str], list[int]] = {}
    for rank, message in enumerate(ranks):
        for item in message["findings"]:
            finding = Finding(**{**item, "status": Status(item["status"])})
            key = (finding.check, finding.subject)
            if key in found:
                others[key].append(rank)
            else:
                detail = f"host {message['host']}, rank {rank}: {finding.detail}"
                found[key], others[key] = replace(finding, detail=detail), []
    return [
        replace(one, detail=f"{one.detail} (and {name_ranks(others[key])})") if others[key] else one
        for key, one in found.items()
    ]
