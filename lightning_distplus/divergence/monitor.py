"""RankDivergenceMonitor: compares the ranks before each step, and stops the run before a difference does damage."""

from __future__ import annotations

import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import xxhash
from torch.distributed.tensor import DTensor

from lightning_distplus.divergence.check import Check, GateMonitor, OnDivergence
from lightning_distplus.divergence.decisions import DecisionCheck, MetricCheck
from lightning_distplus.divergence.gradients import LocalFailureCheck, NonFiniteCheck, PairingCheck
from lightning_distplus.divergence.replicas import AtRestCheck, ReplicaCheck
from lightning_distplus.divergence.settings import BatchCheck, BatchShapes, SettingsCheck
from lightning_distplus.divergence.signature import first_odd_entry, signature, weights
from lightning_distplus.divergence.stragglers import OnStraggler, StragglerCheck
from lightning_distplus.divergence.tracing import CollectiveTrace
from lightning_distplus.errors import CheckpointMismatch, DivergenceError, refuse_unknown_arguments, require_choice
from lightning_distplus.majority import disagreement, first_difference
from lightning_distplus.rng import rng_state
from lightning_distplus.watchdog.stacks import stack_of, user_location

__all__ = [
    "GENERATORS",
    "OnLocalFailure",
    "PlanCheck",
    "RankDivergenceMonitor",
    "RngPolicy",
    "TraceCheck",
    "make_checks",
]

RngPolicy = Literal["same", "distinct", "any"]
log = logging.getLogger(__name__)
GENERATORS = ("python", "numpy", "torch", "cuda")
OnLocalFailure = Literal["raise", "skip_all"]
STATE_VERSION = 1


class RankDivergenceMonitor(GateMonitor):
    """Names the rank that differs from the others before its difference reaches a collective or the weights.

    Works with every strategy of Lightning; on a Resilient one it uses that strategy's gate.

    Args:
        every_n_steps: How often the batches are looked into, at most. Place, learning rate and settings are compared
            each step.
        parameters_every_n_steps: How often replicated state is compared in full, at most.
        on_divergence: ``"raise"`` on all ranks; ``"warn"`` where the run can go on, which it cannot when the ranks
            stand at different points; ``"skip"`` leaves out, on all ranks, a step whose loss or gradients are not
            finite, and raises otherwise.
        max_skips_in_a_row: So many steps may be left out one after the other.
        on_local_failure: What follows when a batch fails on some ranks (out of memory, ``training_step`` returns None):
            ``"raise"``, or ``"skip_all"``: all ranks leave the step out.
        trace_collectives: Compare every call of ``torch.distributed`` in training before it is made: operation, root,
            reduce operation, group, shapes. Costs one exchange per call.
        rng_policy: For each of the generators "python", "numpy", "torch" and "cuda", whether its state must be the
            "same" on all ranks or "distinct" on each, at the start of each epoch; nothing is required of the others.
        repair_replicas: Overwrite a wrong copy of a weight, a buffer or an optimizer state with the majority's, and
            write that into the ledger. Without a majority the run ends as it does otherwise.
        on_straggler: What follows when the others wait for one rank in every step: ``"note"`` tells the ledger and the
            report, ``"warn"`` the log as well, as ``StragglerMonitor()`` does; or ``"ignore"``.
        state_at_rest: Fingerprint what this rank alone holds (its shards of weights and optimizer state) after each
            step, and again before the next one: finds memory that changes by itself. Costs two passes over it.
        budget: How much of a step's time the looks at batches and replicated state may take, once the first full
            comparison has shown what they cost: they become rarer until they fit. What must be seen in each step stays.
            The ledger tells how many steps a pass over the whole state takes (``monitor_plan``). None: nothing waits.
        batch_shapes: ``"any"`` where batches of different sizes are right, as for sequences; ``"equal"`` where each
            rank must have the same shapes.
    """

    def __init__(
        self,
        every_n_steps: int = 1,
        parameters_every_n_steps: int = 50,
        on_divergence: OnDivergence = "raise",
        max_skips_in_a_row: int = 3,
        on_local_failure: OnLocalFailure = "raise",
        trace_collectives: bool = False,
        rng_policy: dict[str, RngPolicy] | None = None,
        repair_replicas: bool = False,
        state_at_rest: bool = False,
        batch_shapes: BatchShapes = "any",
        on_straggler: OnStraggler = "note",
        budget: float | None = 0.005,
        **removed: Any,
    ) -> None:
        refuse_unknown_arguments(type(self).__name__, removed, inspect.signature(RankDivergenceMonitor).parameters)
        super().__init__(max_skips_in_a_row=max_skips_in_a_row, budget=budget)
        if budget is not None and not 0 < budget <= 1:
            raise ValueError(f"budget is {budget}; it is a share of a step's time, above 0 and at most 1, or None.")
        for name, value in (("every_n_steps", every_n_steps), ("parameters_every_n_steps", parameters_every_n_steps)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it is at least 1.")
        require_choice("on_divergence", on_divergence, OnDivergence)
        require_choice("on_local_failure", on_local_failure, OnLocalFailure)
        require_choice("on_straggler", on_straggler, OnStraggler)
        require_choice("batch_shapes", batch_shapes, BatchShapes)
        self.every_n_steps = every_n_steps
        self.parameters_every_n_steps = parameters_every_n_steps
        self.on_divergence = on_divergence
        self.on_local_failure = on_local_failure
        self.trace_collectives = trace_collectives
        self.rng_policy = rng_policy
        self.repair_replicas = repair_replicas
        self.state_at_rest = state_at_rest
        self.on_straggler = on_straggler
        self.batch_shapes = batch_shapes
        self.checks = make_checks(self, self._before_save)

    def metrics(self) -> dict[str, float]:
        """What goes to the loggers, as ``distplus/...``."""
        counted = {"divergences": self._incidents.count if self._incidents else 0, "skipped_steps": self.skips.total}
        return {**{f"distplus/{name}": float(count) for name, count in counted.items()}, **super().metrics()}

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts and whatever the checks keep: plain values."""
        return {
            "version": STATE_VERSION,
            "skips": self.skips.state_dict(),
            "checks": {type(check).__name__: check.state_dict() for check in self.checks},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back.

        Raises:
            CheckpointMismatch: Another version of this package wrote it.
        """
        if state_dict.get("version") != STATE_VERSION:
            raise CheckpointMismatch(
                f"The checkpoint's RankDivergenceMonitor has version {state_dict.get('version')!r}; this one reads "
                f"version {STATE_VERSION}. Use the version of lightning_distplus that wrote it."
            )
        self.skips.load_state_dict(state_dict["skips"])
        for check in self.checks:
            check.load_state_dict(state_dict["checks"].get(type(check).__name__, {}))


def make_checks(chosen: RankDivergenceMonitor, before_save: Callable[[], None]) -> list[Check]:
    """All checks that the user has chosen. Each keeps its own state.

    Args:
        chosen: The monitor with its arguments.
        before_save: Called on all ranks when they have met before a save.
    """
    finite = NonFiniteCheck()
    pairing = PairingCheck(lambda: finite.is_incomplete)
    return [
        *([AtRestCheck()] if chosen.state_at_rest else []),
        PlanCheck(chosen.rng_policy),
        SettingsCheck(),
        BatchCheck(chosen.every_n_steps, chosen.batch_shapes),
        DecisionCheck(before_save),
        MetricCheck(),
        *([LocalFailureCheck(pairing.tie)] if chosen.on_local_failure == "skip_all" else []),
        finite,
        pairing,
        *([StragglerCheck(warns=chosen.on_straggler == "warn")] if chosen.on_straggler != "ignore" else []),
        ReplicaCheck(repairs=chosen.repair_replicas),
        *([TraceCheck()] if chosen.trace_collectives else []),
    ]


# -- the check at the start: model, plan of the run, random generators -------------------------------------------------


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
            self._mention(self._odd_weights, logging.DEBUG)
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


# -- every call of torch.distributed, when that is asked for -----------------------------------------------------------


class TraceCheck(Check):
    """Compares collectives before they begin: those of the user, of torchmetrics, of Lightning, FSDP and DDP's hook."""

    def __init__(self) -> None:
        self._trace: CollectiveTrace | None = None
        self._num_calls = 0

    def start(self) -> None:
        """All ranks are about to train."""
        run = self.run
        self._trace = CollectiveTrace(run.plane, patience=run.patience, locate=_location, tell=run.tell)
        self._trace.start()
        run.gate.attend = self._trace.at_gate

    def train_end(self) -> None:
        """What follows is not of the training."""
        self.detach()

    def metrics(self) -> dict[str, float]:
        """How many calls this rank has made."""
        return {"traced_collectives": float(self._count())}

    def detach(self) -> None:
        """Puts the functions back."""
        self._num_calls = self._count()
        if self._trace is not None:
            self._trace.stop()
            self.run.gate.attend = lambda moment: nullcontext()
        self._trace = None

    def _count(self) -> int:
        return self._num_calls if self._trace is None else self._trace.num_calls


def _location() -> str | None:
    return user_location(stack_of(threading.get_ident()))
