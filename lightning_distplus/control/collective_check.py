"""The check of collectives: ranks compare what they are about to do before any of them enters a collective.

One check with two sources of calls: those of Lightning (``strategies.collectives``), and on request those of
``torch.distributed`` (``divergence.monitor.TraceCheck``), which may be of some ranks only.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn, Protocol

import xxhash

from lightning_distplus.control.exchange import Exchange, GateRecord
from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.control.secret import words_of
from lightning_distplus.errors import DistplusError, DivergenceError
from lightning_distplus.majority import odd_ranks
from lightning_distplus.process import running_time
from lightning_distplus.world import name_ranks, ranks_by_text

_SHOWN_SIDES = 8
_SHOWN_STRUCTURE = 600
_BEFORE_DIFFERENCE = 100

_ON_SOME_RANKS = (
    "Call it on every rank, in the same order, or on none: code under `if rank == 0` must not synchronise, and "
    "`trainer.save_checkpoint` and `trainer.log_dir` do."
)
_OTHER_KEYS = "Log the same keys with sync_dist=True on every rank, in the same order."
_OTHER_STRUCTURE = (
    "Give the same tree, shapes and dtypes on every rank; lightning_distplus.gather(tree) takes tensors whose first "
    "dimension differs."
)
_OTHER_ARGUMENTS = "Pass the same arguments on every rank."
_END_ON_ALL_RANKS = (
    "What they wait for never comes. End on all ranks at the same batch: a StopIteration out of a step or a hook, or "
    "-1 from on_train_batch_start, ends the epoch of that rank alone; trainer.should_stop must be set on every rank."
)
_END = "the end of its "


@dataclass(frozen=True, kw_only=True)
class Point:
    """One call in which all ranks, or those of a group, must take part; equal on all of them."""

    operation: str
    """The call, for example ``"barrier"``."""
    name: str = ""
    structure: str = ""
    """Tree, dtypes and shapes of what is exchanged; "" where they may differ."""
    arguments: str = ""
    """What else must be equal, for example the reduction."""

    @classmethod
    def at_end(cls, what: str, batch_idx: int | None = None) -> Point:
        """The end of a ``"run"``, or of an ``"epoch"`` that is left in the middle of a batch."""
        return cls(operation=f"{_END}{what}" + ("" if batch_idx is None else f" after batch {batch_idx}"))

    @property
    def has_ended(self) -> str:
        """What a rank has ended that stands here, as it follows its name; "" where this is no end."""
        return f"has ended its {self.operation.removeprefix(_END)}" if self.operation.startswith(_END) else ""

    @cached_property
    def digest(self) -> bytes:
        """8 bytes that are equal where the points are."""
        text = "\0".join((self.operation, self.name, self.structure, self.arguments))
        return xxhash.xxh3_64_digest(text.encode(errors="replace"))

    def __str__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        structure = f" of {self.structure}" if self.structure else ""
        arguments = f" [{self.arguments}]" if self.arguments else ""
        return f"{self.operation}{name}{structure}{arguments}"


# The sequences that a rank counts: the points of all ranks, those of each smaller group (named by its ranks), the
# gates, and the backwards, of which one has the number of the gate before it. A rank leaves a point or a gate only when
# all ranks of that sequence have come there.
POINTS, GATES = "points", "gates"
BACKWARDS = "backwards"
"""In the backward of a step, where the gradients of all ranks meet; or behind it, in the same step."""
END = "end"
"""The run has ended on this rank: it waits for nobody and comes to nothing any more."""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where one rank stands."""

    rank: int
    sequence: str
    """In which of the sequences that it counts."""
    begun: Mapping[str, int]
    """How many of each sequence the rank has begun."""
    point: Point
    ranks: Sequence[int] = ()
    """All ranks of the point, where it is one of a group."""
    location: str | None = None
    """``file.py:line`` in the user's code from which a point was reached; a gate is Lightning's own call."""

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Whereabouts:
        """Reads what a peer has published."""
        return cls(**{**values, "point": Point(**values["point"]), "ranks": tuple(values["ranks"])})

    def waits_for(self, other: Whereabouts) -> bool:
        """Whether this rank cannot go on before the other has come to where it stands."""
        takes_part = self.sequence != END and (not self.ranks or other.rank in self.ranks)
        return takes_part and other.begun.get(self.sequence, 0) < self.begun[self.sequence]

    def excludes(self, other: Whereabouts) -> bool:
        """Whether neither can ever go on: each waits for what the other, who waits or has ended, has not begun.

        What is published stays true for as long as it matters: a rank leaves its place only after the others have
        come to it, so that an old word of a peer never stands against a place that this rank has not passed.

        A backward, unlike the other places, may go on by itself; but on ranks that run one program what comes before it
        on one of them does so on all. A rank that is in it will not come to a call at which another one stands before.
        """
        if END in (self.sequence, other.sequence):
            return self.waits_for(other) or other.waits_for(self)
        return self.waits_for(other) and other.waits_for(self)

    def is_there_beside(self, other: Whereabouts) -> bool:
        """Whether this is no old word, as the other is none: this rank waits for it, stands with it, or has ended."""
        is_with_it = self.sequence == other.sequence and self.begun[self.sequence] == other.begun[self.sequence]
        return is_with_it or self.sequence == END or self.waits_for(other)

    def describe(self) -> str:
        """The place, as it follows the name of the rank."""
        if self.point.has_ended:
            return self.point.has_ended
        if self.sequence == GATES:
            return f"at {self.point}"
        return f"in {self.point}{f' at {self.location}' if self.location else ''}"


def disagreement(places: Mapping[int, Whereabouts], ranks: Sequence[int]) -> DivergenceError:
    """The error for ranks that stand where they cannot meet; those in ``places`` have come.

    The majority is right; in a call of a group that of its ranks, since no other one need come to it. Without a
    majority the step gate or the backward is: every step comes to it, the other calls are the odd ones. With nothing to
    decide, all that have come are named.
    """
    ended = {rank: one.point.has_ended for rank, one in places.items() if one.point.has_ended}
    if 0 < len(ended) < len(places):
        return ended_early(ended, {rank: one.describe() for rank, one in places.items() if rank not in ended})
    ranks = min((one.ranks for one in places.values() if one.ranks), key=len, default=ranks)
    places = {rank: one for rank, one in places.items() if rank in ranks}
    kinds = {rank: (one.sequence, one.point) for rank, one in places.items()}
    wrong, right = odd_ranks(kinds)
    of_step = {kind for kind in kinds.values() if kind[0] in (GATES, BACKWARDS)}
    if right is None and len(of_step) == 1:
        wrong = sorted(rank for rank, kind in kinds.items() if kind not in of_step)
    absent = sorted(set(ranks) - set(places))
    late = f"; {name_ranks(absent)} elsewhere" if absent else ""
    blame = f"wrong: {name_ranks(wrong)}" if len(wrong) < len(places) else "no majority decides who is wrong"
    texts = _shortened(places)
    sequences = {one.sequence: one.begun[one.sequence] for one in places.values()}
    group = "the gate" if GATES in sequences else f"a call of {name_ranks(ranks)}"
    call = f"call {sequences[POINTS]} of this run" if POINTS in sequences else group
    field, remedy = _kind_of_difference(places.values())
    return DivergenceError(
        f"The ranks do not agree at {call}, and would wait for each other or mix what they hold: {sides(texts)}{late} "
        f"({blame}). Nothing was exchanged. {remedy}",
        ranks=wrong,
        field=field,
        values=texts,
    )


def ended_early(ended: Mapping[int, str], others: Mapping[int, str]) -> DivergenceError:
    """The error for ranks that wait for what ranks that have ended will never come to; in a tie, these are wrong."""
    going_on = {rank: f"has not: {place}" for rank, place in others.items()}
    wrong = sorted(ended if len(ended) <= len(others) else others)
    return DivergenceError(
        f"{sides(ended)}; {sides(going_on)} (wrong: {name_ranks(wrong)}). {_END_ON_ALL_RANKS}",
        ranks=wrong,
        field="end",
        values={**ended, **going_on},
    )


def _kind_of_difference(places: Iterable[Whereabouts]) -> tuple[str, str]:
    found = list(places)
    if len({(one.sequence, one.point.operation, one.point.name) for one in found}) > 1:
        is_logging = all(one.point.operation == "log" for one in found)
        return "collective", _OTHER_KEYS if is_logging else _ON_SOME_RANKS
    if len({one.point.structure for one in found}) > 1:
        return "structure", _OTHER_STRUCTURE
    return "arguments", _OTHER_ARGUMENTS


def _shortened(places: Mapping[int, Whereabouts]) -> dict[int, str]:
    """The places as text; of long structures, what stands around the first difference."""
    structures = {one.point.structure for one in places.values()}
    texts = {rank: one.describe() for rank, one in places.items()}
    if max(map(len, structures)) <= _SHOWN_STRUCTURE:
        return texts
    least, most = min(structures), max(structures)  # between them, all others share what these two share
    same = next((place for place, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))
    start = max(0, same - _BEFORE_DIFFERENCE)
    for rank, one in places.items():
        whole = one.point.structure
        part = whole[start : start + _SHOWN_STRUCTURE]
        dots = "..." if start and whole else "", "..." if start + _SHOWN_STRUCTURE < len(whole) else ""
        texts[rank] = texts[rank].replace(whole, f"{dots[0]}{part}{dots[1]}") if whole else texts[rank]
    return texts


def sides(texts: Mapping[int, str]) -> str:
    """Who is where: "rank 0 in barrier 'x' at a.py:14; ranks 1-3 at the step gate"."""
    groups = ranks_by_text(texts)
    shown = [f"{name_ranks(ranks)} {text}" for text, ranks in list(groups.items())[:_SHOWN_SIDES]]
    more = len(groups) - _SHOWN_SIDES
    return "; ".join([*shown, f"and {more} more groups of ranks"] if more > 0 else shown)


# -- the calls of a run ------------------------------------------------------------------------------------------------


_ALONE_S = 0.02  # a wait that lasts longer is published, and the others' places are looked at
_LOOK_EVERY_S = 0.1
_LOOK_SHARE = 0.2  # a longer wait looks less often
_LOOK_AT_LEAST_EVERY_S = 1.0
_LOOK_PER_RANK_S = 0.002
# How long a contradiction must stand. A signal that reaches the ranks one after the other may put one of them into a
# call (a save) that the next one enters a moment later.
_SETTLE_S = 0.75
_ALL_OTHERS = 16  # among more ranks, some others are looked at

# Keeps the runs of one process apart, whatever Trainers they use; all ranks count alike.
_runs = itertools.count(1)
_AT_END = Point.at_end("run")
_active: Points | None = None


def active_points() -> Points | None:
    """The points of the run in progress in this process: under a strategy of ours, or where calls are traced."""
    return _active


def beat_key(rank: int) -> str:
    """The key under which a rank's watchdog says once a second where it is."""
    return f"watchdog/beat/{rank}"


class Waits(Protocol):
    """Knows how long a rank waits for its peers now: ``run_access.Phases``, or who follows no phases."""

    @property
    def patience(self) -> timedelta:
        """From this moment on; for a call that begins now."""


class Points:
    """The points of one run, numbered: what stands at the same number must be the same on all ranks that take part.

    At each point a rank shows the digest of what it is about to do. One that waits, at a point or at a gate, publishes
    where it stands, and looks where the others stand: two ranks that wait for each other in different places are found,
    whether they differ at one number or not. The ranks of a group make its points at the same moment of the run.

    Args:
        plane: The control plane.
        waits: Knows how long to wait for the slowest rank.
        locate: Tells the line of the user's code in which this rank stands.
        name: Keeps the runs of one process apart; by default a number that grows.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        waits: Waits,
        locate: Callable[[], str | None] = lambda: None,
        name: str | None = None,
    ) -> None:
        self._plane = plane
        self._waits = waits
        self._locate = locate
        self.name = name or f"run-{next(_runs)}"
        """Of the run, alike on all ranks."""
        self._thread = threading.get_ident()
        self._exchanges = {POINTS: Exchange(plane, f"points/{self.name}")}
        self._begun = {POINTS: 0, GATES: 0}
        self._backward = ("", 0)
        """The backward that this rank has begun last, and the gate before it; replaced at once, for another thread."""
        self._sequence: str | None = None
        """In which this rank waits; None: it does not."""
        self._ranks: Sequence[int] = plane.world.ranks
        """Of the place where it waits."""
        self._point: Point | GateRecord = _AT_END
        self._is_covered = False
        self._look_at_s = _ALONE_S
        self._own: Whereabouts | None = None
        self._excluded_since: float | None = None

    def begin(self) -> None:
        """Meets all ranks; watches the waits of this process."""
        global _active
        self._exchanges[POINTS].open(self._waits.patience)
        self._plane.watcher = self
        _active = self

    def end(self, point: Point = _AT_END) -> None:
        """Says that this rank takes part in nothing any more, and where it has ended; never raises."""
        global _active
        _active = None
        self._plane.watcher = None
        self._enter(END, point)
        try:
            self._publish()
        except (DistplusError, RuntimeError):  # the store is gone, or the job has failed: nobody asks any more
            return

    @property
    def num_calls(self) -> int:
        """How many points of all ranks this rank has begun."""
        return self._begun[POINTS]

    @property
    def are_due(self) -> bool:
        """Whether a call takes part: of the thread that trains, not inside another one, nor where this rank failed."""
        error = self._plane.first_error
        has_failed = error is not None and error.rank == self._plane.world.rank
        return threading.get_ident() == self._thread and not self._is_covered and not has_failed

    @contextmanager
    def covering(self) -> Iterator[None]:
        """A call that is compared as a whole: those that it takes inside are not."""
        was_covered, self._is_covered = self._is_covered, True
        try:
            yield
        finally:
            self._is_covered = was_covered

    # -- the two places where a rank waits -----------------------------------------------------------------------------

    def meet(self, point: Point, ranks: Sequence[int] = ()) -> None:
        """Returns on every rank once all of them, or all of these ``ranks``, are about to do the same.

        Raises:
            DivergenceError: The ranks are in different calls; the error holds both sides.
            PeerMissing, PeerFailed, PeerLost: A peer is the cause; ``.ranks`` names it.
        """
        is_of_all = len(ranks) in (0, self._plane.world.size)
        sequence = POINTS if is_of_all else "-".join(map(str, ranks))
        if sequence not in self._exchanges:  # without memory: only these ranks know of it
            self._exchanges[sequence] = Exchange(self._plane, f"points/{self.name}/{sequence}", ranks)
        exchange = self._exchanges[sequence]
        self._enter(sequence, point, () if is_of_all else ranks)
        exchange.post(b"", point.digest)
        try:
            exchange.collect(self._waits.patience, what=str(point), referee=self)
        finally:
            self._sequence = None

    def enter_gate(self, record: GateRecord) -> None:
        """This rank is about to wait at a step gate."""
        self._enter(GATES, record)

    def leave_gate(self) -> None:
        """This rank has passed the gate, or has given up."""
        self._sequence = None

    def begin_backward(self, operation: str) -> None:
        """Says that this rank is about to enter a backward in which the gradients of all ranks meet."""
        self._backward = (operation, self._begun[GATES])

    def beat(self) -> dict[str, Any] | None:
        """What each beat tells of this rank, from another thread: a rank inside a backward cannot say it itself."""
        operation, gate = self._backward  # read before the number of points, which must not be older
        if not operation:
            return None
        begun = {**self._begun, BACKWARDS: gate}
        point, rank = Point(operation=operation), self._plane.world.rank
        return {"run": self.name, **asdict(Whereabouts(rank=rank, sequence=BACKWARDS, begun=begun, point=point))}

    # -- where the others are ------------------------------------------------------------------------------------------

    def _enter(self, sequence: str, point: Point | GateRecord, ranks: Sequence[int] = ()) -> None:
        self._begun[sequence] = self._begun.get(sequence, 0) + 1
        self._sequence, self._point, self._ranks = sequence, point, ranks or self._plane.world.ranks
        self._look_at_s = _ALONE_S
        self._own = self._excluded_since = None

    def while_waiting(self, elapsed_s: float) -> None:
        """Says, once a wait lasts, where this rank stands, and looks where the others do."""
        if self._sequence is None or elapsed_s < self._look_at_s:
            return
        pause_s = min(_LOOK_EVERY_S + _LOOK_SHARE * elapsed_s, _LOOK_AT_LEAST_EVERY_S)
        self._look_at_s = elapsed_s + max(pause_s, _LOOK_PER_RANK_S * len(self._ranks))
        own = self._publish()
        others = self._some_others(self._ranks)
        if own.sequence != GATES and any(own.excludes(other) for other in self._in_backwards(others).values()):
            self._decide(self._in_backwards(self._ranks) | self._places())
        places = (self._read(rank) for rank in others)
        if not any(other is not None and own.excludes(other) for other in places):
            self._excluded_since = None
            return
        self._look_at_s = elapsed_s + _LOOK_EVERY_S
        if self._has_stood(_SETTLE_S):
            self._decide(self._places())

    def judge(self) -> None:
        """The ranks do different things here: this one waits a moment for the words of all, whose number decides."""
        self._publish()
        places = self._places()
        differ = len({(one.sequence, one.point) for one in places.values()}) > 1
        if differ and (len(places) == len(self._ranks) or self._has_stood(_SETTLE_S)):
            self._decide(places)

    def _has_stood(self, seconds: float) -> bool:
        now = running_time()
        if self._excluded_since is None:
            self._excluded_since = now
        return now - self._excluded_since >= seconds

    def _decide(self, places: dict[int, Whereabouts]) -> NoReturn:
        """One rank's decision holds for all of them: whoever hears of it raises the same."""
        error = disagreement(places, self._ranks)
        self._plane.report_failure(error)
        self._plane.raise_if_peer_failed()
        raise error

    def _places(self) -> dict[int, Whereabouts]:
        """Where this rank and those that it waits for stand, of those who stand somewhere."""
        own = self._publish()
        words = self._plane.read_each([self._at(rank) for rank in self._ranks])
        places = [Whereabouts.from_plain(words_of(word)) for word in words if word is not None]
        here = {own.rank: own}
        while near := [one for one in places if one.rank not in here and any(map(one.is_there_beside, here.values()))]:
            here |= {one.rank: one for one in near}
        return here

    def _in_backwards(self, ranks: Iterable[int]) -> dict[int, Whereabouts]:
        """Those that are in the backward of a step of which this rank has not begun its own, by their last beats."""
        beats = self._plane.read_each([beat_key(rank) for rank in ranks])
        told = [words_of(beat)["whereabouts"] for beat in beats if beat is not None]
        found = [Whereabouts.from_plain(one) for one in told if one is not None and one.pop("run") == self.name]
        return {one.rank: one for one in found if one.begun[BACKWARDS] > self._backward[1]}

    def ended(self, line: ControlPlane) -> dict[int, str]:
        """Peers that have ended their run, or wait for this rank at the end of an epoch, and which.

        From any thread, over a connection of its own.
        """
        found = {}
        for rank in self._some_others(self._plane.world.ranks):
            one = self._read(rank, line)
            if one is not None and (one.sequence == END or one.begun[POINTS] > self.num_calls) and one.point.has_ended:
                found[rank] = one.point.has_ended
        return found

    def _some_others(self, ranks: Sequence[int]) -> list[int]:
        """All others, or, among many, those at distances 1, 2, 4, ...: one pair that differs is enough."""
        place, size = ranks.index(self._plane.world.rank), len(ranks)
        if size <= _ALL_OTHERS + 1:
            return [*ranks[:place], *ranks[place + 1 :]]
        return sorted({ranks[(place + (1 << power)) % size] for power in range((size - 1).bit_length())})

    def _publish(self) -> Whereabouts:
        if self._own is None:
            assert self._sequence is not None
            rank, point, is_point = self._plane.world.rank, self._point, self._sequence in self._exchanges
            if isinstance(point, GateRecord):
                point = Point(operation=f"the step gate of batch {point.micro_batch}")
            self._own = Whereabouts(
                rank=rank,
                sequence=self._sequence,
                begun={**self._begun, BACKWARDS: self._backward[1]},
                point=point,
                ranks=self._ranks if is_point and self._sequence != POINTS else (),
                location=self._locate() if is_point else None,
            )
            self._plane.send(self._at(rank), json.dumps(asdict(self._own)).encode())
        return self._own

    def _read(self, rank: int, line: ControlPlane | None = None) -> Whereabouts | None:
        data = (line or self._plane).read(self._at(rank))
        return None if data is None else Whereabouts.from_plain(words_of(data))

    def _at(self, rank: int) -> str:
        return f"points/{self.name}/at/{rank}"
