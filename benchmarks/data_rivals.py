"""Token loaders against each other, same machine, same run: resuming far in, exactness, state, tokens per second."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.figures import Figure
from benchmarks.rival_jobs import BATCH, LOADERS
from benchmarks.rivals import call
from lightning_distplus import ResumableDataModule

__all__ = ["run"]

_OURS = "lightning_distplus"
_FOLLOW = 200  # batches that are compared after a resume
_SHORT, _LONG = 17, 2049  # tokens of a block: short ones to get far, long ones to measure speed
_FAR = 10**6
_BUDGET_S = 100.0  # for reading up to there; a loader that is not there by then is resumed where it has come to
_TURNS = 2
_BLOCKS_PER_FILE = 8192
# Positions by the number of workers. With workers these short samples are slow: far in would take minutes to reach.
_POSITIONS = {0: _FAR, 2: 505, 8: 505}
_QUICK_POSITIONS = {0: 505, 2: 505, 8: 505}
_WORKERS = dict.fromkeys(LOADERS, (0, 2)) | {"TinyLlama's skip loop": (0,), "litdata, combined": (0, 2, 8)}
_SMALL_SOURCES = ("TinyLlama's skip loop", "mosaicml-streaming")  # they begin again where a source ends


def run(quick: bool) -> list[Figure]:
    """Resumes at 1,000,000 batches (quick: 505); reads 1,000 batches of 8 x 2048 tokens (quick: 200)."""
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        return [
            *_resumes(Path(folder), _QUICK_POSITIONS if quick else _POSITIONS),
            *_speeds(Path(folder), 200 if quick else 1000),
            *_under_lightning(),
        ]


def _resumes(folder: Path, positions: dict[int, int]) -> list[Figure]:
    places = {kind: str(folder / f"short-{kind.split()[0].strip(',')}") for kind in _WORKERS}

    def read(kind: str) -> dict[int, dict[str, int]]:
        files = 16 if kind in _SMALL_SOURCES else 16 + positions[0] * BATCH // _BLOCKS_PER_FILE
        call("write", kind, places[kind], [files * _BLOCKS_PER_FILE, files // 2 * _BLOCKS_PER_FILE], _SHORT)
        return {
            count: call("save", kind, places[kind], _SHORT, count, positions[count], _FOLLOW, _BUDGET_S)
            for count in _WORKERS[kind]
        }

    with ThreadPoolExecutor(2) as pool:  # nothing is timed here
        saves = dict(zip(_WORKERS, pool.map(read, _WORKERS), strict=True))
    figures, far_s = [], {}
    for kind, counts in _WORKERS.items():
        for count in counts:
            turns = 1 if kind.startswith("TinyLlama") else 2
            found = [call("resume", kind, places[kind], _SHORT, count) for _ in range(turns)]
            elapsed_s = min(one["elapsed_s"] for one in found)
            figures.append(_resume(kind, count, saves[kind][count], elapsed_s, found[0]))
            if count == 0:
                far_s[kind] = elapsed_s
    return figures + [
        Figure(name=f"ours / {kind}: resume far in", value=far_s[_OURS] / elapsed_s, unit="", target=1.0)
        for kind, elapsed_s in far_s.items()
        if kind != _OURS
    ]


def _resume(kind: str, workers: int, saved: dict[str, int], elapsed_s: float, found: dict[str, Any]) -> Figure:
    order = "same order" if found["same"] else "another order"
    note = f"repeated {found['repeated']}, missed {found['missed']} of {_FOLLOW * BATCH}, {order}"
    if kind != _OURS:
        note += f"; state {saved['state_bytes']:,} bytes"
    if kind.startswith("mosaicml") and saved["position"] == _FAR:
        note += "; against a run that began 50 batches before"
    name = f"{kind}, {workers} workers: resume at {saved['position']:,} batches"
    return Figure(name=name, value=1000 * elapsed_s, unit="ms", note=note)


def _speeds(folder: Path, num_batches: int) -> list[Figure]:
    """Tokens per second, the best of two turns each, and the two ratios that have a target."""
    sizes = [8 * _BLOCKS_PER_FILE // 4] * 2
    raw, figures = 0.0, []
    places = {kind: str(folder / f"long-{kind.split()[0].strip(',')}") for kind in _WORKERS}
    for kind, place in places.items():
        blocks = [8 * _BLOCKS_PER_FILE] * 2 if kind.startswith("TinyLlama") else sizes
        call("write", kind, place, blocks, _LONG)
    for workers in (0, 2):
        kinds = [kind for kind, counts in _WORKERS.items() if workers in counts]
        found = dict.fromkeys(kinds, 0.0)
        for _ in range(_TURNS):  # in turn, so that a busy moment of the machine falls on all
            raw = max(raw, _raw_gather(folder, sum(sizes), num_batches))
            for kind in kinds:
                found[kind] = max(found[kind], call("speed", kind, places[kind], _LONG, workers, num_batches))
        figures.append(Figure(name="raw gather of memmap rows", value=raw / 1e6, unit="Mtok/s"))
        for kind, value in found.items():
            figures.append(Figure(name=f"{kind}, {workers} workers", value=value / 1e6, unit="Mtok/s"))
        best = max((kind for kind in found if kind != _OURS), key=found.__getitem__)
        figures += [
            Figure(name=f"raw gather / ours, {workers} workers", value=raw / found[_OURS], unit="", target=2.0),
            Figure(
                name=f"fastest rival / ours, {workers} workers", value=found[best] / found[_OURS], unit="",
                target=1.0, note=best,
            ),
        ]  # fmt: skip
    return figures


def _raw_gather(folder: Path, num_blocks: int, num_batches: int) -> float:
    path = folder / "raw.bin"
    np.zeros(num_blocks * _LONG, dtype=np.uint16).tofile(path)
    tokens = np.memmap(path, dtype=np.uint16, mode="r").reshape(-1, _LONG)
    draw = np.random.default_rng(0)
    turns = []
    for _ in range(4):
        rows = draw.integers(0, num_blocks, (num_batches, BATCH))  # others in each turn, as a loader has
        begin = time.perf_counter()
        for row in rows:
            np.stack([tokens[index] for index in row])
        turns.append(num_batches * BATCH * (_LONG - 1) / (time.perf_counter() - begin))
    return max(turns)


# A Trainer that is resumed in the middle of its second epoch.

_SAMPLES, _SMALL, _STOP = 64, 4, 22


class _Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class _Notes(pl.LightningModule):
    """Notes the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.steps: dict[int, list[int]] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps[self.global_step] = batch.flatten().int().tolist()
        loss: torch.Tensor = self.layer(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def _loader(kind: str) -> Any:
    data = _Numbers()
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    generator = torch.Generator().manual_seed(0)
    return {
        _OURS: lambda: ResumableDataModule(data, batch_size=_SMALL),
        "DataLoader(shuffle=True)": lambda: DataLoader(data, _SMALL, shuffle=True, generator=generator),
        "DataLoader, DistributedSampler": lambda: DataLoader(data, _SMALL, sampler=sampler),
        "StatefulDataLoader(shuffle=True)": lambda: StatefulDataLoader(data, _SMALL, shuffle=True, generator=generator),
        "StatefulDataLoader, DistributedSampler": lambda: StatefulDataLoader(data, _SMALL, sampler=sampler),
    }[kind]()


def _under_lightning() -> list[Figure]:
    """Samples of epoch 1 that a run which resumes in it sees twice or never."""
    figures = []
    for kind in (
        _OURS, "DataLoader(shuffle=True)", "DataLoader, DistributedSampler", "StatefulDataLoader(shuffle=True)",
        "StatefulDataLoader, DistributedSampler",
    ):  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
            first, path = _fit(kind, _STOP, None), f"{folder}/saved.ckpt"
            first.trainer.save_checkpoint(path)
            second = _fit(kind, 3 * _SAMPLES // _SMALL, path)
        per_epoch = _SAMPLES // _SMALL
        before = [one for step, batch in first.steps.items() if step >= per_epoch for one in batch]
        after = [one for step in sorted(second.steps)[: 2 * per_epoch - _STOP] for one in second.steps[step]]
        repeated, missed = len(before + after) - len({*before, *after}), _SAMPLES - len({*before, *after})
        name = f"Trainer, resumed in epoch 1: {kind}"
        target = 0.0 if kind == _OURS else None
        figures.append(Figure(name=name, value=repeated, unit="repeated", target=target, note=f"missed {missed} of 64"))
    return figures


def _fit(kind: str, max_steps: int, load: str | None) -> Any:
    torch.manual_seed(0)
    model, data = _Notes(), _loader(kind)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=max_steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=load)
    return model
