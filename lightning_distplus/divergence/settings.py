"""Checks of what each rank is about to train with: the plan of the run, optimizer settings, and the batch."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distplus import _compat
from lightning_distplus.control import GateRecord
from lightning_distplus.divergence.check import Check, digest
from lightning_distplus.divergence.replicas import fingerprint_of_each
from lightning_distplus.errors import DivergenceError
from lightning_distplus.gathering import flatten
from lightning_distplus.majority import disagreement, first_difference, is_equal
from lightning_distplus.run_access import rng_state

log = logging.getLogger(__name__)
RngPolicy = Literal["same", "distinct", "any"]
_GENERATORS = ("python", "numpy", "torch", "cuda")
_ARGUMENTS = (
    "accumulate_grad_batches", "max_steps", "max_epochs", "min_steps", "min_epochs", "limit_train_batches",
    "limit_val_batches", "num_sanity_val_steps", "val_check_interval",
    "check_val_every_n_epoch", "gradient_clip_val", "precision",
)  # fmt: skip
_MAX_ENTRIES = 50_000  # the digests of so many fit into one message
_MASK = (1 << 64) - 1


# -- at the start: model, plan of the run, random generators -----------------------------------------------------------


class PlanCheck(Check):
    """Compares what holds for the whole run: the model's signature, and the numbers that decide when what happens.

    Args:
        rng_policy: For each generator, whether its state must be the same on all ranks or distinct on each. Lightning's
            ``seed_everything`` makes all of them the same, and many runs rely on it: nothing is required by default.
    """

    def __init__(self, rng_policy: Mapping[str, RngPolicy] | None = None) -> None:
        self._policy = dict(rng_policy or {})
        for name, policy in self._policy.items():
            if name not in _GENERATORS or policy not in get_args(RngPolicy):
                raise ValueError(
                    f"rng_policy has {name!r}: {policy!r}; the names are {', '.join(_GENERATORS)}, and a policy is one "
                    f"of {', '.join(get_args(RngPolicy))}."
                )

    def before_engine(self) -> None:
        """The model is built, and no engine has wrapped it: DDP would average a with b, or abort the process."""
        self._compare("arguments", self._arguments())
        if odd := _first_odd_entry(_signature(self.run.module), self.run.gather):
            self.run.differ(
                "model",
                odd[1],
                where=f"at entry {odd[0]} of its parameters and buffers, before the engine wraps it",
                remedy="build the model alike on all ranks: no branch by rank, no set, one order of registration",
            )
        self._odd_weights = self._compare_weights()

    def _compare_weights(self) -> DivergenceError | None:
        """The first parameter whose values differ; engines overwrite those of the other ranks, or mix them."""
        named = self.run.module.named_parameters()
        held = [(name, one) for name, one in named if one.numel() and not one.is_meta and not isinstance(one, DTensor)]
        lines: list[str] = []
        if len({one.device for _, one in held}) == 1:
            found = fingerprint_of_each([one for _, one in held]).tolist()
            lines = [f"{name}: {value & _MASK:016x}" for (name, _), value in zip(held, found, strict=True)]
        odd = _first_odd_entry(lines, lambda name, value: self.run.gather(f"weights, {name}", value))
        remedy = (
            "DDP and ZeRO take those of rank 0 for all, FSDP keeps a part of each rank's; seed_everything makes them "
        )
        remedy += "the same"
        return odd and disagreement("initial weights", odd[1], where="before the first step", remedy=remedy)

    def start(self) -> None:
        """Compares the plan and the generators; numbers that the modules have saved may differ rightly, as a seed."""
        self._compare("plan", self._plan())
        if self._odd_weights is not None:  # in a run without a seed they always do
            self._mention(self._odd_weights, logging.DEBUG)
        if odd := first_difference(self.run.gather("hyperparameters", _hyperparameters(self.run.trainer))):
            remedy = "start every rank with the same configuration, unless it is meant"
            self._mention(disagreement(*odd, where="before the first step", remedy=remedy), logging.WARNING)
        self.epoch_start()

    def _mention(self, error: DivergenceError, level: int) -> None:
        self.run.note("difference", field=error.field, ranks=error.ranks, values=error.values)
        log.log(level, "rank %d: %s", self.run.rank, error)

    def _compare(self, what: str, mine: dict[str, Any]) -> None:
        if odd := first_difference(self.run.gather(what, mine)):
            self.run.differ(
                *odd,
                where="before the first step",
                remedy="the ranks would come to validations, saves or the end at different steps: give all of them the "
                "same arguments, data and checkpoint; ResumableDataModule(uneven=...) makes batches even",
            )

    def epoch_start(self) -> None:
        """Compares the random generators by the policy."""
        if not any(policy != "any" for policy in self._policy.values()):
            return
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

    def _arguments(self) -> dict[str, Any]:
        """Of the Trainer: a rank without validation waits for nobody where the others wait for it, before any step."""
        trainer = self.run.trainer
        return {
            **{name: _plain(getattr(trainer, name, None)) for name in _ARGUMENTS},
            "time between validations": _plain(_compat.validation_interval(trainer)),
            "automatic_optimization": self.run.module.automatic_optimization,
        }

    def _plan(self) -> dict[str, Any]:
        trainer = self.run.trainer
        return {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "number of training batches": _plain(trainer.num_training_batches),
            "number of validation batches": [_plain(number) for number in trainer.num_val_batches],
            **self._arguments(),
            "optimizers": ", ".join(type(one).__name__ for one in trainer.optimizers),
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


def _plain(value: Any) -> Any:
    """As JSON has it: the number of batches of a loader that does not tell it is ``"inf"``."""
    is_plain = value is None or (isinstance(value, (int, float)) and math.isfinite(value))
    return value if is_plain else str(value)


def _signature(module: torch.nn.Module) -> list[str]:
    """One line for each parameter and buffer, in the order of registration, which is that of gradient buckets.

    What FSDP1 has sharded already, in a ``validate`` or another ``fit`` before, has another shape on each rank.
    """

    def text_of(tensor: torch.Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    lines = [
        f"parameter {name}: {'a shard' if _compat.is_fsdp_shard(tensor) else text_of(tensor)}, "
        f"{'trainable' if tensor.requires_grad else 'frozen'}"
        for name, tensor in module.named_parameters()
    ]
    return lines + [f"buffer {name}: {text_of(tensor)}" for name, tensor in module.named_buffers()]


def _first_odd_entry(entries: list[str], gather: Callable[[str, Any], list[Any]]) -> tuple[int, dict[int, str]] | None:
    """The first entry in which two ranks differ, with what each of them has there; None where all agree.

    Args:
        entries: This rank's list.
        gather: Collects a value from every rank; all ranks call this function alike.
    """
    if is_equal(gather("signature", digest(entries))):
        return None
    digests = gather("signature entries", [digest(entry) for entry in entries[:_MAX_ENTRIES]])
    length = max(map(len, digests))
    differing = (index for index in range(length) if not is_equal(one[index : index + 1] for one in digests))
    index = next(differing, length)
    return index, dict(enumerate(gather("signature entry", entries[index] if index < len(entries) else "nothing")))


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
_MOST_KINDS = 256  # of sequences by their length there may be many, when sizes count


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
        self._structures: dict[Hashable, int] = {}
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
                fields["batch_structure"] = self._structure_of(batch)
            if self.run.budget.is_due("batch"):
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

    def _structure_of(self, batch: Any) -> int:
        """64 bits of the structure; each is computed once, as a run has few and asks before every step."""
        kind = _kind(batch, self._has_sizes)
        found = self._structures.get(kind)
        if found is None:
            if len(self._structures) >= _MOST_KINDS:
                self._structures.clear()
            found = self._structures[kind] = digest(_structure(batch, self._has_sizes))
        return found

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
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def _structure(batch: Any, has_sizes: bool) -> dict[str, str]:
    """The path of each leaf, and what it is: type, and number of dimensions or shape, and dtype, of tensors.

    Sizes may differ between ranks: sequences have different lengths, the last batch of an epoch is smaller. A list is
    told by its first element, because it holds one for each sample.
    """
    found: dict[str, str] = {}
    for path, leaf in itertools.islice(_leaves(batch, "batch"), _MAX_LEAVES):
        if isinstance(leaf, torch.Tensor):
            what = f"shape {list(leaf.shape)}" if has_sizes else f"{leaf.dim()} dimensions"
            found[path] = f"{str(leaf.dtype).removeprefix('torch.')} tensor of {what}"
        else:
            found[path] = type(leaf).__name__
    return found


def _kind(value: Any, has_sizes: bool) -> Hashable:
    """What decides the structure, where the types are usual ones without the text of it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape if has_sizes else value.dim()
    kind: Any = type(value)
    if kind is dict:
        return dict, *((key, _kind(item, has_sizes)) for key, item in value.items())
    if kind is tuple:
        return tuple, *(_kind(item, has_sizes) for item in value)
    if kind is list:
        return list, _kind(value[0], has_sizes) if value else None
    return kind if kind in _PLAIN else (kind, *_structure(value, has_sizes).items())


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
