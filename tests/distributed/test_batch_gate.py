"""The step gate inside a Trainer: one for each optimizer step, before its first micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.control import GateRecord
from lightning_distplus.testing import spawn
from tests.distributed import jobs


def gates_of_a_fit(accumulate: int, folder: str) -> list[tuple[int, int, int]]:
    strategy: Any = jobs.strategy("ResilientDDP", timeout="20s")
    trainer = jobs.trainer(strategy, 2, folder, max_epochs=2, limit_train_batches=5, accumulate_grad_batches=accumulate)
    seen: list[tuple[int, int, int]] = []
    passed = strategy.pass_gate

    def noted(records: list[GateRecord]) -> None:
        seen.append((records[0].epoch, records[0].micro_batch, records[0].global_step))
        passed(records)

    strategy.pass_gate = noted
    trainer.fit(jobs.Model(), jobs.loader())
    return seen


@pytest.mark.parametrize(
    ("accumulate", "expected"),
    [
        (1, [(epoch, batch, 5 * epoch + batch) for epoch in range(2) for batch in range(5)]),
        (2, [(epoch, 2 * step, 3 * epoch + step) for epoch in range(2) for step in range(3)]),
    ],
)
def test_there_is_one_gate_at_the_head_of_each_optimizer_step(
    accumulate: int, expected: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    run = spawn(gates_of_a_fit, 2, args=(accumulate, str(tmp_path)), deadline="30s").check()
    assert run.results == {0: expected, 1: expected}
