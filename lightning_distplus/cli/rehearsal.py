"""A configuration as one process plays it: the Trainer on a CPU, the model on the meta device, ranks pretended."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_distplus import _compat, env
from lightning_distplus.cli.training import DistplusCLI
from lightning_distplus.errors import PreflightError

__all__ = [
    "Layout",
    "Rates",
    "RehearsalCLI",
    "build_model",
    "optimizers_of",
    "pretend_ranks",
    "rates",
    "reported_steps",
]

_MAX_STEPPED = 5000
_MAX_STEPPING_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the Trainer of the configuration asks for, which this host may not have."""

    accelerator: str = "auto"
    per_node: int = 1
    nodes: int = 1
    precision: str = "32-true"

    @classmethod
    def of(cls, trainer: Namespace) -> Layout:
        """As the section ``trainer`` says it."""
        devices = trainer.get("devices", 1)
        if isinstance(devices, str):
            devices = [one for one in devices.split(",") if one] if "," in devices else _number(devices)
        per_node = len(devices) if isinstance(devices, (list, tuple)) else devices
        return cls(
            accelerator=str(trainer.get("accelerator")),
            per_node=max(1, per_node),
            nodes=int(trainer.get("num_nodes") or 1),
            precision=_precision(trainer.get("precision")),
        )

    @property
    def ranks(self) -> int:
        """Of the whole run."""
        return self.per_node * self.nodes


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 1  # "auto" and -1: as many as there are, which nobody knows here


def _precision(wanted: Any) -> str:
    text = str(wanted or "32-true")
    return {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}.get(text, text)


class RehearsalCLI(DistplusCLI):
    """Builds what a configuration says, without its devices: the Trainer on one CPU, the model without memory."""

    exits_on_error = False
    layout = Layout()
    asked: Namespace = Namespace()
    """The configuration as it was given."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Also lets the model be made on the meta device."""
        super().add_arguments_to_parser(parser)
        parser.add_instantiator(_without_memory, LightningModule, prepend=True)

    def before_instantiate_classes(self) -> None:
        """Notes the layout, and takes this host's in its place."""
        self.asked = self.config.clone()
        trainer = self.config.trainer
        self.layout = Layout.of(trainer)
        here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "precision": "32-true", "logger": False}
        trainer.update(Namespace(**here))
        trainer["strategy"] = _on_any_device(trainer.get("strategy"), self.layout.ranks)

    def instantiate_classes(self) -> None:
        """Builds outside of whatever launcher this shell belongs to."""
        with env.changed(**{variable.name: None for variable in env.LAUNCH_VARIABLES}):
            super().instantiate_classes()

    def _refuse(self, error: Exception) -> None:
        raise PreflightError(str(error)) from error


def _without_memory(class_type: type, *arguments: Any, **named: Any) -> Any:
    try:
        with torch.device("meta"):
            return class_type(*arguments, **named)
    except (RuntimeError, TypeError, ValueError):  # it reads values of its own tensors
        return class_type(*arguments, **named)


_OURS = {
    "DDPStrategy": "lightning_distplus.ResilientDDP",
    "FSDPStrategy": "lightning_distplus.ResilientFSDP",
    "ModelParallelStrategy": "lightning_distplus.ResilientModelParallel",
    "DeepSpeedStrategy": "lightning_distplus.ResilientDeepSpeed",
}


def _on_any_device(strategy: Any, ranks: int) -> Any:
    """Ours in the place of the parent, which may refuse a CPU; it takes the same arguments."""
    if isinstance(strategy, Namespace):
        name = str(strategy.get("class_path", "")).rpartition(".")[2]
        if name in _OURS:
            strategy["class_path"] = _OURS[name]
        return strategy
    if strategy in ("auto", None):
        return "resilient_ddp" if ranks > 1 else "auto"
    return f"resilient_{strategy}" if strategy in ("ddp", "fsdp", "deepspeed") else strategy


@contextmanager
def pretend_ranks(trainer: Any, model: Any, layout: Layout) -> Iterator[None]:
    """The Trainer sees as many ranks as the layout has, and a mesh of them where its strategy uses one."""
    strategy = trainer.strategy
    strategy.connect(model)
    model.trainer = trainer
    if hasattr(strategy, "parallel_devices"):
        strategy.parallel_devices = [torch.device("cpu")] * layout.per_node
        strategy.num_nodes = layout.nodes
        strategy.set_world_ranks()
    if not isinstance(strategy, ModelParallelStrategy):
        yield
        return
    tensor = _compat.tensor_parallel_size(strategy) or layout.per_node
    names = ("data_parallel", "tensor_parallel")
    with _compat.fake_default_group(layout.ranks) as is_there:
        if is_there:
            mesh = init_device_mesh("cpu", (max(1, layout.ranks // tensor), tensor), mesh_dim_names=names)
            _compat.give_mesh(strategy, model, mesh)
        yield


def build_model(model: LightningModule) -> None:
    """Calls ``configure_model`` without memory; whatever it raises is an error of the configuration."""
    with torch.device("meta"):
        model.configure_model()


def optimizers_of(trainer: Any) -> tuple[list[Optimizer], list[Any]]:
    """The optimizers and schedules, as Lightning makes them."""
    Strategy.setup_optimizers(trainer.strategy, trainer)
    return trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs


def reported_steps(total: int) -> list[int]:
    """Steps worth a row: the first ones, tenths of powers, quarters, and the last."""
    powers = [10**power for power in range(1, int(math.log10(max(total, 1))) + 1)]
    chosen = {0, *powers, *(total * part // 4 for part in (1, 2, 3)), total - 1}
    return sorted(step for step in chosen if 0 <= step < total)


@dataclass
class Rates:
    """Learning rates by step, and why some are missing."""

    by_step: dict[int, list[float]] = field(default_factory=dict)
    missing: str = ""


def rates(optimizer: Optimizer, schedule: Any, wanted: Sequence[int], steps_per_epoch: int | None) -> Rates:
    """The learning rate of each parameter group at each wanted step.

    Args:
        optimizer: Of throw-away parameters.
        schedule: Lightning's description of the schedule, or None.
        wanted: Steps, ascending.
        steps_per_epoch: For a schedule that moves by epochs.
    """
    found = Rates()
    if schedule is None:
        found.by_step = {step: [float(group["lr"]) for group in optimizer.param_groups] for step in wanted}
        return found
    if schedule.reduce_on_plateau:
        found.missing = "it follows a metric"
        return found
    per_count = schedule.frequency
    if schedule.interval == "epoch":
        if steps_per_epoch is None:
            found.missing = "it moves by epochs, whose length is not known"
            return found
        per_count *= steps_per_epoch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule moves and the optimizer does not
        _follow(optimizer, schedule.scheduler, {step: step // per_count for step in wanted}, found)
    return found


def _follow(optimizer: Optimizer, scheduler: Any, counts: dict[int, int], found: Rates) -> None:
    """Counts the schedule up, one by one; a long one jumps where its rate is a function of the count alone."""
    end, here = time.monotonic() + _MAX_STEPPING_S, 0
    for step, count in counts.items():
        if count > _MAX_STEPPED and hasattr(scheduler, "lr_lambdas"):
            scheduler.last_epoch = here = count - 1
        while here < count:
            scheduler.step()
            here += 1
            if time.monotonic() > end:
                found.missing = f"{here} of {count} steps of it took {_MAX_STEPPING_S:g} s"
                return
        found.by_step[step] = [float(group["lr"]) for group in optimizer.param_groups]
