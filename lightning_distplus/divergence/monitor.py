"""RankDivergenceMonitor: compares the ranks before each step, and stops the run before a difference does damage."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist

from lightning_distplus.control import Point, Points, active_points
from lightning_distplus.divergence.check import Check, GateMonitor, OnDivergence
from lightning_distplus.divergence.decisions import DecisionCheck, MetricCheck
from lightning_distplus.divergence.gradients import GradientCheck, LocalFailureCheck
from lightning_distplus.divergence.replicas import AtRestCheck, ReplicaCheck
from lightning_distplus.divergence.settings import (
    BatchCheck,
    BatchShapes,
    GeneratorCheck,
    RngPolicy,
    SettingsCheck,
    StartCheck,
)
from lightning_distplus.divergence.stragglers import OnStraggler, StragglerCheck
from lightning_distplus.errors import CheckpointMismatch, DivergenceError, refuse_unknown_arguments, require_choice
from lightning_distplus.gathering import describe
from lightning_distplus.watchdog.stacks import line_of_the_caller
from lightning_distplus.world import ranges

OnLocalFailure = Literal["raise", "skip_all"]
_STATE_VERSION = 1


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
        budget: How much of a step's time the looks at samples and at replicated state may take, once a full
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
        if budget is not None and not 0 < budget <= 1:
            raise ValueError(f"budget is {budget}; it is a share of a step's time, above 0 and at most 1, or None.")
        for name, value in (("every_n_steps", every_n_steps), ("parameters_every_n_steps", parameters_every_n_steps)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it is at least 1.")
        require_choice("on_divergence", on_divergence, OnDivergence)
        require_choice("on_local_failure", on_local_failure, OnLocalFailure)
        require_choice("on_straggler", on_straggler, OnStraggler)
        require_choice("batch_shapes", batch_shapes, BatchShapes)
        checks = [
            *([AtRestCheck()] if state_at_rest else []),
            StartCheck(),
            *([GeneratorCheck(rng_policy)] if rng_policy else []),
            SettingsCheck(),
            BatchCheck(every_n_steps, batch_shapes),
            DecisionCheck(),
            MetricCheck(),
            *([LocalFailureCheck()] if on_local_failure == "skip_all" else []),
            GradientCheck(),
            *([StragglerCheck(warns=on_straggler == "warn")] if on_straggler != "ignore" else []),
            ReplicaCheck(repairs=repair_replicas),
            *([TraceCheck()] if trace_collectives else []),
        ]
        super().__init__(checks, max_skips_in_a_row=max_skips_in_a_row, budget=budget)
        self.on_divergence = on_divergence
        self.parameters_every_n_steps = parameters_every_n_steps

    def metrics(self) -> dict[str, float]:
        """What goes to the loggers, as ``distplus/...``."""
        counted = {"divergences": self.num_divergences, "skipped_steps": self.skips.total}
        return {**{f"distplus/{name}": float(count) for name, count in counted.items()}, **super().metrics()}

    def state_dict(self) -> dict[str, Any]:
        """The counts: plain values."""
        return {"version": _STATE_VERSION, "skips": self.skips.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back.

        Raises:
            CheckpointMismatch: Another version of this package wrote it.
        """
        if state_dict.get("version") != _STATE_VERSION:
            raise CheckpointMismatch(
                f"The checkpoint's RankDivergenceMonitor has version {state_dict.get('version')!r}; this one reads "
                f"version {_STATE_VERSION}. Use the version of lightning_distplus that wrote it."
            )
        self.skips.load_state_dict(state_dict["skips"])


# -- every call of torch.distributed, when that is asked for -----------------------------------------------------------

# What must be equal on all ranks in structure; nothing where ranks may rightly differ.
_EQUAL_TENSORS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather": ("tensor_list",),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "all_gather_single": ("output_tensor", "input_tensor"),
    "gather": ("tensor",),
    "scatter": ("tensor",),
    "reduce_scatter": ("input_list",),
    "reduce_scatter_tensor": ("output", "input"),
    "reduce_scatter_single": ("output", "input"),
    "all_to_all": (),
    "all_to_all_single": (),
    "barrier": (),
    "all_gather_object": (),
    "broadcast_object_list": (),
    "gather_object": (),
    "scatter_object_list": (),
}
_ROOTS = ("src", "dst", "group_src", "group_dst")


class TraceCheck(Check):
    """Stands in the place of the collectives in ``torch.distributed`` while the run trains, and compares them.

    Seen are calls of the user, of torchmetrics, of Lightning, FSDP and DDP's hook. Before each the ranks of its group
    compare operation, reduce operation, root, group, shapes and dtypes, as ``control.Points`` does with the calls of
    Lightning. Calls from other threads than the one that trains, calls of code that has imported a function by name
    before, of C++ (DDP without a communication hook), and point-to-point messages are not seen.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        self._own_points: Points | None = None

    def start(self) -> None:
        """All ranks are about to train. Under a strategy of ours its points go on, under another one some begin."""
        self._num_calls = 0
        if (points := active_points()) is None:
            points = self._own_points = Points(self.run.plane, waits=self.run, locate=line_of_the_caller)
            points.begin()
        for name in _EQUAL_TENSORS:
            original = getattr(dist, name, None)
            if callable(original):
                self._originals[name] = original
                setattr(dist, name, self._checked(name, original, points))

    def train_end(self) -> None:
        """What follows is not of the training."""
        self.detach()

    def detach(self) -> None:
        """Puts the functions back."""
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()
        if self._own_points is not None:
            self._own_points.end()
            self._own_points = None

    def metrics(self) -> dict[str, float]:
        """How many calls this rank has made."""
        return {"traced_collectives": float(self._num_calls)}

    def _checked(self, name: str, original: Callable[..., Any], points: Points) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def checked(*arguments: Any, **named: Any) -> Any:
            if not points.are_due:
                return original(*arguments, **named)
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            with points.covering():
                if dist.get_rank(bound.arguments["group"]) >= 0:
                    self._num_calls += 1
                    self._compare(name, bound.arguments, points)
                return original(*arguments, **named)

        return checked

    def _compare(self, name: str, arguments: dict[str, Any], points: Points) -> None:
        group: Any = arguments["group"] or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        operator = arguments.get("op")
        parts = [] if operator is None else [getattr(operator, "name", type(operator).__name__)]
        parts += [f"{root} {arguments[root]}" for root in _ROOTS if arguments.get(root) is not None]
        parts.append(f"group {group.group_name} of ranks {ranges(ranks)}")
        structure = ", ".join(describe(arguments[tensor]) for tensor in _EQUAL_TENSORS[name])
        point = Point(operation=name, structure=structure, arguments=", ".join(parts))
        try:
            points.meet(point, ranks)
        except DivergenceError as error:
            first = self.run.plane.first_error
            if self._own_points is not None and not (first is not None and first.has_verdict):
                self.run.tell(error)  # a strategy of ours does so itself
            raise
