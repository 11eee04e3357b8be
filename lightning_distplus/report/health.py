"""The figures of a run while it goes on, from what its own rank sees: for loggers, the progress bar and Prometheus."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lightning_distplus.report.goodput import Window, find_attempts, split_wall_time
from lightning_distplus.report.run import chains_of, read_ledgers
from lightning_distplus.watchdog.verdict import duration_in_words

if TYPE_CHECKING:
    from lightning_distplus.control import GateRecord

__all__ = ["FIGURES", "Endpoint", "FigureSource", "RunHealth", "metric_name"]


FIGURES = {
    "global_step": "optimizer steps that are done",
    "goodput": "part of the wall time of the job, over all attempts, that trained the model",
    "step_p50_s": "seconds of a step without waiting for slower ranks, median over the ranks",
    "step_p95_s": "the same, 95th percentile over the ranks",
    "slowest_rank": "the rank for which the others wait longest; -1 where they wait for none",
    "slowest_excess_s": "seconds by which its step is longer than the median over the ranks",
    "checkpoint_age_s": "seconds since the last commit, before it since training began",
    "checkpoint_stall_s": "seconds for which training stood still for the last save",
    "restarts": "attempts of the job before this one",
    "divergence_checks": "steps in which the divergence monitor has compared the ranks",
}
"""Each with its meaning; those of a step are medians of the last 64."""
_NUM_STEPS = 64
_SHOWN_SHARE = 0.1  # of a step: so late a rank still is that the run has named, or the bar leaves it out


class RunHealth:
    """Keeps what rank 0 sees of its run: it asks no other rank, and reads nothing but its own ledger, once."""

    def __init__(self) -> None:
        self._reset(time.time())

    def _reset(self, now: float) -> None:
        self._steps: deque[tuple[float, list[float]]] = deque(maxlen=_NUM_STEPS)
        self._passed_at = math.nan
        self._global_step = 0
        self._job_began = self._safe_since = now
        self._trained_s = self._stall_s = 0.0
        self._num_restarts = 0
        self._has_saved = False
        self._named: set[int] = set()

    def begin(self, home: Path, rank: int, run_id: str, attempt: int, began: float) -> None:
        """Training begins: reads what earlier attempts of the job have left in the ledger of this rank; never raises.

        Args:
            home: The folder of the artefacts.
            rank: This rank.
            run_id: ``ControlPlane.run_id``.
            attempt: Restarts before this process, where there is no ledger.
            began: Unix time at which this process began.
        """
        now = time.time()
        self._reset(now)
        self._job_began, self._num_restarts = began, attempt
        try:
            ledgers = read_ledgers(home, rank=rank)
            own = ledgers.of_runs(next(runs for runs in chains_of(ledgers) if run_id in runs))
            attempts = find_attempts(own.events, own.windows, own.verdicts, now)
            goodput = split_wall_time(attempts)
            self._trained_s = goodput["share"] * goodput["wall_s"]
            self._job_began, self._num_restarts = attempts[0].began, len(attempts) - 1
        except (OSError, ValueError, LookupError, StopIteration):  # no ledger: only this attempt counts
            return

    def take(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Hears one event that this rank has just written."""
        if kind == "steps":
            window = Window.from_event({"time": 0.0, **fields})
            self._trained_s += max(window.step_s * window.steps - window.data_s, 0.0)
        elif kind == "saved":
            self._safe_since, self._has_saved = time.time(), True
            self._stall_s = fields.get("stall_s", 0.0)
        elif kind == "straggler":
            self._named.update(fields.get("ranks", ()))

    def pass_gate(self, global_step: int, records: Sequence[GateRecord]) -> None:
        """All ranks leave the gate of a step; a few microseconds."""
        now = time.monotonic()
        step_s, self._passed_at, self._global_step = now - self._passed_at, now, global_step
        late = [one.lead_s - one.wait_s for one in records]
        if math.isfinite(step_s + sum(late)):
            self._steps.append((step_s, late))

    def figures(self) -> dict[str, float]:
        """By the names of ``FIGURES``; those of which nothing is known yet are left out. Any thread may ask."""
        now = time.time()
        found: dict[str, float] = {
            "global_step": self._global_step,
            "checkpoint_age_s": max(now - self._safe_since, 0.0),
            "restarts": self._num_restarts,
        }
        if self._trained_s > 0:
            found["goodput"] = min(self._trained_s / max(now - self._job_began, 1e-9), 1.0)
        if self._has_saved:
            found["checkpoint_stall_s"] = self._stall_s
        return found | self._of_steps()

    def _of_steps(self) -> dict[str, float]:
        steps = self._steps.copy()
        if not steps:
            return {}
        step_s = float(np.median([took for took, _ in steps]))
        late = np.median(np.array([late for _, late in steps]), axis=0)
        own = np.maximum(step_s - (late.max() - late), 0.0)  # the latest rank has no time to wait
        excess = float(late.max() - np.median(late))
        return {
            "step_p50_s": float(np.percentile(own, 50)),
            "step_p95_s": float(np.percentile(own, 95)),
            "slowest_rank": int(late.argmax()) if excess > 0 else -1,
            "slowest_excess_s": excess,
        }

    def for_the_bar(self) -> dict[str, str]:
        """What a progress bar has room for: the age of the last commit, and a rank that was named and is late still."""
        shown = {"ckpt": f"{duration_in_words(time.time() - self._safe_since)} ago"} if self._has_saved else {}
        found = self._of_steps() if self._named else {}
        rank, excess = int(found.get("slowest_rank", -1)), found.get("slowest_excess_s", 0.0)
        if rank in self._named and excess > _SHOWN_SHARE * found["step_p95_s"]:
            shown["slow"] = f"rank {rank} +{1e3 * excess:.0f} ms"
        return shown


# -- Prometheus --------------------------------------------------------------------------------------------------------


def metric_name(figure: str) -> str:
    """``distplus_checkpoint_age_seconds`` of ``checkpoint_age_s``: Prometheus spells units out."""
    stem = f"{figure.removesuffix('_s')}_seconds" if figure.endswith("_s") else figure
    return f"distplus_{stem}" + ("_ratio" if figure == "goodput" else "")


class FigureSource(Protocol):
    """Knows the figures of a run."""

    def figures(self) -> Mapping[str, float]:
        """By the names of ``FIGURES``."""
        ...


class Endpoint:
    """Serves ``/metrics`` from a thread of its own, on all addresses of this host.

    Args:
        port: Where; 0 takes a free one.
        run_id: Stands at each figure as the label ``run_id``.
        source: Asked at each scrape, on another thread.

    Raises:
        ImportError: ``prometheus-client`` is not installed.
        OSError: The port is taken.
    """

    def __init__(self, port: int, run_id: str, source: FigureSource) -> None:
        import prometheus_client

        self._run_id = run_id
        self._source = source
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        self._server, self._thread = prometheus_client.start_http_server(port, registry=registry)
        self.port = int(self._server.server_port)

    def collect(self) -> Iterator[Any]:
        """Called by the client library for each scrape."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._source.figures().items():
            gauge = GaugeMetricFamily(metric_name(name), FIGURES.get(name, name), labels=["run_id"])
            gauge.add_metric([self._run_id], value)
            yield gauge

    def describe(self) -> list[Any]:
        """Nothing: the names are known at the first scrape."""
        return []

    def close(self) -> None:
        """Stops to serve."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)
