"""Checks of what each rank is about to train with: optimizer settings, and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lightning_distplus import _compat
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.batch import StructureDigests, content, digest, structure
from lightning_distplus.divergence.check import Check, MonitoredRun
from lightning_distplus.majority import disagreement

__all__ = ["BatchCheck", "BatchShapes", "SettingsCheck"]

_MAX_PARAMETERS = 2000
_MASK = (1 << 64) - 1


class SettingsCheck(Check):
    """Compares, before every step, learning rates, step counts, the trainable parameters and the loss scale.

    Above 2,000 parameters, which of them are trainable is compared every ``parameters_every_n_steps`` only; a value
    that lies on a device is not read.
    """

    def attach(self, run: MonitoredRun) -> None:
        """Takes down the parameters in order."""
        super().attach(run)
        self._parameters = dict(run.module.named_parameters())
        self._tensors = list(self._parameters.values())
        self._num_said = 0
        is_on_cpu = run.trainer.strategy.root_device.type == "cpu"  # elsewhere a question waits for the device
        self._scaler = getattr(run.trainer.precision_plugin, "scaler", None) if is_on_cpu else None
        self._have_steps: list[bool] = []

    def start(self) -> None:
        """All ranks learn which optimizers have elements to step on every rank: an FSDP1 shard may be all frozen."""
        mine = [_holds_trainable(optimizer) for optimizer in self._optimizers()]
        self._have_steps = [all(held) for held in zip(*self.run.gather("elements to step", mine), strict=False)]

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The first learning rate and the loss scale as they are, everything as one number."""
        optimizers = self._optimizers()
        numbers = self._numbers(optimizers)
        if len(self._tensors) <= _MAX_PARAMETERS or self._num_said % self.run.parameters_every_n_steps == 0:
            numbers.append(hash(tuple([tensor.requires_grad for tensor in self._tensors])))
        self._num_said += 1
        return {
            "learning_rate": numbers[0] if optimizers else 0.0,
            "loss_scale": 0.0 if self._scaler is None else float(self._scaler.get_scale()),
            # The hash of a tuple of numbers is the same in every process.
            "settings": hash(tuple(numbers)) & _MASK,
            "collectives": _compat.num_collectives(),
        }

    def explain(self, field: str) -> dict[str, Any]:
        """Each number with its name."""
        if field != "settings":
            return {}
        named: dict[str, Any] = {}
        for index, optimizer in enumerate(self._optimizers()):
            for number, group in enumerate(optimizer.param_groups):
                for name in ("lr", "weight_decay"):
                    named[f"{name} of optimizer {index}, group {number}"] = _number(group.get(name, 0.0))
            named[f"step count of optimizer {index}"] = self._steps_of(index, optimizer)
        for name, parameter in list(self._parameters.items())[:_MAX_PARAMETERS]:
            named[f"requires_grad of {name}"] = parameter.requires_grad
        return named

    def _numbers(self, optimizers: list[Any]) -> list[float]:
        """The first learning rate, then whatever else the optimizers go by."""
        numbers: list[float] = []
        for index, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                numbers += (_number(group.get("lr", 0.0)), _number(group.get("weight_decay", 0.0)))
            numbers.append(self._steps_of(index, optimizer))
        return numbers

    def _steps_of(self, index: int, optimizer: Any) -> float:
        return _steps_of(optimizer) if all(self._have_steps[index : index + 1]) else 0.0

    def _optimizers(self) -> list[Any]:
        return [one for one in self.run.trainer.optimizers if getattr(one, "param_groups", None)]


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        return float(value.item()) if value.is_cpu else 0.0
    return float(value)


def _steps_of(optimizer: Any) -> float:
    """The first count that the optimizer keeps for a parameter; 0 where it keeps none, or keeps it on a device."""
    state: Any = getattr(optimizer, "state", None)
    states = state.values() if hasattr(state, "values") else ()
    first = next((one for one in states if one), None)  # of a parameter without elements here there is nothing
    return _number(first.get("step", 0.0)) if isinstance(first, dict) else 0.0


def _holds_trainable(optimizer: Any) -> bool:
    return any(one.requires_grad and one.numel() for group in optimizer.param_groups for one in group["params"])


# -- the batch: structure, place in the order, samples -----------------------------------------------------------------

BatchShapes = Literal["any", "equal"]
_SAME_IN_A_ROW = 2
_OF_SAMPLER = ("epoch", "seed", "num_replicas", "total_size")
_ABSENT = -(1 << 32)  # a number, because the hash of None is not the same in every process
_SHOWN_IDS = 8


class BatchCheck(Check):
    """Compares the batches of the ranks before the forward.

    Structure and place in the data must agree. Ranks that share a place on the data-parallel axis must hold identical
    batches; others must not, twice in a row. A batch on a device is read every ``parameters_every_n_steps`` only, and
    any batch as often as the budget allows.

    Args:
        every_n_steps: How often it looks.
        shapes: Whether sizes are a part of the structure.
    """

    def __init__(self, every_n_steps: int, shapes: BatchShapes = "any") -> None:
        self._every = every_n_steps
        self._has_sizes = shapes == "equal"
        self._structures = StructureDigests(sizes=self._has_sizes)
        self._num_said = 0
        self._batch: Any = None
        self._replicas: list[int] = []
        self._last_contents: list[int] = []
        self._num_shared = 0

    def start(self) -> None:
        """All ranks learn who shares whose data."""
        run = self.run
        kwargs = run.trainer.distributed_sampler_kwargs or {"rank": run.rank}
        self._mine = int(kwargs["rank"])
        self._replicas = run.gather("data-parallel rank", self._mine)
        self._loaders = tree_leaves(run.trainer.train_dataloader)
        self._require_own_shards()
        model: Any = run.trainer.strategy.model
        # With unused parameters allowed, ranks may well have batches of different kinds.
        self._compares_structure = not (isinstance(model, DistributedDataParallel) and model.find_unused_parameters)
        self._reads_every = 1 if run.trainer.strategy.root_device.type == "cpu" else run.parameters_every_n_steps

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Structure, place and content of this rank's batch."""
        self._batch = batch
        turn, rest = divmod(self._num_said, self._every)
        self._num_said += 1
        # The hash of a tuple of numbers is the same in every process.
        fields: dict[str, Any] = {"data_fingerprint": hash(self._numbers_of_place()) & _MASK}
        if rest == 0:
            if self._compares_structure:
                fields["batch_structure"] = self._structures.of(batch)
            if turn % self.run.budget.exceeds("batch", self._every) == 0:
                with self.run.budget.measure("batch"):
                    fields["batch_content"] = self._content(batch, may_read=turn % self._reads_every == 0)
        return fields

    def explain(self, field: str) -> dict[str, Any]:
        """What stands behind the fingerprints."""
        if field == "data_fingerprint":
            return self._place()
        return structure(self._batch, sizes=self._has_sizes) if field == "batch_structure" else {}

    def hear(self, records: Sequence[GateRecord]) -> None:
        """Compares contents: equal where data is shared, different elsewhere."""
        contents = [record.batch_content for record in records]
        if all(contents) and self.run.gate.reads_all_records:
            self._require_equal_peers(contents)
            self._require_own_samples(contents)
            self._last_contents = contents

    # -- place -------------------------------------------------------------------------------------------------------

    def _numbers_of_place(self) -> tuple[int, ...]:
        """What decides which samples come next, and must be the same on all ranks; ``_place`` has the names."""
        numbers: list[int] = []
        for loader in self._loaders:
            sampler = getattr(loader, "sampler", None)
            for name in _OF_SAMPLER:
                value = getattr(sampler, name, _ABSENT)
                numbers.append(value if isinstance(value, int) else _ABSENT)
        delivered = getattr(getattr(self.run.trainer, "datamodule", None), "delivered", None)
        if delivered is not None:
            size = len(delivered.positions)
            numbers += (delivered.epoch, int(delivered.positions[0]) - self._mine * size if size else -1)
        return tuple(numbers)

    def _place(self) -> dict[str, int]:
        names = [f"{name} of sampler {index}" for index in range(len(self._loaders)) for name in _OF_SAMPLER]
        names += ["epoch of the data", "position in the data"]
        numbers = zip(names, self._numbers_of_place(), strict=False)
        return {name: value for name, value in numbers if value != _ABSENT}

    def _require_own_shards(self) -> None:
        """A distributed sampler has the rank of its data-parallel place, as Lightning knows it."""
        own = [getattr(getattr(loader, "sampler", None), "rank", None) for loader in self._loaders]
        for index, shards in enumerate(zip(*self.run.gather("shards", own), strict=True)):
            owners: dict[int, list[int]] = {}
            for rank, shard in enumerate(shards):
                if isinstance(shard, int):
                    owners.setdefault(shard, []).append(rank)
            shared = [ranks for ranks in owners.values() if len({self._replicas[rank] for rank in ranks}) > 1]
            if shared:
                values = {rank: f"shard {shards[rank]} of sampler {index}" for ranks in shared for rank in ranks}
                self.run.tell(
                    disagreement(
                        "shard",
                        values,
                        wrong=values,
                        where="before the first step: they would train on the same samples",
                        remedy="give DistributedSampler the rank of each process, or none: Lightning sets it",
                    )
                )

    # -- content -----------------------------------------------------------------------------------------------------

    def _content(self, batch: Any, *, may_read: bool) -> int:
        ids = self.run.sample_ids()
        if ids is not None:
            return digest(ids)
        return content(batch) if may_read else 0

    def _require_equal_peers(self, contents: list[int]) -> None:
        for replica in sorted(set(self._replicas)):
            peers = [rank for rank, one in enumerate(self._replicas) if one == replica]
            if len({contents[rank] for rank in peers}) > 1:
                self._tell(
                    "tensor_parallel_batch",
                    contents,
                    peers,
                    where=f"they share data-parallel rank {replica}, so that their batches must be the same",
                    remedy="give tensor-parallel peers one sampler: num_replicas and rank of the data-parallel axis",
                )

    def _require_own_samples(self, contents: list[int]) -> None:
        owners: dict[int, set[int]] = {}
        for rank, found in enumerate(contents):
            owners.setdefault(found, set()).add(self._replicas[rank])
        shared = [rank for rank, found in enumerate(contents) if len(owners[found]) > 1]
        # Ranks that see one constant batch for ever train on synthetic data.
        is_new = contents != self._last_contents
        self._num_shared = self._num_shared + is_new if shared else 0
        if self._num_shared < _SAME_IN_A_ROW:
            return
        self._num_shared = 0
        self._tell(
            "duplicate_batches",
            contents,
            shared,
            wrong=shared,
            where=f"{_SAME_IN_A_ROW} batches in a row were the same on data-parallel ranks",
            remedy="each data-parallel rank needs its own shard: a DistributedSampler, or ResumableDataModule",
        )

    def _tell(
        self,
        field: str,
        contents: list[int],
        ranks: Sequence[int],
        *,
        where: str,
        remedy: str,
        wrong: Sequence[int] | None = None,
    ) -> None:
        """All ranks have come to the same conclusion, so that all gather."""
        ids = self.run.gather("sample ids", (self.run.sample_ids() or [])[:_SHOWN_IDS])
        values = {rank: f"samples {ids[rank]}" if ids[rank] else f"content {contents[rank]:016x}" for rank in ranks}
        where = f"before step {self.run.trainer.global_step}: {where}"
        self.run.tell(disagreement(field, values, wrong=wrong, where=where, remedy=remedy))
