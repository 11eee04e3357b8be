"""Checks of what each rank is about to train with: the plan of the run, optimizer settings, and the batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from lightning_distplus import _compat
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.check import Check, MonitoredRun
from lightning_distplus.divergence.replicas import fingerprint_of_each
from lightning_distplus.errors import DivergenceError
from lightning_distplus.majority import disagreement, first_difference, is_equal
from lightning_distplus.rng import rng_state

__all__ = [
    "GENERATORS",
    "BatchCheck",
    "BatchShapes",
    "PlanCheck",
    "RngPolicy",
    "SettingsCheck",
    "StructureDigests",
    "content",
    "digest",
    "first_odd_entry",
    "signature",
    "structure",
    "weights",
]


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


# -- what a batch is made of, and a sum of its content -----------------------------------------------------------------

_MAX_LEAVES = 64
_WHOLE_BYTES = 8 << 10
_PROBES = 64


def digest(value: Any) -> int:
    """64 bits of anything whose ``repr`` is the same on all ranks."""
    return xxhash.xxh3_64_intdigest(repr(value).encode())


def structure(batch: Any, *, sizes: bool = False) -> dict[str, str]:
    """The path of each leaf, and what it is: type, number of dimensions and dtype of tensors.

    Sizes may differ between ranks: sequences have different lengths, the last batch of an epoch is smaller. A list is
    told by its first element, because it holds one for each sample.

    Args:
        batch: Any tree of tensors and other things.
        sizes: Whether the shapes of tensors are told too.
    """
    found: dict[str, str] = {}
    for path, leaf in _leaves(batch, "batch"):
        if isinstance(leaf, torch.Tensor):
            what = f"shape {list(leaf.shape)}" if sizes else f"{leaf.dim()} dimensions"
            found[path] = f"{str(leaf.dtype).removeprefix('torch.')} tensor of {what}"
        else:
            found[path] = type(leaf).__name__
        if len(found) >= _MAX_LEAVES:
            break
    return found


class StructureDigests:
    """The digests of structures, each computed once: a run has few, and asks before every step.

    Args:
        sizes: As for ``structure``.
    """

    _MOST = 256  # of sequences by their length there may be many, when sizes count

    def __init__(self, *, sizes: bool) -> None:
        self._has_sizes = sizes
        self._known: dict[Hashable, int] = {}

    def of(self, batch: Any) -> int:
        """64 bits of the structure of a batch."""
        try:
            kind = self._kind(batch)
        except _Unknown:
            return digest(structure(batch, sizes=self._has_sizes))
        found = self._known.get(kind)
        if found is None:
            if len(self._known) >= self._MOST:
                self._known.clear()
            found = self._known[kind] = digest(structure(batch, sizes=self._has_sizes))
        return found

    def _kind(self, value: Any) -> Hashable:
        """What decides the structure, without the text of it."""
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape if self._has_sizes else value.dim()
        kind = type(value)
        if kind is dict:
            return dict, *((key, self._kind(item)) for key, item in value.items())
        if kind is tuple:
            return tuple, *map(self._kind, value)
        if kind is list:
            return list, self._kind(value[0]) if value else None
        if kind in _PLAIN:
            return kind.__name__
        raise _Unknown


_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class _Unknown(Exception):
    """Only ``structure`` can tell."""


def content(batch: Any) -> int:
    """64 bits of the values of a batch, of which large tensors give a sample; 0 where it holds no tensor.

    Waits for the device where the batch lies on one.
    """
    hasher = xxhash.xxh3_64()
    has_values = False
    for count, (path, leaf) in enumerate(_leaves(batch, "")):
        if count >= _MAX_LEAVES:
            break
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
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    if flat.numel() * flat.element_size() > _WHOLE_BYTES:
        edge = _WHOLE_BYTES // 4 // flat.element_size()
        flat = torch.cat([flat[:edge], flat[edge : -edge or None : max(1, flat.numel() // _PROBES)], flat[-edge:]])
    return bytes(flat.cpu().clone().view(torch.uint8).numpy())  # the storage of the batch stays as it is


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield from _leaves(value[0], f"{path}[:]") if len(value) else [(f"{path}[:]", None)]
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (torch.Tensor, torch.nn.Module)):
        for name, item in vars(value).items():
            yield from _leaves(item, f"{path}.{name}")
    else:
        yield path, value


# -- the check at the start: model, plan of the run, random generators -------------------------------------------------

RngPolicy = Literal["same", "distinct", "any"]
log = logging.getLogger(__name__)
GENERATORS = ("python", "numpy", "torch", "cuda")


class PlanCheck(Check):
    """Compares what holds for the whole run: the model's signature, and the numbers that decide when what happens.

    Args:
        rng_policy: For each generator, whether its state must be the same on all ranks or distinct on each. Lightning's
            ``seed_everything`` makes all of them the same, and many runs rely on it: nothing is required by default.
    """

    def __init__(self, rng_policy: Mapping[str, RngPolicy] | None = None) -> None:
        self._policy = dict(rng_policy or {})
        for name, policy in self._policy.items():
            if name not in GENERATORS or policy not in get_args(RngPolicy):
                raise ValueError(
                    f"rng_policy has {name!r}: {policy!r}; the names are {', '.join(GENERATORS)}, and a policy is one "
                    f"of {', '.join(get_args(RngPolicy))}."
                )

    def before_engine(self) -> None:
        """The model is built, and no engine has wrapped it: DDP would average a with b, or abort the process.

        Raises:
            DivergenceError: The first argument of the Trainer, parameter or buffer that differs, with both sides.
        """
        self._compare("arguments", self._arguments())
        odd = first_odd_entry(signature(self.run.module), self.run.gather)
        if odd is not None:
            index, values = odd
            self.run.tell(
                disagreement(
                    "model",
                    values,
                    where=f"at entry {index} of its parameters and buffers, before the engine wraps it",
                    remedy="build the model alike on all ranks: no branch by rank, no set, one order of registration",
                )
            )
        self._odd_weights = self._compare_weights()

    def _compare_weights(self) -> DivergenceError | None:
        """The first parameter whose values differ; engines overwrite those of the other ranks, or mix them."""
        held = {
            name: one.detach()
            for name, one in self.run.module.named_parameters()
            if one.numel() and not one.is_meta and not isinstance(one, DTensor)
        }
        devices = {one.device for one in held.values()}
        held = held if len(devices) == 1 else {}
        odd = first_odd_entry(weights(held), lambda name, value: self.run.gather(f"weights, {name}", value))
        if odd is None:
            return None
        return disagreement(
            "initial weights",
            odd[1],
            where="before the first step",
            remedy="DDP and ZeRO take those of rank 0 for all, FSDP keeps a part of each rank's; seed_everything makes "
            "them the same",
        )

    def start(self) -> None:
        """Compares the plan, and the generators."""
        self._compare("plan", self._plan())
        if self._odd_weights is not None:  # in a run without a seed they always do
            self._mention(self._odd_weights, logging.DEBUG)
        self._compare_hyperparameters()
        self.epoch_start()

    def _compare_hyperparameters(self) -> None:
        """Numbers that the modules have saved: some may rightly differ, a seed for one."""
        odd = first_difference(self.run.gather("hyperparameters", _hyperparameters(self.run.trainer)))
        if odd is not None:
            name, values = odd
            remedy = "start every rank with the same configuration, unless it is meant"
            self._mention(disagreement(name, values, where="before the first step", remedy=remedy), logging.WARNING)

    def _mention(self, error: DivergenceError, level: int) -> None:
        """What is not wrong by itself is told, and the run goes on."""
        self.run.note("difference", field=error.field, ranks=error.ranks, values=error.values)
        log.log(level, "rank %d: %s", self.run.rank, error)

    def _compare(self, what: str, mine: dict[str, Any]) -> None:
        odd = first_difference(self.run.gather(what, mine))
        if odd is not None:
            name, values = odd
            self.run.tell(
                disagreement(
                    name,
                    values,
                    where="before the first step",
                    remedy="the ranks would come to validations, saves or the end at different steps: give all of them "
                    "the same arguments, data and checkpoint; ResumableDataModule(uneven=...) makes batches even",
                )
            )

    def epoch_start(self) -> None:
        """Compares the random generators by the policy."""
        if not any(policy != "any" for policy in self._policy.values()):
            return
        mine = {name: xxhash.xxh3_64_hexdigest(state) for name, state in rng_state().items() if name in self._policy}
        states = self.run.gather("random generators", mine)
        for name, policy in self._policy.items():
            values = {rank: one[name] for rank, one in enumerate(states) if name in one}
            self._require_policy(name, policy, values)

    def _require_policy(self, name: str, policy: RngPolicy, values: dict[int, str]) -> None:
        ranks_of: dict[str, list[int]] = {}
        for rank, value in values.items():
            ranks_of.setdefault(value, []).append(rank)
        where = f"in epoch {self.run.trainer.current_epoch}"
        if policy == "same" and len(ranks_of) > 1:
            remedy = "seed it alike on all ranks, and draw from it alike"
            self.run.tell(disagreement(f"the state of the {name} generator", values, where=where, remedy=remedy))
        shared = sorted(rank for ranks in ranks_of.values() if len(ranks) > 1 for rank in ranks)
        if policy == "distinct" and shared:
            self.run.tell(
                disagreement(
                    f"the state of the {name} generator",
                    {rank: values[rank] for rank in shared},
                    wrong=shared,
                    where=f"{where}: it is equal on them and must be distinct",
                    remedy="add the rank to the seed, or every rank draws the same augmentation",
                )
            )

    def _arguments(self) -> dict[str, Any]:
        """Of the Trainer: a rank without validation waits for nobody where the others wait for it, before any step."""
        trainer: Any = self.run.trainer
        return {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "max_steps": trainer.max_steps,
            "max_epochs": trainer.max_epochs,
            "min_steps": trainer.min_steps,
            "min_epochs": trainer.min_epochs,
            "limit_train_batches": trainer.limit_train_batches,
            "limit_val_batches": trainer.limit_val_batches,
            "num_sanity_val_steps": str(trainer.num_sanity_val_steps),
            # By the clock, the Trainer has the one and not the other.
            "val_check_interval": str(getattr(trainer, "val_check_interval", None)),
            "val_check_interval in seconds": getattr(trainer, "_val_check_time_interval", None),
            "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
            "gradient_clip_val": trainer.gradient_clip_val,
            "precision": str(trainer.precision),
            "automatic_optimization": self.run.module.automatic_optimization,
        }

    def _plan(self) -> dict[str, Any]:
        trainer = self.run.trainer
        optimizers = [type(one).__name__ for one in trainer.optimizers]
        return {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "number of training batches": _finite(trainer.num_training_batches),
            "number of validation batches": [_finite(number) for number in trainer.num_val_batches],
            **self._arguments(),
            "optimizers": ", ".join(optimizers),
            "checkpoint": Path(str(trainer.ckpt_path or "none")).name,
        }


def _hyperparameters(trainer: Any) -> dict[str, float]:
    owners = {"module": trainer.lightning_module, "data": getattr(trainer, "datamodule", None)}
    return {
        f"hyperparameter {name} of the {owner}": value
        for owner, module in owners.items()
        for name, value in sorted((getattr(module, "hparams", None) or {}).items())
        if isinstance(value, (bool, int, float))
    }


def _finite(number: float) -> int | None:
    """A number of batches; None where the loader does not tell."""
    return None if math.isinf(number) else int(number)


# -- the signature of a model ------------------------------------------------------------------------------------------

_MAX_ENTRIES = 50_000  # the digests of so many fit into one message


def signature(module: torch.nn.Module) -> list[str]:
    """One line for each parameter and buffer, in the order of registration, which is that of gradient buckets.

    What FSDP1 has sharded already, in a ``validate`` or another ``fit`` before, has another shape on each rank.
    """
    lines = [
        f"parameter {name}: {'a shard' if _compat.is_fsdp_shard(tensor) else _text_of(tensor)}, "
        f"{'trainable' if tensor.requires_grad else 'frozen'}"
        for name, tensor in module.named_parameters()
    ]
    return lines + [f"buffer {name}: {_text_of(tensor)}" for name, tensor in module.named_buffers()]


def weights(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """One line for each tensor: its name and the fingerprint of its values."""
    found = fingerprint_of_each(list(tensors.values())).tolist() if tensors else []
    return [f"{name}: {value & (1 << 64) - 1:016x}" for name, value in zip(tensors, found, strict=True)]


def _text_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def first_odd_entry(entries: list[str], gather: Callable[[str, Any], list[Any]]) -> tuple[int, dict[int, str]] | None:
    """The first entry in which two ranks differ, with what each of them has there; None where all agree.

    Args:
        entries: This rank's list.
        gather: Collects a value from every rank; all ranks call this function alike.
    """
    if is_equal(gather("signature", digest(entries))):
        return None
    digests = gather("signature entries", [digest(entry) for entry in entries[:_MAX_ENTRIES]])
    length = max(len(one) for one in digests)
    index = next(
        (index for index in range(length) if not is_equal(tuple(one[index : index + 1]) for one in digests)), length
    )
    found = gather("signature entry", entries[index] if index < len(entries) else "nothing")
    return index, dict(enumerate(found))
