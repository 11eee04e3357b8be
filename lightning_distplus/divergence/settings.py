"""Checks of what each rank is about to train with: the plan of the run, optimizer settings, and the batch."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.check import Check, digest
from lightning_distplus.errors import DivergenceError
from lightning_distplus.gathering import flatten
from lightning_distplus.majority import is_equal
from lightning_distplus.preflight import Facts, Status
from lightning_distplus.preflight.agreement import (
    Disagreement,
    Statement,
    disagreements,
    state_before_engine,
    state_before_training,
    state_of_process,
)
from lightning_distplus.run_access import rng_state

log = logging.getLogger(__name__)
RngPolicy = Literal["same", "distinct", "any"]
_GENERATORS = ("python", "numpy", "torch", "cuda")
_MASK = (1 << 64) - 1


# -- at the start: what preflight compares, and random generators ------------------------------------------------------


class StartCheck(Check):
    """Compares, on a strategy without preflight, what must be equal on all ranks at the start."""

    def before_engine(self) -> None:
        """The model is built, and no engine has wrapped it."""
        self._compare(state_of_process(Facts()) | state_before_engine(self.run.trainer))

    def start(self) -> None:
        """Everything is restored."""
        self._compare(state_before_training(self.run.trainer))

    def _compare(self, mine: Statement) -> None:
        if not self.run.is_stock:  # the strategy has compared
            return
        for found in disagreements(self.run.plane, mine, self.run.patience, {}):
            assert isinstance(found, Disagreement)
            if found.status is Status.ERROR:
                self.run.tell(DivergenceError(str(found), ranks=found.ranks, field=found.field, values=found.values))
                continue
            self.run.note("difference", field=found.field, ranks=found.ranks, values=found.values)
            if found.status is Status.WARNING and self.run.rank == 0:
                log.warning("%s", found)


class GeneratorCheck(Check):
    """Compares the random generators at the start of each epoch.

    Args:
        rng_policy: For each generator, whether its state must be the same on all ranks or distinct on each. Lightning's
            ``seed_everything`` makes all of them the same, and many runs rely on it: nothing is required by default.
    """

    def __init__(self, rng_policy: Mapping[str, RngPolicy]) -> None:
        self._policy = dict(rng_policy)
        for name, policy in self._policy.items():
            if name not in _GENERATORS or policy not in get_args(RngPolicy):
                raise ValueError(
                    f"rng_policy has {name!r}: {policy!r}; the names are {', '.join(_GENERATORS)}, and a policy is one "
                    f"of {', '.join(get_args(RngPolicy))}."
                )

    def start(self) -> None:
        """A run that goes on within an epoch does not begin it."""
        self.epoch_start()

    def epoch_start(self) -> None:
        """Compares them by the policy."""
        mine = {name: xxhash.xxh3_64_hexdigest(state) for name, state in rng_state().items() if name in self._policy}
        states = self.run.gather("random generators", mine)
        where = f"in epoch {self.run.trainer.current_epoch}"
        for name, policy in self._policy.items():
            field = f"the state of the {name} generator"
            values = {rank: one[name] for rank, one in enumerate(states) if name in one}
            counts = Counter(values.values())
            if policy == "same" and len(counts) > 1:
                self.run.differ(field, values, where=where, remedy="seed it alike on all ranks, and draw from it alike")
            shared = {rank: value for rank, value in values.items() if counts[value] > 1}
            if policy == "distinct" and shared:
                remedy = "add the rank to the seed, or every rank draws the same augmentation"
                equal = f"{where}: it is equal on them and must be distinct"
                self.run.differ(field, shared, wrong=shared, where=equal, remedy=remedy)


# -- optimizer settings ------------------------------------------------------------------------------------------------

_MAX_PARAMETERS = 2000
_OF_GROUP = ("lr", "weight_decay")


class SettingsCheck(Check):
    """Compares, before every step, learning rates, step counts, the trainable parameters, the loss scale and the number
    of collectives.

    Above 2,000 parameters, which of them are trainable is compared every ``parameters_every_n_steps`` only; a value
    that lies on a device is not read.
    """

    def attach(self) -> None:
        """Takes down the parameters in order."""
        self._parameters = dict(self.run.module.named_parameters())
        self._tensors = list(self._parameters.values())
        self._num_said = 0
        trainer = self.run.trainer
        is_on_cpu = trainer.strategy.root_device.type == "cpu"  # elsewhere a question waits for the device
        self._scaler = getattr(trainer.precision_plugin, "scaler", None) if is_on_cpu else None
        self._counts_collectives = True
        self._have_steps: list[bool] = []
        self._optimizers: list[Any] = []

    def start(self) -> None:
        """All ranks learn which optimizers have elements to step on every rank: an FSDP1 shard may be all frozen."""
        self.epoch_start()
        mine = [
            any(one.requires_grad and one.numel() for group in optimizer.param_groups for one in group["params"])
            for optimizer in self._optimizers
        ]
        self._have_steps = [all(held) for held in zip(*self.run.gather("elements to step", mine), strict=False)]

    def epoch_start(self) -> None:
        """Takes down the optimizers, which do not change within an epoch."""
        self._optimizers = [one for one in self.run.trainer.optimizers if getattr(one, "param_groups", None)]

    def say(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """The first learning rate and the loss scale as they are, everything as one number."""
        numbers = self._numbers()
        learning_rate = numbers[0] if numbers else 0.0
        if len(self._tensors) <= _MAX_PARAMETERS or self._num_said % self.run.parameters_every_n_steps == 0:
            numbers.append(hash(tuple([tensor.requires_grad for tensor in self._tensors])))
        self._num_said += 1
        return {
            "learning_rate": learning_rate,
            "loss_scale": 0.0 if self._scaler is None else float(self._scaler.get_scale()),
            # The hash of a tuple of numbers is the same in every process.
            "settings": hash(tuple(numbers)) & _MASK,
            "collectives": _compat.num_collectives() if self._counts_collectives else 0,
        }

    def excuses(self, field: str) -> bool:
        """Gloo counts point-to-point messages as well, of which ranks may rightly send more or fewer."""
        if field != "collectives" or not self._counts_collectives:
            return False
        recorded = self.run.gather("recorded collectives", _compat.num_recorded_collectives())
        if None in recorded or not is_equal(recorded):
            return False
        self._counts_collectives = False
        log.info("rank %d: collectives are counted no more, as messages between two ranks would be", self.run.rank)
        return True

    def explain(self, field: str) -> dict[str, Any]:
        """Each number with its name."""
        if field != "settings":
            return {}
        names: list[str] = []
        for index, optimizer in enumerate(self._optimizers):
            for number in range(len(optimizer.param_groups)):
                names += [f"{name} of optimizer {index}, group {number}" for name in _OF_GROUP]
            names.append(f"step count of optimizer {index}")
        trained = {f"requires_grad of {name}": one.requires_grad for name, one in self._parameters.items()}
        return dict(zip(names, self._numbers(), strict=True)) | dict(itertools.islice(trained.items(), _MAX_PARAMETERS))

    def _numbers(self) -> list[float]:
        numbers: list[float] = []
        for index, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                numbers += [_number(group.get(name, 0.0)) for name in _OF_GROUP]
            numbers.append(self._steps_of(index, optimizer))
        return numbers

    def _steps_of(self, index: int, optimizer: Any) -> float:
        """The first count that the optimizer keeps for a parameter; 0 where it keeps none, or keeps it on a device."""
        state: Any = getattr(optimizer, "state", None)
        if not all(self._have_steps[index : index + 1]) or not hasattr(state, "values"):
            return 0.0
        first = next((one for one in state.values() if one), None)  # of a parameter without elements here is nothing
        return _number(first.get("step", 0.0)) if isinstance(first, dict) else 0.0


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        return float(value.item()) if value.is_cpu else 0.0
    return float(value)


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
        self._num_said = self._num_shared = 0
        self._batch: Any = None
        self._replicas: list[int] = []
        self._last_contents: list[int] = []

    def start(self) -> None:
        """All ranks learn who shares whose data."""
        run = self.run
        kwargs = run.trainer.distributed_sampler_kwargs or {"rank": run.rank}
        self._mine = int(kwargs["rank"])
        self._replicas = run.gather("data-parallel rank", self._mine)
        self._loaders = [loader for _, loader in flatten(run.trainer.train_dataloader)[0]]
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
                fields["batch_structure"] = digest(_structure(batch, self._has_sizes))
            if turn % self.run.budget.exceeds("batch", self._every) == 0:
                began = time.thread_time()
                ids = self.run.sample_ids()
                may_read = turn % self._reads_every == 0
                fields["batch_content"] = digest(ids) if ids is not None else _content(batch) if may_read else 0
                self.run.budget.took("batch", began)
        return fields

    def explain(self, field: str) -> dict[str, Any]:
        """What stands behind the fingerprints."""
        if field == "data_fingerprint":
            return self._place()
        return _structure(self._batch, self._has_sizes) if field == "batch_structure" else {}

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
            shared = self._shared_by_replicas({rank: shard for rank, shard in enumerate(shards) if type(shard) is int})
            values = {rank: f"shard {shards[rank]} of sampler {index}" for rank in shared}
            where = "before the first step: they would train on the same samples"
            remedy = "give DistributedSampler the rank of each process, or none: Lightning sets it"
            if shared:
                self.run.differ("shard", values, wrong=shared, where=where, remedy=remedy)

    def _shared_by_replicas(self, values: Mapping[int, int]) -> list[int]:
        """The ranks whose value stands on another place of the data-parallel axis too."""
        owners: dict[int, set[int]] = defaultdict(set)
        for rank, value in values.items():
            owners[value].add(self._replicas[rank])
        return [rank for rank, value in values.items() if len(owners[value]) > 1]

    # -- content -----------------------------------------------------------------------------------------------------

    def _require_equal_peers(self, contents: list[int]) -> None:
        for replica in sorted(set(self._replicas)):
            peers = [rank for rank, one in enumerate(self._replicas) if one == replica]
            if len({contents[rank] for rank in peers}) > 1:
                where = f"they share data-parallel rank {replica}, so that their batches must be the same"
                remedy = "give tensor-parallel peers one sampler: num_replicas and rank of the data-parallel axis"
                self._tell("tensor_parallel_batch", contents, peers, where, remedy, wrong=None)

    def _require_own_samples(self, contents: list[int]) -> None:
        shared = self._shared_by_replicas(dict(enumerate(contents)))
        # Ranks that see one constant batch for ever train on synthetic data.
        is_new = contents != self._last_contents
        self._num_shared = self._num_shared + is_new if shared else 0
        if self._num_shared >= _SAME_IN_A_ROW:
            self._num_shared = 0
            where = f"{_SAME_IN_A_ROW} batches in a row were the same on data-parallel ranks"
            remedy = "each data-parallel rank needs its own shard: a DistributedSampler, or ResumableDataModule"
            self._tell("duplicate_batches", contents, shared, where, remedy, wrong=shared)

    def _tell(
        self, field: str, contents: list[int], ranks: list[int], where: str, remedy: str, wrong: list[int] | None
    ) -> None:
        """All ranks have come to the same conclusion, so that all gather."""
        ids = self.run.gather("sample ids", (self.run.sample_ids() or [])[:_SHOWN_IDS])
        values = {rank: f"samples {ids[rank]}" if ids[rank] else f"content {contents[rank]:016x}" for rank in ranks}
        where = f"before step {self.run.trainer.global_step}: {where}"
        self.run.differ(field, values, where=where, remedy=remedy, wrong=wrong)


# -- what a batch is made of, and a sum of its content -----------------------------------------------------------------

_MAX_LEAVES = 64
_WHOLE_BYTES = 8 << 10
_PROBES = 64


def _structure(batch: Any, has_sizes: bool) -> dict[str, str]:
    """The path of each leaf, and what it is: type, and number of dimensions or shape, and dtype, of tensors.

    Sizes may differ between ranks: sequences have different lengths, the last batch of an epoch is smaller. A list is
    told by its first element, because it holds one for each sample.
    """
    return {
        path: _tensor_text(leaf.dtype, leaf.shape if has_sizes else leaf.dim())
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for path, leaf in itertools.islice(_leaves(batch, "batch"), _MAX_LEAVES)
    }


@lru_cache(maxsize=1000)
def _tensor_text(dtype: torch.dtype, size: int | torch.Size) -> str:
    what = f"{size} dimensions" if isinstance(size, int) else f"shape {list(size)}"
    return f"{str(dtype).removeprefix('torch.')} tensor of {what}"


def _content(batch: Any) -> int:
    """64 bits of the values of a batch, of which large tensors give a sample; 0 where it holds no tensor.

    Waits for the device where the batch lies on one.
    """
    hasher = xxhash.xxh3_64()
    has_values = False
    for path, leaf in itertools.islice(_leaves(batch, ""), _MAX_LEAVES):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            has_values = True
            hasher.update(f"{path}{tuple(leaf.shape)}".encode())
            hasher.update(_probe(leaf))
        elif isinstance(leaf, (str, int, float)):
            hasher.update(repr(leaf).encode())
    return (hasher.intdigest() or 1) if has_values else 0


def _probe(tensor: torch.Tensor) -> bytes:
    """All bytes of a small tensor; of a large one, elements at equal distances and both ends."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.contiguous().view(-1)
    if flat.numel() * flat.element_size() > _WHOLE_BYTES:
        edge = _WHOLE_BYTES // 4 // flat.element_size()
        flat = torch.cat([flat[:edge], flat[edge : -edge or None : max(1, flat.numel() // _PROBES)], flat[-edge:]])
    return bytes(flat.cpu().clone().view(torch.uint8).numpy())  # the storage of the batch stays as it is


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):  # the most common first: this is asked in each step
        yield path, value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):  # ranks may have filled them in another order
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield from _leaves(value[0], f"{path}[:]") if len(value) else [(f"{path}[:]", None)]
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, torch.nn.Module):
        for name, item in vars(value).items():
            yield from _leaves(item, f"{path}.{name}")
    else:
        yield path, value
