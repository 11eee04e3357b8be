"""A source that a run, or its weight, would repeat many times is named before the first step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.resume_jobs import SampleDiary, SaveAt, quiet_trainer, token_data, write_tokens


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """200 samples, of which every fourth sample of the run comes from 5."""
    return [
        {"path": write_tokens(tmp_path / "prose", 4 * 200 + 1), "weight": 3.0, "name": "prose"},
        {"path": write_tokens(tmp_path / "code", 4 * 5 + 1, start=9000), "weight": 1.0, "name": "code"},
    ]


def run(sources: Any, *, load: Any = None, data: dict[str, Any] | None = None, **settings: Any) -> None:
    loaded = token_data(sources=sources, **(data or {}))
    quiet_trainer(limit_val_batches=0, **settings).fit(SampleDiary(), loaded, ckpt_path=load)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "reads a source many times" in one.getMessage()]


@pytest.mark.parametrize(
    ("settings", "data", "num_samples"),
    [
        ({"max_steps": 60}, {}, 120),
        ({"max_steps": 25, "accumulate_grad_batches": 2}, {}, 100),
        ({"max_steps": 12}, {"global_batch_size": [(0, 2), (8, 12)]}, 104),
        ({"max_epochs": 2, "limit_train_batches": 30}, {}, 120),
        ({"max_epochs": 1, "max_steps": 10**6}, {}, 204),
    ],
)
def test_source_that_its_weight_repeats_is_named_with_the_numbers(
    settings: dict[str, Any], data: dict[str, Any], num_samples: int, sources: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run(sources, data=data, **settings)
    draws = num_samples // 4
    assert warnings(caplog) == [
        "this run reads a source many times:\n"
        f"  code: {draws / 5:.1f} times; its weight is 0.25, so that {draws} of {num_samples} samples come from it, "
        "and it has 5\n"
        "Take fewer steps, smaller weights or more data; max_epochs_per_source sets a bound."
    ]


def test_nothing_is_said_up_to_four_times_nor_of_batches_that_are_repeated_on_purpose(
    sources: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run(sources, max_steps=40)  # 80 samples, 20 of them from code
    run(sources, max_epochs=30, overfit_batches=2)
    assert not warnings(caplog)


def test_a_resumed_run_counts_from_its_beginning(
    sources: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "saves").mkdir()
    saver = SaveAt("on_train_batch_end", tmp_path / "saves")
    run(sources, callbacks=[saver], max_steps=5)
    path = saver.saves[-1][0]
    assert not warnings(caplog)
    run(sources, load=path, max_steps=60)
    (text,) = warnings(caplog)
    assert "30 of 120 samples" in text
    caplog.clear()
    # From sample 10 on, of which code gave some, every second one comes from code.
    sources[1]["weight"] = 3.0
    run(sources, load=path, data={"allow_mixture_change": True}, max_steps=60)
    (text,) = warnings(caplog)
    drawn = int(text.split("so that ")[1].split(" of 120")[0])
    assert 55 < drawn < 55 + 10


def test_a_bound_refuses_the_run_before_its_first_step(sources: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    bounded = {"max_epochs_per_source": 5}
    with pytest.raises(ValueError, match=r"(?s)more than max_epochs_per_source=5 times:.*code: 6.0 times; its weight"):
        run(sources, data=bounded, max_steps=60)
    run(sources, data=bounded, max_steps=50)
    assert not warnings(caplog)
