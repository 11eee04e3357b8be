"""What a way to differ is, the list of them, and the run in which one is planted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_distplus import _compat
from tests.distributed import jobs

OUR_DDP, FSDP, FSDP2 = ("ResilientDDP",), ("ResilientFSDP",), ("ResilientModelParallel",)
DDP = (*OUR_DDP, "DDPStrategy")
ZERO2, ZERO3 = ("zero2",), ("zero3",)
SHARDED = FSDP + FSDP2 + ZERO2 + ZERO3
ALL = DDP + SHARDED

Blame = Literal["odd", "guilty", "pair", "agreed"]
"""Who is named: the odd one among three or more and nobody of two; always the guilty one; it and the next rank;
or nobody, because the ranks come to an agreement."""


@dataclass(kw_only=True)
class Run:
    """What a run is made of on one rank; a fault changes a part of it."""

    rank: int
    size: int
    guilty: int
    step: int
    """The fault strikes when so many steps are done."""
    module: Any = field(default_factory=jobs.Model)
    data: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    strategy: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    """Further arguments of a strategy with DDP."""
    trainer: dict[str, Any] = field(default_factory=dict)
    monitor: dict[str, Any] = field(default_factory=dict)
    is_planted: bool = False
    planted_at: float = 0.0
    collectives: int = -1
    """How many collectives this rank had begun when the fault struck; negative before training begins."""

    @property
    def is_guilty(self) -> bool:
        """Whether this is the rank that will differ."""
        return self.rank == self.guilty

    def validate(self, num_samples: int = 8) -> None:
        """Gives the run a validation after each epoch of four batches."""
        self.data = {
            "train_dataloaders": own_loader(self.rank, 16),
            "val_dataloaders": own_loader(self.rank, num_samples),
        }
        self.trainer["num_sanity_val_steps"] = 0

    def strike(self, deed: Callable[[Any, Any], None], hook: str = "on_train_batch_end") -> None:
        """Does a deed to the guilty rank, once; all ranks note where their collectives stand then."""
        self.callbacks.append(Strike(self, deed, hook))

    def note(self) -> None:
        """Now it happens."""
        self.is_planted, self.planted_at, self.collectives = True, time.time(), _compat.num_collectives()


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """One way to differ."""

    row: str
    """Of the failure table."""
    number: int
    """In the list of docs/evidence/divergence-faults.md; 0 where it is not one of the 43."""
    plant: Callable[[Run], None]
    field: str
    """What the error's field begins with; "" where the ranks agree and go on."""
    blame: Blame
    strategies: tuple[str, ...]
    says: str
    """What the message says beside that."""
    is_before: bool
    """Whether no collective begins between the fault and the error."""


DIVERGENCES: dict[str, Divergence] = {}


def diverges(
    row: str,
    field: str,
    *,
    number: int = 0,
    says: str = "",
    blame: Blame = "odd",
    on: tuple[str, ...] = ALL,
    is_before: bool = True,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enters a fault into the list."""

    def enter(plant: Callable[[Run], None]) -> Callable[[Run], None]:
        DIVERGENCES[plant.__name__] = Divergence(
            row=row, number=number, plant=plant, field=field, says=says, blame=blame, strategies=on,
            is_before=is_before,
        )  # fmt: skip
        return plant

    return enter


class Strike(Callback):
    def __init__(self, run: Run, deed: Callable[[Any, Any], None], hook: str) -> None:
        self.run = run
        self.deed = deed
        setattr(self, hook, self._strike)

    def _strike(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == self.run.step and not self.run.is_planted and not trainer.sanity_checking:
            self.run.note()
            if self.run.is_guilty:
                self.deed(trainer, module)


def own_loader(rank: int, num_samples: int = 200, **options: Any) -> DataLoader:
    """Samples of this rank's own."""
    samples = torch.randn(num_samples, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(rank))
    return DataLoader(samples, **{"batch_size": 4, **options})


class Stepwise(jobs.Model):
    """Its loss goes through a function in one step of the guilty rank."""

    def __init__(self, run: Run, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.change = change

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step != self.run.step or self.run.is_planted:
            return loss
        self.run.note()
        return self.change(loss) if self.run.is_guilty else loss
