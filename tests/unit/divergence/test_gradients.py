"""The eyes of one rank on its own gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.gradients import (
    BucketHook,
    FlaggingReduceScatter,
    GradientCheck,
    LocalGradients,
    NonFinite,
    name_at,
)
from lightning_distplus.trainer_gate import Flag, Moment


def a(index: int) -> str:
    return f"element {index}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_first_element_that_is_not_finite_is_remembered(dtype: torch.dtype, value: float) -> None:
    gradients = LocalGradients(lambda: "micro-batch 7, samples 3, 4")
    gradient = torch.ones(10, 10, dtype=dtype)
    assert gradients.look_at(gradient, a) is True
    gradient[4, 2] = value
    assert gradients.look_at(gradient, a) is False
    text = f"gradient of element 42 is {value} in micro-batch 7, samples 3, 4"
    assert gradients.found == NonFinite("gradient", "element 42", text)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 1e38), (torch.float16, 6e4), (torch.bfloat16, 1e38)])
def test_large_finite_gradients_are_no_alarm(dtype: torch.dtype, value: float) -> None:
    gradients = LocalGradients()
    assert gradients.look_at(torch.full((1000,), value, dtype=dtype), a) is True
    assert gradients.found is None


def test_once_something_is_found_nothing_more_contributes_until_the_next_step() -> None:
    gradients = LocalGradients()
    gradients.look_at_loss(torch.tensor(math.nan))
    assert gradients.found is not None
    assert gradients.look_at(torch.ones(3), a) is False
    replaced = gradients.filtered(torch.ones(3), a)
    assert replaced is not None
    assert replaced.tolist() == [0, 0, 0]
    gradients.reset()
    assert gradients.filtered(torch.ones(3), a) is None


def test_beside_a_loss_scaler_only_the_loss_counts() -> None:
    gradients = LocalGradients(gradients_may_overflow=True)
    assert gradients.look_at(torch.tensor([math.inf]), a) is True
    assert gradients.found is None
    gradients.look_at_loss(torch.tensor(math.inf))
    assert gradients.found is not None
    assert gradients.found.what == "loss"


def test_an_element_of_a_flat_gradient_has_the_name_of_its_parameter() -> None:
    sections = [("first", 3), ("empty", 0), ("last", 2)]
    assert [name_at(sections, index) for index in range(6)] == ["first", "first", "first", "last", "last", None]


def test_an_element_of_a_reduce_scatter_input_has_the_name_of_its_parameter() -> None:
    """Two ranks: dimension 0 of 3 is padded to 2 rows each."""
    reduce_scatter = FlaggingReduceScatter(LocalGradients(), [("w", torch.Size([3, 5])), ("b", torch.Size([3]))])
    names = [reduce_scatter._name_at(column, 12, 2) for column in range(12)]
    assert names == ["w"] * 10 + ["b"] * 2
    assert reduce_scatter._name_at(0, 10, 2) == "w or b", "one had no gradient"


def test_a_large_bucket_is_examined_in_blocks_as_if_at_once() -> None:
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (300_000, 300_000)]
    gradients = LocalGradients()
    hook = BucketHook(gradients, {id(weight): name for weight, name in zip(weights, "ab", strict=True)}, None)
    bucket = torch.randn(600_000)
    half = bucket / 2
    assert hook._look_and_scale(bucket, weights, 2) is True
    assert torch.equal(bucket, half)
    bucket[599_999] = math.nan
    assert hook._look_and_scale(bucket, weights, 2) is False
    assert gradients.found is not None
    assert gradients.found.parameter == "b"


class Knows(LocalGradients):
    """Its answer comes from the device, as a tensor."""

    def look_at(self, gradient: torch.Tensor, name_of: Any) -> torch.Tensor:
        return torch.isfinite(gradient).all()


def held(tensor: torch.Tensor) -> list[float]:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor.to_dense()).tolist()


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_what_takes_a_gradients_place_is_of_its_kind(value: float) -> None:
    """A device answers late, so that there is always something in its place: dense, sparse, or of a mesh."""
    dense = torch.tensor([2.0, value])
    sparse = torch.sparse_coo_tensor([[0, 1]], dense, (2,))
    with _compat.fake_default_group(1):
        of_mesh = distribute_tensor(dense, dist.device_mesh.init_device_mesh("cpu", (1,)), [Shard(0)])
        for gradient in (dense, sparse, of_mesh):
            found = Knows().filtered(gradient, a)
            assert type(found) is type(gradient)
            assert found.is_sparse == gradient.is_sparse
            assert held(found) == ([2.0, 1.0] if value == 1.0 else [0.0, 0.0])
            at_once = LocalGradients().filtered(gradient, a)
            assert at_once is None if value == 1.0 else held(at_once) == [0.0, 0.0]


def test_the_flag_of_a_bucket_is_taken_away_also_where_its_first_gradient_lies_channels_last() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last))
    gradients = LocalGradients()
    hook = BucketHook(gradients, {}, None)
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    (model(torch.ones(1, 3, 8, 8)).sum() * math.nan).backward()
    weight = model.module.weight.grad
    assert not weight.is_contiguous()
    assert hook.was_flagged()
    assert weight.count_nonzero() == 0
    del model
    dist.destroy_process_group()


def test_a_sparse_gradient_that_is_not_finite_is_found_before_the_sum() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = torch.nn.Embedding(5, 2, sparse=True)
    model = DistributedDataParallel(module)
    check: Any = GradientCheck()
    loops = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=3))
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=model), precision_plugin=None, fit_loop=loops)
    check.run = SimpleNamespace(trainer=trainer, rank=0, sample_ids=lambda: None)
    check.attach()
    (model(torch.tensor([1, 4])).sum() * math.inf).backward()
    assert check._gradients.found.text == "gradient of weight is inf in micro-batch 3"
    assert module.weight.grad.to_dense().count_nonzero() == 0
    check.detach()
    del model, check, trainer
    dist.destroy_process_group()


class AnswersLate(LocalGradients):
    """As on a device: what was found is known when it is asked."""

    asked = False

    def settle(self) -> None:
        self.asked, self.found = True, NonFinite("loss", None, "loss is nan")


@pytest.mark.parametrize(("meets", "is_flagged"), [(True, False), (False, True), (False, False)])
def test_a_device_is_asked_before_the_ranks_meet_or_where_the_sum_is_flagged(meets: bool, is_flagged: bool) -> None:
    check: Any = GradientCheck()
    met: list[Flag] = []
    acted: list[str] = []

    def meet(moment: Moment, flag: Flag) -> list[GateRecord]:
        met.append(flag)
        return [GateRecord(global_step=0, micro_batch=0, epoch=0, decisions=int(moment | flag))]

    check.run = SimpleNamespace(gate=SimpleNamespace(meet=meet), skips=SimpleNamespace(stepped=lambda: None))
    check._gradients, check._meets, check._is_flagged = AnswersLate(), meets, is_flagged
    check._act = lambda optimizer: acted.append(check._gradients.found.text)
    check.before_optimizer_step(None)
    assert check._gradients.asked == (meets or is_flagged)
    assert met == [Flag.NOT_FINITE] * meets
    assert acted == ["loss is nan"] * (meets or is_flagged)


def test_all_gradients_go_with_a_step_that_is_left_out() -> None:
    """Optimizers that step after one backward, each with its own parameters."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    module(torch.ones(2)).sum().backward()
    check: Any = GradientCheck()
    check.run = SimpleNamespace(module=module)
    assert check._leave_out(torch.optim.SGD(module[0].parameters()))
    assert all(one.grad is None for one in module.parameters())


class Layers(torch.nn.ModuleList):
    first = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(batch).sum() for layer in self[self.first :]]).sum()


def test_a_sum_is_whole_when_all_buckets_are_sent_and_none_when_the_backward_sends_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = Layers(torch.nn.Linear(64, 64) for _ in range(3))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    hook = BucketHook(LocalGradients(), {}, None)
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    found = []
    for is_synced, layers.first in ((True, 0), (False, 0), (True, 1)):  # the first layer is in the last bucket
        model.require_backward_grad_sync, hook.is_whole = is_synced, None
        model(torch.ones(64)).backward()
        found.append(hook.is_whole)
    del model
    dist.destroy_process_group()
    assert found == [True, None, False]
