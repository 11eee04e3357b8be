"""Merging the records of all ranks and runs: what was repeated, what was missed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_distplus.data.audit_records import AuditBatch, AuditFile, read_audit
from lightning_distplus.data.order import EpochOrder
from lightning_distplus.data.phases import order_of
from lightning_distplus.data.quarantine import Quarantine

__all__ = ["AuditReport", "Sighting", "audit"]

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


def audit(folder: str | Path) -> AuditReport:
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
