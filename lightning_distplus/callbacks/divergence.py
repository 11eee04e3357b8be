"""The callback that compares the ranks before each step, and stops the run before a difference does damage."""

from __future__ import annotations

from typing import Any, Literal

from lightning_distplus.callbacks.batches import BatchShapes
from lightning_distplus.callbacks.checks import make_checks
from lightning_distplus.callbacks.monitor import GateMonitor, OnDivergence
from lightning_distplus.callbacks.plan import RngPolicy
from lightning_distplus.callbacks.spikes import OnSpike
from lightning_distplus.callbacks.stragglers import OnStraggler
from lightning_distplus.choices import require_choice
from lightning_distplus.errors import CheckpointMismatch

__all__ = ["OnDivergence", "OnLocalFailure", "RankDivergenceMonitor"]

OnLocalFailure = Literal["raise", "skip_all"]

STATE_VERSION = 1


class RankDivergenceMonitor(GateMonitor):
    """Names the rank that differs from the others before its difference reaches a collective or the weights.

    Works with every strategy of Lightning; on a Resilient one it uses that strategy's gate.

    Args:
        every_n_steps: How often the batches are looked into. Place, learning rate and settings are compared each step.
        parameters_every_n_steps: How often replicated state is compared in full.
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
        on_spike: What follows when one rank's loss or gradient norm stands out from the others' and from its own past:
            ``"warn"`` (rank, step, samples), ``"raise"``, or ``"ignore"``.
        on_straggler: What follows when the others wait for one rank in every step: ``"warn"`` as ``StragglerMonitor()``
            does, or ``"ignore"``.
        replay_suspects: Compute a step again, on its rank alone, when its loss or gradients stand out or are not
            finite: the same again speaks for the samples, otherwise the device miscalculated. For DDP with one
            micro-batch per step; costs a copy of buffers and generators per step, and of the model in a replay.
        state_at_rest: Fingerprint what this rank alone holds (its shards of weights and optimizer state) after each
            step, and again before the next one: finds memory that changes by itself. Costs two passes over it.
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
        on_spike: OnSpike = "warn",
        replay_suspects: bool = False,
        batch_shapes: BatchShapes = "any",
        on_straggler: OnStraggler = "warn",
    ) -> None:
        super().__init__(max_skips_in_a_row=max_skips_in_a_row)
        for name, value in (("every_n_steps", every_n_steps), ("parameters_every_n_steps", parameters_every_n_steps)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it is at least 1.")
        require_choice("on_divergence", on_divergence, OnDivergence)
        require_choice("on_local_failure", on_local_failure, OnLocalFailure)
        require_choice("on_spike", on_spike, OnSpike)
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
        self.on_spike = on_spike
        self.on_straggler = on_straggler
        self.replay_suspects = replay_suspects
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
