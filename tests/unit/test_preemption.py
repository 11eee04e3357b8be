from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loops.progress import _BatchProgress

from lightning_distplus import PreemptionHandler
from lightning_distplus.preemption import _forget_fetched_batch


@pytest.mark.parametrize(("processed", "is_last"), [(7, True), (6, False)], ids=["all trained on", "one only fetched"])
def test_a_batch_that_was_only_fetched_is_fetched_again(processed: int, is_last: bool) -> None:
    batches = _BatchProgress(is_last_batch=True)
    for counts in (batches.current, batches.total):
        counts.ready, counts.processed = 7, processed
    _forget_fetched_batch(SimpleNamespace(fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches))))
    assert (batches.current.ready, batches.total.ready, batches.is_last_batch) == (processed, processed, is_last)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"signals": ["SIGNONE"]}, "SIGNONE"),
        ({"signals": ["SIGKILL"]}, "SIGKILL"),
        ({"signals": "SIGTERM"}, "are lists"),
        ({"keep": 0}, "keep is 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreemptionHandler(**arguments)
