"""``distplus rehearse``: what a configuration would do on many ranks, before the queue is entered. Needs no GPU."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_distplus.cli.doctor import print_findings
from lightning_distplus.cli.rehearsal import (
    Layout,
    RehearsalCLI,
    build_model,
    optimizers_of,
    pretend_ranks,
    rates,
    reported_steps,
)
from lightning_distplus.cli.rehearsed_steps import run_steps
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.trainer_view import data_parallel
from lightning_distplus.errors import ExitCode, PreflightError
from lightning_distplus.preflight import Facts, Finding, Status, run_checks
from lightning_distplus.preflight.host import write_speed
from lightning_distplus.preflight.memory import ADAM_STATES, Estimate, count, estimate, fits, gib, states_of
from lightning_distplus.strategies.sizing import checkpoint_bytes, engine_of

__all__ = ["CHECKS", "main"]

CHECKS = ("config", "layout", "model", "batch", "data", "optimizer", "memory", "checkpoint", "steps")
"""The names of what a rehearsal looks at."""

_TRIAL_BYTES = 32 << 20


@dataclass
class Rehearsal:
    """What has been found out so far."""

    layout: Layout = field(default_factory=Layout)
    strategy: str = ""
    findings: list[Finding] = field(default_factory=list)
    batch: dict[str, Any] = field(default_factory=dict)
    memory: Estimate | None = None
    checkpoint: dict[str, Any] = field(default_factory=dict)
    schedule: list[dict[str, Any]] = field(default_factory=list)

    def add(self, check: str, status: Status, subject: str, detail: str = "", remedy: str = "") -> None:
        """Notes a finding."""
        self.findings.append(Finding(check=check, status=status, subject=subject, detail=detail, remedy=remedy))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "version": 1,
            "ranks": self.layout.ranks,
            "nodes": self.layout.nodes,
            "strategy": self.strategy,
            "precision": self.layout.precision,
            "batch": self.batch,
            "memory": None if self.memory is None else self.memory.to_dict(),
            "checkpoint": self.checkpoint,
            "schedule": self.schedule,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def main(argv: Sequence[str]) -> int:
    """Exit code 0 where the run could start, 173 where a finding is an error."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    for name in (*arguments.off, *arguments.warn):
        if name not in CHECKS:
            parser.error(f"there is no check {name!r}; there are: {', '.join(CHECKS)}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    begin = time.monotonic()
    found = Rehearsal()
    _rehearse(found, arguments, rest)
    found.findings = list(_wished(found.findings, arguments))
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _tell(found, time.monotonic() - begin, [name for name in CHECKS if name not in arguments.off])
    has_errors = any(finding.status is Status.ERROR for finding in found.findings)
    return int(ExitCode.PREFLIGHT if has_errors else ExitCode.DONE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="distplus rehearse",
        allow_abbrev=False,
        description="Builds a configuration as distplus fit takes it, with the model on the meta device and the ranks "
        "pretended: batch sizes, learning rates, memory per rank, size and time of a checkpoint.",
        epilog=f"Everything else is passed on: --config FILE, --trainer.max_steps N. Checks: {', '.join(CHECKS)}. "
        "Exit code 0: it could start; 173: it could not.",
    )
    parser.add_argument("--world", type=int, metavar="RANKS", help="ranks of the run (default: as the file says)")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of one rank's device, to hold against")
    parser.add_argument("--steps", type=int, default=0, help="also train so many steps on two CPU processes")
    parser.add_argument(
        "--small", action="append", default=[], metavar="KEY=VALUE", help="a smaller value, for --steps only"
    )
    parser.add_argument("--deadline", default="10m", help="of --steps (default: %(default)s)")
    parser.add_argument("--off", action="append", default=[], metavar="NAME", help="leave this out of the report")
    parser.add_argument("--warn", action="append", default=[], metavar="NAME", help="its errors are warnings")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _rehearse(found: Rehearsal, arguments: argparse.Namespace, rest: list[str]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the process has other arguments
            cli = RehearsalCLI(rest, run=False)
    except (Exception, SystemExit) as error:
        remedy = "Mend the file or the option that it names"
        found.add("config", Status.ERROR, "The configuration cannot be built.", f"{error}", remedy)
        return
    found.strategy = type(cli.trainer.strategy).__name__
    found.layout = cli.layout
    if arguments.world is not None:
        found.layout = _spread(found, cli.layout, arguments.world)
    with pretend_ranks(cli.trainer, cli.model, found.layout):
        try:
            build_model(cli.model)
        except Exception as error:
            found.add("model", Status.ERROR, "The model cannot be built.", f"{type(error).__name__}: {error}")
            return
        epoch = _batches(found, cli)
        states, name = _rates(found, cli, epoch)
        _memory(found, cli, states, name, arguments.memory)
        _checkpoint(found, cli, states)
    if arguments.steps:
        found.findings += run_steps(cli.parser, cli.asked, arguments.steps, arguments.small, arguments.deadline)


def _spread(found: Rehearsal, asked: Layout, ranks: int) -> Layout:
    """So many ranks, on nodes as the configuration has them."""
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
    epoch = None if per_rank is None else per_rank // accumulation
    tokens = getattr(data, "seq_len", None)
    found.batch["tokens"] = tokens and found.batch["global_batch"] and tokens * found.batch["global_batch"]
    found.batch["steps_per_epoch"] = epoch
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if epoch is not None and trainer.max_epochs is not None and trainer.max_epochs > 0:
        limits.append(epoch * trainer.max_epochs)
    found.batch["steps"] = min(limits, default=None)
    if epoch == 0:
        detail = f"{per_rank} micro-batches a rank, accumulation {accumulation}"
        found.add("batch", Status.ERROR, "An epoch has no whole step on so many ranks.", detail, "Use smaller batches")
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
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        remedy = "Rehearse where the data is, to know the length of an epoch"
        found.add("data", Status.WARNING, "The training data cannot be read on this host.", text, remedy)
        return None, micro
    return length, micro


def _rates(found: Rehearsal, cli: Any, epoch: int | None) -> tuple[float, str]:
    """The table of learning rates; returns the values that the optimizer keeps per parameter, and its name."""
    try:
        optimizers, schedules = optimizers_of(cli.trainer)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        found.add("optimizer", Status.WARNING, "The optimizer was not made; Adam is assumed.", text)
        return ADAM_STATES, "Adam is assumed"
    if not optimizers:
        return ADAM_STATES, "no optimizer was made; Adam is assumed"
    steps = found.batch.get("steps")
    for index, optimizer in enumerate(optimizers):
        schedule = next((one for one in schedules if one.scheduler.optimizer is optimizer), None) if schedules else None
        table = rates(optimizer, schedule, reported_steps(steps or 0), epoch)
        if table.missing:
            found.add("optimizer", Status.WARNING, f"Not all learning rates are known: {table.missing}.")
        size = found.batch.get("global_batch")
        for step, values in table.by_step.items():
            row = {"optimizer": index, "step": step, "lr": sorted(set(values)), "samples": size and size * step}
            found.schedule.append(row)
    kept = [states_of(optimizer) for optimizer in optimizers]
    known = [states for states in kept if states is not None]
    name = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    if len(known) < len(kept):
        return ADAM_STATES, f"{name}; Adam's state is assumed"
    return max(known), name


def _memory(found: Rehearsal, cli: Any, states: float, optimizer: str, free_gib: float | None) -> None:
    layout, strategy = found.layout, cli.trainer.strategy
    engine = engine_of(strategy, precision=layout.precision, ranks=layout.ranks, per_node=layout.per_node)
    found.memory = estimate(count(cli.model), engine, states=states)
    if free_gib is not None:
        found.findings += fits(found.memory, int(free_gib * 2**30), "--memory", optimizer=optimizer)


def _checkpoint(found: Rehearsal, cli: Any, states: float) -> None:
    """Its size, and how long it takes at the speed of its folder."""
    assert found.memory is not None
    trainer, saves = cli.trainer, cli.trainer.checkpoint_callback
    size = checkpoint_bytes(count(cli.model), found.memory.engine, states)
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
            yield Finding(
                status=Status.ERROR,
                subject=f"One checkpoint has {gib(size)} GiB, and its folder has room for {gib(free)}.",
                detail=str(folder),
                remedy="Save to another folder, or rehearse where the run will save (--off checkpoint)",
            )
        elif 2 * size > free:
            subject = "The folder has room for one checkpoint only; the next is written beside it."
            yield Finding(status=Status.WARNING, subject=subject, detail=f"{folder}: {gib(free)} GiB free")

    found.findings += run_checks({"checkpoint": speed}, Facts(variables={}))


def _wished(findings: list[Finding], arguments: argparse.Namespace) -> Iterator[Finding]:
    for finding in findings:
        if finding.check in arguments.off:
            continue
        softened = finding.check in arguments.warn and finding.status is Status.ERROR
        yield replace(finding, status=Status.WARNING) if softened else finding


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
    if found.memory is not None:
        print(f"memory      {found.memory}")
    if saved:
        speed = "; {seconds:g} s at {mb_per_s:g} MB/s, as {folder} takes them from here".format
        took = speed(**saved) if "seconds" in saved else ""
        print(f"checkpoint  {gib(saved['bytes'])} GiB{took}")
    if found.schedule:
        print(f"{'step':>12} {'samples':>16}  learning rate")
    for row in found.schedule:
        lr = ", ".join(f"{value:.4g}" for value in row["lr"])
        samples = "" if row["samples"] is None else f"{row['samples']:,}"
        print(f"{row['step']:>12,} {samples:>16}  {lr}")
    with suppress(PreflightError):
        print_findings(found.findings, Facts(), names, elapsed_s)
