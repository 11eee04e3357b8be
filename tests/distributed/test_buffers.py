"""Buffers that differ between the ranks of FSDP and FSDP2 are saved as rank 0 has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_distplus.testing import spawn
from tests.distributed import jobs


class Placed(jobs.Model):
    """Has buffers that differ between ranks, as BatchNorm's do; torch would have both ranks write some of them."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "places"):
            self.places = nn.ModuleList(nn.Module() for _ in range(4))
            for place in self.places:
                place.register_buffer("rank", torch.full((300,), self.trainer.global_rank))


def save_and_resume(rank: int, name: str, folder: str) -> set[int]:
    trainer = jobs.trainer(jobs.strategy(name), 2, folder, max_steps=2)
    trainer.fit(Placed(), jobs.loader())
    trainer.save_checkpoint(f"{folder}/2.ckpt")
    module = Placed()
    trainer = jobs.trainer(jobs.strategy(name), 2, folder, max_steps=3)
    trainer.fit(module, jobs.loader(), ckpt_path=f"{folder}/2.ckpt")
    return {found for place in module.places for found in place.rank.tolist()}


@pytest.mark.parametrize("name", ["ResilientFSDP", "ResilientModelParallel"])
def test_a_run_resumes_whose_ranks_hold_other_buffers_with_those_of_rank_0(name: str, tmp_path: Path) -> None:
    result = spawn(save_and_resume, 2, args=(name, str(tmp_path)), deadline="60s").check()
    assert result.results == {0: {0}, 1: {0}}
