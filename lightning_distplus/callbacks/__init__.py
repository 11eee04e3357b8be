"""Lightning callbacks, each one idea; they work with any strategy."""

from lightning_distplus.callbacks.divergence import RankDivergenceMonitor
from lightning_distplus.callbacks.preemption import PreemptionHandler
from lightning_distplus.callbacks.stragglers import StragglerMonitor

__all__ = ["PreemptionHandler", "RankDivergenceMonitor", "StragglerMonitor"]
