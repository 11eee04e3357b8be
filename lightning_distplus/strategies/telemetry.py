"""Where people watch already: the Trainer's loggers, its progress bar, and Prometheus."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback, ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_distplus.divergence.check import GateMonitor
from lightning_distplus.process import age_of_process
from lightning_distplus.report.health import Endpoint, RunHealth
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts

if TYPE_CHECKING:
    from lightning_distplus.strategies.base import ResilientStrategy

__all__ = ["Telemetry"]

log = logging.getLogger(__name__)


class Telemetry(Callback):
    """Tells the figures of a run, on rank 0, from what that rank knows: no collective, and no wait for a device.

    It writes straight to the loggers, so that ``trainer.logged_metrics`` and ``callback_metrics`` stay the user's.

    Args:
        strategy: One of ours.
        port: Of the endpoint for Prometheus; None: there is none.
        logs: Whether the loggers and the progress bar are told.
    """

    def __init__(self, strategy: ResilientStrategy, port: int | None, *, logs: bool) -> None:
        self._strategy = strategy
        self._port = port
        self._logs = logs
        self._endpoint: Endpoint | None = None
        self._bar: ProgressBar | None = None
        self._before: Any = None
        """What the user has put in the place of that bar's method."""
        self._loggers: list[Any] = []
        """Of rank 0, once it trains."""
        self._logged_at = -1
        self._is_over = False

    @property
    def _health(self) -> RunHealth:
        return self._strategy.health

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins to tell."""
        self._logged_at, self._is_over = trainer.global_step, False
        if not trainer.is_global_zero:
            return
        self._loggers = list(trainer.loggers)
        plane, home = self._strategy.plane, self._strategy.home
        self._health.begin(home, plane.world.rank, plane.run_id, plane.attempt, time.time() - age_of_process())
        if self._port is not None and self._endpoint is None:
            self._serve(self._port, trainer)
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
        self._logged_at = step
        scalars = {f"distplus/{name}": float(value) for name, value in self.figures(trainer).items()}
        scalars.pop("distplus/global_step", None)
        try:
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=step)
        except Exception as error:  # a logger that fails is the user's; but for these figures no run ends
            self._is_over = True
            log.warning("the figures of the run are not logged any more (%s: %s)", type(error).__name__, error)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Puts everything back; never raises."""
        self._stop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Puts everything back; never raises."""
        self._stop()

    def figures(self, trainer: Any) -> dict[str, float]:
        """Those of this rank, and the counts of the divergence monitor."""
        monitors = [one for one in trainer.callbacks if isinstance(one, GateMonitor)]
        found = self._health.figures()
        if monitors:
            found["divergence_checks"] = monitors[0].num_compared
        return found

    def log_verdicts(self, since: float = 0.0) -> None:
        """Tells the loggers the verdicts on this run as text, where they take text; never raises.

        Args:
            since: Unix time; older ones are left out.
        """
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

    def _serve(self, port: int, trainer: Any) -> None:
        try:
            self._endpoint = Endpoint(port, self._strategy.plane.run_id, lambda: self.figures(trainer))
        except ImportError:
            log.warning("metrics_port needs prometheus-client: pip install 'lightning-distplus[prometheus]'")
        except OSError as error:
            log.warning("nothing serves the figures of the run on port %d (%s); training goes on", port, error)

    def _stop(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            vars(bar).pop("get_metrics", None)
            if self._before is not None:
                vars(bar)["get_metrics"] = self._before
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            with suppress(Exception):
                endpoint.close()


def log_text(logger: Any, name: str, text: str, step: int) -> None:
    """Logs a text where Lightning's logger, or what is behind it, takes one."""
    if isinstance(logger, WandbLogger):
        logger.log_text(key=name, columns=["verdict"], data=[[text]])
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_text(logger.run_id, text, f"{name}.txt")
    elif isinstance(logger, TensorBoardLogger) or hasattr(logger.experiment, "add_text"):
        logger.experiment.add_text(name, "    " + text.replace("\n", "\n    "), step)  # as code, in Markdown
