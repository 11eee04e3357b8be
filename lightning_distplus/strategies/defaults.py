"""What one line brings to a fit: monitor, preemption handler, figures for people, a log that is seen, a summary."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_distplus import env
from lightning_distplus.data.dataloader import LoaderResume
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.progress import data_parallel
from lightning_distplus.divergence import RankDivergenceMonitor
from lightning_distplus.divergence.check import GateMonitor
from lightning_distplus.preemption import PreemptionHandler, checkpoint_folder
from lightning_distplus.process import age_of_process
from lightning_distplus.report.health import Endpoint
from lightning_distplus.timeouts import Phase
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts

if TYPE_CHECKING:
    from lightning_distplus.strategies.base import ResilientStrategy

__all__ = ["Telemetry", "batch_sizes", "bring_callbacks", "require_callback", "show_log", "summary"]

log = logging.getLogger(__name__)

_PACKAGE = "lightning_distplus"

# -- callbacks ---------------------------------------------------------------------------------------------------------


def require_callback(name: str, value: object, kind: type[Callback]) -> None:
    """Refuses anything but True, False and an instance, by a TypeError."""
    if not isinstance(value, (bool, kind)):
        raise TypeError(f"{name} is {value!r}; it is True, False or a {kind.__name__}.")


def bring_callbacks(strategy: ResilientStrategy, trainer: Any) -> list[Callback]:
    """Adds to the Trainer of a fit what it lacks: monitor, handler, exact resume of loaders; before their first hook.

    A callback of the user's own wins, also over an instance that the strategy was given. By default a run of one rank
    has no monitor, because there is nothing to compare, and a Trainer with ``barebones=True`` neither of them. Under
    Slurm without a script of ``distplus launch slurm``, Lightning's own requeue stays in charge of the signals: a
    handler in its place would end the job, and nobody would start it again. An instance is always taken. Returns what
    was added.
    """
    wishes: tuple[tuple[type[Callback], Callback | bool, bool], ...] = (
        (RankDivergenceMonitor, strategy.monitor, strategy.world_size > 1),
        (PreemptionHandler, strategy.preemption, not _is_requeued_by_lightning(strategy)),
    )
    brought: list[Callback] = []
    for kind, wish, by_default in wishes:
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            continue
        if isinstance(wish, Callback):
            brought.append(wish)
        elif wish and by_default and not trainer.barebones:
            brought.append(kind())
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
    else:
        is_requeued = _is_requeued_by_lightning(strategy)
        yield "SIGTERM and SIGUSR1 are left to Lightning's Slurm requeue" if is_requeued else "SIGTERM saves nothing"
    yield f"data: {_data(strategy, trainer)}"
    yield f"events in {_shown(strategy.home)}"


def _data(strategy: ResilientStrategy, trainer: Any) -> str:
    if isinstance(trainer.datamodule, ExactDataModule):
        return f"exact resume ({type(trainer.datamodule).__name__})"
    if strategy.data == "as_is":
        return "as it is"
    is_exact = any(isinstance(one, LoaderResume) and one.is_exact for one in trainer.callbacks)
    return "exact resume (DataLoader)" if is_exact else "a resume begins the epoch anew"


def _short(duration: timedelta) -> str:
    seconds = duration.total_seconds()
    unit, length = next((one for one in (("h", 3600), ("m", 60)) if seconds and seconds % one[1] == 0), ("s", 1))
    return f"{seconds / length:g}{unit}"


def _shown(path: Path) -> str:
    """Below the working directory without it."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)


def batch_sizes(trainer: Any) -> dict[str, int]:
    """What all ranks train on in an optimizer step: ``samples``, and ``tokens`` where the data has a ``seq_len``."""
    data = trainer.datamodule
    micro_batch = getattr(data, "micro_batch", None) or getattr(trainer.train_dataloader, "batch_size", None)
    if not isinstance(micro_batch, int):
        return {}
    samples = micro_batch * data_parallel(trainer).size * trainer.accumulate_grad_batches
    length = getattr(data, "seq_len", None)
    return {"samples": samples, **({"tokens": samples * length} if isinstance(length, int) else {})}


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


# -- figures where people watch ----------------------------------------------------------------------------------------


class Telemetry(Callback):
    """Tells the figures of a run, on rank 0, from what that rank knows: no collective, and no wait for a device.

    It writes straight to the loggers, so that ``trainer.logged_metrics`` and ``callback_metrics`` stay the user's.
    Without a port there is no endpoint for Prometheus, and without ``logs`` neither loggers nor progress bar are told.
    """

    def __init__(self, strategy: ResilientStrategy, port: int | None, *, logs: bool) -> None:
        self._strategy = strategy
        self._health = strategy.health
        self._port = port
        self._logs = logs
        self._endpoint: Endpoint | None = None
        self._bar: ProgressBar | None = None
        self._before: Any = None  # what the user has put in the place of that bar's method
        self._loggers: list[Any] = []  # of rank 0, once it trains
        self._monitor: GateMonitor | None = None
        self._logged_at = -1
        self._is_over = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to tell."""
        self._logged_at, self._is_over = trainer.global_step, False
        if not trainer.is_global_zero:
            return
        self._loggers = list(trainer.loggers)
        self._monitor = next((one for one in trainer.callbacks if isinstance(one, GateMonitor)), None)
        plane, home = self._strategy.plane, self._strategy.home
        self._health.begin(home, plane.world.rank, plane.run_id, plane.attempt, time.time() - age_of_process())
        if self._port is not None and self._endpoint is None:
            self._serve(self._port)
        if self._logs:
            self._extend_bar(trainer.progress_bar_callback)
            self.log_verdicts()  # on the attempts before this one

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tells the loggers, at their own cadence."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if not (self._logs and trainer.is_global_zero and trainer.loggers) or self._is_over or not every:
            return
        if step // every == self._logged_at // every:
            return
        self._logged_at, figures = step, self.figures()
        scalars = {f"distplus/{name}": float(value) for name, value in figures.items() if name != "global_step"}
        try:
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=step)
        except Exception as error:  # a logger that fails is the user's; but for these figures no run ends
            self._is_over = True
            log.warning("the figures of the run are not logged any more (%s: %s)", type(error).__name__, error)

    def teardown(self, trainer: Any, pl_module: Any, stage: Any) -> None:
        """Puts everything back; never raises."""
        bar, self._bar = self._bar, None
        if bar is not None:
            vars(bar).pop("get_metrics", None)
            if self._before is not None:
                vars(bar)["get_metrics"] = self._before
        endpoint, self._endpoint = self._endpoint, None
        with suppress(Exception):
            if endpoint is not None:
                endpoint.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Puts everything back; never raises."""
        self.teardown(trainer, pl_module, None)

    def figures(self) -> dict[str, float]:
        """Those of this rank, and the counts of the divergence monitor."""
        found = self._health.figures()
        if self._monitor is not None:
            found["divergence_checks"] = self._monitor.num_compared
        return found

    def log_verdicts(self, since: float = 0.0) -> None:
        """Tells the loggers the verdicts on this run since then as text, where they take text; never raises."""
        if not (self._logs and self._loggers):
            return
        with suppress(Exception):  # a file of another version, or a logger that fails
            for told in find_verdicts(self._strategy.home, run_id=self._strategy.plane.run_id, since=since):
                verdict = Verdict.from_json(told["path"].read_bytes())
                for logger in self._loggers:
                    log_text(logger, f"distplus/{verdict.incident}", verdict.render(), verdict.global_step)

    # -- the bar, and the endpoint -----------------------------------------------------------------------------------

    def _extend_bar(self, bar: ProgressBar | None) -> None:
        """Adds to what the bar shows beside it; bars that are not of these two kinds are left alone."""
        if self._bar is not None or not isinstance(bar, TQDMProgressBar | RichProgressBar):
            return
        inner, health = bar.get_metrics, self._health
        self._before = vars(bar).get("get_metrics")

        def get_metrics(trainer: Any, pl_module: Any) -> dict[str, Any]:
            return {**health.for_the_bar(), **inner(trainer, pl_module)}  # a name of the user's wins

        vars(bar)["get_metrics"] = get_metrics
        self._bar = bar

    def _serve(self, port: int) -> None:
        try:
            self._endpoint = Endpoint(port, self._strategy.plane.run_id, self)
        except ImportError:
            log.warning("metrics_port needs prometheus-client: pip install 'lightning-distplus[prometheus]'")
        except OSError as error:
            log.warning("nothing serves the figures of the run on port %d (%s); training goes on", port, error)


def log_text(logger: Any, name: str, text: str, step: int) -> None:
    """Logs a text where Lightning's logger, or what is behind it, takes one."""
    if isinstance(logger, WandbLogger):
        logger.log_text(key=name, columns=["verdict"], data=[[text]])
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_text(logger.run_id, text, f"{name}.txt")
    elif isinstance(logger, TensorBoardLogger) or hasattr(logger.experiment, "add_text"):
        logger.experiment.add_text(name, "    " + text.replace("\n", "\n    "), step)  # as code, in Markdown
