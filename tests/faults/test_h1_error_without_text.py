"""Row H1: an error of which not even the text can be had is told to the others as what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lightning_distplus.errors import PeerFailed
from lightning_distplus.testing import spawn
from tests.distributed import jobs


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class Raises(jobs.Model):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if (self.global_rank, batch_idx) == (1, 3):
            raise Mute
        return super().training_step(batch, batch_idx)


def train(folder: str) -> tuple[str, Any]:
    trainer = jobs.trainer(jobs.strategy("ResilientDDP"), 2, folder, max_steps=8)
    try:
        trainer.fit(Raises(), jobs.loader())
    except Mute:
        return "own", None
    except PeerFailed as error:
        return str(error), error.ranks
    return "", None


def test_an_exception_whose_str_raises_is_named_on_every_rank(tmp_path: Path) -> None:
    run = spawn(train, 2, args=(str(tmp_path),), deadline="60s").check()
    assert run.results[1] == ("own", None)
    text, ranks = run.results[0]
    assert ranks == [1]
    assert "Mute: (no message: its __str__ raises RuntimeError)" in text
    assert "raise Mute" in text
    (path,) = (tmp_path / "distplus").glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    assert (verdict["kind"], verdict["culprits"]) == ("exception", [1])
