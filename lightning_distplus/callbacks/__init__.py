"""Lightning callbacks, each one idea; they work with any strategy."""

from lightning_distplus.callbacks.divergence import RankDivergenceMonitor

__all__ = ["RankDivergenceMonitor"]
