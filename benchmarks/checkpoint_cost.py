"""What a committed save, a background save and a verified load cost, against the parent's own save and load.

One fit on two processes and each strategy, 540 MB of state (45 million parameters with AdamW's moments). Between two
steps all ways take their turn, in an order that differs from round to round: the parent's save, the same with its bytes
forced to the disk, ours, the parent's again (A/A). A load is the whole restore; it is verified by the digests of the
files, and then also by the fingerprints of the tensors in memory. It is measured with the files in the page cache, and
from the disk, as in a run that starts, in a fit of its own, beside whose loads nothing is saved: in each round each way
once, in an order of its own. A save in the background is measured by what it holds training up,
against the parent's save just before or after it, and, in a fit without the parent's saves, which leave memory behind,
by how much more memory the steps with it take than those before the first one. Each ratio is of one round; the figure
is their median, so that a busy machine does less harm.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils.data import DataLoader

import lightning_distplus
from benchmarks import jobs
from benchmarks.figures import Figure, median
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.files import remove_tree
from lightning_distplus.testing import spawn

__all__ = ["run"]

STRATEGIES: dict[str, type] = {
    "ResilientDDP": DDPStrategy,
    "ResilientFSDP": FSDPStrategy,
    "ResilientModelParallel": ModelParallelStrategy,
    "ResilientDeepSpeed": DeepSpeedStrategy,
}
_WIDTH, _LAYERS = 1500, 20  # 45 million parameters
_TARGET_SYNC, _TARGET_STALL, _TARGET_LOAD, _TARGET_MEMORY = 1.05, 0.1, 1.1, 1.0
_STEPS_BEHIND = 20
_LOADS_PER_ROUND = 2
_LOADS = tuple(f"{how}{place}" for how in ("parent", "files", "full") for place in ("", ", from disk"))
_ARMS = ("parent", "parent, on disk", "ours", "control")


def run(quick: bool) -> list[Figure]:
    """Rounds of saves for each strategy, and twice as many of loads: 6 (quick: 2, and a tenth of the state)."""
    rounds, layers = (2, 2) if quick else (6, _LAYERS)
    return [figure for name in STRATEGIES for figure in _figures(name, rounds, layers)]


def _figures(name: str, rounds: int, layers: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="distplus-bench-") as folder:
        arguments = (name, rounds, layers, folder)
        found = spawn(_save, 2, args=arguments, deadline="15m").check().results[0]
        loads = spawn(_load, 2, args=arguments, deadline="15m").check().results[0]
        behind = spawn(_save_behind, 2, args=arguments, deadline="15m").check().results[0]
        alone = spawn(_save_behind, 2, args=(name, 2, layers, folder, False), deadline="15m").check().results[0]
    parent_s = median(found["parent"])

    def ratio(
        what: str, of: str, to: str, target: float | None = None, note: str = "", within: dict[str, list[float]] = found
    ) -> Figure:
        ratios = [mine / theirs for mine, theirs in zip(within[of], within[to], strict=True)]
        return Figure.of(f"{name}: {what}", ratios, "x", target=target, note=note)

    size = f"{median(found['bytes']) / 1e6:,.0f} MB"
    yield ratio("save", "ours", "parent", _TARGET_SYNC, f"of the parent's save: {size} in {parent_s:.2f} s")
    yield ratio("save, both forced to the disk", "ours", "parent, on disk", _TARGET_SYNC)
    yield ratio("A/A", "control", "parent", note="the parent's save twice")
    for place, where in (("", ""), (", from disk", " from the disk")):
        to = f"parent{place}"
        took = f"parent {median(loads[to]):.2f} s"
        yield ratio(f"verified load{where}", f"files{place}", to, _TARGET_LOAD, took, loads)
        yield ratio(f"verified load{where}, tensors compared", f"full{place}", to, _TARGET_LOAD, "the default", loads)
    stall = f"of the parent's save: {median(behind['parent']):.2f} s; the first one held up {behind['stall'][0]:.2f} s"
    yield ratio("stall of a background save", "stall", "parent", _TARGET_STALL, stall, behind)
    if found["rival"]:
        rival = "AsyncCheckpointIO" if name == "ResilientDDP" else "torch's async_save"
        yield ratio(f"stall of {rival}", "rival", "parent", note="of the parent's save; without commit and digests")
    slower_s = median(behind["with"]) - median(behind["without"])
    note = f"the {_STEPS_BEHIND} steps with the save in them, less without one"
    yield Figure(name=f"{name}: the same with the slower steps", value=slower_s / parent_s, unit="x", note=note)
    copies = alone["copies"]
    note = f"what rank 0 writes; at most {max(copies):.2f}"
    yield Figure.of(f"{name}: memory of a background save", copies, "x", target=_TARGET_MEMORY, note=note)


class _Wide(pl.LightningModule):
    """Square layers; a step on few rows, so that it is short against a save."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.net: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(self.layers)))
            mesh = getattr(self, "_device_mesh", None)
            if mesh is not None:
                torch.distributed.fsdp.fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.net is not None
        loss: torch.Tensor = self.net(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _AfterSteps(Callback):
    """Calls ``measure`` after each of so many steps, once AdamW has its moments."""

    def __init__(self, measure: Callable[[pl.Trainer, int], None], steps: int) -> None:
        self.measure = measure
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if 0 <= trainer.global_step - 2 < self.steps:
            self.measure(trainer, trainer.global_step - 2)


def _fit(name: str, folder: str, layers: int, callback: _AfterSteps, **arguments: Any) -> None:
    strategy = getattr(lightning_distplus, name)(monitor=False, preemption=False, **arguments)
    steps = callback.steps + 2
    trainer = jobs.trainer(strategy, folder, max_steps=steps, callbacks=[callback])
    trainer.fit(_Wide(layers), DataLoader([torch.randn(_WIDTH) for _ in range(2 * steps)], batch_size=2))


def _nothing(*arguments: object, **named: object) -> None:
    """Takes the place of a comparison."""


def _timed(trainer: pl.Trainer, call: Callable[[], object]) -> float:
    trainer.strategy.barrier("benchmark")
    begin = time.perf_counter()
    call()
    trainer.strategy.barrier("benchmark")
    return time.perf_counter() - begin


def _save_as_parent(trainer: pl.Trainer, path: str, *, forced: bool = False) -> None:
    strategy: Any = trainer.strategy
    parent: Any = STRATEGIES[type(strategy).__name__]
    plugin, strategy.checkpoint_io = strategy.checkpoint_io, TorchCheckpointIO()
    try:
        parent.save_checkpoint(strategy, trainer._checkpoint_connector.dump_checkpoint(), path)
    finally:
        strategy.checkpoint_io = plugin
    strategy.barrier("saved")
    if forced:
        rank = strategy.global_rank
        for file in [Path(path)] if Path(path).is_file() else sorted(Path(path).rglob("*")):
            if file.is_file() and (rank == 0 or file.name.startswith(f"__{rank}_")):
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())


def _load(rank: int, name: str, rounds: int, layers: int, folder: str) -> dict[str, list[float]]:
    """Rounds of loads of one checkpoint, each way once in each."""
    seconds: dict[str, list[float]] = {load: [] for load in _LOADS}

    def restore(trainer: pl.Trainer, path: str) -> None:
        checkpoint = trainer.strategy.load_checkpoint(path)
        if trainer.strategy.lightning_restore_optimizer:
            trainer.strategy.load_model_state_dict(checkpoint)
            trainer.strategy.load_optimizer_state_dict(checkpoint)

    def measure(trainer: pl.Trainer, step: int) -> None:
        path = f"{folder}/loaded.ckpt"
        strategy: Any = trainer.strategy
        compare = strategy.loads.compare
        trainer.save_checkpoint(path)
        os.sync()
        for number in range(_LOADS_PER_ROUND * rounds):
            for load in random.Random(number).sample(_LOADS, len(_LOADS)):
                strategy.verify = "off" if load.startswith("parent") else "full"
                strategy.loads.compare = compare if load.startswith("full") else _nothing
                strategy.barrier("benchmark")
                if load.endswith("from disk"):
                    _forget(Path(path))
                seconds[load].append(_timed(trainer, lambda: restore(trainer, path)))
        strategy.barrier("benchmark")
        if rank == 0:
            strategy.remove_checkpoint(path)

    _fit(name, folder, layers, _AfterSteps(measure, 1))
    return seconds


def _save(rank: int, name: str, rounds: int, layers: int, folder: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {arm: [] for arm in (*_ARMS, "bytes", "rival")}
    parent: Any = STRATEGIES[name]
    groups: list[Any] = []  # of the rival's thread: its collectives must not meet those of the training thread

    def stall_of_rival(trainer: pl.Trainer, path: str) -> float | None:
        """Lightning's AsyncCheckpointIO for DDP, torch's async_save for shards; neither commits or verifies."""
        strategy: Any = trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy):
            return None
        wait: list[Callable[[], object]] = []
        groups[:] = groups or [torch.distributed.new_group(backend="gloo")]

        def save() -> None:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            if isinstance(strategy, DDPStrategy):
                plugin = AsyncCheckpointIO(TorchCheckpointIO())
                before, strategy.checkpoint_io = strategy.checkpoint_io, plugin
                parent.save_checkpoint(strategy, checkpoint, path)
                strategy.checkpoint_io = before
                wait.append(plugin.teardown)
            else:
                state = {"model": checkpoint["state_dict"], "optimizer_0": checkpoint["optimizer_states"][0]}
                # torch 2.13's default stager cannot copy what FSDP1 gives.
                stager = BlockingAsyncStager() if isinstance(strategy, FSDPStrategy) else None
                wait.append(async_save(state, checkpoint_id=path, async_stager=stager, process_group=groups[0]).result)

        took = _timed(trainer, save)
        wait[0]()
        return took

    def measure(trainer: pl.Trainer, step: int) -> None:
        order = list(_ARMS)
        random.Random(step).shuffle(order)
        for arm in order:
            path = f"{folder}/{step}-{order.index(arm)}.ckpt"
            if arm == "ours":
                seconds[arm].append(_timed(trainer, lambda path=path: trainer.save_checkpoint(path)))  # type: ignore[misc]
                seconds["bytes"].append(_size(path))
            else:
                forced = arm == "parent, on disk"
                call = lambda path=path, forced=forced: _save_as_parent(trainer, path, forced=forced)  # noqa: E731
                seconds[arm].append(_timed(trainer, call))
            if arm == "control" and (stalled := stall_of_rival(trainer, f"{path}-rival")) is not None:
                seconds["rival"].append(stalled)
            os.sync()  # what one way leaves to be written does not slow the next one down
            trainer.strategy.barrier("benchmark")
            if rank == 0:
                trainer.strategy.remove_checkpoint(path)
                remove_tree(Path(f"{path}-rival"))

    _fit(name, folder, layers, _AfterSteps(measure, rounds))
    return seconds


def _save_behind(
    rank: int, name: str, rounds: int, layers: int, folder: str, beside_parent: bool = True
) -> dict[str, list[float]]:
    """Rounds of steps, every second one with a save in the background at its beginning, beside the parent's save."""
    found: dict[str, list[float]] = {kind: [] for kind in ("stall", "parent", "with", "without", "copies")}
    began_at, least_bytes = 0.0, [0]

    def save_as_parent(trainer: pl.Trainer, path: str) -> None:
        if not beside_parent:
            return
        os.sync()
        found["parent"].append(_timed(trainer, lambda: _save_as_parent(trainer, path)))
        if rank == 0:
            remove_tree(Path(path))
        os.sync()

    def measure(trainer: pl.Trainer, step: int) -> None:
        nonlocal began_at
        strategy: Any = trainer.strategy
        number, place = divmod(step, _STEPS_BEHIND)
        saves, path = number % 2 == 1, f"{folder}/{number}.ckpt"
        if place == 0:
            if saves and number % 4 == 1:
                save_as_parent(trainer, f"{path}-parent")
            _reset_peak()
            strategy.barrier("benchmark")
            began_at = time.perf_counter()
            if saves:
                found["stall"].append(_timed(trainer, lambda: trainer.save_checkpoint(path)))
        if place == _STEPS_BEHIND - 1:
            strategy.barrier("benchmark")
            found["with" if saves else "without"].append(time.perf_counter() - began_at)
            if saves:
                strategy.saves.settle()
                if rank == 0:
                    found["copies"].append((_status("VmHWM") - least_bytes[0]) / _written(path))
                    strategy.remove_checkpoint(path)
                strategy.barrier("benchmark")
                if number % 4 == 3:
                    save_as_parent(trainer, f"{path}-parent")
            least_bytes[0] = least_bytes[0] or _status("VmHWM")

    _fit(name, folder, layers, _AfterSteps(measure, 2 * rounds * _STEPS_BEHIND), async_save=True)
    return found


def _size(path: str) -> int:
    return sum(entry.size_bytes for entry in read_manifest(Path(path)).files)


def _written(path: str) -> int:
    """What rank 0 has written of a checkpoint; the files of others bear their ranks."""
    entries = read_manifest(Path(path)).files
    return sum(e.size_bytes for e in entries if not re.search(r"(^__|rank_)[1-9]", Path(e.path).name))


def _forget(path: Path) -> None:
    """Has the page cache let go of a checkpoint, which is on the disk."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _reset_peak() -> None:
    """From here the peak of the memory is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
