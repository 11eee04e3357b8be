"""Oracles over whole runs: resuming is exact, all ranks hold the same, weights are bit for bit equal.

And the callbacks of Lightning that strike planned faults, and record for an oracle what a run did.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import xxhash
from lightning.pytorch.callbacks import Callback

from lightning_distplus.gathering import flatten
from lightning_distplus.testing.faults import FaultPlan, Where, local_part
from lightning_distplus.testing.spawning import Mode, SpawnResult, spawn
from lightning_distplus.timeouts import Duration
from lightning_distplus.world import ranks_by_text

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one rank saw in one run. Step ``k`` is the one that begins with ``k`` completed optimizer steps."""

    samples: dict[int, list[Any]]
    """Per step: the ids of the samples, in order."""
    losses: dict[int, list[str]]
    """Per step: the loss of each micro-batch as ``float.hex`` gives it, so that a comparison is bit for bit."""
    weights: str
    """Digest of the final weights of this rank (``weights_digest``)."""


class ResumableRun(Protocol):
    """A training run that the oracle can stop and continue. It is called in each rank of a new set of processes."""

    def __call__(self, max_steps: int, ckpt_path: str | None, save_at: Mapping[int, str]) -> Trace:
        """Trains until ``max_steps`` optimizer steps are complete.

        Args:
            max_steps: The total, also when the run continues from a checkpoint.
            ckpt_path: The checkpoint to continue from; None starts anew.
            save_at: ``{completed steps: path}`` of the checkpoints to write.
        """


def assert_resumes_exactly(
    run: ResumableRun,
    *,
    max_steps: int,
    save_at: Sequence[int] | None = None,
    world_size: int = 1,
    deadline: Duration = "60s",
    mode: Mode = "forkserver",
    folder: str | Path | None = None,
) -> dict[int, Trace]:
    """Proves that a run which is stopped and resumed is, bit for bit, the run that nobody disturbed.

    Runs once undisturbed, once saving at every save point (saving must change nothing), and once from each of these
    checkpoints, every time in new processes. Samples, losses and final weights must be equal on every rank. The idea of
    restoring at *every* step is Grain's; ``LightningRun`` makes a ``run`` from a Trainer, a model and data.

    Args:
        run: An importable function, or a picklable object such as ``LightningRun``.
        max_steps: Optimizer steps of the whole run.
        save_at: Completed steps at which to save; by default every one from 1 to ``max_steps - 1``.
        world_size: The number of ranks.
        deadline: The longest time of one run.
        mode: How the ranks are started.
        folder: Where the checkpoints go; by default a temporary folder.

    Returns:
        The traces of the undisturbed run, per rank.

    Raises:
        AssertionError: Names save point, rank, step and both values of the first difference.
    """
    points = range(1, max_steps) if save_at is None else save_at
    with tempfile.TemporaryDirectory(prefix="distplus-resume-") as temporary:
        paths = {step: str(Path(folder or temporary) / f"step={step}.ckpt") for step in points}

        def traces(ckpt_path: str | None, saves: Mapping[int, str]) -> dict[int, Trace]:
            result = spawn(run, world_size, args=(max_steps, ckpt_path, saves), deadline=deadline, mode=mode)
            return cast("dict[int, Trace]", result.check().results)

        undisturbed = traces(None, {})
        _require_steps(undisturbed, max_steps)
        _compare(undisturbed, traces(None, paths), 0, f"a run that saves at {list(points)}")
        for step, path in paths.items():
            _compare(undisturbed, traces(path, {}), step, f"a run resumed after {step} steps")
        return undisturbed


def assert_same_on_all_ranks(
    results: SpawnResult | Mapping[int, Any], key: str | Callable[[Any], Any] | None = None
) -> None:
    """Fails where a value differs between ranks, and names the ranks of each value.

    Args:
        results: What ``spawn`` returned, or a value per rank.
        key: Which part of the value must agree: a key of a mapping, an attribute, or a function of the value.

    Raises:
        AssertionError: The ranks differ, or there are none.
    """
    values = results.results if isinstance(results, SpawnResult) else results
    if isinstance(results, SpawnResult) and (missing := sorted(set(results.exit_codes) - set(values))):
        raise AssertionError(f"Ranks {missing} returned nothing to compare; their exit codes are {results.exit_codes}.")
    if not values:
        raise AssertionError("There is no rank to compare: the results are empty.")
    sides_of = ranks_by_text({rank: repr(_part(value, key)) for rank, value in values.items()})
    if len(sides_of) > 1:
        what = f"{key!r} differs" if isinstance(key, str) else "The value differs"
        sides = "\n".join(f"  ranks {ranks}: {_short(text)}" for text, ranks in sides_of.items())
        raise AssertionError(f"{what} between ranks:\n{sides}")


def weights_digest(source: torch.nn.Module | Mapping[str, Any]) -> str:
    """Digest of names, dtypes, shapes and bytes of all parameters and buffers, or of a state dict.

    Of a sharded model (FSDP, FSDP2, ZeRO-3) this rank's shard is read: no collective takes place, and the digests of
    two ranks differ. Compare them rank by rank between runs of the same world size.

    Args:
        source: A module, wrapped or not, or a possibly nested mapping of names to tensors and plain values.

    Returns:
        32 hexadecimal digits (XXH3, 128 bits), equal on every machine of the same byte order.
    """
    digest = xxhash.xxh3_128()
    if isinstance(source, torch.nn.Module):
        named: list[tuple[str, Any]] = [*source.named_parameters(), *source.named_buffers()]
    else:
        named, _ = flatten(source)
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name}={value!r};".encode())
            continue
        local = local_part(value).detach().cpu().contiguous()
        digest.update(f"{name}:{local.dtype}:{tuple(local.shape)};".encode())
        digest.update(local.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_steps(undisturbed: Mapping[int, Trace], max_steps: int) -> None:
    for rank, trace in undisturbed.items():
        if sorted(trace.samples) != list(range(max_steps)):
            raise AssertionError(
                f"Rank {rank} of the undisturbed run recorded the steps {sorted(trace.samples)}, not 0 to "
                f"{max_steps - 1}. The data must last for max_steps, and the trace must have an entry for each step."
            )


def _compare(expected: Mapping[int, Trace], found: Mapping[int, Trace], from_step: int, run: str) -> None:
    for rank, trace in expected.items():
        for field in ("samples", "losses"):
            of_field: dict[int, Any] = getattr(trace, field)
            wanted = {step: value for step, value in of_field.items() if step >= from_step}
            seen: dict[int, Any] = getattr(found[rank], field)
            for step in sorted({*wanted, *seen}):
                if wanted.get(step) != seen.get(step):
                    raise AssertionError(
                        f"{run} differs from the undisturbed run: {field} of rank {rank} in step {step}\n"
                        f"  undisturbed: {_short(repr(wanted.get(step)))}\n"
                        f"  this run:    {_short(repr(seen.get(step)))}"
                    )
        if trace.weights != found[rank].weights:
            raise AssertionError(
                f"{run} saw the same samples and losses as the undisturbed run, but the final weights of rank {rank} "
                f"differ: {trace.weights} and {found[rank].weights}. The last optimizer step differs: look at its "
                "learning rate, its gradient clipping, and the state of the optimizer."
            )


def _part(value: Any, key: str | Callable[[Any], Any] | None) -> Any:
    if key is None:
        return value
    if not isinstance(key, str):
        return key(value)
    return value[key] if isinstance(value, Mapping) else getattr(value, key)


def _short(text: str, length: int = 300) -> str:
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


# -- callbacks of Lightning --------------------------------------------------------------------------------------------


def _fires(where: Where, when: str) -> Any:
    def hook(self: FaultCallback, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        if where in ("batch_start", "validation", "save"):
            self._step = trainer.global_step
        loss = rest[0] if where == "before_backward" else None
        self.plan.fire(trainer.global_rank, self._step, where, loss=loss, module=trainer.strategy.model)

    hook.__doc__ = f"``{where}``: {when}."
    return hook


class FaultCallback(Callback):
    """Fires the faults of a plan at the points of the training loop that they name.

    A step is counted as in ``Fault.step``; with accumulation the first micro-batch of a step meets the fault. At
    ``validation`` and ``save`` the step is the Trainer's ``global_step`` then. Put it first among the callbacks: then a
    fault at ``batch_start`` strikes before any other callback has seen the batch.

    Args:
        plan: The plan; None takes the one that ``spawn`` gave to this process.
    """

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = FaultPlan.from_environment() if plan is None else plan
        self._step = 0

    on_train_batch_start = _fires("batch_start", "the batch is fetched, nothing is computed")
    on_before_backward = _fires("before_backward", "the loss is there")
    on_after_backward = _fires("after_backward", "the engine has reduced the gradients")
    on_before_optimizer_step = _fires("before_optimizer_step", "the gradients are final")
    on_train_batch_end = _fires("batch_end", "the optimizer step is done")
    on_validation_batch_start = _fires("validation", "before a validation batch")
    on_save_checkpoint = _fires("save", "the state is collected, nothing is written")


@dataclass(frozen=True, kw_only=True)
class LightningRun:
    """Trains with Lightning, records every step, and saves where the oracle asks for it.

    ``assert_resumes_exactly(LightningRun(...), max_steps=6, world_size=2)`` calls it. All four arguments are importable
    functions.
    """

    make_trainer: Callable[..., Trainer]
    """``make_trainer(max_steps=, callbacks=)``; the callbacks go last into the list of the Trainer."""
    make_model: Callable[[], LightningModule]
    """The model, with the same initial weights in every call; ``training_step`` returns a loss."""
    make_data: Callable[[], LightningDataModule]
    """The data module."""
    sample_ids: Callable[[Any], list[Any]]
    """The ids of the samples in a batch, in order; something that compares by value."""

    def __call__(self, max_steps: int, ckpt_path: str | None, save_at: Mapping[int, str]) -> Trace:
        """Trains until ``max_steps`` optimizer steps are complete; see ``ResumableRun``."""
        recorder = _Recorder(self.sample_ids, save_at)
        trainer = self.make_trainer(max_steps=max_steps, callbacks=[recorder])
        trainer.fit(self.make_model(), datamodule=self.make_data(), ckpt_path=ckpt_path)
        return Trace(samples=dict(recorder.samples), losses=dict(recorder.losses), weights=recorder.weights)


class _Recorder(Callback):
    def __init__(self, sample_ids: Callable[[Any], list[Any]], save_at: Mapping[int, str]) -> None:
        self.sample_ids = sample_ids
        self.save_at = save_at
        self.samples: dict[int, list[Any]] = defaultdict(list)
        self.losses: dict[int, list[str]] = defaultdict(list)
        self.weights = ""
        self._step = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        self.samples[self._step] += self.sample_ids(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self.losses[self._step].append(float(loss).hex())
        if trainer.global_step > self._step and (path := self.save_at.get(trainer.global_step)):
            trainer.save_checkpoint(path)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights = weights_digest(cast("Any", trainer.strategy.model))
