"""RankDivergenceMonitor: compares the ranks before each step, and stops the run before a difference does damage."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from lightning_distplus.control import Watcher
from lightning_distplus.control.secret import words_of
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
from lightning_distplus.majority import disagreement, odd_ranks
from lightning_distplus.trainer_gate import GateParticipant, Moment
from lightning_distplus.watchdog.stacks import stack_of, user_location
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
_ALONE_S = 0.1  # a wait that lasts longer is published, and the others' calls are looked at
_SETTLED_S = 2.0  # after so long a wait, whoever has not said where it waits is not counted
_GATES = "gates"

# Keeps the runs of one process apart; all ranks count alike.
_runs = itertools.count(1)


class _Call(NamedTuple):
    """One call on one rank: what must be the same on all ranks of its group."""

    text: str
    ranks: tuple[int, ...]
    sequence: str
    """What it is counted in: the calls on groups of the same ranks, or the gates."""
    number: int
    """How many of that sequence this rank has made."""


class TraceCheck(Check, GateParticipant):
    """Stands in the place of the collectives in ``torch.distributed`` while the run trains.

    Seen are calls of the user, of torchmetrics, of Lightning, FSDP and DDP's hook. Before each the ranks of its group
    show each other operation, reduce operation, root, group, shapes and dtypes. A rank that waits also looks where the
    others wait: two that wait for each other in calls on different groups are found as well, or one in a call and
    others at a gate. Calls from other threads than the one that trains, calls of code that has imported a function by
    name before, of C++ (DDP without a communication hook), and point-to-point messages are not seen.
    """

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._is_inside = False
        self._waiting = ExitStack()

    def start(self) -> None:
        """All ranks are about to train."""
        self._name = f"trace/{next(_runs)}"
        self._thread = threading.get_ident()
        self._made.clear()
        for name in _EQUAL_TENSORS:
            original = getattr(dist, name, None)
            if callable(original):
                self._originals[name] = original
                setattr(dist, name, self._checked(name, original))
        self.run.gate.add(self)

    def train_end(self) -> None:
        """What follows is not of the training."""
        self.detach()

    def detach(self) -> None:
        """Puts the functions back."""
        for name, original in self._originals.items():
            setattr(dist, name, original)
        if self._originals:
            self.run.gate.remove(self)
        self._originals.clear()

    def metrics(self) -> dict[str, float]:
        """How many calls this rank has made."""
        return {"traced_collectives": float(self._made.total() - self._made[_GATES])}

    def _checked(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def checked(*arguments: Any, **named: Any) -> Any:
            error = self.run.plane.first_error
            has_failed = error is not None and error.rank == self.run.rank
            if self._is_inside or has_failed or threading.get_ident() != self._thread:
                return original(*arguments, **named)
            bound = signature.bind(*arguments, **named)
            bound.apply_defaults()
            self._is_inside = True
            try:
                if dist.get_rank(bound.arguments["group"]) >= 0:
                    self._meet(self._call(name, bound.arguments))
                return original(*arguments, **named)
            finally:
                self._is_inside = False

        return checked

    def _call(self, name: str, arguments: dict[str, Any]) -> _Call:
        group: Any = arguments["group"] or dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        sequence = "-".join(map(str, ranks))
        self._made[sequence] += 1
        structure = ", ".join(describe(arguments[tensor]) for tensor in _EQUAL_TENSORS[name])
        operator = arguments.get("op")
        parts = [] if operator is None else [getattr(operator, "name", type(operator).__name__)]
        parts += [f"{root} {arguments[root]}" for root in _ROOTS if arguments.get(root) is not None]
        what = f"{name}{f' of {structure}' if structure else ''}" + (f" [{', '.join(parts)}]" if parts else "")
        text = f"{what} on group {group.group_name} of ranks {ranges(ranks)}"
        return _Call(text, ranks, sequence, self._made[sequence])

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _meet(self, call: _Call) -> None:
        """Returns on every rank of the group once all of them are about to make the same call.

        Raises:
            DivergenceError: They are not; or two ranks wait for each other in calls on different groups.
            PeerMissing, PeerFailed, PeerLost: A peer is the cause.
        """
        key = f"{self._name}/{call.sequence}"
        told = self._exchange(f"{key}/{call.number}", call.text, call)
        if len(set(told.values())) > 1:
            lines = self._exchange(f"{key}/{call.number}/lines", str(_location()), call)
            self.run.tell(_disagreement({rank: f"{told[rank]}, at {lines[rank]}" for rank in told}))
        if self.run.rank == call.ranks[0]:  # whoever has come here has read the one before
            self.run.plane.delete(f"{key}/{call.number - 1}")

    def _exchange(self, key: str, text: str, call: _Call) -> dict[int, str]:
        """What each rank of the group says."""
        plane = self.run.plane
        entries = plane.secret.entries(key)
        plane.append(key, entries.entry(json.dumps([self.run.rank, text]).encode()))
        told: dict[int, str] = {}

        def is_complete() -> bool:
            told.update(words_of(one) for one in entries.read(plane.read_unsigned(key) or b""))
            return len(told) == len(call.ranks)

        others = set(plane.world.ranks) - set(call.ranks)
        with self._while_waiting(call, told):
            plane.poll(is_complete, self.run.patience, what=call.text, arrived=lambda: set(told) | others)
        return told

    def on_wait(self, moment: Moment) -> None:
        """A rank that waits at a gate says so to those that wait for it in a call."""
        self._made[_GATES] += 1
        ranks = tuple(self.run.plane.world.ranks)
        call = _Call(f"the gate at {moment} on all ranks", ranks, _GATES, self._made[_GATES])
        self._waiting.enter_context(self._while_waiting(call))

    def on_waited(self) -> None:
        """It goes on."""
        self._waiting.close()

    @contextmanager
    def _while_waiting(self, call: _Call, come: Mapping[int, str] | None = None) -> Iterator[None]:
        """Says, once a wait lasts, where this rank waits; where it knows who has come, looks where the missing wait."""
        plane, beside = self.run.plane, self.run.plane.watcher
        plane.watcher = _Lookout(self, call, come, beside)
        try:
            yield
        finally:
            plane.watcher = beside

    def where(self, other: int) -> str | None:
        """The call in which another rank waits for this one, and its line; None where it has told of none."""
        data = self.run.plane.read(f"{self._name}/at/{other}")
        if data is None:
            return None
        line, text, ranks, sequence, number = words_of(data)
        return f"{text}, at {line}" if self.run.rank in ranks and number > self._made[sequence] else None

    def say_where(self, call: _Call) -> str:
        """Publishes where this rank waits; returns its line."""
        line = str(_location())
        self.run.plane.send(f"{self._name}/at/{self.run.rank}", json.dumps([line, *call]).encode())
        return line


@dataclass
class _Lookout:
    """Watches one wait in a traced call, or at a gate, where nobody is missing: ``come`` is None."""

    trace: TraceCheck
    call: _Call
    come: Mapping[int, str] | None
    beside: Watcher | None
    line: str = ""
    look_at_s: float = _ALONE_S

    def while_waiting(self, elapsed_s: float) -> None:
        if self.beside is not None:
            self.beside.while_waiting(elapsed_s)
        if elapsed_s < self.look_at_s:
            return
        self.line = self.line or self.trace.say_where(self.call)
        self.look_at_s = math.inf if self.come is None else 2 * elapsed_s
        missing = [] if self.come is None else sorted(set(self.call.ranks) - set(self.come))
        elsewhere = {other: text for other in missing if (text := self.trace.where(other)) is not None}
        if elsewhere and (len(elsewhere) == len(missing) or elapsed_s >= _SETTLED_S):
            run = self.trace.run
            error = _disagreement({run.rank: f"{self.call.text}, at {self.line}", **elsewhere})
            # One rank's decision holds for all of them: whoever hears of it raises the same.
            run.plane.report_failure(error)
            run.plane.raise_if_peer_failed()
            run.tell(error)


def _location() -> str | None:
    return user_location(stack_of(threading.get_ident()))


def _disagreement(values: dict[int, str]) -> DivergenceError:
    wrong, _ = odd_ranks({rank: text.rpartition(", at ")[0] for rank, text in values.items()})
    where = "and would wait for each other or mix their numbers; nothing was exchanged"
    remedy = "call it on every rank of the group, in the same order and with the same arguments"
    return disagreement("collective", dict(sorted(values.items())), where=where, wrong=wrong, remedy=remedy)
