"""``distplus rehearse``: what a configuration would do on many ranks, before the queue is entered. Needs no GPU."""

from __future__ import annotations

import argparse
import math
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from lightning_distplus import _compat, env
from lightning_distplus.cli import import_from_here, print_json, stdout, table
from lightning_distplus.cli.preflight import add_wishes, exit_code_of, print_findings, wishes
from lightning_distplus.cli.training import DistplusCLI, explain
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.progress import data_parallel
from lightning_distplus.errors import PreflightError
from lightning_distplus.preflight import Facts, Finding, Status, run_checks
from lightning_distplus.preflight.host import write_speed

__all__ = ["main", "rates", "reported_steps"]

_MAX_STEPPED = 5000
_MAX_STEPPING_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the Trainer of the configuration asks for, which this host may not have."""

    per_node: int = 1
    nodes: int = 1
    precision: str = "32-true"

    @classmethod
    def of(cls, trainer: Namespace) -> Layout:
        """As the section ``trainer`` says it; "auto" and -1 are as many devices as there are, which nobody knows."""
        devices, precision = trainer.get("devices", 1), str(trainer.get("precision") or "32-true")
        if isinstance(devices, str):
            listed = [one for one in devices.split(",") if one]
            devices = listed if "," in devices else int(devices) if devices.isdecimal() else 1
        names = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
        return cls(
            per_node=max(1, len(devices) if isinstance(devices, list | tuple) else devices),
            nodes=int(trainer.get("num_nodes") or 1),
            precision=names.get(precision, precision),
        )

    @property
    def ranks(self) -> int:
        """Of the whole run."""
        return self.per_node * self.nodes


class RehearsalCLI(DistplusCLI):
    """Builds what a configuration says, without its devices: the Trainer on one CPU, the model without memory."""

    exits_on_error = False
    layout = Layout()

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Also lets the model be made on the meta device."""
        super().add_arguments_to_parser(parser)
        parser.add_instantiator(_without_memory, LightningModule, prepend=True)

    def before_instantiate_classes(self) -> None:
        """Notes the layout, and takes this host's in its place."""
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


def _on_any_device(strategy: Any, ranks: int) -> Any:
    """Ours in the place of the parent, which may refuse a CPU; it takes the same arguments."""
    if isinstance(strategy, Namespace):
        name = str(strategy.get("class_path", "")).rpartition(".")[2]
        if name in ("DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"):
            strategy["class_path"] = f"lightning_distplus.Resilient{name.removesuffix('Strategy')}"
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


def states_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Values that an optimizer keeps per trainable parameter, found by a step; None where it cannot step here.

    Its parameters are on the meta device, or need not keep their values.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError):  # it reads values, which the meta device does not have
        return None
    finally:
        for parameter in parameters:
            parameter.grad = None
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    kept = sum(tensor.numel() for tensor in tensors if tensor.dim() > 0)  # scalars count steps
    return float(kept / max(1, sum(parameter.numel() for parameter in parameters)))


def checkpoint_bytes(model: LightningModule, strategy: Any, precision: str, states: float) -> int:
    """Bytes of one checkpoint of all ranks: parameters, buffers, and the state of the optimizer.

    Args:
        model: On the meta device, whole.
        strategy: ZeRO adds a float32 copy of what is trained, and saves weights as it computes with them.
        precision: The Trainer's, for example ``"bf16-mixed"``.
        states: Values that the optimizer keeps per trainable parameter.
    """
    kind, _, mode = precision.partition("-")
    width = {"64": 8, "32": 4}.get(kind, 2)
    is_zero = isinstance(strategy, DeepSpeedStrategy)
    at_rest = width if is_zero or mode != "mixed" else 4
    total = sum(one.numel() for one in model.parameters())
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    buffers = sum(one.numel() * one.element_size() for one in model.buffers())
    return total * at_rest + buffers + int(trained * ((1 + states) * 4 if is_zero else states * at_rest))


def reported_steps(total: int) -> list[int]:
    """Steps worth a row: the first ones, tenths of powers, quarters, and the last."""
    powers = [10**power for power in range(1, int(math.log10(max(total, 1))) + 1)]
    chosen = {0, *powers, *(total * part // 4 for part in (1, 2, 3)), total - 1}
    return sorted(step for step in chosen if 0 <= step < total)


def rates(
    optimizer: Optimizer, schedule: Any, wanted: Sequence[int], steps_per_epoch: int | None
) -> tuple[dict[int, list[float]], str]:
    """The learning rate of each parameter group at each wanted step, and why some are missing.

    Args:
        optimizer: Of throw-away parameters.
        schedule: Lightning's description of the schedule, or None.
        wanted: Steps, ascending.
        steps_per_epoch: For a schedule that moves by epochs.
    """
    if schedule is None:
        return {step: [float(group["lr"]) for group in optimizer.param_groups] for step in wanted}, ""
    if schedule.reduce_on_plateau:
        return {}, "it follows a metric"
    is_by_epochs = schedule.interval == "epoch"
    if is_by_epochs and steps_per_epoch is None:
        return {}, "it moves by epochs, whose length is not known"
    per_count = schedule.frequency * (steps_per_epoch if is_by_epochs else 1)
    found: dict[int, list[float]] = {}
    end, here = time.monotonic() + _MAX_STEPPING_S, 0
    scheduler = schedule.scheduler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the schedule moves and the optimizer does not
        for step in wanted:
            count = step // per_count
            if count > _MAX_STEPPED and hasattr(scheduler, "lr_lambdas"):  # its rate is a function of the count alone
                scheduler.last_epoch = here = count - 1
            while here < count:
                scheduler.step()
                here += 1
                if time.monotonic() > end:
                    return found, f"{here} of {count} steps of it took {_MAX_STEPPING_S:g} s"
            found[step] = [float(group["lr"]) for group in optimizer.param_groups]
    return found, ""


# -- the command -------------------------------------------------------------------------------------------------------

CHECKS = ("config", "layout", "model", "batch", "data", "optimizer", "checkpoint")
"""The names of what a rehearsal looks at."""
_TRIAL_BYTES = 32 << 20
_ADAM_STATES = 2.0


@dataclass
class Rehearsal:
    """What has been found out so far."""

    layout: Layout = field(default_factory=Layout)
    strategy: str = ""
    findings: list[Finding] = field(default_factory=list)
    batch: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    schedule: list[dict[str, Any]] = field(default_factory=list)

    def add(self, check: str, status: Status, subject: str, detail: str = "", remedy: str = "") -> None:
        """Notes a finding."""
        self.findings.append(Finding(check=check, status=status, subject=subject, detail=detail, remedy=remedy))


def main(argv: Sequence[str]) -> int:
    """Exit code 0 where the run could start, 173 where a finding is an error."""
    parser = argparse.ArgumentParser(
        prog="distplus rehearse",
        allow_abbrev=False,
        description="Builds a configuration as distplus fit takes it, with the model on the meta device and the ranks "
        "pretended: batch sizes, learning rates, size and time of a checkpoint.",
        epilog=f"Everything else is passed on: --config FILE, --trainer.max_steps N. Checks: {', '.join(CHECKS)}. "
        "Exit code 0: it could start; 173: it could not.",
    )
    parser.add_argument("--world", type=int, metavar="RANKS", help="ranks of the run (default: as the file says)")
    add_wishes(parser)
    arguments, rest = parser.parse_known_args(argv)
    settings = wishes(parser, arguments, CHECKS)
    if arguments.world is not None and arguments.world < 1:
        parser.error("--world is at least 1")
    import_from_here()
    begin = time.monotonic()
    found = Rehearsal()
    _rehearse(found, arguments, rest)
    kept = (one.under(settings.get(one.check)) for one in found.findings)
    found.findings = [one for one in kept if one is not None]
    if arguments.json:
        layout = {"ranks": found.layout.ranks, "nodes": found.layout.nodes, "precision": found.layout.precision}
        findings = [finding.to_dict() for finding in found.findings]
        told = {"version": 1, **layout, "strategy": found.strategy, "batch": found.batch}
        told |= {"checkpoint": found.checkpoint, "schedule": found.schedule, "findings": findings}
        print_json(told)
    else:
        _tell(found, time.monotonic() - begin, [name for name in CHECKS if name not in arguments.off])
    return exit_code_of(found.findings)


def _rehearse(found: Rehearsal, arguments: argparse.Namespace, rest: list[str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the process has other arguments
            cli = RehearsalCLI(rest, run=False)
    except (Exception, SystemExit) as error:
        remedy = "Mend the file or the option that it names"
        found.add("config", Status.ERROR, "The configuration cannot be built.", explain(f"{error}")[0], remedy)
        return
    found.strategy = type(cli.trainer.strategy).__name__
    found.layout = cli.layout
    if arguments.world is not None:
        found.layout = _spread(found, cli.layout, arguments.world)
    with pretend_ranks(cli.trainer, cli.model, found.layout):
        try:
            with torch.device("meta"):
                cli.model.configure_model()
        except Exception as error:
            found.add("model", Status.ERROR, "The model cannot be built.", f"{type(error).__name__}: {error}")
            return
        epoch = _batches(found, cli)
        _checkpoint(found, cli, _rates(found, cli, epoch))


def _spread(found: Rehearsal, asked: Layout, ranks: int) -> Layout:
    if ranks < asked.per_node:
        return replace(asked, per_node=ranks, nodes=1)
    nodes, left = divmod(ranks, asked.per_node)
    if left:
        found.add(
            "layout", Status.ERROR, f"{ranks} ranks do not fill nodes of {asked.per_node}.",
            f"{ranks} = {nodes} x {asked.per_node} + {left}", f"--world {nodes * asked.per_node}, or other devices",
        )  # fmt: skip
    return replace(asked, nodes=max(1, nodes))


def _batches(found: Rehearsal, cli: Any) -> int | None:
    """The batch arithmetic; returns the optimizer steps of an epoch, where the data is here."""
    trainer, data = cli.trainer, cli.datamodule
    ranks = data_parallel(trainer)
    micro = getattr(data, "micro_batch", None) or getattr(data, "batch_size", None)
    try:
        if data is not None and isinstance(data, ExactDataModule):
            data.trainer = trainer
            data.accumulation(trainer, ranks)
    except ValueError as error:
        found.add("batch", Status.ERROR, "The batch sizes do not fit this number of ranks.", str(error))
        return None
    per_rank, micro = _length(found, trainer, data, micro)
    accumulation = int(trainer.accumulate_grad_batches)
    found.batch = {"micro_batch": micro, "data_parallel_ranks": ranks.size, "accumulation": accumulation}
    found.batch["global_batch"] = None if micro is None else micro * ranks.size * accumulation
    epoch = None if per_rank is None else -(-per_rank // accumulation)  # the last batches are a step too
    tokens = getattr(data, "seq_len", None)
    found.batch["tokens"] = tokens and found.batch["global_batch"] and tokens * found.batch["global_batch"]
    found.batch["steps_per_epoch"] = epoch
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if epoch is not None and trainer.max_epochs is not None and trainer.max_epochs > 0:
        limits.append(epoch * trainer.max_epochs)
    found.batch["steps"] = min(limits, default=None)
    if epoch == 0:
        found.add("batch", Status.ERROR, "An epoch has no batch on so many ranks.", remedy="Use smaller batches")
    return epoch


def _length(found: Rehearsal, trainer: Any, data: Any, micro: int | None) -> tuple[int | None, int | None]:
    """Micro-batches of an epoch on one rank, and their size, where the data is on this host."""
    owner = data if data is not None else trainer.lightning_module
    try:
        if data is not None:
            data.trainer = trainer
            data.setup("fit")
        loader = owner.train_dataloader()
        length = len(loader)
        if not isinstance(data, ExactDataModule):  # Lightning cuts a stock loader itself
            micro = micro or getattr(loader, "batch_size", None)
            length = -(-length // data_parallel(trainer).size)
        limit = trainer.limit_train_batches
        length = min(length, limit) if isinstance(limit, int) else int(length * limit)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        remedy = "Rehearse where the data is, to know the length of an epoch"
        found.add("data", Status.WARNING, "The training data cannot be read on this host.", text, remedy)
        return None, micro
    return length, micro


def _rates(found: Rehearsal, cli: Any, epoch: int | None) -> float:
    """Fills the table of learning rates; returns how many values the optimizer keeps per parameter."""
    strategy = cli.trainer.strategy
    try:
        Strategy.setup_optimizers(strategy, cli.trainer)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        found.add("optimizer", Status.WARNING, "The optimizer was not made; Adam is assumed.", text)
        return _ADAM_STATES
    steps, size = found.batch.get("steps"), found.batch.get("global_batch")
    for index, optimizer in enumerate(strategy.optimizers):
        schedule = next((one for one in strategy.lr_scheduler_configs if one.scheduler.optimizer is optimizer), None)
        by_step, missing = rates(optimizer, schedule, reported_steps(steps or 0), epoch)
        if missing:
            found.add("optimizer", Status.WARNING, f"Not all learning rates are known: {missing}.")
        for step, values in by_step.items():
            row = {"optimizer": index, "step": step, "lr": sorted(set(values)), "samples": size and size * step}
            found.schedule.append(row)
    kept = [states_of(optimizer) for optimizer in strategy.optimizers]
    return max((_ADAM_STATES if states is None else states for states in kept), default=_ADAM_STATES)


def _checkpoint(found: Rehearsal, cli: Any, states: float) -> None:
    """Its size, and how long it takes at the speed of its folder."""
    trainer, saves = cli.trainer, cli.trainer.checkpoint_callback
    size = checkpoint_bytes(cli.model, trainer.strategy, found.layout.precision, states)
    found.checkpoint = {"bytes": size}
    place = str(getattr(saves, "dirpath", None) or trainer.default_root_dir)
    if saves is None or "://" in place:
        return

    def speed(facts: Facts) -> Iterator[Finding]:
        folder = Path(place).absolute()
        while not folder.is_dir():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        mb_per_s = write_speed(folder, min(_TRIAL_BYTES, free // 2))
        seconds = size / 1e6 / mb_per_s
        found.checkpoint.update({"folder": str(folder), "mb_per_s": round(mb_per_s, 1), "seconds": round(seconds, 1)})
        if size > free:
            subject = f"One checkpoint has {_gib(size)} GiB, and its folder has room for {_gib(free)}."
            remedy = "Save to another folder, or rehearse where the run will save (--off checkpoint)"
            yield Finding.error(subject, detail=str(folder), remedy=remedy)
        elif 2 * size > free:
            subject = "The folder has room for one checkpoint only; the next is written beside it."
            yield Finding.warning(subject, detail=f"{folder}: {_gib(free)} GiB free")

    found.findings += run_checks({"checkpoint": speed}, Facts(variables={}))


def _tell(found: Rehearsal, elapsed_s: float, names: list[str]) -> None:
    layout, batch, saved = found.layout, found.batch, found.checkpoint
    if found.strategy:
        nodes = f"{layout.nodes} nodes x {layout.per_node}"
        print(f"{found.strategy} on {layout.ranks} ranks ({nodes}), {layout.precision}")
    if batch.get("global_batch"):
        tokens = f", {batch['tokens']:,} tokens" if batch["tokens"] else ""
        print(
            f"batch       {batch['global_batch']:,} samples{tokens} = micro-batch {batch['micro_batch']} x "
            f"{batch['data_parallel_ranks']} ranks x accumulation {batch['accumulation']}"
        )
    if batch.get("steps"):
        epoch = f"{batch['steps_per_epoch']:,} an epoch" if batch["steps_per_epoch"] else "an epoch is not known here"
        print(f"steps       {batch['steps']:,}; {epoch}")
    if saved:
        speed = "; {seconds:g} s at {mb_per_s:g} MB/s, as {folder} takes them from here".format
        took = speed(**saved) if "seconds" in saved else ""
        print(f"checkpoint  {_gib(saved['bytes'])} GiB{took}")
    if found.schedule:
        print("rates       k times the global batch: k times the learning rate (SGD), or sqrt(k) times (Adam)")
        shown = table("step", "samples", "learning rate", numbers=("step", "samples"))
        for row in found.schedule:
            samples = "" if row["samples"] is None else f"{row['samples']:,}"
            shown.add_row(f"{row['step']:,}", samples, ", ".join(f"{value:.4g}" for value in row["lr"]))
        stdout().print(shown)
    print_findings(found.findings, Facts(), names, elapsed_s)


def _gib(size_bytes: float) -> str:
    value = size_bytes / 2**30
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"
