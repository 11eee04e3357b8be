"""The one comparison of what must be equal on all ranks at the start, and what their checks have found as one list.

A Resilient strategy makes it before its engine wraps the model and before the first step; on any other strategy the
divergence monitor does. What may change later is compared by the checks of the monitor.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane
from lightning_distplus.majority import is_equal, odd_ranks
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
        plain = value.detach().cpu().contiguous().clone()  # FSDP2 cannot free a storage that numpy has seen
        value = plain.view(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    yield np.ascontiguousarray(value).tobytes()


def _spread(count: int) -> list[int]:
    """Up to 1,024 places from the first to the last."""
    if count <= _ROWS:
        return list(range(count))
    return [place * (count - 1) // (_ROWS - 1) for place in range(_ROWS)]


# -- what each rank states when it starts ------------------------------------------------------------------------------

Statement = Mapping[str, Any]
"""What one rank states: plain values by name, ``check`` or ``check.field``. A list may be long: only its first entry in
which ranks differ is told."""
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "PYTORCH_CUDA_ALLOC_CONF")
_SETTINGS = (
    "max_epochs", "max_steps", "min_epochs", "min_steps", "accumulate_grad_batches", "gradient_clip_val", "precision",
    "val_check_interval", "check_val_every_n_epoch", "limit_train_batches", "limit_val_batches", "num_sanity_val_steps",
    "reload_dataloaders_every_n_epochs",
)  # fmt: skip


def state_of_process(facts: Facts) -> dict[str, Any]:
    """Versions, revision, seed and the variables of the communication libraries."""
    found = {f"versions.{name}": version for name, version in versions().items()}
    found["revision"] = revision(facts.folder)
    found["seed"] = facts.variables.get("PL_GLOBAL_SEED", "unset")
    found |= {f"variables.{name}": value for name, value in facts.variables.items() if name.startswith(_PREFIXES)}
    return found


def state_before_engine(trainer: Any) -> dict[str, Any]:
    """The Trainer's settings and the model, before an engine averages one parameter with another, or aborts."""
    module = trainer.lightning_module
    return {
        **_settings(trainer),
        "model.class": type(module).__name__,
        "model": _signature(module),
        "initial_weights": _weights(module) if trainer.state.fn == "fit" else [],
        **_hyperparameters(trainer),
    }


def state_before_training(trainer: Any) -> dict[str, Any]:
    """Where the run stands once everything is restored, and its data."""
    found = {
        "trainer.global_step": trainer.global_step,
        "trainer.epoch": trainer.current_epoch,
        **_settings(trainer),
        "trainer.optimizers": ", ".join(type(one).__name__ for one in trainer.optimizers),
        "trainer.checkpoint": Path(str(trainer.ckpt_path or "none")).name,
        "data.number of training batches": _plain(trainer.num_training_batches),
        "data.number of validation batches": [_plain(number) for number in trainer.num_val_batches],
    }
    loader = trainer.train_dataloader
    is_cut = hasattr(getattr(loader, "sampler", None), "num_replicas")  # what must be the same on all ranks
    if is_cut and hasattr(loader.dataset, "__len__"):
        found["data.length of the data set"] = len(loader.dataset)
        found["data.content of the data set"] = content_of(loader.dataset) or "not read"
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


def _settings(trainer: Any) -> dict[str, Any]:
    """A rank without validation waits for nobody where the others wait for it."""
    return {
        **{f"trainer.{name}": _plain(getattr(trainer, name, None)) for name in _SETTINGS},
        "trainer.time between validations": _plain(_compat.validation_interval(trainer)),
        "trainer.automatic_optimization": trainer.lightning_module.automatic_optimization,
    }


def _plain(value: Any) -> Any:
    """As JSON has it: the number of batches of a loader that does not tell it is ``"inf"``."""
    is_plain = value is None or (isinstance(value, (int, float)) and math.isfinite(value))
    return value if is_plain else str(value)


def _signature(module: torch.nn.Module) -> list[str]:
    """One line for each parameter and buffer, in the order of registration, which is that of gradient buckets."""
    return [
        f"parameter {name}: {_shape(tensor)}, {'trainable' if tensor.requires_grad else 'frozen'}"
        for name, tensor in module.named_parameters()
    ] + [f"buffer {name}: {_shape(tensor)}" for name, tensor in module.named_buffers()]


def _shape(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if torch.nn.parameter.is_lazy(tensor):
        return f"{dtype} of no shape yet"
    if _compat.is_fsdp_shard(tensor):  # of an earlier run of this module: each rank sees its own part
        return f"{dtype} shard"
    return f"{dtype} {list(getattr(tensor, 'ds_shape', tensor.shape))}"  # under ZeRO 3 the parameter itself is empty


def _weights(module: torch.nn.Module) -> list[str]:
    """Engines overwrite those of the other ranks, or mix them; what is sharded or quantized by its type is left out."""
    return [
        f"{name}: {content_of(parameter.data)}"
        for name, parameter in module.named_parameters()
        if type(parameter.data) is torch.Tensor
        and not (torch.nn.parameter.is_lazy(parameter) or parameter.is_meta or _compat.is_fsdp_shard(parameter))
        and parameter.layout is torch.strided
        and parameter.numel()
    ]


def _hyperparameters(trainer: Any) -> dict[str, Any]:
    """The numbers among those that the modules have saved."""
    owners = {"module": trainer.lightning_module, "data": getattr(trainer, "datamodule", None)}
    return {
        f"hyperparameters.{name} of the {owner}": _plain(value)
        for owner, module in owners.items()
        for name, value in sorted((getattr(module, "hparams", None) or {}).items())
        if isinstance(value, (bool, int, float))
    }


# -- in what they differ, and which rank is the odd one ----------------------------------------------------------------

_OF_A_HOST = ("_IFNAME", "_DEBUG", "_FILE", "_HCA", "_NAME_PREFIX", "_GID_INDEX")
_SHOWN_RANKS = 8
_MANY = 200
_MAX_ENTRIES = 50_000  # the digests of so many fit into one message
_REMEDIES = {
    "versions": "Install the same versions on every node, in the same environment",
    "revision": "Check out the same revision on every node, or start all of them from one shared folder",
    "trainer": "Start every node with the same configuration and checkpoint; else the ranks come to validations, saves "
    "or the end at different steps",
    "model": "Build the model alike on all ranks: no branch by rank, no set, one order of registration",
    "seed": "Call seed_everything with the same number on every rank",
    "variables": "Export the variable in the same way on every node",
    "data": "Give every rank the same data set; the sampler cuts it, and a shorter one ends a rank too early. "
    "ResumableDataModule(uneven=...) makes batches even",
    "initial_weights": "DDP and ZeRO take those of rank 0 for all, FSDP keeps a part of each rank's; seed_everything "
    "makes them the same",
    "hyperparameters": "Start every rank with the same configuration, unless it is meant",
}
_NAMES = {
    "versions": "The version of {}", "revision": "The git revision", "seed": "The seed", "variables": "{}",
    "initial_weights": "An initial weight", "hyperparameters": "Hyperparameter {}",
}  # fmt: skip
_STATUS = {"initial_weights": Status.NOTE, "hyperparameters": Status.WARNING}  # without a seed weights always differ
AGREEMENT_CHECKS = (*_REMEDIES, "devices")
"""The names of what is compared."""


@dataclass(frozen=True, kw_only=True)
class Disagreement(Finding):
    """A finding that ranks state different values."""

    field: str
    """What differs, such as ``"max_steps"``."""
    ranks: list[int]
    """The odd ones; all ranks where there is no majority."""
    values: dict[int, Any]
    """What each rank states."""


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
    lists = {name: value for name, value in mine.items() if isinstance(value, list)}
    brief = {**mine, **{name: _digest(value) for name, value in lists.items()}}
    world = plane.world
    # Whoever knows the outcome may end, and the store with it: nothing is read after the last exchange.
    name = f"rank {world.rank} (host {world.host}, pid {world.pid})"
    short = {"name": name, "digest": _digest(brief), "device": device, "off": dict(settings)}
    told = plane.gather_json("agreement", short, deadline)
    names, wishes = [one["name"] for one in told], told[0]["off"]
    findings = list(_shared_devices([one["device"] for one in told], names))
    if len({one["digest"] for one in told}) > 1:
        statements = plane.gather_json("statements", brief, deadline)
        for field, value in lists.items():
            if not is_equal(statement.get(field) for statement in statements):
                for statement, entry in zip(statements, _odd_entries(plane, value, deadline), strict=True):
                    statement[field] = entry
        findings += compare(statements, names)
    return [one for finding in findings if (one := finding.under(wishes.get(finding.check))) is not None]


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _odd_entries(plane: ControlPlane, mine: list[Any], deadline: timedelta) -> list[Any]:
    """What each rank has in the first place of a list in which two of them differ."""
    digests = [xxhash.xxh32_intdigest(json.dumps(entry).encode()) for entry in mine[:_MAX_ENTRIES]]
    columns = itertools.zip_longest(
        *(one["digests"] for one in plane.gather_json("entries", {"digests": digests}, deadline))
    )
    place = next((place for place, column in enumerate(columns) if len(set(column)) > 1), _MAX_ENTRIES)
    if place == _MAX_ENTRIES:  # it is behind those, or two short digests are alike by chance
        entry = f"{len(mine)} entries, digest {_digest(mine)}"
    else:
        entry = mine[place] if place < len(mine) else "nothing"
    return [one["entry"] for one in plane.gather_json("entry", {"entry": entry}, deadline)]


def _shared_devices(devices: Sequence[str], names: Sequence[str]) -> Iterator[Finding]:
    holders = defaultdict(list)
    for rank, device in enumerate(devices):
        if device:
            holders[device].append(rank)
    for device, ranks in holders.items():
        if len(ranks) > 1:
            yield Finding.error(
                f"{len(ranks)} ranks use one GPU: {', '.join(names[rank] for rank in ranks[:_SHOWN_RANKS])}.",
                detail=f"GPU {device}",
                remedy="Show each process all GPUs of its node, and let LOCAL_RANK choose; or start fewer processes",
                check="devices",
            )


def compare(statements: Sequence[Statement], names: Sequence[str]) -> Iterator[Disagreement]:
    """The fields in which the ranks' statements differ, in the order of the first statement.

    Args:
        statements: In the order of the ranks.
        names: How each rank is called in a message.
    """
    for field in dict.fromkeys(field for statement in statements for field in statement):
        values = {rank: statement.get(field, "unset") for rank, statement in enumerate(statements)}
        if not is_equal(values.values()):
            yield _disagreement(field, values, names)


def _disagreement(field: str, values: dict[int, Any], names: Sequence[str]) -> Disagreement:
    check, _, part = field.partition(".")
    odd, right = odd_ranks(values)
    told = "; ".join(f"{names[rank]}: {_short(values[rank])}" for rank in odd[:_SHOWN_RANKS])
    more = f"; and {len(odd) - _SHOWN_RANKS} more" if len(odd) > _SHOWN_RANKS else ""
    others = "" if right is None else f"; the other {len(values) - len(odd)} ranks: {_short(values[right])}"
    who = "the ranks" if right is None else f"rank {', '.join(map(str, odd[:_SHOWN_RANKS]))}"
    # A seed for each rank is a style of its own; one rank that differs from all others is a mistake.
    is_legal = part.endswith(_OF_A_HOST) or (check == "seed" and right is None)
    subject = _NAMES.get(check, f"{check.capitalize()}: {{}}" if part else f"The {check}").format(part)
    return Disagreement(
        check=check,
        status=_STATUS.get(check, Status.WARNING if is_legal else Status.ERROR),
        subject=f"{subject} differs on {who}.",
        detail=f"{told}{more}{others}",
        remedy=_REMEDIES[check],
        field=part if check in ("trainer", "data") else field,
        ranks=odd,
        values=values,
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MANY else f"{text[:_MANY]}..."


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
