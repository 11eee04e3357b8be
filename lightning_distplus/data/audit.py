"""The audit of the samples that went through ``training_step``: records, report, and the callback that writes them."""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import json
import os
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray

from lightning_distplus.data.batches import Quarantine, Request
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.order import EpochOrder, order_of
from lightning_distplus.errors import DatasetMismatch, refuse_other_trainer
from lightning_distplus.run_access import gather_bytes

__all__ = ["AuditReport", "AuditWriter", "SampleAudit", "Sighting", "audit_folder", "read_audit", "sum_of_samples"]

# -- records -----------------------------------------------------------------------------------------------------------

# kind, numbers per id, samples (in a header: bytes), epoch, step, unix time; then the payload and its CRC-32.
_HEAD = struct.Struct("<cBIqqd")
_CRC = struct.Struct("<I")
_HEADER, _BATCH, _END = b"H", b"B", b"E"
_MULTIPLIERS = tuple(
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_SHIFT = np.uint64(32)
_MAX_WAITING = 256  # micro-batches


def sum_of_samples(epoch: int, positions: NDArray[np.int64], ids: NDArray[np.int64]) -> int:
    """The sum, modulo 2**64, of a hash of each sample: the order and the cut into batches do not matter to it.

    Args:
        epoch: The epoch of the positions.
        positions: int64 of shape (num_samples,).
        ids: int64 of shape (num_samples,) or (num_samples, numbers per id).
    """
    mixed = positions.astype(np.uint64) * _MULTIPLIERS[0]
    mixed += np.uint64(epoch)
    for column in ids.reshape(len(ids), -1).T:
        mixed ^= mixed >> _SHIFT
        mixed *= _MULTIPLIERS[1]
        mixed ^= column.astype(np.uint64) * _MULTIPLIERS[3]
    mixed ^= mixed >> _SHIFT
    mixed *= _MULTIPLIERS[2]
    mixed ^= mixed >> _SHIFT
    return int(np.add.reduce(mixed))


class SampleSum:
    """A growing ``sum_of_samples``. It hashes many micro-batches at once: one alone costs 30 microseconds.

    Args:
        total: The sum so far.
        num_samples: How many samples are in it.
    """

    def __init__(self, total: int = 0, num_samples: int = 0) -> None:
        self._total = total
        self._num_samples = num_samples
        self._waiting: list[tuple[int, Request]] = []

    def add(self, batches: Iterable[tuple[int, Request]]) -> None:
        """Takes micro-batches, each with the epoch of its positions."""
        self._waiting += batches
        if len(self._waiting) >= _MAX_WAITING:
            self._fold()

    def value(self) -> tuple[int, int]:
        """The sum, not reduced, and the number of samples."""
        self._fold()
        return self._total, self._num_samples

    def _fold(self) -> None:
        of_epoch: dict[int, list[Request]] = {}
        for epoch, request in self._waiting:
            of_epoch.setdefault(epoch, []).append(request)
        for epoch, requests in of_epoch.items():
            positions = np.concatenate([request.positions for request in requests])
            self._total += sum_of_samples(epoch, positions, np.concatenate([request.ids for request in requests]))
            self._num_samples += len(positions)
        self._waiting = []


class AuditWriter:
    """Appends the records of one rank and one run, each with one system call and without a wait for the disk.

    What a killed process has written is there; what a crashed host has written in the last seconds may not be.

    Args:
        folder: Of all records of the job; made when missing.
        run: The name of this run, the same on all ranks; names order like time.
        rank: Global rank.
        facts: What is true of the whole run; plain values.
    """

    def __init__(self, folder: str | Path, run: str, rank: int, facts: dict[str, Any]) -> None:
        self.path = Path(folder) / f"{run}-rank{rank:05d}.audit"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        payload = json.dumps({**facts, "run": run, "rank": rank}).encode()
        self._write(_HEADER, 0, len(payload), 0, 0, payload)

    def write(self, epoch: int, step: int, positions: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
        """Appends one micro-batch; shapes as in ``sum_of_samples``."""
        width = 1 if ids.ndim == 1 else ids.shape[1]
        self._write(_BATCH, width, len(positions), epoch, step, positions.tobytes() + ids.tobytes())

    def end(self) -> None:
        """Notes that the run ended by itself."""
        self._write(_END, 0, 0, 0, 0, b"")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _write(self, kind: bytes, width: int, count: int, epoch: int, step: int, payload: bytes) -> None:
        record = _HEAD.pack(kind, width, count, epoch, step, time.time()) + payload
        os.write(self._file, record + _CRC.pack(zlib.crc32(record)))


@dataclass(frozen=True, kw_only=True)
class AuditBatch:
    """One micro-batch that went through ``training_step``."""

    epoch: int
    step: int
    at: float
    positions: NDArray[np.int64]
    """int64 of shape (num_samples,)."""
    ids: NDArray[np.int64]
    """int64 of shape (num_samples, numbers per id): what the data set was asked for."""
    arrived: NDArray[np.int64] | None = None
    """Likewise, as the batch carried them into ``training_step``; None where the records do not have them."""

    def sum(self) -> int:
        """The ``sum_of_samples`` of what was recorded."""
        recorded = self.ids if self.arrived is None else np.concatenate([self.ids, self.arrived], axis=1)
        return sum_of_samples(self.epoch, self.positions, recorded)


@dataclass(kw_only=True)
class AuditFile:
    """The records of one rank in one run."""

    path: Path
    facts: dict[str, Any]
    batches: list[AuditBatch] = field(default_factory=list)
    has_ended: bool = False
    num_torn_bytes: int = 0
    """Behind the last whole record: what a kill has cut off."""


def read_audit(path: Path) -> AuditFile:
    """Reads a file up to its first torn record.

    Raises:
        ValueError: It does not begin with a header.
    """
    data = path.read_bytes()
    records = _records(data)
    first = next(records, None)
    if first is None or first[0] != _HEADER:
        raise ValueError(f"{path} does not begin with the header of an audit. Remove it, or restore it.")
    found = AuditFile(path=path, facts=json.loads(first[-2]))
    end = first[-1]
    for kind, width, count, epoch, step, at, payload, after in records:
        end = after
        if kind == _END:
            found.has_ended = True
            continue
        numbers = np.frombuffer(payload, dtype=np.int64)
        positions, ids = numbers[:count], numbers[count:].reshape(count, width)
        arrived = None
        if found.facts.get("ids") == "arrived":
            ids, arrived = ids[:, : width // 2], ids[:, width // 2 :]
        found.batches.append(AuditBatch(epoch=epoch, step=step, at=at, positions=positions, ids=ids, arrived=arrived))
    found.num_torn_bytes = len(data) - end
    return found


def _records(data: bytes) -> Iterator[tuple[Any, ...]]:
    """(kind, width, count, epoch, step, time, payload, place behind it) of each whole record."""
    start = 0
    while start + _HEAD.size + _CRC.size <= len(data):
        kind, width, count, epoch, step, at = _HEAD.unpack_from(data, start)
        size = {_HEADER: count, _BATCH: 8 * count * (1 + width), _END: 0}.get(kind)
        if size is None or start + _HEAD.size + size + _CRC.size > len(data):
            return
        end = start + _HEAD.size + size
        if zlib.crc32(data[start:end]) != _CRC.unpack_from(data, end)[0]:
            return
        yield kind, width, count, epoch, step, at, data[start + _HEAD.size : end], end + _CRC.size
        start = end + _CRC.size


# -- the report --------------------------------------------------------------------------------------------------------

_MODULUS = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """One sample in one micro-batch of one rank."""

    epoch: int
    position: int
    sample_id: tuple[int, ...]
    step: int
    rank: int
    run: int
    at: float


@dataclass(kw_only=True)
class AuditReport:
    """What the records of all runs say."""

    num_runs: int = 0
    num_samples: int = 0
    """In steps that count: a step that a later run did again counts once."""
    num_steps: int = 0
    num_undone: int = 0
    """Samples of steps that a later run did again, or that a run did not finish."""
    repeated: list[list[Sighting]] = field(default_factory=list)
    """All sightings of each sample that was seen more than once in its epoch."""
    missed: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """(epoch, position, id) of each sample that no step has seen; the id is () where the records do not tell it."""
    num_apart: int = 0
    """Samples in quarantine whose place another one has taken; they are neither missed nor repeated."""
    problems: list[str] = field(default_factory=list)
    num_arrived: int = 0
    """Samples whose ids the batch carried into ``training_step``; of the others is known what was asked for."""

    @property
    def ok(self) -> bool:
        """Whether every sample was seen once, and the records and checkpoints agree."""
        return not (self.repeated or self.missed or self.problems)


@dataclass
class _Run:
    number: int
    files: list[AuditFile]

    @property
    def facts(self) -> dict[str, Any]:
        return self.files[0].facts

    def last_finished_step(self) -> float:
        """Later steps may lack the records of some ranks, or some micro-batches."""
        if all(file.has_ended for file in self.files):
            return float("inf")
        return min(max((batch.step for batch in file.batches), default=-1) for file in self.files) - 1

    def batches(self) -> Iterator[tuple[int, AuditBatch]]:
        """(rank, batch); of tensor-parallel peers, which get the same samples, only the first."""
        seen = set()
        for file in sorted(self.files, key=lambda one: one.facts["rank"]):
            place = file.facts["data_parallel"][0]
            if place not in seen:
                seen.add(place)
                yield from ((file.facts["rank"], batch) for batch in file.batches)


def audit_folder(folder: str | Path) -> AuditReport:
    """Merges the records in a folder.

    Where a run resumes at step s, the steps from s on of the runs before it are undone: the weights never saw them.

    Raises:
        ValueError: A file is no audit.
    """
    report = AuditReport()
    runs = _runs(Path(folder), report)
    kept: list[tuple[int, int, AuditBatch]] = []
    for run in runs:
        first = run.facts["first_step"]
        report.num_undone += sum(len(batch.positions) for _, _, batch in kept if batch.step >= first)
        kept = [one for one in kept if one[2].step < first]
        _compare_sum(run, kept, report)
        last = run.last_finished_step() if run is runs[-1] else float("inf")
        for rank, batch in run.batches():
            if batch.step <= last:
                kept.append((run.number, rank, batch))
            else:
                report.num_undone += len(batch.positions)
    if runs:
        report.num_samples = sum(len(batch.positions) for _, _, batch in kept)
        report.num_arrived = sum(len(batch.positions) for _, _, batch in kept if batch.arrived is not None)
        report.num_steps = len({batch.step for _, _, batch in kept})
        _check(runs, kept, report)
    return report


def _runs(folder: Path, report: AuditReport) -> list[_Run]:
    by_name: dict[str, list[AuditFile]] = defaultdict(list)
    for path in sorted(folder.glob("*.audit")):
        file = read_audit(path)
        by_name[file.facts["run"]].append(file)
    report.num_runs = len(by_name)
    runs = [_Run(number, files) for number, (_, files) in enumerate(sorted(by_name.items()))]
    for run in runs:
        lacking = sorted(set(range(run.facts["world_size"])) - {file.facts["rank"] for file in run.files})
        if lacking and any(file.batches for file in run.files):
            report.problems.append(
                f"run {run.number} had {run.facts['world_size']} ranks, and the records of rank(s) "
                f"{', '.join(map(str, lacking))} are not in {folder}. Bring the files of all hosts together."
            )
    return runs


def _compare_sum(run: _Run, kept: list[tuple[int, int, AuditBatch]], report: AuditReport) -> None:
    """The checkpoint from which a run resumed holds the sum of what the runs before it have done."""
    loaded = next((file.facts["loaded"] for file in run.files if file.facts["loaded"]), None)
    if loaded is None:
        if run.number > 0 and run.facts["first_step"] > 0:
            report.problems.append(f"run {run.number} resumed from a checkpoint that holds no audit")
        return
    num_samples = sum(len(batch.positions) for _, _, batch in kept)
    total = sum(batch.sum() for _, _, batch in kept) % _MODULUS
    if (loaded["sum"], loaded["num_samples"]) != (f"{total:016x}", num_samples):
        report.problems.append(
            f"run {run.number} resumed at step {run.facts['first_step']} from a checkpoint of {loaded['num_samples']} "
            f"samples (sum {loaded['sum']}); the records of the steps before it have {num_samples} samples "
            f"(sum {total:016x})"
        )


def _check(runs: list[_Run], kept: list[tuple[int, int, AuditBatch]], report: AuditReport) -> None:
    epochs: dict[int, list[tuple[int, int, AuditBatch]]] = defaultdict(list)
    for one in kept:
        epochs[one[2].epoch].append(one)
    first_epoch, first_position = runs[0].facts["first"]
    last_epoch = max(epochs, default=first_epoch)
    for epoch in range(first_epoch, last_epoch + 1):
        batches = epochs.get(epoch, [])
        start = first_position if epoch == first_epoch else 0
        positions = np.concatenate([batch.positions for _, _, batch in batches] or [np.empty(0, dtype=np.int64)])
        values, counts = np.unique(positions, return_counts=True)
        end = int(values[-1]) + 1 if len(values) else start
        if epoch < last_epoch:
            facts = runs[batches[-1][0] if batches else -1].facts
            end = max(end, facts["epoch_samples"])
        lost = np.setdiff1d(np.arange(start, end, dtype=np.int64), values)
        for identity, places in _by_phase(runs, lost):
            ids = _expected_ids(identity, epoch, places)
            rows = [()] * len(places) if ids is None else [tuple(row) for row in ids.tolist()]
            report.missed += [(epoch, place, row) for place, row in zip(places.tolist(), rows, strict=True)]
        doubled = set(values[counts > 1].tolist())
        _collect_repeated(batches, doubled, report)
        _compare_ids(runs, epoch, batches, report)


def _collect_repeated(batches: list[tuple[int, int, AuditBatch]], doubled: set[int], report: AuditReport) -> None:
    if not doubled:
        return
    found: dict[int, list[Sighting]] = defaultdict(list)
    for run, rank, batch in batches:
        for row, position in enumerate(batch.positions.tolist()):
            if position in doubled:
                sample_id = tuple(batch.ids[row].tolist())
                place = {"epoch": batch.epoch, "position": position, "step": batch.step}
                found[position].append(Sighting(**place, sample_id=sample_id, rank=rank, run=run, at=batch.at))
    report.repeated += [found[position] for position in sorted(found)]


def _by_phase(runs: list[_Run], positions: NDArray[np.int64]) -> Iterator[tuple[dict[str, Any], NDArray[np.int64]]]:
    """The positions that each identity governs: a run that resumes ends the phases that began later."""
    phases: list[tuple[int, dict[str, Any]]] = []
    for run in runs:
        identity = run.facts["identity"]
        begins = identity.get("phase", [0])[0]
        phases = [one for one in phases if one[0] < begins] + [(begins, identity)]
    ends: list[float] = [begins for begins, _ in phases[1:]]
    for (begins, identity), end in zip(phases, [*ends, float("inf")], strict=True):
        yield identity, positions[(positions >= begins) & (positions < end)]


def _compare_ids(runs: list[_Run], epoch: int, batches: list[tuple[int, int, AuditBatch]], report: AuditReport) -> None:
    """Each position once is each sample once only if the ids are those of the order."""
    for run, rank, batch in batches:
        _compare_arrived(run, rank, batch, report)
        expected = _expected_ids(runs[run].facts["identity"], epoch, batch.positions)
        if expected is None:
            continue
        is_apart = _in_quarantine(runs[run].facts, expected)
        report.num_apart += int(is_apart.sum())
        for row in np.flatnonzero(_in_quarantine(runs[run].facts, batch.ids)).tolist():
            report.problems.append(
                f"run {run}, rank {rank}, step {batch.step}: position {batch.positions[row]} of epoch {epoch} held "
                f"sample {tuple(batch.ids[row].tolist())}, which is in quarantine"
            )
        for row in np.flatnonzero((expected != batch.ids).any(axis=1) & ~is_apart).tolist():
            report.problems.append(
                f"run {run}, rank {rank}, step {batch.step}: position {batch.positions[row]} of epoch {epoch} held "
                f"sample {tuple(batch.ids[row].tolist())}, and the order says {tuple(expected[row].tolist())}"
            )


def _compare_arrived(run: int, rank: int, batch: AuditBatch, report: AuditReport) -> None:
    """A data set, or what collates its samples, may give others than it was asked for."""
    if batch.arrived is None:
        return
    for row in np.flatnonzero((batch.arrived != batch.ids).any(axis=1)).tolist():
        report.problems.append(
            f"run {run}, rank {rank}, step {batch.step}: for position {batch.positions[row]} of epoch {batch.epoch} "
            f"the data was asked for sample {tuple(batch.ids[row].tolist())}, and {tuple(batch.arrived[row].tolist())} "
            "reached training_step"
        )


def _in_quarantine(facts: dict[str, Any], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    quarantine = Quarantine()
    quarantine.add(facts.get("quarantine", []))
    return quarantine.holds(ids)


def _expected_ids(identity: dict[str, Any], epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The ids that the order assigns to positions, int64 of shape (num_positions, numbers per id); None: not known."""
    if identity.get("sampling") is not None or identity.get("parts"):
        return None  # weights, lengths or sampler are not in the records; several data sets are of earlier versions
    if "sources" in identity:
        return order_of({"order_version": 1, **identity})(positions)
    keyed = {"seed": identity["seed"], "epoch": epoch, "shuffle": identity["shuffle"]}
    keyed["version"] = identity.get("order_version", 1)  # which older records lack
    order = EpochOrder(num_samples=identity["num_samples"], **keyed)
    return order(positions)[:, None]


# -- the callback ------------------------------------------------------------------------------------------------------


_VERSION = 1


class SampleAudit(Callback):
    """Writes the ids of each micro-batch that went through ``training_step``; ``distplus audit`` reads them.

    By itself it knows what the data set was asked for: one that returns another sample passes. Where the batch carries
    the ids, name their place by ``ids``; then they are recorded too, and compared. The report says which it has.

    A checkpoint holds the sum of a hash of every sample of its completed steps, over all ranks: ``distplus audit``
    compares it with what the runs before it have written. In a save the ranks exchange their sums, without a
    collective. List it before callbacks of your own that save; Lightning puts a ModelCheckpoint last by itself.

    Args:
        folder: For the records; None means ``<default_root_dir>/distplus/audit``. All runs of a job have the same.
        ids: Where a batch carries the index with which the data set was asked for each sample: a key of a dict, or a
            place in a tuple. Integers of shape (num_samples,), or (num_samples, 2) for source and index. Reading them
            from a GPU waits for it.
    """

    def __init__(self, folder: str | None = None, *, ids: str | int | None = None) -> None:
        self._folder = folder
        self._place_of_ids = ids
        self._writer: AuditWriter | None = None
        self._data: ExactDataModule | None = None
        self._loaded: dict[str, Any] | None = None
        self._request: Request | None = None
        self._step = 0
        self._is_stream = False
        self._is_counted = True  # tensor-parallel peers get the same samples: the first of them counts
        # Of the steps that are done, and of the one that is not, on this rank; the loaded part counts on rank 0 alone.
        self._done = SampleSum()
        self._window: list[tuple[int, Request]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses the Trainer of ``pytorch_lightning``."""
        refuse_other_trainer(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens this run's file."""
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, ExactDataModule):
            raise ValueError(
                f"SampleAudit knows the samples of ResumableDataModule and TokenDataModule, not of "
                f"{type(data).__name__}. Fit with one of them, or leave SampleAudit out."
            )
        if data.is_iterable:
            raise ValueError(
                "SampleAudit writes the ids of samples, and those of iterable training data have none. Leave it out."
            )
        if vars(trainer)["overfit_batches"] > 0:  # an attribute that Lightning sets unannounced
            raise ValueError(
                "overfit_batches repeats samples on purpose, and SampleAudit would name each. Leave it out."
            )
        self._data, self._step = data, trainer.global_step
        loaded, self._loaded = self._loaded, None
        is_first = trainer.is_global_zero
        self._done = SampleSum(int(loaded["sum"], 16), loaded["num_samples"]) if loaded and is_first else SampleSum()
        self._window = []
        position, geometry = data.position(), data.geometry
        self._is_counted = trainer.global_rank % (trainer.world_size // geometry.ranks.size) == 0
        self._is_stream = "sources" in data.identity
        facts = {
            "version": _VERSION,
            "ids": "asked for" if self._place_of_ids is None else "arrived",
            "world_size": trainer.world_size,
            "data_parallel": [geometry.ranks.rank, geometry.ranks.size],
            "first_step": trainer.global_step,
            "first": [0, position.consumed_samples] if self._is_stream else [position.epoch, position.offset],
            "epoch_samples": int(trainer.num_training_batches) * geometry.micro_step,
            "identity": data.identity,
            "quarantine": data.quarantine.ids,
            "loaded": loaded,
        }
        folder = self._folder or Path(trainer.default_root_dir) / "distplus" / "audit"
        run = trainer.strategy.broadcast(f"{time.time_ns():020d}")
        self._writer = AuditWriter(folder, run, trainer.global_rank, facts)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes the samples for the sum."""
        assert self._data is not None
        if (step := trainer.global_step) != self._step:
            self._done.add(self._window)
            self._window, self._step = [], step
        request = self._request = self._data.delivered
        assert request is not None, "a batch was delivered"
        if self._place_of_ids is not None:
            arrived = self._arrived(batch, has_weights=request.weights is not None)
            request = self._request = request._replace(ids=_side_by_side(request.ids, arrived))
        if self._is_counted:
            self._window.append((self._epoch(request), request))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes the record."""
        assert self._writer is not None
        request = self._request
        assert request is not None, "on_train_batch_start has run"
        self._writer.write(self._epoch(request), self._step, request.positions, request.ids)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that the run ended by itself."""
        if self._writer is not None:
            self._writer.end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """The sum over all ranks of all completed steps."""
        if self._data is None:
            return dict(self._loaded or {})
        if self._data.position().steps > self._step:
            self._done.add(self._window)
            self._window = []
        mine = json.dumps(self._done.value()).encode()
        everyone = gather_bytes(self._data.trainer.strategy, "sample-audit", mine)  # type: ignore[union-attr]
        sums, counts = zip(*map(json.loads, everyone), strict=True)
        return {"version": _VERSION, "sum": f"{sum(sums) % _MODULUS:016x}", "num_samples": sum(counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the sum of a checkpoint over.

        Raises:
            DatasetMismatch: It is of a version that this package does not know.
        """
        if state_dict and state_dict.get("version") != _VERSION:
            raise DatasetMismatch(
                f"The checkpoint's SampleAudit has version {state_dict.get('version')!r}; this lightning_distplus "
                f"reads {_VERSION}. Resume with the version that wrote it, or without SampleAudit."
            )
        self._loaded = dict(state_dict) or None

    def _arrived(self, batch: Any, *, has_weights: bool) -> NDArray[np.int64]:
        """The ids in a batch: int64 of shape (num_samples, numbers per id)."""
        carrier, place = batch[0] if has_weights else batch, self._place_of_ids
        try:
            found = torch.as_tensor(carrier[place])
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            what = f"the keys {sorted(map(str, carrier))}" if isinstance(carrier, dict) else type(carrier).__name__
            raise ValueError(
                f"SampleAudit(ids={place!r}): the batch carries no ids there, it is {what} ({error}). Name the key of "
                "a dict or the place in a tuple that holds the index of each sample, or leave ids out."
            ) from error
        ids: NDArray[np.int64] = found.detach().cpu().numpy().astype(np.int64)
        return ids.reshape(len(ids), -1) if ids.ndim else ids.reshape(1, 1)

    def _epoch(self, request: Request) -> int:
        """Positions of a stream count over all epochs."""
        return 0 if self._is_stream else request.epoch


def _side_by_side(asked: NDArray[np.int64], arrived: NDArray[np.int64]) -> NDArray[np.int64]:
    """What was asked for and what arrived, in a row of twice the numbers per id; -1 where nothing arrived."""
    asked = asked.reshape(len(asked), -1)
    rows, width = np.full_like(asked, -1), min(asked.shape[1], arrived.shape[1])
    rows[: len(arrived), :width] = arrived[: len(asked), :width]
    return np.concatenate([asked, rows], axis=1)
