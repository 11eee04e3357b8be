"""The ways in which one rank can come to differ: each is planted on one rank of any run."""

from tests.faults.divergences import calls, course, state
from tests.faults.divergences.registry import DIVERGENCES, Divergence, Run, own_loader

__all__ = ["DIVERGENCES", "Divergence", "Run", "calls", "course", "own_loader", "state"]
