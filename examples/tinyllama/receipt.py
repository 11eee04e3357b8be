"""What two runs have in common: samples, losses, and the whole state of their last checkpoints."""

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.tinyllama.job import Start
from examples.tinyllama.record import digest_samples
from lightning_distplus.data import MegatronTokens

Sample = tuple[int, int, str]  # source, index, digest of the tokens

# Absolute paths of the run's own folder, as ModelCheckpoint keeps them.
NOT_STATE = {"callbacks"}


def committed_steps(starts: Iterable[Start]) -> dict[int, dict[int, list[dict[str, Any]]]]:
    """Step -> rank -> micro-batches that the final weights come from: what came after the last resume before it."""
    history: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for start in sorted(starts, key=lambda start: (start.rank, start.number)):
        for ranks in (ranks for step, ranks in history.items() if step >= start.first_step):
            ranks.pop(start.rank, None)
        for batch in start.batches:
            history.setdefault(batch["step"], {}).setdefault(start.rank, []).append(batch)
    return history


def samples_of(history: dict[int, dict[int, list[dict[str, Any]]]]) -> dict[int, list[Sample]]:
    """Step -> samples in the order of ranks and micro-batches."""
    return {
        step: [tuple(sample) for rank in sorted(ranks) for batch in ranks[rank] for sample in batch["samples"]]
        for step, ranks in sorted(history.items())
    }


def losses_of(history: dict[int, dict[int, list[dict[str, Any]]]]) -> dict[int, float]:
    """Step -> mean loss over ranks and micro-batches."""
    return {
        step: float(np.mean([float.fromhex(batch["loss"]) for batches in ranks.values() for batch in batches]))
        for step, ranks in sorted(history.items())
    }


def count_differences(found: dict[int, list[Sample]], expected: dict[int, list[Sample]]) -> tuple[int, int]:
    """How many samples were repeated and missed, against the run that nobody disturbed."""
    ours = Counter(sample[:2] for samples in found.values() for sample in samples)
    theirs = Counter(sample[:2] for samples in expected.values() for sample in samples)
    return (ours - theirs).total(), (theirs - ours).total()


def misread_samples(samples: dict[int, list[Sample]], prefixes: list[Path], seq_len: int) -> int:
    """How many samples were not what the token files hold at their index: it proves that the ids are true."""
    sources = [MegatronTokens(prefix, seq_len) for prefix in prefixes]
    wrong = 0
    for source, index, digest in (sample for batch in samples.values() for sample in batch):
        block = torch.from_numpy(sources[source].gather(np.array([index])).astype(np.int64))
        wrong += digest_samples(block[:, :-1], block[:, 1:]) != [digest]
    return wrong


def state_differences(one: Path, other: Path) -> tuple[list[str], int]:
    """Names of what differs between two checkpoints of any strategy, bit for bit; and the number of tensors."""
    left, right = dict(_leaves(_load(one))), dict(_leaves(_load(other)))
    differences = sorted(left.keys() ^ right.keys())
    differences += [name for name in sorted(left.keys() & right.keys()) if not _is_equal(left[name], right[name])]
    return differences, sum(isinstance(value, torch.Tensor) for value in left.values())


def _load(path: Path) -> dict[str, Any]:
    """The content of all files of a checkpoint, by name."""
    if path.is_file():
        return {"file": torch.load(path, map_location="cpu", weights_only=True)}
    content: dict[str, Any] = {}
    if any(path.glob("*.distcp")):
        with tempfile.TemporaryDirectory() as folder:
            dcp_to_torch_save(path, Path(folder) / "whole.pt")
            content["shards"] = torch.load(Path(folder) / "whole.pt", map_location="cpu", weights_only=False)
    for file in sorted(path.rglob("*.pt")):
        # DeepSpeed keeps objects of its own beside the tensors; the file was written by a child of this process.
        content[str(file.relative_to(path))] = torch.load(file, map_location="cpu", weights_only=False)
    return content


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        children = [(str(key), child) for key, child in value.items() if key not in NOT_STATE]
    elif isinstance(value, (list, tuple)):
        children = [(str(index), child) for index, child in enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, Enum)):
        children = list(vars(value).items())
    else:
        yield name, value
        return
    yield name, type(value).__name__
    for key, child in children:
        yield from _leaves(child, f"{name}/{key}" if name else key)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        one, other = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return type(one) is type(other) and bool(one == other)
