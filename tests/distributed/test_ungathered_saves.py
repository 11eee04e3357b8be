"""Sharded saves of FSDP1 that gather nothing: they hold, bit for bit, what FSDP's own sharded state holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_distplus import _compat, newest_valid
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.consolidating import tensors_of_shards
from lightning_distplus.checkpoint.fingerprints import add_up, describe, sums_of_pieces
from lightning_distplus.checkpoint.flat_parts import FlatPart
from lightning_distplus.checkpoint.reading_back import tensor_findings
from lightning_distplus.strategies.tensors import pieces_of_saved
from lightning_distplus.strategies.ungathered import HeldState
from lightning_distplus.testing import spawn
from tests.distributed import jobs

NUM_FEATURES = 6


class Odd(nn.Module):
    """Shapes that no number of ranks divides, of one to three axes, and buffers of two dtypes."""

    def __init__(self, *, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(NUM_FEATURES, 7), nn.BatchNorm1d(7))
        self.mixed = nn.Parameter(torch.randn(3, 5, 7))
        self.second = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.first[0].bias.requires_grad_(not is_frozen)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bk,ijk->bj", self.first(batch), self.mixed)
        return self.second(hidden) * self.scale


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False), nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.head.weight = self.embed.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(batch))


Optimizers = list[torch.optim.Optimizer]


def adamw(model: nn.Module) -> Optimizers:
    parameters = list(model.parameters())
    groups = [{"params": parameters[1:], "lr": 0.1}, {"params": parameters[:1]}] if len(parameters) > 1 else parameters
    return [torch.optim.AdamW(groups, amsgrad=True)]


def sgd(model: nn.Module, momentum: float) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)]


def one_for_each_unit(model: nn.Module) -> Optimizers:
    inner = list(model.first.parameters())
    known = {id(parameter) for parameter in inner}
    outer = [parameter for parameter in model.parameters() if id(parameter) not in known]
    return [torch.optim.SGD(inner, lr=0.1, momentum=0.9), torch.optim.Adam(outer)]


def sharded(module: nn.Module, **arguments: Any) -> nn.Module:
    named = {"device_id": torch.device("cpu"), "use_orig_params": True, **arguments}
    return FullyShardedDataParallel(module, **named)


def wrapped(**arguments: Any) -> nn.Module:
    return sharded(Odd(is_frozen=arguments.pop("is_frozen", False)), **arguments)


def wrapped_inside() -> nn.Module:
    """Two units without a common one, a part with activation checkpointing, and parameters outside."""
    model = Odd()
    model.first = sharded(CheckpointWrapper(model.first))
    model.second = sharded(model.second)
    return model


def ignoring() -> nn.Module:
    model = Odd()
    return sharded(model, ignored_states=[model.mixed, model.scale])


def evaluated(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, NUM_FEATURES))
    model.train()


NESTED = ModuleWrapPolicy({nn.Sequential, nn.Linear})
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizers]]] = {
    "one unit": (wrapped, adamw),
    "nested": (partial(wrapped, auto_wrap_policy=NESTED), adamw),
    "flat": (partial(wrapped, use_orig_params=False), adamw),
    "flat, nested": (partial(wrapped, use_orig_params=False, auto_wrap_policy=NESTED), partial(sgd, momentum=0.9)),
    "frozen": (partial(wrapped, is_frozen=True), adamw),
    "without moments": (wrapped, partial(sgd, momentum=0)),
    "mixed precision": (partial(wrapped, mixed_precision=LOW), adamw),
    "gradients alone": (
        partial(wrapped, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, auto_wrap_policy=NESTED),
        adamw,
    ),
    "inside": (wrapped_inside, adamw),
    "ignored": (ignoring, adamw),
    "tied": (lambda: sharded(Tied()), adamw),
    "tied, flat": (lambda: sharded(Tied(), use_orig_params=False), adamw),
    "an optimizer for each unit": (
        partial(wrapped, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})),
        one_for_each_unit,
    ),
}


def trained(make: Callable[[], nn.Module], optimizers_of: Callable[[nn.Module], Optimizers]) -> tuple[Any, Optimizers]:
    model = make()
    optimizers = optimizers_of(model)
    torch.manual_seed(100)
    for _ in range(2):
        model(torch.randn(4, NUM_FEATURES)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    evaluated(model)
    return model, optimizers


def as_the_parent(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """What FSDPStrategy hands to torch's distributed checkpoint."""
    with _compat.in_shards(model):
        moments = [FullyShardedDataParallel.optim_state_dict(model, optimizer) for optimizer in optimizers]
        return {"model": model.state_dict(), **{f"optimizer_{n}": one for n, one in enumerate(moments)}}


def agreed(model: nn.Module, optimizers: Optimizers) -> tuple[HeldState, set[str]]:
    held = HeldState(model, optimizers)
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, held.facts)
    return held, held.agree(facts)


def as_held(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    held, doubts = agreed(model, optimizers)
    assert not doubts
    before = _compat.num_collectives()
    found = {"model": held.of_module()}
    found |= {f"optimizer_{n}": held.of_optimizer(optimizer) for n, optimizer in enumerate(optimizers)}
    assert _compat.num_collectives() == before > 0, "nothing is gathered"
    assert held.of_optimizer(optimizers[0]) is None, "it is asked for once"
    return found


def read(folder: Path) -> dict[str, tuple[torch.dtype, Any]]:
    tensors = {".".join(map(str, place)): tensor for place, tensor in tensors_of_shards(folder)}
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}


def keys_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: keys_of(value) for key, value in state.items()}
    return "a tensor" if isinstance(state, torch.Tensor) else state


def compare(rank: int, folder: str, names: list[str]) -> list[str]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=dist_size(folder))
    warnings.simplefilter("ignore")
    for name in names:
        model, optimizers = trained(*(CASES | HYBRID)[name])
        parent, mine = as_the_parent(model, optimizers), as_held(model, optimizers)
        folders = [Path(folder) / f"{name} {kind}" for kind in ("parent", "mine")]
        for state, path in zip((parent, mine), folders, strict=True):
            save(state, checkpoint_id=path)
        assert keys_of(mine["model"]) == keys_of(parent["model"]), name
        for key in parent.keys() - {"model"}:
            assert mine[key]["param_groups"] == parent[key]["param_groups"], name
        assert any(isinstance(value, FlatPart) for value in mine["model"].values())
        sums: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sums, sums_of_pieces(pieces_of_saved(mine, is_first=rank == 0)))
        if rank == 0:
            expected = read(folders[0])
            assert read(folders[1]) == expected, name
            (folders[1] / "meta.pt").touch()
            fingerprints = describe(add_up(sums))
            assert len(fingerprints) == len(expected), "each tensor is counted, and once"
            found = tensor_findings(folders[1], fingerprints)
            assert not found, (name, found)
        dist.barrier()
    dist.destroy_process_group()
    return names


def dist_size(folder: str) -> int:
    return int(Path(folder).name)


HYBRID = {
    "hybrid": (
        lambda: wrapped(
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=init_device_mesh("cpu", (2, 2)),
            auto_wrap_policy=NESTED,
        ),
        adamw,
    )
}


UNEVEN = ["nested", "flat, nested", "frozen", "inside", "tied"]
"""Those whose parts differ most, for three ranks."""


@pytest.mark.parametrize(("world_size", "names"), [(2, list(CASES)), (3, UNEVEN), (4, list(HYBRID))])
def test_what_a_rank_holds_is_saved_as_what_fsdp_gathers(world_size: int, names: list[str], tmp_path: Path) -> None:
    folder = tmp_path / str(world_size)
    folder.mkdir()
    result = spawn(compare, world_size, args=(str(folder), names), deadline="60s").check()
    assert all(done == names for done in result.results.values())


# -- where it is gathered ----------------------------------------------------------------------------------------------


class Extra(Odd):
    def get_extra_state(self) -> dict[str, float]:
        return {"mean": self.mixed.mean().item()}

    def set_extra_state(self, state: Any) -> None:
        pass


class OwnState(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


def hooked() -> nn.Module:
    model = Odd()
    model.first.register_state_dict_post_hook(lambda *_: None)
    return sharded(model)


def hooked_beside() -> nn.Module:
    """A module that makes its own state dict, and holds nothing that is sharded."""
    model = Odd()
    model.metric = nn.Module()
    model.metric.register_state_dict_post_hook(lambda *_: None)
    return sharded(model)


def channels_last() -> nn.Module:
    convolution = nn.Conv2d(2, 4, (2, 1)).to(memory_format=torch.channels_last)
    return sharded(nn.Sequential(nn.Unflatten(1, (2, 3, 1)), convolution))


def moved_on_rank_1(model: nn.Module, optimizers: Optimizers) -> None:
    if dist.get_rank() == 1:
        parameter = next(filter(torch.Tensor.numel, model.parameters()))
        parameter.data = parameter.data.clone()


def shrink_a_moment(model: nn.Module, optimizers: Optimizers) -> None:
    for values in optimizers[0].state.values():
        values["exp_avg"] = values["exp_avg"][:1]


def forget_a_moment(model: nn.Module, optimizers: Optimizers) -> None:
    if dist.get_rank() == 0:
        optimizers[0].state.clear()


def add_to_state(model: nn.Module, optimizers: Optimizers) -> None:
    optimizers[0].state["counts"] = torch.ones(1)


def half_for_each(model: nn.Module) -> Optimizers:
    parameters = list(model.parameters())
    return [torch.optim.SGD(half, lr=0.1, momentum=0.9) for half in (parameters[:3], parameters[3:])]


def nothing(model: nn.Module, optimizers: Optimizers) -> None:
    pass


Doubtful = tuple[
    Callable[[], nn.Module],
    Callable[[nn.Module], Optimizers],
    Callable[[nn.Module, Optimizers], None],
    bool,
    set[str],
]
SPLIT = "optimizer {} has moments of some parameters of a unit only"
DOUBTS: dict[str, Doubtful] = {
    "hook": (hooked, adamw, nothing, False, {"first (Sequential) makes its own state dict"}),
    "hook beside": (hooked_beside, adamw, nothing, True, set()),
    "extra state": (lambda: sharded(Extra()), adamw, nothing, False, {"the model (Extra) makes its own state dict"}),
    "strides": (channels_last, adamw, nothing, False, {"the model has parameters that are not contiguous, or empty"}),
    "one rank": (
        wrapped, adamw, moved_on_rank_1, False,
        {"mixed was given other memory, which FSDP takes over in the next step"},
    ),
    "shapes": (wrapped, adamw, shrink_a_moment, True, {"AdamW has moments that are not shaped as the parameters"}),
    "no moments": (wrapped, adamw, forget_a_moment, True, {SPLIT.format(0)}),
    "of nothing": (wrapped, adamw, add_to_state, True, {"AdamW has a state that is not of a parameter"}),
    "halves": (
        wrapped, half_for_each, nothing, True,
        {SPLIT.format(0), SPLIT.format(1)},
    ),
    "own state": (
        wrapped, lambda model: [OwnState(model.parameters())], nothing, True,
        {"OwnState makes its own state dict"},
    ),
    "of others": (
        wrapped, lambda model: [torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))])], nothing, True,
        {"SGD trains parameters that are not those of the model"},
    ),
    "nothing is sharded": (partial(wrapped, sharding_strategy=ShardingStrategy.NO_SHARD), adamw, nothing, False, set()),
}  # fmt: skip


def doubt(rank: int, folder: str) -> dict[str, tuple[bool, set[str]]]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    warnings.simplefilter("ignore")
    found = {}
    for name, (make, optimizers_of, change, _, _) in DOUBTS.items():
        model, optimizers = trained(make, optimizers_of)
        change(model, optimizers)
        held, doubts = agreed(model, optimizers)
        found[name] = held.is_enough, doubts
        if doubts:
            assert not held.is_enough or any(held.of_optimizer(optimizer) is None for optimizer in optimizers), name
    with FullyShardedDataParallel.summon_full_params(fresh := wrapped()):
        found["in use"] = agreed(fresh, [])[0].is_enough, agreed(fresh, [])[1]
    dist.destroy_process_group()
    return found


def test_what_does_not_fit_on_one_rank_is_gathered_on_all(tmp_path: Path) -> None:
    expected = {name: (is_enough, doubts) for name, (*_, is_enough, doubts) in DOUBTS.items()}
    expected["in use"] = False, {"the model is not at rest between two steps"}
    result = spawn(doubt, 2, args=(str(tmp_path),), deadline="60s").check()
    for found in result.results.values():
        assert found == expected


# -- in a run ----------------------------------------------------------------------------------------------------------


class Hooked(jobs.Model):
    """Saves without one parameter, and asks for the weights as the parent gives them. Its buffer is of its rank."""

    def configure_model(self) -> None:
        super().configure_model()
        self.register_buffer("place", torch.full((3,), self.trainer.global_rank))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_collectives = _compat.num_collectives()
        weights = checkpoint["state_dict"]
        self.kinds = [type(value).__name__ for value in weights.values()]
        self.shapes = [tuple(value.shape) for value in weights.values()]
        checkpoint["state_dict"] = {name: value for name, value in weights.items() if name != "net.2.bias"}
        asked = self.trainer.strategy.lightning_module_state_dict()
        self.kinds_of_others = [type(value).__name__ for value in asked.values()]


class SavesTwice(Callback):
    """At one step: the parent's save, ours, ours of the weights alone, and ours when rank 1 has to gather."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.collectives: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Hooked, *_: Any) -> None:
        if trainer.global_step == 3:
            strategy = trainer.strategy
            FSDPStrategy.save_checkpoint(
                strategy, trainer._checkpoint_connector.dump_checkpoint(), self.folder / "parent.ckpt"
            )
            self.kinds_of_parent = module.kinds
            for name, weights_only in (("mine.ckpt", False), ("weights.ckpt", True)):
                before = _compat.num_collectives()
                trainer.save_checkpoint(self.folder / name, weights_only)
                self.collectives.append(module.num_collectives - before)
            self.kinds = module.kinds
            for _ in range(2):  # FSDP takes it over while it gathers
                moved_on_rank_1(module, [])
                trainer.save_checkpoint(self.folder / "gathered.ckpt")


def save_twice(folder: str, async_save: bool) -> dict[str, Any]:
    saves, module = SavesTwice(folder), Hooked()
    strategy = jobs.strategy("ResilientFSDP", async_save=async_save, read_back_saves=True)
    trainer = jobs.trainer(strategy, 2, folder, max_steps=5, callbacks=[saves])
    trainer.fit(module, jobs.loader())
    kinds = [set(kinds) for kinds in (saves.kinds_of_parent, saves.kinds, module.kinds_of_others, module.kinds)]
    return {"kinds": kinds, "shapes": module.shapes, "collectives": saves.collectives}


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


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_gathers_nothing_and_who_asks_without_saving_gets_what_the_parent_gives(
    async_save: bool, tmp_path: Path
) -> None:
    result = spawn(save_twice, 2, args=(str(tmp_path), async_save), deadline="60s").check()
    for found in result.results.values():
        gathered = {"ShardedTensor", "Tensor"}
        assert found["kinds"] == [gathered, {"FlatPart", "Tensor"}, gathered, gathered]
        assert found["shapes"] == [(3,), (16, jobs.NUM_FEATURES), (16,), (1, 16), (1,)]
        assert found["collectives"] == [0, 0]
    for log in result.logs.values():
        assert log.count("gathers the state of FSDP for each save: ") == 1, "it is told once"
    expected = read(tmp_path / "parent.ckpt") | {"model.place": (torch.int64, [0, 0, 0])}
    assert expected.keys() == read(tmp_path / "mine.ckpt").keys()
    assert len(expected) == 1 + 3 + 4 * 3
    assert read(tmp_path / "mine.ckpt") == read(tmp_path / "gathered.ckpt") == expected
    weights = {name: value for name, value in expected.items() if name.startswith("model.")}
    assert read(tmp_path / "weights.ckpt") == weights
    fingerprints = read_manifest(tmp_path / "mine.ckpt").tensors
    assert len(fingerprints) == len(expected)
    assert tensor_findings(tmp_path / "mine.ckpt", fingerprints) == []
    assert newest_valid(tmp_path) is not None
