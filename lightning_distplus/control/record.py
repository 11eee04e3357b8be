"""What one rank says at a step gate, on the wire, and the comparison of what all ranks say."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from operator import attrgetter

from lightning_distplus.errors import DivergenceError

__all__ = ["RECORD_BYTES", "GateRecord", "Wish", "compare"]

RECORD_VERSION = 4


class Wish(IntFlag):
    """What a rank wants, or says, at a gate. One rank's wish is enough for all; SAVED counts when all say it."""

    NONE = 0
    STOP = 1
    PREEMPT = 2
    SKIP = 4
    FAILED = 8
    SAVED = 16
    LATE = 32


@dataclass(frozen=True, kw_only=True)
class GateRecord:
    """What one rank says at a gate; at most 128 bytes on the wire.

    The fields of ``must_agree`` are compared at every gate. A field that a run does not fill stays 0 on all ranks.
    """

    global_step: int
    """Completed optimizer steps."""
    micro_batch: int
    """Index of the micro-batch in its epoch."""
    epoch: int
    wishes: Wish = Wish.NONE
    decisions: int = 0
    """Bits: what follows this step (validation, save, stop, last batch, accumulation boundary)."""
    consumed_samples: int = 0
    data_fingerprint: int = 0
    """Order and content of the data, unsigned 64 bits."""
    batch_structure: int = 0
    """Tree, shapes and dtypes of the batch, unsigned 64 bits."""
    collectives: int = 0
    """Sequence numbers of all process groups, unsigned 64 bits."""
    state_fingerprint: int = 0
    """The step's window of the model state, unsigned 64 bits."""
    settings: int = 0
    """What the optimizers do: rates and counts of all groups, trainable parameters; unsigned 64 bits."""
    batch_content: int = 0
    """A sum of this rank's own samples, unsigned 64 bits; it never has to agree."""
    learning_rate: float = 0.0
    loss_scale: float = 0.0
    lead_s: float = 0.0
    """From the gate before to this rank's first backward, to three digits; it never has to agree."""
    wait_s: float = 0.0
    """How long this rank waited at the gate before, to three digits; it never has to agree."""

    def pack(self) -> bytes:
        """The record as bytes."""
        return _LAYOUT.pack(RECORD_VERSION, *_values(self))

    @staticmethod
    def is_readable(data: bytes) -> bool:
        """Whether this version of the package can unpack it."""
        return data[:1] == bytes([RECORD_VERSION]) and len(data) == RECORD_BYTES

    @classmethod
    def unpack(cls, data: bytes, *, rank: int) -> GateRecord:
        """Reads a record.

        Raises:
            DivergenceError: Another version of this package packed it.
        """
        if not cls.is_readable(data):
            raise DivergenceError(
                f"Rank {rank} runs another version of lightning_distplus: its step record has version {data[0]} and "
                f"{len(data)} bytes, this one has version {RECORD_VERSION} and {_LAYOUT.size} bytes. "
                "Install the same version everywhere.",
                ranks=[rank],
                field="record_version",
            )
        values = dict(zip(_NAMES, _LAYOUT.unpack(data)[1:], strict=True))
        values["wishes"] = Wish(values["wishes"])
        return cls(**values)


_NAMES = tuple(field.name for field in fields(GateRecord))
_values = attrgetter(*_NAMES)  # dataclasses.astuple copies deeply, which costs more than the exchange
_LAYOUT = struct.Struct("<B QQI H H QQQQQQQ dd ee".replace(" ", ""))
RECORD_BYTES = _LAYOUT.size


def compare(records: Sequence[GateRecord], must_agree: Sequence[str]) -> None:
    """Compares what all ranks say, given in rank order.

    Raises:
        DivergenceError: The first field of ``must_agree`` in which they differ; the majority is right.
    """
    for field in must_agree:
        values = {rank: getattr(record, field) for rank, record in enumerate(records)}
        if len(set(values.values())) > 1:
            raise _disagreement(field, values)


def _disagreement(field: str, values: dict[int, object]) -> DivergenceError:
    """The error for one field; the majority is right, a tie is undecided."""
    (common, count), *others = Counter(values.values()).most_common()
    undecided = others[0][1] == count
    wrong = sorted(values) if undecided else [rank for rank, value in values.items() if value != common]
    sides = "; ".join(f"rank {rank}: {value}" for rank, value in list(values.items())[:16])
    blame = "no majority decides who is wrong" if undecided else f"wrong: {wrong}"
    return DivergenceError(
        f"The ranks are about to train with different values of {field} ({sides}; {blame}). Nothing was averaged. "
        "A rank skipped or repeated a step: look for code that returns or raises on one rank only.",
        ranks=wrong,
        field=field,
        values=values,
    )
