"""From the SIGKILL of one of two ranks to the next training step, below four launchers, by the same script.

The job of ``benchmarks.hangs`` with its fault "kill", one run at a time, the arms in turn. NVRx's launcher needs
``DISTPLUS_RIVALS_PYTHON``, as described there, else it is left out. The peer of stock Lightning waits for the process
group's time-out, and torchrun ends it 30 s later: a run is given up some time after its fault, and says so.
"""

from __future__ import annotations

from math import inf

from benchmarks.figures import Figure, bootstrap_ci95, median
from benchmarks.hangs import has_rivals, measure

__all__ = ["run"]

_LONGEST_S = 90.0  # of a run, start included
_AFTER_FAULT_S = 20.0
_TITLES = {
    "warm": "distplus launch",
    "cold": "distplus launch --start cold",
    "stock": "torchrun, stock Lightning",
    "nvrx": "NVRx 0.4.1, stock Lightning",
}


def run(quick: bool) -> list[Figure]:
    """Ten runs of each arm (quick: two)."""
    arms = [arm for arm in _TITLES if arm != "nvrx" or has_rivals()]
    took_s: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(2 if quick else 10):
        for arm in arms:
            trained_s = measure(arm, "kill", _LONGEST_S, _AFTER_FAULT_S).training_s
            took_s[arm].append(inf if trained_s is None else trained_s)
    best_rival_s = min(median(values) for arm, values in took_s.items() if arm not in ("warm", "cold"))
    return [_figure(arm, values, best_rival_s) for arm, values in took_s.items()]


def _figure(arm: str, values: list[float], best_rival_s: float) -> Figure:
    never = f"; {values.count(inf)} not within {_AFTER_FAULT_S:g} s" if inf in values else ""
    return Figure(
        name=_TITLES[arm],
        value=median(values),
        unit="s",
        target=best_rival_s if arm == "warm" else None,
        ci95=None if inf in values else bootstrap_ci95(values),
        note=f"{len(values)} runs, {min(values):.1f} .. {max(values):.1f}{never}",
    )
