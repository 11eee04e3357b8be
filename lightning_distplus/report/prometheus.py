"""An endpoint for Prometheus: the figures of a run, asked for when it scrapes; needs the extra ``[prometheus]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_distplus.report.health import FIGURES

__all__ = ["Endpoint", "metric_name"]


def metric_name(figure: str) -> str:
    """``distplus_checkpoint_age_seconds`` of ``checkpoint_age_s``: Prometheus spells units out."""
    stem = f"{figure.removesuffix('_s')}_seconds" if figure.endswith("_s") else figure
    return f"distplus_{stem}" + ("_ratio" if figure == "goodput" else "")


class Endpoint:
    """Serves ``/metrics`` from a thread of its own, on all addresses of this host.

    Args:
        port: Where; 0 takes a free one.
        run_id: Stands at each figure as the label ``run_id``.
        figures: Asked for at each scrape, on another thread; by name.

    Raises:
        ImportError: ``prometheus-client`` is not installed.
        OSError: The port is taken.
    """

    def __init__(self, port: int, run_id: str, figures: Callable[[], Mapping[str, float]]) -> None:
        import prometheus_client

        self._run_id = run_id
        self._figures = figures
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        self._server, self._thread = prometheus_client.start_http_server(port, registry=registry)
        self.port = int(self._server.server_port)

    def collect(self) -> Iterator[Any]:
        """Called by the client library for each scrape."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._figures().items():
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
