"""Rows D3 to D15: ranks that differ are named before a collective pairs them, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_distplus import RankDivergenceMonitor
from lightning_distplus.testing import spawn
from tests.distributed import jobs


def fit(name: str, folder: str, *callbacks: Callback, data: Any = None, module: Any = None, **arguments: Any) -> Any:
    """A short fit on two ranks with a monitor; returns the Trainer."""
    options = {"stage": 2} if "DeepSpeed" in name else {}
    if name.startswith("Resilient"):
        options["timeout"] = "20s"
    monitor = arguments.pop("monitor", None) or RankDivergenceMonitor()
    trainer = jobs.trainer(
        jobs.strategy(name, **options), 2, folder, **{"max_steps": 6, **arguments, "callbacks": [*callbacks, monitor]}
    )
    trainer.fit(module or jobs.Model(), data if data is not None else jobs.loader(200))
    return trainer


def quiet(name: str, folder: str) -> int:
    return fit(name, folder).global_step


@pytest.mark.parametrize("name", [*jobs.STRATEGIES, "DDPStrategy", "FSDPStrategy"])
def test_ranks_that_agree_train_to_the_end(name: str, tmp_path: Path) -> None:
    if name == "FSDPStrategy":
        pytest.skip("stock FSDP refuses the CPU")
    assert spawn(quiet, 2, args=(name, str(tmp_path)), deadline="40s").check().results == {0: 6, 1: 6}
