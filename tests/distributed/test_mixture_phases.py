"""A mixture that changes between runs: recorded, deterministic, and no sample of a source repeated or missed.

Row R7.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_distplus.cli.__main__ import main
from lightning_distplus.data import SampleAudit, Source
from lightning_distplus.data.order import BLOCK, Mixture
from lightning_distplus.errors import DatasetMismatch
from tests.distributed.resume_jobs import SampleDiary, SaveAt, quiet_trainer, token_data, write_tokens

FIRST = {"a": 3.0, "b": 1.0}
SECOND = {"b": 1.0, "c": 1.0, "a": 0.5}
PER_STEP = 4


def run(folder: Path, weights: dict[str, float], max_steps: int, load: Any = None, **arguments: Any) -> Any:
    """Ids are the first token of each sample: source a holds 0.., b 10,000.., c 20,000.. in steps of 4."""
    sources = [Source(path=str(folder / name), weight=weight, name=name) for name, weight in weights.items()]
    model = SampleDiary()
    saver = SaveAt("on_train_batch_end", folder / str(max_steps))
    audit = SampleAudit(str(folder / "audit"))
    trainer = quiet_trainer(max_steps=max_steps, callbacks=[saver, *([audit] if arguments.pop("audits", True) else [])])
    trainer.fit(model, token_data(sources=sources, micro_batch_size=PER_STEP, **arguments), ckpt_path=load)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate("abc"):
        write_tokens(tmp_path / name, 801 if name == "a" else 401, start=10_000 * number)
    return tmp_path


def ids_of(model: Any) -> dict[int, list[int]]:
    return {step: batches[0] for step, batches in model.steps.items()}


def test_changed_mixture_is_a_recorded_phase_in_which_every_source_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run(folder, FIRST, 20)
    with pytest.raises(DatasetMismatch, match="number of sources: 2 in the checkpoint, 3 in this run"):
        run(folder, SECOND, 40, load=folder / "20" / "19.ckpt", audits=False)
    with caplog.at_level(logging.WARNING):
        after = run(folder, SECOND, 40, load=folder / "20" / "19.ckpt", allow_mixture_change=True)
    assert caplog.text.count("the mixture changes at sample 80: weights 0.75, 0.25 become b 0.4 (from its sample ") == 1

    state = torch.load(folder / "40" / "9.ckpt", weights_only=True)["TokenDataModule"]
    drawn = Mixture([3.0, 1.0], seed=3).draws_at(80)
    assert state["phase"] == [80, [drawn[1], 0, drawn[0]], [1, 2, 0]]
    assert len(repr(state)) < 1000

    # A later run needs no permission, on another cut, and is the same; so is the same change made once more.
    again = run(folder, SECOND, 60, load=folder / "40" / "9.ckpt")
    assert ids_of(again)[35] == ids_of(run(folder, SECOND, 36, load=folder / "40" / "14.ckpt", audits=False))[35]
    assert {step: ids_of(after)[step] for step in range(30, 40)} == {
        step: ids_of(again)[step] for step in range(30, 40)
    }
    third = run(folder, FIRST, 62, load=folder / "60" / "29.ckpt", allow_mixture_change=True)

    steps = ids_of(before) | ids_of(after) | ids_of(again) | ids_of(third)
    seen = np.array([steps[step] for step in range(62)]).ravel()
    shares = np.bincount(seen[80:240] // 10_000) / 160
    assert np.abs(shares - [0.2, 0.4, 0.4]).max() < 0.1
    assert len(np.unique(seen)) == 248, "no source has run out, so that no sample comes twice"
    assert main(["audit", str(folder / "audit")]) == 0
    assert "repeated 0, missed 0" in capsys.readouterr().out.splitlines()


def test_draws_before_any_number_are_counted() -> None:
    mixture = Mixture([0.6, 0.3, 0.1], seed=2)
    sources, _ = mixture.locate(np.arange(3 * BLOCK))
    for number in (0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 7, 3 * BLOCK - 1):
        assert mixture.draws_at(number) == np.bincount(sources[:number], minlength=3).tolist()


def test_permission_does_not_cover_another_seed_and_ignoring_needs_no_phase(folder: Path) -> None:
    run(folder, FIRST, 6, audits=False)
    path = folder / "6" / "5.ckpt"
    with pytest.raises(DatasetMismatch, match="seed: 3 in the checkpoint, 4 in this run"):
        run(folder, SECOND, 8, load=path, allow_mixture_change=True, audits=False, seed=4)
    ignored = run(folder, SECOND, 8, load=path, ignore_fingerprint=True, audits=False)
    assert "phase" not in ignored.trainer.datamodule.state_dict()
    same = run(folder, FIRST, 8, load=path, allow_mixture_change=True, audits=False)
    assert "phase" not in same.trainer.datamodule.state_dict(), "nothing has changed"
