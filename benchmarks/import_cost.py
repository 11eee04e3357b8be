"""What ``import lightning_distplus`` alone costs, in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import Figure, median

__all__ = ["run"]

_TARGET_MS = 50.0
_HEAVY = ("torch", "lightning", "deepspeed", "transformers", "numpy")
_CODE = f"""
import sys, time
start = time.perf_counter()
import lightning_distplus
elapsed_ms = 1000 * (time.perf_counter() - start)
import json
print(json.dumps([elapsed_ms, [name for name in {_HEAVY} if name in sys.modules]]))
"""


def run(quick: bool) -> list[Figure]:
    """Imports the package in 10 interpreters (quick: 3), one after the other."""
    times_ms: list[float] = []
    loaded: set[str] = set()
    for _ in range(3 if quick else 10):
        elapsed_ms, heavy = _import_once()
        times_ms.append(elapsed_ms)
        loaded |= set(heavy)
    note = f"also loads {', '.join(sorted(loaded))}" if loaded else f"loads none of {', '.join(_HEAVY)}"
    return [
        Figure(name="import, median", value=median(times_ms), unit="ms", target=_TARGET_MS, note=note),
        Figure(name="import, fastest", value=min(times_ms), unit="ms"),
        Figure(name="torch is loaded", value=float("torch" in loaded), unit="", target=0.0),
    ]


def _import_once() -> tuple[float, list[str]]:
    root = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", _CODE], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    elapsed_ms, heavy = json.loads(ended.stdout)
    return elapsed_ms, heavy
