"""A checkpoint on another number of ranks, and in another strategy: parameters and AdamW's moments are the same.

Row R9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from lightning_distplus import newest_valid, verify
from lightning_distplus.cli.checkpoints import run_export as export
from lightning_distplus.errors import CheckpointMismatch
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.pairs import kept

NUM_PARAMETERS = 4


class WholeState(Callback):
    """The digest of every parameter and moment, whole, at the begin and the end of a run, where it saves them.

    Args:
        target: The checkpoint.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.loaded: dict[str, str] = {}
        self.saved: dict[str, str] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step:
            self.loaded = whole_state(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.saved = whole_state(trainer)
        trainer.save_checkpoint(self.target)


def whole_state(trainer: Any) -> dict[str, str]:
    if "DeepSpeed" in type(trainer.strategy).__name__:
        return {name: weights_digest({name: value}) for name, value in state_of_zero(trainer.strategy.model.module)}
    (optimizer,) = trainer.optimizers
    model, moments = get_state_dict(trainer.strategy.model, optimizer, options=StateDictOptions(full_state_dict=True))
    digests = {name: weights_digest({name: value}) for name, value in model.items()}
    for name, moment in moments["state"].items():
        digests |= {f"{name}.{key}": weights_digest({key: torch.as_tensor(value)}) for key, value in moment.items()}
    return digests


def state_of_zero(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    named = list(module.named_parameters())
    moments = [
        (f"{name}.{key}", safe_get_full_optimizer_state(value, key))
        for name, value in named
        for key in ("exp_avg", "exp_avg_sq")
    ]
    return [(name, safe_get_full_fp32_param(value)) for name, value in named] + moments


def resume_and_save(
    name: str, world_size: int, source: str | None, target: str, steps: int, arguments: dict[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    state = WholeState(target)
    trainer = jobs.trainer(
        jobs.strategy(name, **arguments), world_size, str(Path(target).parent), max_steps=steps, callbacks=[state]
    )
    trainer.fit(jobs.Model(), jobs.loader(), ckpt_path=source)
    return state.loaded, state.saved


def station(
    folder: Path, number: int, name: str, world_size: int, source: Path | None, **arguments: Any
) -> tuple[dict[str, str], dict[str, str]]:
    """Trains one step from ``source`` and saves ``NUMBER.ckpt``; what was loaded, and what was saved, on every rank."""
    call = (name, world_size, source and str(source), str(folder / f"{number}.ckpt"), number, arguments)
    results = spawn(resume_and_save, world_size, args=call, deadline="50s").check().results
    assert all(result == results[0] for result in results.values())
    assert any(key.endswith("exp_avg_sq") for key in results[0][1])
    return results[0]


def chain(folder: Path, *stations: tuple[str, int, dict[str, Any]]) -> None:
    """Trains one step in each station, from the checkpoint of the one before, and compares what is handed on."""
    handed_on: dict[str, str] = {}
    for number, (name, world_size, arguments) in enumerate(stations, start=1):
        source = folder / f"{number - 1}.ckpt" if handed_on else None
        loaded, saved = station(folder, number, name, world_size, source, **arguments)
        assert loaded == handed_on
        handed_on = saved


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


@pytest.mark.parametrize("name", ["ResilientFSDP", "ResilientModelParallel"])
def test_an_exported_checkpoint_of_shards_goes_on_in_ddp(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, saved = station(tmp_path, 1, name, 2, None)
    whole, weights = tmp_path / "whole.ckpt", tmp_path / "weights.safetensors"
    assert export([str(tmp_path / "1.ckpt"), str(whole)]) == 0
    assert export([str(tmp_path / "1.ckpt"), str(weights)]) == 0
    loaded, _ = station(tmp_path, 2, "ResilientDDP", 2, whole)
    assert loaded == saved
    state = load_file(weights)
    assert len(state) == NUM_PARAMETERS
    assert {key: weights_digest({key: value}) for key, value in state.items()}.items() <= saved.items()
    assert export([str(whole), str(weights)]) == 1, "what is there is not overwritten"


@pytest.mark.parametrize("stage", kept([2, 3], [3]))
def test_zero_on_another_number_of_ranks_is_refused_with_the_command_that_converts(stage: int, tmp_path: Path) -> None:
    _, saved = station(tmp_path, 1, "ResilientDeepSpeed", 2, None, stage=stage)
    call = ("ResilientDeepSpeed", 3, str(tmp_path / "1.ckpt"), str(tmp_path / "2.ckpt"), 2, {"stage": stage})
    refused = spawn(resume_and_save, 3, args=call, deadline="50s")
    command = f"distplus export --universal {tmp_path / '1.ckpt'} {tmp_path / '1-universal.ckpt'}"
    for rank in range(3):
        assert refused.exit_codes[rank] == CheckpointMismatch.exit_code
        assert "shards of 2 ranks; this run has 3, which cannot read them. Convert it, and resume" in refused.logs[rank]
        assert command in refused.logs[rank]

    assert export(command.split()[2:]) == 0
    assert newest_valid(tmp_path) == tmp_path / "1-universal.ckpt"
    loaded, _ = station(tmp_path, 2, "ResilientDeepSpeed", 3, tmp_path / "1-universal.ckpt", stage=stage)
    assert loaded == saved

    # Asked to, the strategy converts by itself, and finds the result again.
    for _ in range(2):
        loaded, _ = station(
            tmp_path, 2, "ResilientDeepSpeed", 3, tmp_path / "1.ckpt", stage=stage, convert_checkpoint=True
        )
        assert loaded == saved
    (converted,) = (tmp_path / ".distplus").glob("1.ckpt.universal-*")
    assert converted.is_dir()


def test_weights_of_zero_are_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _, saved = station(tmp_path, 1, "ResilientDeepSpeed", 2, None, stage=3)
    whole, weights = tmp_path / "whole.ckpt", tmp_path / "weights.safetensors"
    assert export([str(tmp_path / "1.ckpt"), str(whole)]) == 0
    assert export([str(tmp_path / "1.ckpt"), str(weights)]) == 0
    found = torch.load(whole, weights_only=False)["state_dict"]
    for state in (found, load_file(weights)):
        assert len(state) == NUM_PARAMETERS
        assert {key: weights_digest({key: value}) for key, value in state.items()}.items() <= saved.items()
    assert verify(whole).ok
    assert newest_valid(tmp_path) == tmp_path / "1.ckpt", "a run goes on from the source, which has the moments"
