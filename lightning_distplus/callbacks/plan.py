"""The check at the start: model, plan of the run and random generators, before and after the engine wraps the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash

from lightning_distplus.callbacks.check import Check
from lightning_distplus.divergence.agreement import disagreement, first_difference
from lightning_distplus.divergence.signature import first_odd_entry, signature
from lightning_distplus.rng import rng_state

__all__ = ["GENERATORS", "PlanCheck", "RngPolicy"]

RngPolicy = Literal["same", "distinct", "any"]
GENERATORS = ("python", "numpy", "torch", "cuda")


class PlanCheck(Check):
    """Compares what holds for the whole run: the model's signature, and the numbers that decide when what happens.

    Args:
        rng_policy: For each generator, whether its state must be the same on all ranks or distinct on each. Lightning's
            ``seed_everything`` makes all of them the same, and many runs rely on it: nothing is required by default.
    """

    def __init__(self, rng_policy: Mapping[str, RngPolicy] | None = None) -> None:
        self._policy = dict(rng_policy or {})
        for name, policy in self._policy.items():
            if name not in GENERATORS or policy not in get_args(RngPolicy):
                raise ValueError(
                    f"rng_policy has {name!r}: {policy!r}; the names are {', '.join(GENERATORS)}, and a policy is one "
                    f"of {', '.join(get_args(RngPolicy))}."
                )

    def before_engine(self) -> None:
        """The model is built, and no engine has wrapped it: DDP would average a with b, or abort the process.

        Raises:
            DivergenceError: The first parameter or buffer that differs, with both sides.
        """
        odd = first_odd_entry(signature(self.run.module), self.run.gather)
        if odd is None:
            return
        index, values = odd
        self.run.tell(
            disagreement(
                "model",
                values,
                where=f"at entry {index} of its parameters and buffers, before the engine wraps it",
                remedy="build the model alike on all ranks: no rank-dependent branch, set, or order of registration",
            )
        )

    def start(self) -> None:
        """Compares the plan, and the generators."""
        plans = self.run.gather("plan", self._plan())
        odd = first_difference(plans)
        if odd is not None:
            name, values = odd
            self.run.tell(
                disagreement(
                    name,
                    values,
                    where="before the first step",
                    remedy="the ranks would come to validations, saves or the end at different steps: give all of them "
                    "the same arguments, data and checkpoint; ResumableDataModule(uneven=...) makes batches even",
                )
            )
        self.epoch_start()

    def epoch_start(self) -> None:
        """Compares the random generators by the policy."""
        if not any(policy != "any" for policy in self._policy.values()):
            return
        mine = {name: xxhash.xxh3_64_hexdigest(state) for name, state in rng_state().items() if name in self._policy}
        states = self.run.gather("random generators", mine)
        for name, policy in self._policy.items():
            values = {rank: one[name] for rank, one in enumerate(states) if name in one}
            self._require_policy(name, policy, values)

    def _require_policy(self, name: str, policy: RngPolicy, values: dict[int, str]) -> None:
        ranks_of: dict[str, list[int]] = {}
        for rank, value in values.items():
            ranks_of.setdefault(value, []).append(rank)
        where = f"in epoch {self.run.trainer.current_epoch}"
        if policy == "same" and len(ranks_of) > 1:
            remedy = "seed it alike on all ranks, and draw from it alike"
            self.run.tell(disagreement(f"the state of the {name} generator", values, where=where, remedy=remedy))
        shared = sorted(rank for ranks in ranks_of.values() if len(ranks) > 1 for rank in ranks)
        if policy == "distinct" and shared:
            self.run.tell(
                disagreement(
                    f"the state of the {name} generator",
                    {rank: values[rank] for rank in shared},
                    wrong=shared,
                    where=f"{where}: it is equal on them and must be distinct",
                    remedy="add the rank to the seed, or every rank draws the same augmentation",
                )
            )

    def _plan(self) -> dict[str, Any]:
        trainer = self.run.trainer
        optimizers = [type(one).__name__ for one in trainer.optimizers]
        return {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "number of training batches": _finite(trainer.num_training_batches),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "min_steps": trainer.min_steps,
            "min_epochs": trainer.min_epochs,
            "number of validation batches": [_finite(number) for number in trainer.num_val_batches],
            # By the clock, the Trainer has the one and not the other.
            "val_check_interval": str(getattr(trainer, "val_check_interval", None)),
            "val_check_interval in seconds": getattr(trainer, "_val_check_time_interval", None),
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
            "gradient_clip_val": trainer.gradient_clip_val,
            "precision": str(trainer.precision),
            "automatic_optimization": self.run.module.automatic_optimization,
            "optimizers": ", ".join(optimizers),
            "checkpoint": Path(str(trainer.ckpt_path or "none")).name,
        }


def _finite(number: float) -> int | None:
    """A number of batches; None where the loader does not tell."""
    return None if math.isinf(number) else int(number)
