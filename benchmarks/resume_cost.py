"""What resuming far into the data costs, against resuming at its beginning: position 10^9 samples against 0."""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import Dataset

from benchmarks import jobs, rival_jobs
from benchmarks.figures import Figure, median
from lightning_distplus import ResilientDDP, ResumableDataModule
from lightning_distplus.testing import spawn

__all__ = ["run"]

_NEAR, _FAR = 0, 10**9
_POSITIONS = (_NEAR, 10**6, _FAR, 10**11)
_TARGET_RATIO = 1.05
_TARGET_MS = 1000.0
_TURNS_IN_PROCESS = 100
_BATCH = 32
_GLOBAL_BATCH = 2 * _BATCH
_LOG = "lightning_distplus.data.progress"


def run(quick: bool) -> list[Figure]:
    """Resumes on two ranks from a checkpoint at each position, in turns (quick: 3 turns, else 15; and 3 or 7 anew)."""
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        for position in _POSITIONS:
            spawn(_save_at, 2, args=(position, folder), deadline="2m").check()
        warm = [_turn(_POSITIONS, folder, "forkserver", turn) for turn in range(3 if quick else 15)]
        cold = [_turn((_NEAR, _FAR), folder, "fresh", turn) for turn in range(3 if quick else 7)]
    return [
        *_compared("from Trainer(...) to the first step", [_part(turn, "trainer_s") for turn in warm], _TARGET_RATIO),
        *_compared("from process start, imports included", [_part(turn, "process_s") for turn in cold], _TARGET_RATIO),
        *(_data_module(position, [turn[position]["data_ms"] for turn in warm]) for position in _POSITIONS),
        *_token_loader(),
    ]


def _token_loader() -> list[Figure]:
    """Opening two sources, and their first batch of 8 x 2048 tokens, in one process: the fastest of many, in turns."""
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        rival_jobs.write_ours(Path(folder), [2048, 2048], 2049)
        fastest_ms = dict.fromkeys((_NEAR, _FAR), float("inf"))
        for _ in range(_TURNS_IN_PROCESS):
            for position in fastest_ms:
                begin = time.perf_counter()
                next(iter(rival_jobs.ours(Path(folder), 2049, 0, position // rival_jobs.BATCH)))
                fastest_ms[position] = min(fastest_ms[position], 1000 * (time.perf_counter() - begin))
    name = "token loader, from opening its sources to a batch"
    return [
        Figure(name=f"{name}, at 0", value=fastest_ms[_NEAR], unit="ms"),
        Figure(name=f"{name}, at 10^9", value=fastest_ms[_FAR], unit="ms", target=1.0),
        Figure(name=f"{name}, ratio", value=fastest_ms[_FAR] / fastest_ms[_NEAR], unit="", target=_TARGET_RATIO),
    ]


def _compared(what: str, turns: list[dict[int, float]], target: float) -> list[Figure]:
    ratios = [turn[_FAR] / turn[_NEAR] for turn in turns]
    return [
        Figure(name=f"{what}, at 0", value=median([turn[_NEAR] for turn in turns]), unit="s"),
        Figure(name=f"{what}, at 10^9", value=median([turn[_FAR] for turn in turns]), unit="s"),
        Figure.of(f"{what}, ratio", ratios, "", target=target),
    ]


def _data_module(position: int, times_ms: list[float]) -> Figure:
    return Figure.of(f"data module: reaching sample {position:,}", times_ms, "ms", target=_TARGET_MS)


def _part(turn: dict[int, dict[str, float]], name: str) -> dict[int, float]:
    return {position: times[name] for position, times in turn.items()}


def _turn(
    positions: tuple[int, ...], folder: str, mode: Literal["forkserver", "fresh"], number: int
) -> dict[int, dict[str, float]]:
    """One resume at each position, every other turn backwards; the times are those of rank 0."""
    times = {}
    for position in positions if number % 2 == 0 else reversed(positions):
        result = spawn(_resume_at, 2, args=(position, folder, time.time()), deadline="2m", mode=mode)
        times[position] = result.check().results[0]
    return times


def _save_at(position: int, folder: str) -> None:
    """Writes a checkpoint one step after ``position``: a run that is told that it stands there, trains, and saves."""
    steps = position // _GLOBAL_BATCH
    first = _data()
    trainer = jobs.trainer(ResilientDDP(monitor=False, preemption=False), folder, max_steps=1)
    trainer.fit(_Model(), datamodule=first)
    here = {"batches": steps, "offset": position, "consumed_samples": position, "total_batches": steps}
    data = _data()
    data.load_state_dict({**first.state_dict(), "epoch": 0, **here})
    trainer = jobs.trainer(ResilientDDP(monitor=False, preemption=False), folder, max_steps=1)
    trainer.fit(_Model(), datamodule=data)
    trainer.save_checkpoint(_path(folder, position))


def _resume_at(position: int, folder: str, started_at: float) -> dict[str, float]:
    """One rank that resumes and trains one step."""
    before = time.perf_counter()
    heard = _Heard()
    logging.getLogger(_LOG).addHandler(heard)
    logging.getLogger(_LOG).setLevel(logging.INFO)
    data, model = _data(), _Model()
    trainer = jobs.trainer(ResilientDDP(monitor=False, preemption=False), folder, max_steps=2)
    trainer.fit(model, datamodule=data, ckpt_path=_path(folder, position))
    assert data.consumed_samples == position + 2 * _GLOBAL_BATCH, "the run went on where the checkpoint was made"
    return {
        "trainer_s": model.first_step - before,
        "process_s": model.first_step_at - started_at,
        "data_ms": heard.elapsed_ms,
    }


class _Heard(logging.Handler):
    """Keeps the time that the data module says it took to resume; rank 0 says it."""

    elapsed_ms = float("nan")

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("resumed") and isinstance(record.args, tuple):
            self.elapsed_ms = float(str(record.args[3]))


class _Numbers(Dataset[torch.Tensor]):
    """2^40 samples that take no space."""

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((jobs.NUM_FEATURES,), index % 1000 / 1000)


class _Model(jobs.Model):
    """Notes when its first step begins."""

    first_step = first_step_at = 0.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if not self.first_step:
            self.first_step, self.first_step_at = time.perf_counter(), time.time()
        return super().training_step(batch, batch_idx)


def _data() -> ResumableDataModule:
    return ResumableDataModule(_Numbers(), batch_size=_BATCH)


def _path(folder: str, position: int) -> str:
    return str(Path(folder) / f"position={position}.ckpt")
