"""RankDivergenceMonitor: compares the ranks before each step, and stops the run before a difference does damage."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from lightning_distplus.control import ControlPlane
from lightning_distplus.control.secret import words_of
from lightning_distplus.divergence.check import Check, GateMonitor, OnDivergence
from lightning_distplus.divergence.decisions import DecisionCheck, MetricCheck
from lightning_distplus.divergence.gradients import LocalFailureCheck, NonFiniteCheck, PairingCheck
from lightning_distplus.divergence.replicas import AtRestCheck, ReplicaCheck
from lightning_distplus.divergence.settings import BatchCheck, BatchShapes, PlanCheck, RngPolicy, SettingsCheck
from lightning_distplus.divergence.stragglers import OnStraggler, StragglerCheck
from lightning_distplus.errors import (
    CheckpointMismatch,
    DistplusError,
    DivergenceError,
    refuse_unknown_arguments,
    require_choice,
)
from lightning_distplus.majority import disagreement
from lightning_distplus.trees import describe
from lightning_distplus.watchdog.stacks import stack_of, user_location
from lightning_distplus.world import ranges

__all__ = ["CollectiveTrace", "OnLocalFailure", "RankDivergenceMonitor", "TraceCheck", "TracedCall", "make_checks"]


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
_REMEDY = "call it on every rank of the group, in the same order and with the same arguments"

# Keeps the runs of one process apart; all ranks count alike.
_runs = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """One call on one rank: what must be the same on all ranks of its group."""

    operation: str
    group: str
    ranks: tuple[int, ...]
    sequence: str
    """What it is counted in: the calls on groups of the same ranks, or the gates."""
    number: int
    """How many of that sequence this rank has made."""
    structure: str = ""
    arguments: str = ""

    def __str__(self) -> str:
        structure = f" of {self.structure}" if self.structure else ""
        arguments = f" [{self.arguments}]" if self.arguments else ""
        return f"{self.operation}{structure}{arguments} on {self.group}"

    def waits_for(self, rank: int, made: Counter[str]) -> bool:
        """Whether it cannot go on before a rank, which has made so many calls, makes another one."""
        return rank in self.ranks and self.number > made[self.sequence]


class CollectiveTrace:
    """Stands in the place of the collectives in ``torch.distributed`` while it is started.

    Before each call the ranks of its group show each other operation, reduce operation, root, group, shapes and dtypes.
    A rank that waits also looks where the others wait: two that wait for each other in calls on different groups are
    found as well, or one in a call and others at a gate. Calls from other threads than the one that starts it, calls of
    code that has imported a function by name before, of C++ (DDP without a communication hook), and point-to-point
    messages are not seen.

    Args:
        plane: The control plane. All ranks make their trace at the same moment of the run.
        patience: How long a rank waits for its peers now.
        locate: Tells the line of the user's code in which this rank stands.
        tell: Writes the evidence down, and raises.
    """

    def __init__(
        self,
        plane: ControlPlane,
        *,
        patience: Callable[[], timedelta],
        locate: Callable[[], str | None],
        tell: Callable[[DivergenceError], None],
    ) -> None:
        self._plane = plane
        self._patience = patience
        self._locate = locate
        self._tell = tell
        self._name = f"trace/{next(_runs)}"
        self._thread = threading.get_ident()
        self._made: Counter[str] = Counter()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._is_inside = False
        self.num_calls = 0

    def start(self) -> None:
        """Takes the place of the functions."""
        for name in _EQUAL_TENSORS:
            original = getattr(dist, name, None)
            if callable(original):
                self._originals[name] = original
                setattr(dist, name, self._checked(name, original))

    def stop(self) -> None:
        """Puts the functions back; idempotent."""
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()

    def _checked(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def checked(*arguments: Any, **named: Any) -> Any:
            if self._is_inside or not self._is_due:
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

    @property
    def _is_due(self) -> bool:
        """Whether this call takes part: from the thread that trains, in a job in which this rank has not failed."""
        error = self._plane.first_error
        has_failed = error is not None and error.rank == self._plane.world.rank
        return threading.get_ident() == self._thread and not has_failed

    def _call(self, name: str, arguments: dict[str, Any]) -> TracedCall:
        group: Any = arguments["group"] or dist.group.WORLD
        ranks = tuple(dist.get_process_group_ranks(group))
        sequence = "-".join(map(str, ranks))
        self._made[sequence] += 1
        self.num_calls += 1
        operator = arguments.get("op")
        parts = [] if operator is None else [getattr(operator, "name", type(operator).__name__)]
        parts += [f"{root} {arguments[root]}" for root in _ROOTS if arguments.get(root) is not None]
        return TracedCall(
            operation=name,
            group=f"group {group.group_name} of ranks {ranges(ranks)}",
            ranks=ranks,
            sequence=sequence,
            number=self._made[sequence],
            structure=", ".join(describe(arguments[tensor]) for tensor in _EQUAL_TENSORS[name]),
            arguments=", ".join(parts),
        )

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _meet(self, call: TracedCall) -> None:
        """Returns on every rank of the group once all of them are about to make the same call.

        Raises:
            DivergenceError: They are not; or two ranks wait for each other in calls on different groups.
            PeerMissing, PeerFailed, PeerLost: A peer is the cause.
        """
        key = f"{self._name}/{call.sequence}"
        told = self._exchange(f"{key}/{call.number}", str(call), call)
        if len(set(told.values())) > 1:
            lines = self._exchange(f"{key}/{call.number}/lines", str(self._locate()), call)
            values = {rank: f"{told[rank]}, at {lines[rank]}" for rank in sorted(told)}
            self._tell(_disagreement(values))
        if self._plane.world.rank == call.ranks[0]:  # whoever has come here has read the one before
            self._plane.delete(f"{key}/{call.number - 1}")

    def _exchange(self, key: str, text: str, call: TracedCall) -> dict[int, str]:
        """What each rank of the group says."""
        entries = self._plane.secret.entries(key)
        self._plane.append(key, entries.entry(json.dumps([self._plane.world.rank, text]).encode()))
        told: dict[int, str] = {}

        def is_complete() -> bool:
            told.update(words_of(one) for one in entries.read(self._plane.read_unsigned(key) or b""))
            return len(told) == len(call.ranks)

        watch = _Watch(self._plane, self._name, call, self._made, self._locate)
        others = set(self._plane.world.ranks) - set(call.ranks)

        def look(elapsed_s: float) -> None:
            if (error := watch.look(elapsed_s, told)) is not None:
                self._end(error)

        with self._while_waiting(look):
            self._plane.poll(is_complete, self._patience(), what=str(call), arrived=lambda: set(told) | others)
        return told

    @contextmanager
    def at_gate(self, moment: str) -> Iterator[None]:
        """Stands around a gate: a rank that waits there says so to those that wait for it in a call."""
        self._made[_GATES] += 1
        ranks = tuple(self._plane.world.ranks)
        call = TracedCall(
            operation=f"the gate at {moment}", group="all ranks", ranks=ranks, sequence=_GATES,
            number=self._made[_GATES],
        )  # fmt: skip
        watch = _Watch(self._plane, self._name, call, self._made, self._locate)
        with self._while_waiting(watch.publish):
            yield

    @contextmanager
    def _while_waiting(self, look: Callable[[float], None]) -> Iterator[None]:
        """Has a function called beside what every wait of this plane does already."""
        beside = self._plane.on_wait

        def both(elapsed_s: float) -> None:
            if beside is not None:
                beside(elapsed_s)
            look(elapsed_s)

        self._plane.on_wait = both
        try:
            yield
        finally:
            self._plane.on_wait = beside

    def _end(self, error: DivergenceError) -> None:
        """One rank's decision holds for all of them: whoever hears of it raises the same."""
        first = self._plane.report_failure(error)
        if first is not None and first.rank != self._plane.world.rank:
            heard: DistplusError = first.as_heard()
            raise heard
        self._tell(error)


class _Watch:
    """Says, during one wait, where this rank waits, and looks where those wait that have not come."""

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        call: TracedCall,
        made: Counter[str],
        locate: Callable[[], str | None],
    ) -> None:
        self._plane = plane
        self._name = name
        self._call = call
        self._made = made
        self._locate = locate
        self._look_at_s = _ALONE_S
        self._line: str | None = None
        self._is_published = False

    def publish(self, elapsed_s: float) -> None:
        """Says where this rank waits, once it has waited for a while."""
        if self._is_published or elapsed_s < _ALONE_S:
            return
        self._is_published = True
        self._line = self._locate()
        own = {**asdict(self._call), "line": self._line}
        self._plane.send(f"{self._name}/at/{self._plane.world.rank}", json.dumps(own).encode())

    def look(self, elapsed_s: float, come: dict[int, str]) -> DivergenceError | None:
        """Publishes this rank's call, and compares it with those of the missing ranks."""
        if elapsed_s < self._look_at_s:
            return None
        self._look_at_s = 2 * elapsed_s
        self.publish(elapsed_s)
        rank = self._plane.world.rank
        missing = sorted(set(self._call.ranks) - set(come))
        elsewhere = {other: text for other in missing if (text := self._where(other)) is not None}
        if not elsewhere or (len(elsewhere) < len(missing) and elapsed_s < _SETTLED_S):
            return None
        return _disagreement({rank: f"{self._call}, at {self._line}", **elsewhere})

    def _where(self, other: int) -> str | None:
        """The call in which another rank waits for this one, and its line; None where it has told of none."""
        data = self._plane.read(f"{self._name}/at/{other}")
        if data is None:
            return None
        theirs = words_of(data)
        line, ranks = theirs.pop("line"), tuple(theirs.pop("ranks"))
        call = TracedCall(**theirs, ranks=ranks)
        return f"{call}, at {line}" if call.waits_for(self._plane.world.rank, self._made) else None


def _disagreement(values: dict[int, str]) -> DivergenceError:
    without_lines = {rank: text.rpartition(", at ")[0] for rank, text in values.items()}
    (common, count), *others = Counter(without_lines.values()).most_common()
    is_tie = bool(others) and others[0][1] == count
    wrong = sorted(rank for rank, text in without_lines.items() if is_tie or text != common)
    where = "and would wait for each other or mix their numbers; nothing was exchanged"
    return disagreement("collective", dict(sorted(values.items())), where=where, wrong=wrong, remedy=_REMEDY)
