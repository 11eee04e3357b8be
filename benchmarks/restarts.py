"""From the SIGKILL of one of two ranks to the next training step, below three launchers, by the same script.

The job of ``benchmarks.hangs`` with its fault "kill", one run at a time, the arms in turn. The rival needs
``DISTPLUS_RIVALS_PYTHON``, as described there, else it is left out.
"""

from __future__ import annotations

from math import inf

from benchmarks.figures import Figure, bootstrap_ci95, median
from benchmarks.hangs import has_rivals, measure

__all__ = ["run"]

_TITLES = {
    "launch": "distplus launch",
    "ours": "torchrun, our strategy",
    "stock": "torchrun, stock",
    "nvrx": "NVRx 0.4.1",
}


def run(quick: bool) -> list[Figure]:
    """Ten runs of each arm (quick: two)."""
    arms = [arm for arm in _TITLES if arm != "nvrx" or has_rivals()]
    took_s: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(2 if quick else 10):
        for arm in arms:
            trained_s = measure(arm, "kill").training_s
            took_s[arm].append(inf if trained_s is None else trained_s)
    return [
        Figure(
            name=_TITLES[arm],
            value=median(values),
            unit="s",
            ci95=None if inf in values else bootstrap_ci95(values),
            note=f"{len(values)} runs, {min(values):.1f} .. {max(values):.1f}; inf: not within 90 s",
        )
        for arm, values in took_s.items()
    ]
