"""What a checkpoint holds, on another number of ranks and in another strategy too, and what it tells of its run.

Row R9.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from lightning_distplus import _compat, newest_valid, verify
from lightning_distplus.checkpoint import Manifest, read_manifest
from lightning_distplus.checkpoint.files import MARKER, meta_folder
from lightning_distplus.checkpoint.formats import PREFIX, _read_deepspeed
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


Digests = dict[str, str]
Leg = tuple[str, str | None, dict[str, Any]]
"""A strategy, the checkpoint that it goes on from, and the strategy's arguments."""


def travel(folder: str, world_size: int, first: int, legs: list[Leg]) -> list[tuple[Digests, Digests]]:
    """Trains one step in each leg and saves ``NUMBER.ckpt``, in the same processes."""
    found = []
    for number, (name, source, arguments) in enumerate(legs, first):
        state = WholeState(f"{folder}/{number}.ckpt")
        jobs.fit(name, world_size, folder, ckpt_path=source, max_steps=number, callbacks=[state], **arguments)
        found.append((state.loaded, state.saved))
    return found


def leg(
    folder: Path, number: int, name: str, world_size: int, source: Path | None, **arguments: Any
) -> tuple[Digests, Digests]:
    """One leg in processes of its own; what was loaded, and what was saved, on every rank."""
    legs = [(name, source and str(source), arguments)]
    results = spawn(travel, world_size, args=(str(folder), world_size, number, legs), deadline="50s").check().results
    assert all(result == results[0] for result in results.values())
    assert any(key.endswith("exp_avg_sq") for key in results[0][0][1])
    return results[0][0]


FIRST = {
    "ResilientFSDP": ("ResilientFSDP", {}),
    "ResilientModelParallel": ("ResilientModelParallel", {}),
    "ZeRO-2": ("ResilientDeepSpeed", {"stage": 2}),
    "ZeRO-3": ("ResilientDeepSpeed", {"stage": 3}),
}
First = Callable[[str, Path], Digests]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> First:
    """Puts ``1.ckpt`` of a strategy on two ranks into a folder, and tells what it holds; each is made once."""

    @functools.cache
    def made(which: str) -> tuple[Path, Digests]:
        folder = tmp_path_factory.mktemp(which)
        name, arguments = FIRST[which]
        return folder, leg(folder, 1, name, 2, None, **arguments)[1]

    def put(which: str, folder: Path) -> Digests:
        source, saved = made(which)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        return saved

    return put


@pytest.mark.parametrize("name", ["ResilientFSDP", "ResilientModelParallel"])
def test_a_sharded_checkpoint_goes_from_2_to_4_to_3_to_2_ranks(name: str, first: First, tmp_path: Path) -> None:
    handed_on = first(name, tmp_path)
    for number, world_size in enumerate((4, 3, 2), start=2):
        loaded, saved = leg(tmp_path, number, name, world_size, tmp_path / f"{number - 1}.ckpt")
        assert loaded == handed_on
        handed_on = saved


def test_a_whole_checkpoint_goes_from_ddp_to_fsdp_to_fsdp2_and_back(tmp_path: Path) -> None:
    legs: list[Leg] = [
        ("ResilientDDP", None, {}),
        ("ResilientFSDP", f"{tmp_path}/1.ckpt", {"state_dict_type": "full"}),
        ("ResilientModelParallel", f"{tmp_path}/2.ckpt", {"save_distributed_checkpoint": False}),
        ("ResilientDDP", f"{tmp_path}/3.ckpt", {}),
    ]
    results = spawn(travel, 2, args=(str(tmp_path), 2, 1, legs), deadline="100s").check().results
    for found in results.values():
        assert [loaded for loaded, _ in found] == [{}, *(saved for _, saved in results[0][:-1])]


@pytest.mark.parametrize("name", kept(["ResilientFSDP", "ResilientModelParallel"], ["ResilientModelParallel"]))
def test_an_exported_checkpoint_of_shards_goes_on_in_ddp(name: str, first: First, tmp_path: Path) -> None:
    saved = first(name, tmp_path)
    whole, weights = export_both(tmp_path, saved)
    loaded, _ = leg(tmp_path, 2, "ResilientDDP", 2, whole)
    assert loaded == saved
    with pytest.raises(FileExistsError, match="exists already"):
        export([str(whole), str(weights)])


def export_both(folder: Path, saved: Digests) -> tuple[Path, Path]:
    """The first checkpoint as one file, and its weights alone, which are those that were saved."""
    from safetensors.torch import load_file

    whole, weights = folder / "whole.ckpt", folder / "weights.safetensors"
    for target in (whole, weights):
        assert export([str(folder / "1.ckpt"), str(target)]) == 0
    for state in (torch.load(whole, weights_only=False)["state_dict"], load_file(weights)):
        assert len(state) == NUM_PARAMETERS
        assert {key: weights_digest({key: value}) for key, value in state.items()}.items() <= saved.items()
    return whole, weights


@pytest.mark.parametrize("stage", kept([2, 3], [3]))
def test_zero_on_another_number_of_ranks_is_refused_with_the_command_that_converts(
    stage: int, first: First, tmp_path: Path
) -> None:
    saved = first(f"ZeRO-{stage}", tmp_path)
    zero = functools.partial(leg, tmp_path, 2, "ResilientDeepSpeed", 3, stage=stage)
    legs = [("ResilientDeepSpeed", str(tmp_path / "1.ckpt"), {"stage": stage})]
    refused = spawn(travel, 3, args=(str(tmp_path), 3, 2, legs), deadline="50s")
    command = f"distplus export --universal {tmp_path / '1.ckpt'} {tmp_path / '1-universal.ckpt'}"
    for rank in range(3):
        assert refused.exit_codes[rank] == CheckpointMismatch.exit_code
        assert "shards of 2 ranks; this run has 3, which cannot read them. Convert it, and resume" in refused.logs[rank]
        assert command in refused.logs[rank]

    assert export(command.split()[2:]) == 0
    assert newest_valid(tmp_path) == tmp_path / "1-universal.ckpt"
    loaded, _ = zero(tmp_path / "1-universal.ckpt")
    assert loaded == saved

    # Asked to, the strategy converts by itself, and finds the result again.
    for _ in range(2):
        loaded, _ = zero(tmp_path / "1.ckpt", convert_checkpoint=True)
        assert loaded == saved
    (converted,) = (tmp_path / ".distplus").glob("1.ckpt.universal-*")
    assert converted.is_dir()


@pytest.mark.parametrize("stage", kept([2, 3], [3]))
def test_weights_of_zero_are_exported_and_its_shards_read_with_all_moments(
    stage: int, first: First, tmp_path: Path
) -> None:
    saved = first(f"ZeRO-{stage}", tmp_path)
    with _compat.refusing_code(tmp_path / "1.ckpt", "trust it"):
        read = _read_deepspeed(tmp_path / "1.ckpt", {})
    values = {f"{name}.{key}": value for name, one in read.moments.items() for key, value in one.items()} | read.weights
    digests = {name.removeprefix(PREFIX): value for name, value in values.items() if not name.endswith(".step")}
    assert {name: weights_digest({name: value}) for name, value in digests.items()} == saved
    whole, _ = export_both(tmp_path, saved)
    assert verify(whole).ok
    assert newest_valid(tmp_path) == tmp_path / "1.ckpt", "a run goes on from the source, which has the moments"


# -- saved before the first step, or with an optimizer that keeps no state ---------------------------------------------

WAYS: dict[str, list[dict[str, Any]]] = {
    "ResilientDDP": [{}],
    "ResilientFSDP": [{}, {"state_dict_type": "full"}],
    "ResilientModelParallel": [{}, {"save_distributed_checkpoint": False}],
    "ResilientDeepSpeed": [{"stage": 1}, {"stage": 3}],
}


class Stateless(jobs.Model):
    """Trained by SGD without momentum, whose learning rate has changed."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 3e-2


def save_and_resume(folder: str, name: str, arguments: dict[str, Any], keeps_state: bool) -> dict[str, Any]:
    path, model = f"{folder}/saved.ckpt", jobs.Model if keeps_state else Stateless
    saves = jobs.At("on_train_batch_start", lambda trainer, *_: trainer.save_checkpoint(path), step=0)
    callbacks = [saves] if keeps_state else []
    first = jobs.fit(name, 2, folder, model(), **arguments, max_steps=2, callbacks=callbacks)
    if not keeps_state:
        first.save_checkpoint(path)
    resumed = model(seed=1)
    second = jobs.fit(name, 2, folder, resumed, ckpt_path=path, **arguments, max_steps=3)
    return {
        "steps": second.global_step,
        "batches": len(resumed.losses),
        "lr": resumed.optimizers().param_groups[0]["lr"],
    }


def save_and_resume_each(folder: str, ways: list[tuple[dict[str, Any], bool]], name: str) -> list[dict[str, Any]]:
    return [save_and_resume(f"{folder}/{number}", name, *way) for number, way in enumerate(ways)]


@pytest.mark.parametrize("name", WAYS)
def test_a_checkpoint_of_an_optimizer_without_state_is_resumed(name: str, tmp_path: Path) -> None:
    """Saved before the first step, or by SGD."""
    ways = [(arguments, keeps_state) for arguments in WAYS[name] for keeps_state in (True, False)]
    run = spawn(save_and_resume_each, 2, args=(str(tmp_path), ways, name), deadline="100s").check()
    kept, lost = {"steps": 3, "batches": 3, "lr": 1e-2}, {"steps": 3, "batches": 1, "lr": 3e-2}
    expected = [kept if keeps_state else lost for _, keeps_state in ways]
    assert run.results == {0: expected, 1: expected}


# -- buffers that differ between ranks ---------------------------------------------------------------------------------


class Placed(jobs.Model):
    """Has buffers that differ between ranks, as BatchNorm's do; torch would have both ranks write some of them."""

    def grow(self) -> None:
        self.places = nn.ModuleList(nn.Module() for _ in range(4))
        for place in self.places:
            place.register_buffer("rank", torch.full((300,), self.trainer.global_rank))


def resume_with_other_buffers(rank: int, name: str, folder: str) -> set[int]:
    trainer = jobs.fit(name, 2, folder, Placed(), max_steps=2)
    trainer.save_checkpoint(f"{folder}/2.ckpt")
    module = Placed()
    trainer = jobs.fit(name, 2, folder, module, ckpt_path=f"{folder}/2.ckpt", max_steps=3)
    return {found for place in module.places for found in place.rank.tolist()}


@pytest.mark.parametrize("name", ["ResilientFSDP", "ResilientModelParallel"])
def test_a_run_resumes_whose_ranks_hold_other_buffers_with_those_of_rank_0(name: str, tmp_path: Path) -> None:
    result = spawn(resume_with_other_buffers, 2, args=(name, str(tmp_path)), deadline="60s").check()
    assert result.results == {0: {0}, 1: {0}}


# -- layout and the checkpoint before it -------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "ResilientDDP": {"data_parallel": 2},
    "ResilientFSDP": {"data_parallel": 2, "sharding": "FULL_SHARD"},
    "ResilientModelParallel": {"data_parallel": 2, "tensor_parallel": 1},
    "ResilientDeepSpeed": {"data_parallel": 2, "zero_stage": 2},
}


def save_twice_and_resume(name: str, folder: str) -> None:
    for start, saves in ((None, ("a", "b")), ("b", ("c",))):
        trainer = jobs.fit(name, 2, folder, ckpt_path=start and f"{folder}/{start}.ckpt", max_steps=4)
        for save in saves:
            trainer.save_checkpoint(f"{folder}/{save}.ckpt")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_manifest_names_layout_and_parent(name: str, tmp_path: Path) -> None:
    spawn(save_twice_and_resume, 2, args=(name, str(tmp_path)), deadline="2m").check()
    manifests: dict[str, Manifest] = {save: read_manifest(tmp_path / f"{save}.ckpt") for save in "abc"}

    assert all(manifest.layout == LAYOUTS[name] for manifest in manifests.values())
    parents = {save: manifest.parent for save, manifest in manifests.items()}
    assert parents.pop("a") is None
    for parent, children in (("a", "b"), ("b", "c")):
        marker = json.loads((meta_folder(tmp_path / f"{parent}.ckpt") / MARKER).read_text())
        expected = {"path": str(tmp_path / f"{parent}.ckpt"), "manifest_xxh3_128": marker["manifest_xxh3_128"]}
        assert [parents[child] for child in children] == [expected] * len(children)
