"""Callbacks that compare the ranks, on any strategy: which rank differs, or is slow."""

from lightning_distplus.divergence.monitor import RankDivergenceMonitor
from lightning_distplus.divergence.stragglers import StragglerMonitor

__all__ = ["RankDivergenceMonitor", "StragglerMonitor"]
