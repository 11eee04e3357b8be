"""A checkpoint on another number of ranks, and in another strategy: parameters and AdamW's moments are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs


class WholeState(Callback):
    """The digest of every parameter and moment, whole, at the begin and the end of a run."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.saved: dict[str, str] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.loaded = whole_state(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.saved = whole_state(trainer)


def whole_state(trainer: Any) -> dict[str, str]:
    (optimizer,) = trainer.optimizers
    model, moments = get_state_dict(trainer.strategy.model, optimizer, options=StateDictOptions(full_state_dict=True))
    digests = {name: weights_digest({name: value}) for name, value in model.items()}
    for name, moment in moments["state"].items():
        digests |= {f"{name}.{key}": weights_digest({key: torch.as_tensor(value)}) for key, value in moment.items()}
    return digests


def resume_and_save(
    name: str, world_size: int, source: str | None, target: str, steps: int, arguments: dict[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    state = WholeState()
    trainer = jobs.trainer(
        jobs.strategy(name, **arguments), world_size, str(Path(target).parent), max_steps=steps, callbacks=[state]
    )
    trainer.fit(jobs.Model(), jobs.loader(), ckpt_path=source)
    trainer.save_checkpoint(target)
    return state.loaded, state.saved


def chain(folder: Path, *stations: tuple[str, int, dict[str, Any]]) -> None:
    """Trains one step in each station, from the checkpoint of the one before, and compares what is handed on."""
    handed_on: dict[str, str] = {}
    source = None
    for number, (name, world_size, arguments) in enumerate(stations, start=1):
        target = str(folder / f"{number}.ckpt")
        call = (name, world_size, source, target, number, arguments)
        run = spawn(resume_and_save, world_size, args=call, deadline="50s").check()
        if source is not None:
            assert run.results[0][0] == handed_on
        handed_on, source = run.results[0][1], target
        assert any(key.endswith("exp_avg_sq") for key in handed_on)


@pytest.mark.parametrize("name", ["ResilientFSDP", "ResilientModelParallel"])
def test_a_sharded_checkpoint_goes_from_2_to_4_to_3_to_2_ranks(name: str, tmp_path: Path) -> None:
    chain(tmp_path, *((name, world_size, {}) for world_size in (2, 4, 3, 2)))


def test_a_whole_checkpoint_goes_from_ddp_to_fsdp_to_fsdp2_and_back(tmp_path: Path) -> None:
    full = {"state_dict_type": "full"}
    chain(
        tmp_path,
        ("ResilientDDP", 2, {}),
        ("ResilientFSDP", 2, full),
        ("ResilientModelParallel", 2, {"save_distributed_checkpoint": False}),
        ("ResilientDDP", 2, {}),
    )
