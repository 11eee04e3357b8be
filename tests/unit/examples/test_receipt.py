"""The receipt of the example finds what is not identical: without that its "yes" would mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from examples.tinyllama.job import Start
from examples.tinyllama.receipt import (
    committed_steps,
    count_differences,
    losses_of,
    misread_samples,
    samples_of,
    state_differences,
)
from examples.tinyllama.record import digest_samples
from lightning_distplus.data import MegatronWriter


def start(rank: int, number: int, first_step: int, steps: dict[int, list[int]]) -> Start:
    batches = [
        {"step": step, "samples": [[0, index, f"digest {index}"] for index in indices], "loss": (1.0 + step).hex()}
        for step, indices in steps.items()
    ]
    return Start(rank, number, pid=1, first_step=first_step, batches=batches)


def test_what_a_resume_rolled_back_is_no_part_of_the_history() -> None:
    starts = [
        start(0, 0, 0, {0: [0], 1: [2], 2: [4], 3: [6]}),
        start(1, 0, 0, {0: [1], 1: [3], 2: [5]}),
        start(0, 1, 2, {2: [4], 3: [6]}),
        start(1, 1, 2, {2: [5], 3: [7]}),
    ]
    samples = samples_of(committed_steps(starts))
    assert [[index for _, index, _ in samples[step]] for step in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert losses_of(committed_steps(starts)) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}


def test_repeated_and_missed_samples_are_counted() -> None:
    expected = samples_of(committed_steps([start(0, 0, 0, {0: [0, 1], 1: [2, 3]})]))
    found = samples_of(committed_steps([start(0, 0, 0, {0: [0, 1], 1: [1, 0]})]))
    assert count_differences(expected, expected) == (0, 0)
    assert count_differences(found, expected) == (2, 2)


def test_a_sample_that_is_not_what_the_file_holds_is_found(tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "tokens") as writer:
        writer.add_document(range(100))
    block = torch.arange(8, 17)[None]
    [digest] = digest_samples(block[:, :-1], block[:, 1:])
    assert misread_samples({0: [(0, 1, digest)]}, [tmp_path / "tokens"], seq_len=8) == 0
    assert misread_samples({0: [(0, 2, digest)]}, [tmp_path / "tokens"], seq_len=8) == 1


def checkpoint(path: Path, **changes: Any) -> Path:
    state = {"weight": torch.tensor([1.0, -0.0]), "moment": [torch.tensor([2.0])], "step": 3, "callbacks": str(path)}
    torch.save({**state, **changes}, path)
    return path


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"weight": torch.tensor([1.0, 0.0])}, "file/weight"),  # equal as numbers, other bits
        ({"weight": torch.tensor([1.0, -0.0], dtype=torch.float64)}, "file/weight"),
        ({"moment": [torch.tensor([2.5])]}, "file/moment/0"),
        ({"step": 4}, "file/step"),
        ({"extra": 1}, "file/extra"),
    ],
)
def test_any_difference_of_state_is_named(changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one.ckpt")
    assert state_differences(one, checkpoint(tmp_path / "same.ckpt")) == ([], 2)
    assert state_differences(one, checkpoint(tmp_path / "other.ckpt", **changes)) == ([name], 2)
