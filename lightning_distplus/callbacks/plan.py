"""The check at the start: model, plan of the run and random generators, before and after the engine wraps the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash
from torch.distributed.tensor import DTensor

from lightning_distplus.callbacks.check import Check
from lightning_distplus.divergence.agreement import disagreement, first_difference
from lightning_distplus.divergence.signature import first_odd_entry, signature, weights
from lightning_distplus.errors import DivergenceError
from lightning_distplus.rng import rng_state

__all__ = ["GENERATORS", "PlanCheck", "RngPolicy"]

RngPolicy = Literal["same", "distinct", "any"]
log = logging.getLogger(__name__)

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
            DivergenceError: The first argument of the Trainer, parameter or buffer that differs, with both sides.
        """
        self._compare("arguments", self._arguments())
        odd = first_odd_entry(signature(self.run.module), self.run.gather)
        if odd is not None:
            index, values = odd
            self.run.tell(
                disagreement(
                    "model",
                    values,
                    where=f"at entry {index} of its parameters and buffers, before the engine wraps it",
                    remedy="build the model alike on all ranks: no branch by rank, no set, one order of registration",
                )
            )
        self._odd_weights = self._compare_weights()

    def _compare_weights(self) -> DivergenceError | None:
        """The first parameter whose values differ; engines overwrite those of the other ranks, or mix them."""
        held = {
            name: one.detach()
            for name, one in self.run.module.named_parameters()
            if one.numel() and not one.is_meta and not isinstance(one, DTensor)
        }
        devices = {one.device for one in held.values()}
        held = held if len(devices) == 1 else {}
        odd = first_odd_entry(weights(held), lambda name, value: self.run.gather(f"weights, {name}", value))
        if odd is None:
            return None
        return disagreement(
            "initial weights",
            odd[1],
            where="before the first step",
            remedy="DDP and ZeRO take those of rank 0 for all, FSDP keeps a part of each rank's; seed_everything makes "
            "them the same",
        )

    def start(self) -> None:
        """Compares the plan, and the generators."""
        self._compare("plan", self._plan())
        if self._odd_weights is not None:  # in a run without a seed they always do
            self._mention(self._odd_weights, logging.INFO)
        self._compare_hyperparameters()
        self.epoch_start()

    def _compare_hyperparameters(self) -> None:
        """Numbers that the modules have saved: some may rightly differ, a seed for one."""
        odd = first_difference(self.run.gather("hyperparameters", _hyperparameters(self.run.trainer)))
        if odd is not None:
            name, values = odd
            remedy = "start every rank with the same configuration, unless it is meant"
            self._mention(disagreement(name, values, where="before the first step", remedy=remedy), logging.WARNING)

    def _mention(self, error: DivergenceError, level: int) -> None:
        """What is not wrong by itself is told, and the run goes on."""
        self.run.note("difference", field=error.field, ranks=error.ranks, values=error.values)
        log.log(level, "rank %d: %s", self.run.rank, error)

    def _compare(self, what: str, mine: dict[str, Any]) -> None:
        odd = first_difference(self.run.gather(what, mine))
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

    def _arguments(self) -> dict[str, Any]:
        """Of the Trainer: a rank without validation waits for nobody where the others wait for it, before any step."""
        trainer: Any = self.run.trainer
        return {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "min_steps": trainer.min_steps,
            "min_epochs": trainer.min_epochs,
            "limit_train_batches": trainer.limit_train_batches,
            "limit_val_batches": trainer.limit_val_batches,
            "num_sanity_val_steps": str(trainer.num_sanity_val_steps),
            # By the clock, the Trainer has the one and not the other.
            "val_check_interval": str(getattr(trainer, "val_check_interval", None)),
            "val_check_interval in seconds": getattr(trainer, "_val_check_time_interval", None),
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
            "gradient_clip_val": trainer.gradient_clip_val,
            "precision": str(trainer.precision),
            "automatic_optimization": self.run.module.automatic_optimization,
        }

    def _plan(self) -> dict[str, Any]:
        trainer = self.run.trainer
        optimizers = [type(one).__name__ for one in trainer.optimizers]
        return {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "number of training batches": _finite(trainer.num_training_batches),
            "number of validation batches": [_finite(number) for number in trainer.num_val_batches],
            **self._arguments(),
            "optimizers": ", ".join(optimizers),
            "checkpoint": Path(str(trainer.ckpt_path or "none")).name,
        }


def _hyperparameters(trainer: Any) -> dict[str, float]:
    owners = {"module": trainer.lightning_module, "data": getattr(trainer, "datamodule", None)}
    return {
        f"hyperparameter {name} of the {owner}": value
        for owner, module in owners.items()
        for name, value in sorted((getattr(module, "hparams", None) or {}).items())
        if isinstance(value, (bool, int, float))
    }


def _finite(number: float) -> int | None:
    """A number of batches; None where the loader does not tell."""
    return None if math.isinf(number) else int(number)
