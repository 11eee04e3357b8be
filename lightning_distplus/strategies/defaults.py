"""What one line brings to a fit: the divergence monitor, the preemption handler, a log that is seen, and a summary."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback

from lightning_distplus import env
from lightning_distplus.data.dataloader_resume import LoaderResume
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.divergence import RankDivergenceMonitor
from lightning_distplus.preemption import PreemptionHandler, checkpoint_folder
from lightning_distplus.strategies.telemetry import Telemetry
from lightning_distplus.timeouts import Phase

if TYPE_CHECKING:
    from lightning_distplus.strategies.base import ResilientStrategy

__all__ = ["bring_callbacks", "require_callback", "show_log", "summary"]

_PACKAGE = "lightning_distplus"

# -- callbacks ---------------------------------------------------------------------------------------------------------


def require_callback(name: str, value: object, kind: type[Callback]) -> None:
    """Refuses anything but True, False and an instance.

    Raises:
        TypeError: Names the argument, its value and what it may be.
    """
    if not isinstance(value, (bool, kind)):
        raise TypeError(f"{name} is {value!r}; it is True, False or a {kind.__name__}.")


def bring_callbacks(strategy: ResilientStrategy, trainer: Any) -> list[Callback]:
    """Adds to the Trainer of a fit what it lacks: monitor, handler, exact resume of loaders; before their first hook.

    A callback of the user's own wins, also over an instance that the strategy was given. By default a run of one rank
    has no monitor, because there is nothing to compare, and a Trainer with ``barebones=True`` neither of them. Under
    Slurm without a script of ``distplus launch slurm``, Lightning's own requeue stays in charge of the signals: a
    handler in its place would end the job, and nobody would start it again. An instance is always taken.

    Returns:
        What was added; ``trainer.callbacks`` is as it was without them.
    """
    monitors = strategy.world_size > 1 and not trainer.barebones
    handles = not trainer.barebones and not _is_requeued_by_lightning(strategy)
    wishes: tuple[tuple[type[Callback], Callback | bool, bool], ...] = (
        (RankDivergenceMonitor, strategy.monitor, monitors),
        (PreemptionHandler, strategy.preemption, handles),
    )
    brought: list[Callback] = []
    for kind, wish, by_default in wishes:
        if wish is False or (wish is True and not by_default):
            continue
        if not any(isinstance(callback, kind) for callback in trainer.callbacks):
            brought.append(kind() if isinstance(wish, bool) else wish)
    if strategy.data == "exact" and not isinstance(trainer.datamodule, ExactDataModule):
        brought.insert(0, LoaderResume(trainer, seeds_samples=strategy.seed_samples))  # its records are made first
    if strategy.metrics_port is not None or (strategy.log_figures and not trainer.barebones):
        brought.append(Telemetry(strategy, strategy.metrics_port, logs=strategy.log_figures))
    trainer.callbacks[:0] = brought  # a ModelCheckpoint stays the last one
    return brought


def _is_requeued_by_lightning(strategy: ResilientStrategy) -> bool:
    environment = strategy.cluster_environment
    is_asked = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    return is_asked and env.DISTPLUS_HOME_FILE.get() is None


# -- one line at the start of a fit ------------------------------------------------------------------------------------


def summary(strategy: ResilientStrategy, trainer: Any) -> str:
    """What watches over this fit, in one line."""
    ranks = "1 rank" if strategy.world_size == 1 else f"{strategy.world_size} ranks"
    return ", ".join([f"distplus: {type(strategy).__name__} on {ranks}", *_parts(strategy, trainer)])


def _parts(strategy: ResilientStrategy, trainer: Any) -> Iterator[str]:
    kinds = [type(callback) for callback in trainer.callbacks]
    if strategy.world_size > 1:
        deadline = None if strategy.timeouts is None else strategy.timeouts.deadline(Phase.STEP)
        auto = ", measured as it runs" if strategy.measured.calibration is not None else ""
        yield "no deadlines" if deadline is None else f"step deadline {_short(deadline)}{auto}"
        has_monitor = any(issubclass(kind, RankDivergenceMonitor) for kind in kinds)
        yield f"divergence monitor {'on' if has_monitor else 'off'}"
    if any(issubclass(kind, PreemptionHandler) for kind in kinds):
        yield f"SIGTERM saves to {_shown(checkpoint_folder(trainer))}"
    elif _is_requeued_by_lightning(strategy):
        yield "SIGTERM and SIGUSR1 are left to Lightning's Slurm requeue"
    else:
        yield "SIGTERM saves nothing"
    yield f"data: {_data(strategy, trainer)}"
    yield f"events in {_shown(strategy.home)}"


def _data(strategy: ResilientStrategy, trainer: Any) -> str:
    if isinstance(trainer.datamodule, ExactDataModule):
        return f"exact resume ({type(trainer.datamodule).__name__})"
    if strategy.data == "as_is":
        return "as it is"
    loaders = next((one for one in trainer.callbacks if isinstance(one, LoaderResume)), None)
    return "exact resume (DataLoader)" if loaders is not None and loaders.is_exact else "a resume begins the epoch anew"


def _short(duration: timedelta) -> str:
    seconds = duration.total_seconds()
    for unit, length in (("h", 3600), ("m", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds:g}s"


def _shown(path: Path) -> str:
    """Below the working directory without it."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)


# -- a log that is seen ------------------------------------------------------------------------------------------------


class _OnStderr(logging.StreamHandler[Any]):
    """Writes what concerns a user who has configured no logging; what is no warning, of rank 0 alone."""

    is_global_zero = True

    def emit(self, record: logging.LogRecord) -> None:
        if self.is_global_zero or record.levelno >= logging.WARNING:
            super().emit(record)


def show_log(*, is_global_zero: bool) -> None:
    """Shows the lines of this package on standard error, as Lightning does with its own.

    Where the user has configured logging, only that counts.
    """
    logger = logging.getLogger(_PACKAGE)
    ours = [handler for handler in logger.handlers if isinstance(handler, _OnStderr)]
    others = [handler for handler in logger.handlers if handler not in ours]
    if logging.getLogger().handlers or others:
        for handler in ours:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        return
    if not ours:
        ours = [_OnStderr()]
        logger.addHandler(ours[0])
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    ours[0].is_global_zero = is_global_zero
