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
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from lightning_distplus.data.batches import Geometry, Quarantine, Request
from lightning_distplus.data.dataloader import LoaderResume, MapOrder
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.iterable import StreamOrder
from lightning_distplus.data.order import EpochOrder, order_of
from lightning_distplus.data.progress import Position, data_parallel, require_version
from lightning_distplus.errors import refuse_other_trainer
from lightning_distplus.run_access import gather_bytes

__all__ = ["AuditReport", "AuditWriter", "SampleAudit", "Sighting", "audit_folder", "read_audit", "sum_of_samples"]

Numbers = NDArray[np.int64]

# -- records -----------------------------------------------------------------------------------------------------------

# kind, numbers per id, samples (in a header: bytes), epoch, step, unix time; then the payload and its CRC-32.
_HEAD = struct.Struct("<cBIqqd")
_CRC = struct.Struct("<I")
_HEADER, _BATCH, _END = b"H", b"B", b"E"


_MULTIPLIERS = tuple(
    np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_SHIFT = np.uint64(32)
_MODULUS = 1 << 64
_MAX_WAITING = 256  # micro-batches


def sum_of_samples(epoch: int, positions: Numbers, ids: Numbers) -> int:
    """The sum, modulo 2**64, of a hash of each sample: the order and the cut into batches do not matter to it.

    positions: int64 of shape (num_samples,); ids: likewise, or of shape (num_samples, numbers per id).
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
    """A growing ``sum_of_samples``. It hashes many micro-batches at once: one alone costs 30 microseconds."""

    def __init__(self, total: int = 0, num_samples: int = 0) -> None:
        self._total = total
        self._num_samples = num_samples
        self._waiting: list[tuple[int, int, Request]] = []

    def add(self, step: int, epoch: int, request: Request) -> None:
        """Takes a micro-batch of a step, with the epoch of its positions."""
        self._waiting.append((step, epoch, request))
        if len(self._waiting) % _MAX_WAITING == 0:
            self.value(step)

    def value(self, step: int) -> tuple[int, int]:
        """The sum, not reduced, over the steps before this one, which are complete, and the number of samples."""
        of_epoch: dict[int, list[Request]] = defaultdict(list)
        for before, epoch, request in self._waiting:
            if before < step:
                of_epoch[epoch].append(request)
        for epoch, requests in of_epoch.items():
            positions = np.concatenate([request.positions for request in requests])
            self._total += sum_of_samples(epoch, positions, np.concatenate([request.ids for request in requests]))
            self._num_samples += len(positions)
        self._waiting = [one for one in self._waiting if one[0] >= step]
        return self._total, self._num_samples


class AuditWriter:
    """Appends the records of one rank and one run, each with one system call and without a wait for the disk.

    What a killed process has written is there; what a crashed host has written in the last seconds may not be. Names
    of runs, the same on all ranks, order like time; ``facts`` are plain values that are true of the whole run.
    """

    def __init__(self, folder: str | Path, run: str, rank: int, facts: dict[str, Any]) -> None:
        self.path = Path(folder) / f"{run}-rank{rank:05d}.audit"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        payload = json.dumps({**facts, "run": run, "rank": rank}).encode()
        self._write(_HEADER, 0, len(payload), 0, 0, payload)

    def write(self, epoch: int, step: int, positions: Numbers, ids: Numbers) -> None:
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


class AuditBatch(NamedTuple):
    """One micro-batch that went through ``training_step``."""

    epoch: int
    step: int  # of the optimizer, to which it belongs
    at: float  # unix time
    positions: Numbers  # int64 of shape (num_samples,)
    ids: Numbers  # what the data set was asked for: int64 of shape (num_samples, numbers per id)
    arrived: Numbers | None  # likewise, as the batch carried them into `training_step`, where the records have them
    rank: int
    run: Any = None  # of the report: a _Run

    def sum(self) -> int:
        """The ``sum_of_samples`` of what was recorded."""
        recorded = self.ids if self.arrived is None else np.concatenate([self.ids, self.arrived], axis=1)
        return sum_of_samples(self.epoch, self.positions, recorded)


@dataclass(kw_only=True)
class AuditFile:
    """The records of one rank in one run."""

    facts: dict[str, Any]
    batches: list[AuditBatch] = field(default_factory=list)
    has_ended: bool = False


def read_audit(path: Path) -> AuditFile:
    """Reads a file up to its first torn record; a ValueError says that it has no header."""
    records = _records(path.read_bytes())
    first = next(records, None)
    if first is None or first[0] != _HEADER:
        raise ValueError(f"{path} does not begin with the header of an audit. Remove it, or restore it.")
    found = AuditFile(facts=json.loads(first[-1]))
    for kind, width, count, epoch, step, at, payload in records:
        if kind == _END:
            found.has_ended = True
            continue
        numbers = np.frombuffer(payload, dtype=np.int64)
        positions, ids, arrived = numbers[:count], numbers[count:].reshape(count, width), None
        if found.facts.get("ids") == "arrived":
            ids, arrived = ids[:, : width // 2], ids[:, width // 2 :]
        found.batches.append(AuditBatch(epoch, step, at, positions, ids, arrived, found.facts["rank"]))
    return found


def _records(data: bytes) -> Iterator[tuple[Any, ...]]:
    """(kind, width, count, epoch, step, time, payload) of each whole record."""
    start = 0
    while start + _HEAD.size + _CRC.size <= len(data):
        kind, width, count, *rest = _HEAD.unpack_from(data, start)
        size = {_HEADER: count, _BATCH: 8 * count * (1 + width), _END: 0}.get(kind)
        if size is None or start + _HEAD.size + size + _CRC.size > len(data):
            return
        end = start + _HEAD.size + size
        if zlib.crc32(data[start:end]) != _CRC.unpack_from(data, end)[0]:
            return
        yield kind, width, count, *rest, data[start + _HEAD.size : end]
        start = end + _CRC.size


# -- the report --------------------------------------------------------------------------------------------------------


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
    """(epoch, position, id) of each sample that no step has seen; -1 or () is what the records do not tell."""
    num_apart: int = 0
    """Samples in quarantine whose place another one has taken; they are neither missed nor repeated."""
    problems: list[str] = field(default_factory=list)
    num_arrived: int = 0
    """Samples whose ids the batch carried into ``training_step``; of the others is known what was asked for."""

    @property
    def ok(self) -> bool:
        """Whether every sample was seen once, and the records and checkpoints agree."""
        return not (self.repeated or self.missed or self.problems)


class _Run:
    """The files of all ranks in one run."""

    def __init__(self, number: int, files: list[AuditFile]) -> None:
        self.number = number
        self.files = sorted(files, key=lambda one: one.facts["rank"])
        self.facts = self.files[0].facts
        self.quarantine = Quarantine()
        self.quarantine.add(self.facts.get("quarantine", []))
        # Later steps may lack the records of some ranks, or some micro-batches.
        last_steps = [max((batch.step for batch in file.batches), default=-1) for file in files]
        self.last_step = float("inf") if all(file.has_ended for file in files) else min(last_steps) - 1

    def batches(self) -> Iterator[AuditBatch]:
        """Of tensor-parallel peers, which get the same samples, those of the first."""
        of_place = {file.facts["data_parallel"][0]: file for file in reversed(self.files)}
        return (batch._replace(run=self) for file in of_place.values() for batch in file.batches)


def audit_folder(folder: str | Path) -> AuditReport:
    """Merges the records in a folder.

    Where a run resumes at step s, the steps from s on of the runs before it are undone: the weights never saw them.

    Raises:
        ValueError: A file is no audit.
    """
    by_name: dict[str, list[AuditFile]] = defaultdict(list)
    for path in sorted(Path(folder).glob("*.audit")):
        file = read_audit(path)
        by_name[file.facts["run"]].append(file)
    runs = [_Run(number, by_name[name]) for number, name in enumerate(sorted(by_name))]
    report = AuditReport(num_runs=len(runs), problems=list(_missing_ranks(runs, folder)))
    kept: list[AuditBatch] = []
    for run in runs:
        first, last = run.facts["first_step"], run.last_step if run is runs[-1] else float("inf")
        undone = [one for one in kept if one.step >= first]
        kept = [one for one in kept if one.step < first]
        report.problems += _other_sum(run, kept)
        for one in run.batches():
            (kept if one.step <= last else undone).append(one)
        report.num_undone += _num_samples(undone)
    report.num_samples = _num_samples(kept)
    report.num_arrived = _num_samples(one for one in kept if one.arrived is not None)
    report.num_steps = len({one.step for one in kept})
    if runs:
        _check_epochs(runs, kept, report)
    return report


def _num_samples(batches: Iterable[AuditBatch]) -> int:
    return sum(len(one.positions) for one in batches)


def _missing_ranks(runs: list[_Run], folder: str | Path) -> Iterator[str]:
    for run in runs:
        size = run.facts["world_size"]
        lacking = sorted(set(range(size)) - {file.facts["rank"] for file in run.files})
        if lacking and any(file.batches for file in run.files):
            ranks = ", ".join(map(str, lacking))
            yield (
                f"run {run.number} had {size} ranks, and the records of rank(s) {ranks} are not in {folder}. Bring the "
                "files of all hosts together."
            )


def _other_sum(run: _Run, kept: list[AuditBatch]) -> Iterator[str]:
    """The checkpoint from which a run resumed holds the sum of what the runs before it have done."""
    first_step = run.facts["first_step"]
    loaded = next((file.facts["loaded"] for file in run.files if file.facts["loaded"]), None)
    if loaded is None:
        if run.number > 0 and first_step > 0:
            yield f"run {run.number} resumed from a checkpoint that holds no audit"
        return
    num_samples, total = _num_samples(kept), f"{sum(one.sum() for one in kept) % _MODULUS:016x}"
    if (loaded["sum"], loaded["num_samples"]) != (total, num_samples):
        yield (
            f"run {run.number} resumed at step {first_step} from a checkpoint of {loaded['num_samples']} samples (sum "
            f"{loaded['sum']}); the records of the steps before it have {num_samples} samples (sum {total})"
        )


def _check_epochs(runs: list[_Run], kept: list[AuditBatch], report: AuditReport) -> None:
    """Each position once is each sample once only if the ids are those of the order."""
    epochs: dict[int, list[AuditBatch]] = defaultdict(list)
    for one in kept:
        epochs[one.epoch].append(one)
    first_epoch, first_position = runs[0].facts["first"]
    last_epoch = max(epochs, default=first_epoch)
    for epoch in range(first_epoch, last_epoch + 1):
        batches, start = epochs[epoch], first_position if epoch == first_epoch else 0
        positions = np.concatenate([one.positions for one in batches] or [np.empty(0, dtype=np.int64)])
        values, counts = np.unique(positions, return_counts=True)
        end = int(values[-1]) + 1 if len(values) else start
        if epoch < last_epoch:
            end = max(end, (batches[-1].run if batches else runs[-1]).facts["epoch_samples"])
        lost = np.setdiff1d(np.arange(start, end, dtype=np.int64), values)
        for identity, places in _by_phase(runs, lost):
            ids = _expected_ids(identity, epoch, places)
            rows = [()] * len(places) if ids is None else map(tuple, ids.tolist())
            report.missed += [(epoch, place, row) for place, row in zip(places.tolist(), rows, strict=True)]
        report.repeated += _sightings(batches, "position", values[counts > 1])
        _check_drawn(batches, epoch, report)
        for one in batches:
            expected = _expected_ids(one.run.facts["identity"], epoch, one.positions)
            if expected is not None:
                report.num_apart += int(one.run.quarantine.holds(expected).sum())
            report.problems += _other_ids(one, expected)


def _check_drawn(batches: list[AuditBatch], epoch: int, report: AuditReport) -> None:
    """Where the sampler draws each sample once: those that two places of an epoch hold, and those that none holds.

    What pads an epoch does not count; nothing is missed where not all places have been seen.
    """
    once = [one for one in batches if one.run.facts["identity"].get("draws_each_once")]
    if not once:
        return
    place_and_id = np.concatenate([np.stack([one.positions, one.ids[:, 0]], axis=1) for one in once])
    num_samples = once[0].run.facts["identity"]["num_samples"]
    pairs = np.unique(place_and_id[place_and_id[:, 0] < num_samples], axis=0)
    ids, counts = np.unique(pairs[:, 1], return_counts=True)
    report.repeated += _sightings(once, "sample", ids[counts > 1], num_samples)
    if len(pairs) == num_samples:
        report.missed += [(epoch, -1, (sample,)) for sample in np.setdiff1d(np.arange(num_samples), ids).tolist()]


def _sightings(batches: list[AuditBatch], by: str, doubled: Numbers, end: float = float("inf")) -> list[list[Sighting]]:
    """All sightings of each of these positions, or samples, at positions before ``end``."""
    found: dict[int, list[Sighting]] = defaultdict(list)
    for batch in batches if len(doubled) else ():
        keys = batch.positions if by == "position" else batch.ids[:, 0]
        for row in np.flatnonzero(np.isin(keys, doubled) & (batch.positions < end)).tolist():
            sighting = Sighting(
                epoch=batch.epoch,
                position=int(batch.positions[row]),
                sample_id=tuple(batch.ids[row].tolist()),
                step=batch.step,
                rank=batch.rank,
                run=batch.run.number,
                at=batch.at,
            )
            found[int(keys[row])].append(sighting)
    return [found[key] for key in sorted(found)]


def _by_phase(runs: list[_Run], positions: Numbers) -> Iterator[tuple[dict[str, Any], Numbers]]:
    """The positions that each identity governs: a run that resumes ends the phases that began later."""
    phases: list[tuple[int, dict[str, Any]]] = []
    for run in runs:
        identity = run.facts["identity"]
        begins = identity.get("phase", [0])[0]
        phases = [one for one in phases if one[0] < begins] + [(begins, identity)]
    ends: list[float] = [begins for begins, _ in phases[1:]]
    for (begins, identity), end in zip(phases, [*ends, float("inf")], strict=True):
        yield identity, positions[(positions >= begins) & (positions < end)]


def _other_ids(batch: AuditBatch, expected: Numbers | None) -> Iterator[str]:
    """What a micro-batch held against its order; a data set, or what collates, may give others than were asked for."""
    run = batch.run

    def at(row: int) -> str:
        place = f"position {batch.positions[row]} of epoch {batch.epoch}"
        return f"run {run.number}, rank {batch.rank}, step {batch.step}: {place}"

    if batch.arrived is not None:
        for row in np.flatnonzero((batch.arrived != batch.ids).any(axis=1)).tolist():
            asked, came = tuple(batch.ids[row].tolist()), tuple(batch.arrived[row].tolist())
            yield f"{at(row)}: the data was asked for sample {asked}, and {came} reached training_step"
    if expected is None:
        return
    is_other = (expected != batch.ids).any(axis=1) & ~run.quarantine.holds(expected)
    for row in np.flatnonzero(run.quarantine.holds(batch.ids)).tolist():
        yield f"{at(row)} held sample {tuple(batch.ids[row].tolist())}, which is in quarantine"
    for row in np.flatnonzero(is_other).tolist():
        held, says = tuple(batch.ids[row].tolist()), tuple(expected[row].tolist())
        yield f"{at(row)} held sample {held}, and the order says {says}"


def _expected_ids(identity: dict[str, Any], epoch: int, positions: Numbers) -> Numbers | None:
    """The ids that the order assigns to positions, int64 of shape (num_positions, numbers per id); None: not known."""
    if "draws_each_once" in identity or identity.get("sampling") is not None or identity.get("parts"):
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

    It knows those of our data modules, and, under a Resilient strategy, of one ``DataLoader`` over map-style data.

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
        self._data: ExactDataModule | _PlainLoader | None = None
        self._loaded: dict[str, Any] | None = None
        self._request: Request | None = None
        self._step = 0
        self._is_stream = False
        self._is_counted = True  # tensor-parallel peers get the same samples: the first of them counts
        self._sum = SampleSum()  # on this rank; the loaded part counts on rank 0 alone

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses the Trainer of ``pytorch_lightning``."""
        refuse_other_trainer(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens this run's file."""
        data = _data_of(trainer)
        if vars(trainer)["overfit_batches"] > 0:  # an attribute that Lightning sets unannounced
            raise ValueError(
                "overfit_batches repeats samples on purpose, and SampleAudit would name each. Leave it out."
            )
        self._data, self._step = data, trainer.global_step
        loaded, self._loaded = self._loaded, None
        is_first = trainer.is_global_zero
        self._sum = SampleSum(int(loaded["sum"], 16), loaded["num_samples"]) if loaded and is_first else SampleSum()
        position, geometry = data.position() or Position(), data.geometry
        self._is_counted = trainer.global_rank % (trainer.world_size // geometry.ranks.size) == 0
        num_samples, identity = int(trainer.num_training_batches) * geometry.micro_batch, data.identity
        if isinstance(data, _PlainLoader):  # whose last batch may be a part of one
            num_samples = min(num_samples, len(data.order.sampler))
        self._is_stream = "sources" in identity
        facts = {
            "version": _VERSION,
            "ids": "asked for" if self._place_of_ids is None else "arrived",
            "world_size": trainer.world_size,
            "data_parallel": [geometry.ranks.rank, geometry.ranks.size],
            "first_step": trainer.global_step,
            "first": [0, position.consumed_samples] if self._is_stream else [position.epoch, position.offset],
            "epoch_samples": num_samples * geometry.ranks.size,
            "identity": identity,
            "quarantine": data.quarantine.ids,
            "loaded": loaded,
        }
        folder = self._folder or Path(trainer.default_root_dir) / "distplus" / "audit"
        run = trainer.strategy.broadcast(f"{time.time_ns():020d}")
        self._writer = AuditWriter(folder, run, trainer.global_rank, facts)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Notes the samples for the sum, and the step that they belong to."""
        assert self._data is not None
        self._step = trainer.global_step
        request = self._data.delivered
        assert request is not None, "a batch was delivered"
        if self._place_of_ids is not None:
            arrived = self._arrived(batch, has_weights=request.weights is not None)
            request = request._replace(ids=_side_by_side(request.ids, arrived))
        self._request = request
        if self._is_counted:
            self._sum.add(self._step, self._epoch(request), request)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Writes the record."""
        request = self._request
        assert self._writer is not None
        assert request is not None, "on_train_batch_start has run"
        self._writer.write(self._epoch(request), self._step, request.positions, request.ids)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Notes that the run ended by itself."""
        if self._writer is not None:
            self._writer.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """The sum over all ranks of all completed steps."""
        if self._data is None:
            return dict(self._loaded or {})
        position = self._data.position()
        step = self._step if position is None else max(self._step, position.steps)
        mine = json.dumps(self._sum.value(step)).encode()
        everyone = gather_bytes(self._data.trainer.strategy, "sample-audit", mine)  # type: ignore[union-attr]
        sums, counts = zip(*map(json.loads, everyone), strict=True)
        return {"version": _VERSION, "sum": f"{sum(sums) % _MODULUS:016x}", "num_samples": sum(counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the sum of a checkpoint over; refuses one of an unknown version."""
        if state_dict:
            require_version("SampleAudit", state_dict, _VERSION)
        self._loaded = dict(state_dict) or None

    def _epoch(self, request: Request) -> int:
        """Positions of a stream count over all epochs."""
        return 0 if self._is_stream else request.epoch

    def _arrived(self, batch: Any, *, has_weights: bool) -> Numbers:
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
        ids: Numbers = found.detach().cpu().numpy().astype(np.int64)
        return ids.reshape(len(ids), -1) if ids.ndim else ids.reshape(1, 1)


class _PlainLoader:
    """One DataLoader over map-style data, as an audit sees a data module."""

    def __init__(self, fit: LoaderResume, order: MapOrder) -> None:
        self.order, self.trainer, self.position = order, fit.trainer, fit.position
        accumulation, ranks = fit.trainer.accumulate_grad_batches, fit.ranks_of(order.sampler)
        self.geometry = Geometry(micro_batch=order.batch_size or 1, accumulation=accumulation, ranks=ranks)
        self.quarantine = Quarantine()

    @property
    def identity(self) -> dict[str, Any]:
        """With whether the samples of an epoch differ, over all ranks, but for those that pad it."""
        sampler, size = self.order.sampler, data_parallel(self.trainer).size
        is_once = type(sampler) is DistributedSampler or (type(sampler) is SequentialSampler and size == 1)
        if type(sampler) is RandomSampler:
            is_once = size == 1 and not sampler.replacement and len(sampler) <= len(sampler.data_source)
        return {**self.order.identity(), "draws_each_once": is_once}

    @property
    def delivered(self) -> Request | None:
        """The samples that have left last, by their indices and their places in the epoch of all ranks."""
        if self.order.delivered is None:
            return None
        epoch, index, before = self.order.delivered
        try:
            ids = np.array(index, dtype=np.int64).reshape(-1, 1)
        except (TypeError, ValueError) as error:
            name = type(self.order.sampler).__qualname__
            raise ValueError(f"{name} draws {index!r}, and an audit holds integers ({error}).") from None
        ranks = self.geometry.ranks
        return Request(ids, np.arange(before, before + len(ids)) * ranks.size + ranks.rank, epoch)


def _data_of(trainer: Any) -> ExactDataModule | _PlainLoader:
    """Who knows the samples of a fit: a data module of ours, or what resumes the user's DataLoader."""
    data: Any = getattr(trainer, "datamodule", None)
    fit = next((one for one in trainer.callbacks if isinstance(one, LoaderResume)), None)
    why = f"{type(data).__name__} under {type(trainer.strategy).__name__}"
    if isinstance(data, ExactDataModule):
        if not data.is_iterable:
            return data
        why = "iterable data"
    elif fit is not None and not fit.is_exact:
        why = "a DataLoader that cannot be resumed exactly"
    elif fit is not None:
        (order, *others) = fit.orders
        if isinstance(order, MapOrder) and order.batch_size is not None and not others:
            return _PlainLoader(fit, order)
        why = "iterable data" if isinstance(order, StreamOrder) else "a batch sampler of your own"
        why = "several DataLoaders" if others else why
    raise ValueError(
        "SampleAudit knows the samples of ResumableDataModule, of TokenDataModule, and, under a Resilient strategy, of "
        f"one DataLoader over map-style data, not of {why}. Fit with one of them, or leave SampleAudit out."
    )


def _side_by_side(asked: Numbers, arrived: Numbers) -> Numbers:
    """What was asked for and what arrived, in a row of twice the numbers per id; -1 where nothing arrived."""
    asked = asked.reshape(len(asked), -1)
    rows, width = np.full_like(asked, -1), min(asked.shape[1], arrived.shape[1])
    rows[: len(arrived), :width] = arrived[: len(asked), :width]
    return np.concatenate([asked, rows], axis=1)
