"""Where a rank stands when it comes to a gate, and what it says of the step: packed into the record's ``decisions``."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from lightning_distplus.control import GateRecord

__all__ = ["Flag", "Moment", "decisions", "flags_of", "moment_of"]

_MOMENT_BITS = 4


class Moment(IntEnum):
    """The points of a run at which ranks meet. A rank that comes to another one than its peers has left the path."""

    STEP = 1
    DECISION = 2
    VALIDATION = 3
    VALIDATION_END = 4
    EPOCH_END = 5
    SAVE = 6
    END = 7
    FORWARD = 8
    GRADIENTS = 9
    METRICS = 10

    def __str__(self) -> str:
        return _NAMES[self]


_NAMES = {
    Moment.STEP: "the start of a step",
    Moment.DECISION: "a decision after a step",
    Moment.VALIDATION: "the start of a validation",
    Moment.VALIDATION_END: "the end of a validation",
    Moment.EPOCH_END: "the end of an epoch",
    Moment.SAVE: "a save",
    Moment.END: "the end of training",
    Moment.FORWARD: "the end of training_step",
    Moment.METRICS: "the reduction of logged metrics",
    Moment.GRADIENTS: "the end of the backward",
}


class Flag(IntFlag):
    """What a rank says beside the moment."""

    NONE = 0
    LAST_BATCH = 1 << _MOMENT_BITS
    WANTS_STOP = 2 << _MOMENT_BITS
    WANTS_VALIDATION = 4 << _MOMENT_BITS
    BATCH_FAILED = 8 << _MOMENT_BITS
    NOT_FINITE = 16 << _MOMENT_BITS


def decisions(moment: Moment, flags: Flag) -> int:
    """Both as one number of 16 bits."""
    return int(moment) | int(flags)


def moment_of(record: GateRecord) -> Moment:
    """The moment at which a rank made this record."""
    return Moment(record.decisions & ((1 << _MOMENT_BITS) - 1))


def flags_of(record: GateRecord) -> Flag:
    """What the rank said beside the moment."""
    return Flag(record.decisions & ~((1 << _MOMENT_BITS) - 1))
