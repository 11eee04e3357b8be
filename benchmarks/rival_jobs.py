"""What each loader does in a process of its own: read for a while, save, resume; ``python -m benchmarks.rival_jobs``.

Sample i of a source begins with its number, in three 15-bit tokens, and the number of the source, so that what a loader
delivers tells where it comes from.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

__all__ = ["LOADERS", "write"]

BATCH = 8
WEIGHTS = (0.7, 0.3)
SEED = 5
_CHUNK_BLOCKS = 8192
_LONG_EPOCH = 2**23
_BESIDE = 50  # batches before a place that is too far in to be read up to


def blocks_of(source: int, first: int, count: int, width: int) -> Any:
    """uint16 of shape (count, width)."""
    rows = np.full((count, width), 7, dtype=np.uint16)
    numbers = np.arange(first, first + count)
    for column in range(3):
        rows[:, column] = (numbers >> (15 * column)) & 0x7FFF
    rows[:, 3] = source
    return rows


def ids_of(batch: Any) -> list[int]:
    """A number for each sample of a batch."""
    if isinstance(batch, dict):
        batch = batch.get("input_ids", batch.get("tokens"))
    rows = np.asarray(batch)[:, :4].astype(np.int64)
    return (rows[:, 0] + (rows[:, 1] << 15) + (rows[:, 2] << 30) + (rows[:, 3] << 45)).tolist()


# Each kind: how its files are written, and its loader.


def write_packed(folder: Path, sizes: list[int], width: int) -> None:
    """TinyLlama's files: a header of 24 bytes, then blocks."""
    for source, size in enumerate(sizes):
        for number, first in enumerate(range(0, size, _CHUNK_BLOCKS)):
            rows = blocks_of(source, first, min(_CHUNK_BLOCKS, size - first), width)
            if len(rows) < _CHUNK_BLOCKS:
                break  # its reader takes whole files alone
            head = b"LITPKDS" + (1).to_bytes(8, "little") + bytes([8]) + rows.size.to_bytes(8, "little")
            target = folder / f"{'ab'[source]}_{number:010d}.bin"
            target.write_bytes(head + rows.tobytes())


def write_ours(folder: Path, sizes: list[int], width: int) -> None:
    """A Megatron pair per source: a sample is a row, and the first token of the next one."""
    from lightning_distplus.data import MegatronWriter

    for source, size in enumerate(sizes):
        with MegatronWriter(folder / "ab"[source]) as writer:
            for first in range(0, size + 1, _CHUNK_BLOCKS):
                writer.add_document(blocks_of(source, first, min(_CHUNK_BLOCKS, size + 1 - first), width - 1).ravel())


def ours(folder: Path, width: int, workers: int, position: int = 0) -> Any:
    from lightning_distplus.data.batches import EpochPlan, Geometry, Request, SampleLoader, WorkerOptions
    from lightning_distplus.data.order import MixedOrder, Mixture
    from lightning_distplus.data.token_datamodule import TokenFetcher
    from lightning_distplus.data.token_files import Source, open_source
    from lightning_distplus.world import DataParallel

    sources = [open_source(Source(path=str(folder / name), format="megatron"), width - 1) for name in "ab"]
    order = MixedOrder(Mixture(WEIGHTS, SEED), [one.num_samples for one in sources], seed=SEED, shuffle=True)
    geometry = Geometry(micro_batch=BATCH, accumulation=1, ranks=DataParallel())
    cut = {"first_batch": position, "first_position": position * BATCH, "num_batches": 2**40}
    plan = EpochPlan(order=order, geometry=geometry, **cut)
    return SampleLoader(
        TokenFetcher(sources=sources, names=["a", "b"], seq_len=width - 1, vocab_size=None),
        plan=lambda: (Request(ids, positions, 0) for positions, ids in plan),
        num_batches=lambda: 2**40,
        options=WorkerOptions(num_workers=workers),
    )


class Packed(IterableDataset[Any]):
    """The reader of TinyLlama (bf12224): windows of 8 files, each in a random order; a source is drawn per sample."""

    def __init__(self, folder: Path, width: int) -> None:
        self.files = [sorted(folder.glob(f"{name}_*.bin")) for name in "ab"]
        self.width = width

    def __iter__(self) -> Iterator[Any]:
        readers = [self._blocks(files) for files in self.files]
        choice = random.Random(SEED)
        while True:
            (reader,) = choice.choices(readers, weights=WEIGHTS, k=1)
            yield next(reader)

    def _blocks(self, files: list[Path]) -> Iterator[Any]:
        draw = np.random.default_rng(SEED)
        while True:
            for first in range(0, len(files) - 7, 8):
                maps = [
                    memoryview(np.memmap(path, mode="r", order="C", offset=24)) for path in files[first : first + 8]
                ]
                per_file = len(maps[0]) // (2 * self.width)
                for place in draw.permutation(8 * per_file).tolist():
                    file, block = divmod(place, per_file)
                    start = block * self.width * 2
                    tokens = np.frombuffer(maps[file], dtype=np.uint16, count=self.width, offset=start)
                    yield torch.from_numpy(tokens.astype(np.int64))


def tinyllama(folder: Path, width: int, workers: int) -> Any:
    return DataLoader(Packed(folder, width), batch_size=BATCH, num_workers=workers)


class Mapped(Dataset[Any]):
    """Blocks of one file, at random."""

    def __init__(self, folder: Path, width: int) -> None:
        self.tokens = np.memmap(folder / "all.bin", dtype=np.uint16, mode="r").reshape(-1, width)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.tokens[index].astype(np.int64))


def write_flat(folder: Path, sizes: list[int], width: int) -> None:
    with (folder / "all.bin").open("wb") as stream:
        for source, size in enumerate(sizes):
            stream.write(blocks_of(source, 0, size, width).tobytes())


def stateful(folder: Path, width: int, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Mapped(folder, width)
    generator = torch.Generator().manual_seed(SEED)
    return StatefulDataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, generator=generator)


def write_litdata(folder: Path, sizes: list[int], width: int) -> None:
    from litdata.streaming import Cache, TokensLoader

    for source, size in enumerate(sizes):
        cache = Cache(str(folder / "ab"[source]), chunk_size=width * _CHUNK_BLOCKS, item_loader=TokensLoader(width))
        rows = torch.from_numpy(blocks_of(source, 0, size, width).astype(np.int32))
        for number, first in enumerate(range(0, size, _CHUNK_BLOCKS)):
            cache[number] = rows[first : first + _CHUNK_BLOCKS].flatten()
        cache.done()
        cache.merge()


def litdata(folder: Path, width: int, workers: int) -> Any:
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader

    parts = [
        StreamingDataset(str(folder / name), item_loader=TokensLoader(width), shuffle=True, drop_last=True, seed=SEED)
        for name in "ab"
    ]
    mixed = CombinedStreamingDataset(parts, seed=SEED, weights=list(WEIGHTS), iterate_over_all=False)
    return StreamingDataLoader(mixed, batch_size=BATCH, num_workers=workers)


def write_streaming(folder: Path, sizes: list[int], width: int) -> None:
    from streaming import MDSWriter

    for source, size in enumerate(sizes):
        with MDSWriter(out=str(folder / "ab"[source]), columns={"tokens": f"ndarray:uint16:{width}"}) as writer:
            for row in blocks_of(source, 0, size, width):
                writer.write({"tokens": row})


def streaming(folder: Path, width: int, workers: int) -> Any:
    from streaming import Stream, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    streams = [Stream(local=str(folder / name), proportion=share) for name, share in zip("ab", WEIGHTS, strict=True)]
    data = StreamingDataset(
        streams=streams,
        batch_size=BATCH,
        shuffle=True,
        shuffle_seed=SEED,
        num_canonical_nodes=1,
        epoch_size=_LONG_EPOCH,  # samples of small sources recur in it, so that it can be left early or late
    )
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


LOADERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lightning_distplus": (write_ours, ours),
    "TinyLlama's skip loop": (write_packed, tinyllama),
    "StatefulDataLoader": (write_flat, stateful),
    "litdata, combined": (write_litdata, litdata),
    "mosaicml-streaming": (write_streaming, streaming),
}


# The jobs.

_IMPORTS = (
    "lightning_distplus.data.token_datamodule", "lightning_distplus.data.token_files",
    "torchdata.stateful_dataloader", "litdata", "streaming",
)  # fmt: skip  # before the clock runs


def write(kind: str, folder: str, sizes: list[int], width: int) -> None:
    """Writes the files of one kind of loader."""
    Path(folder).mkdir(parents=True)
    LOADERS[kind][0](Path(folder), sizes, width)


def speed(kind: str, folder: str, width: int, workers: int, num_batches: int) -> float:
    """Tokens per second of the faster of two passes over so many batches, as the raw gather is measured."""
    batches = iter(LOADERS[kind][1](Path(folder), width, workers))
    next(batches)
    elapsed_s = []
    for _ in range(2):
        begin = time.perf_counter()
        for _ in range(num_batches):
            next(batches)
        elapsed_s.append(time.perf_counter() - begin)
    return num_batches * BATCH * (width - 1) / min(elapsed_s)


def save(
    kind: str, folder: str, width: int, workers: int, position: int, follow: int, budget_s: float
) -> dict[str, Any]:
    """Reads up to ``position`` batches within the budget, saves, and reads on: where, and the state's size."""
    loader = LOADERS[kind][1](Path(folder), width, workers)
    first = 0
    if kind == "mosaicml-streaming" and position > _LONG_EPOCH // BATCH // 100:
        first = _begin_beside(loader, position)
    batches = iter(loader)
    before: list[int] = []
    end = time.monotonic() + budget_s
    while first < position and time.monotonic() < end:
        before += ids_of(next(batches))
        first += 1
    state = loader.state_dict() if hasattr(loader, "state_dict") else first
    after = [one for _ in range(follow) for one in ids_of(next(batches))]
    Path(f"{folder}-{workers}.state").write_bytes(pickle.dumps((state, np.array(before), after)))
    size = len(json.dumps(state)) if _is_plain(state) else len(pickle.dumps(state))
    return {"state_bytes": size, "position": first}


def _begin_beside(loader: Any, position: int) -> int:
    """Begins shortly before a place that would take an hour to read up to (3 ms per batch); where that is."""
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict({**state, "sample_in_epoch": (position - _BESIDE) * BATCH})
    return position - _BESIDE


def resume(kind: str, folder: str, width: int, workers: int) -> dict[str, Any]:
    """Resumes from the save: seconds to the first batch, and how what follows differs from the undisturbed run."""
    state, before, after = pickle.loads(Path(f"{folder}-{workers}.state").read_bytes())
    for name in _IMPORTS:
        with suppress(ImportError):
            import_module(name)
    begin = time.perf_counter()
    if kind == "lightning_distplus":
        batches = iter(ours(Path(folder), width, workers, state))
    else:
        loader = LOADERS[kind][1](Path(folder), width, workers)
        if hasattr(loader, "load_state_dict"):
            loader.load_state_dict(state)
        batches = iter(loader)
        if kind.startswith("TinyLlama"):
            for _ in range(state):
                next(batches)
    got = ids_of(next(batches))
    elapsed_s = time.perf_counter() - begin
    while len(got) < len(after):
        got += ids_of(next(batches))
    # Against the undisturbed run, which may repeat by itself where it draws a source more often than it has samples.
    more, less = Counter(got) - Counter(after), Counter(after) - Counter(got)
    has_come_before = np.isin([*more], np.append(before, after)) if more else []
    repeated = sum(count for count, again in zip(more.values(), has_come_before, strict=True) if again)
    return {"elapsed_s": elapsed_s, "repeated": repeated, "missed": less.total(), "same": got == after}


def _is_plain(state: Any) -> bool:
    try:
        json.dumps(state)
    except TypeError:
        return False
    return True


if __name__ == "__main__":
    job, *words = sys.argv[1:]
    print(json.dumps({"write": write, "speed": speed, "save": save, "resume": resume}[job](*map(json.loads, words))))
