"""Where a rank stands when it waits for the others, which places cannot go together, and who is wrong then."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from lightning_distplus.errors import DivergenceError
from lightning_distplus.world import name_ranks

__all__ = ["Place", "Point", "Whereabouts", "disagreement", "ended_early", "sides"]

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
    """One call in which all ranks must take part; equal on all of them."""

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
        """16 bytes that are equal where the points are."""
        text = "\0".join((self.operation, self.name, self.structure, self.arguments))
        return hashlib.blake2b(text.encode(errors="replace"), digest_size=16).digest()

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        structure = f" of {self.structure}" if self.structure else ""
        arguments = f" [{self.arguments}]" if self.arguments else ""
        return f"{self.operation}{name}{structure}{arguments}"


class Place(str, Enum):
    """What kind of place it is."""

    POINT = "point"
    GATE = "gate"
    BACKWARD = "backward"
    """In the backward of a step, where the gradients of all ranks meet; or behind it, in the same step."""
    END = "end"
    """The run has ended on this rank: it waits for nobody and comes to nothing any more."""


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Where one rank stands."""

    rank: int
    place: Place
    points: int
    """How many points the rank has begun; the last of them is where it stands, if it stands at one."""
    gates: int
    """How many gates the rank has begun."""
    point: Point
    backward_gate: int = 0
    """How many gates it had begun when it began its last backward."""
    location: str | None = None
    """``file.py:line`` in the user's code from which a point was reached; a gate is Lightning's own call."""

    def to_plain(self) -> dict[str, Any]:
        """The whereabouts as they are published."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Whereabouts:
        """Reads what a peer has published."""
        return cls(**{**values, "place": Place(values["place"]), "point": Point(**values["point"])})

    def waits_for(self, other: Whereabouts) -> bool:
        """Whether this rank cannot go on before the other has come to where it stands."""
        if self.place is Place.POINT:
            return other.points < self.points
        if self.place is Place.BACKWARD:
            return other.backward_gate < self.backward_gate
        return self.place is Place.GATE and other.gates < self.gates

    def excludes(self, other: Whereabouts) -> bool:
        """Whether neither can ever go on: each waits for what the other, who waits or has ended, has not begun.

        What is published stays true for as long as it matters: a rank leaves its place only after the others have
        come to it, so that an old word of a peer never stands against a place that this rank has not passed.

        A backward, unlike the other places, may go on by itself; but on ranks that run one program what comes before it
        on one of them does so on all. A rank that is in it will not come to a call at which another one stands before.
        """
        if Place.END in (self.place, other.place):
            return self.waits_for(other) or other.waits_for(self)
        return self.waits_for(other) and other.waits_for(self)

    def describe(self) -> str:
        """The place, as it follows the name of the rank."""
        if self.point.has_ended:
            return self.point.has_ended
        if self.place is Place.GATE:
            return f"at {self.point}"
        return f"in {self.point}{f' at {self.location}' if self.location else ''}"


def disagreement(places: Mapping[int, Whereabouts], world_size: int) -> DivergenceError:
    """The error for ranks that stand where they cannot meet.

    The majority is right. In a tie the step gate or the backward is: every step comes to it, the other call is the
    odd one. With nothing to decide, all that have come are named.

    Args:
        places: Where the ranks stand, as far as they have come.
        world_size: The number of all ranks.
    """
    ended = {rank: one.point.has_ended for rank, one in places.items() if one.point.has_ended}
    if 0 < len(ended) < len(places):
        return ended_early(ended, {rank: one.describe() for rank, one in places.items() if rank not in ended})
    kinds = {rank: (one.place, one.point) for rank, one in places.items()}
    wrong = _wrong(kinds)
    absent = sorted(set(range(world_size)) - set(places))
    late = f"; {name_ranks(absent)} elsewhere" if absent else ""
    blame = f"wrong: {name_ranks(wrong)}" if len(wrong) < len(places) else "no majority decides who is wrong"
    texts = _shortened(places)
    numbers = {one.points for one in places.values() if one.place is Place.POINT}
    call = f"call {max(numbers)} of this run" if numbers else "the gate"
    field, remedy = _kind_of_difference(places.values())
    return DivergenceError(
        f"The ranks do not agree at {call}, and would wait for each other or mix what they hold: {sides(texts)}{late} "
        f"({blame}). Nothing was exchanged. {remedy}",
        ranks=wrong,
        field=field,
        values=texts,
    )


def ended_early(ended: Mapping[int, str], others: Mapping[int, str]) -> DivergenceError:
    """The error for ranks that wait for what ranks that have ended will never come to; in a tie, these are wrong.

    Args:
        ended: What each of some ranks has ended, as it follows its name.
        others: Where each of the others stands.
    """
    going_on = {rank: f"has not: {place}" for rank, place in others.items()}
    wrong = sorted(ended if len(ended) <= len(others) else others)
    return DivergenceError(
        f"{sides(ended)}; {sides(going_on)} (wrong: {name_ranks(wrong)}). {_END_ON_ALL_RANKS}",
        ranks=wrong,
        field="end",
        values={**ended, **going_on},
    )


def _wrong(kinds: Mapping[int, tuple[Place, Point]]) -> list[int]:
    (common, count), *others = Counter(kinds.values()).most_common()
    leading = [common, *(kind for kind, number in others if number == count)]
    if len(leading) > 1:
        leading = [kind for kind in leading if kind[0] in (Place.GATE, Place.BACKWARD)]
    right = leading[0] if len(leading) == 1 else None
    return sorted(rank for rank, kind in kinds.items() if kind != right)


def _kind_of_difference(places: Iterable[Whereabouts]) -> tuple[str, str]:
    found = list(places)
    if len({(one.place, one.point.operation, one.point.name) for one in found}) > 1:
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
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        groups.setdefault(texts[rank], []).append(rank)
    shown = [f"{name_ranks(ranks)} {text}" for text, ranks in list(groups.items())[:_SHOWN_SIDES]]
    more = len(groups) - _SHOWN_SIDES
    return "; ".join([*shown, f"and {more} more groups of ranks"] if more > 0 else shown)
