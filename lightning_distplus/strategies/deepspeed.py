"""DeepSpeed ZeRO 1 to 3, resilient, on GPUs and on the CPU."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.cpp_extension import get_default_build_root

from lightning_distplus import _compat, env
from lightning_distplus.checkpoint.formats import converted_beside, is_universal, num_shards
from lightning_distplus.checkpoint.tensors import pieces_of_live
from lightning_distplus.errors import CheckpointMismatch, DistplusError
from lightning_distplus.strategies.base import ResilientStrategy
from lightning_distplus.strategies.saving import Writes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

log = logging.getLogger(__name__)

# -- the strategy ------------------------------------------------------------------------------------------------------


class _DeepSpeedOnAnyDevice(DeepSpeedStrategy):
    """Lets DeepSpeed run on the CPU; Lightning 2.6.6 refuses every accelerator but CUDA."""

    @property
    def _is_on_cpu(self) -> bool:
        return bool(super().root_device.type == "cpu")

    @property
    def root_device(self) -> torch.device:
        device = super().root_device
        # DeepSpeed takes its rank on the device from the index, which a CPU device does not have.
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        if self._is_on_cpu:
            super(DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if self._is_on_cpu:
            if env.DS_ACCELERATOR.get() is None:
                env.DS_ACCELERATOR.set("cpu")
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if not is_universal(Path(checkpoint_path)):
            return super().load_checkpoint(checkpoint_path, weights_only)
        with _compat.loading_universal(self.deepspeed_engine):
            return super().load_checkpoint(checkpoint_path, weights_only)


class ResilientDeepSpeed(ResilientStrategy, _DeepSpeedOnAnyDevice):
    """``DeepSpeedStrategy`` with deadlines, a step gate and committed checkpoints.

    Args:
        convert_checkpoint: Whether rank 0 converts a checkpoint of another number of ranks before it is loaded, beside
            it, once; otherwise it is refused with the command that does so.
        **kwargs: Everything that ``ResilientStrategy`` and ``DeepSpeedStrategy`` take.
    """

    strategy_name = "resilient_deepspeed"

    def __init__(self, *, convert_checkpoint: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.convert_checkpoint = convert_checkpoint

    def write_checkpoint(
        self, checkpoint: dict[str, Any], stage: str | Path, storage_options: Any, writes: Writes
    ) -> None:
        """The parent's save, which passes all of DeepSpeed's barriers on every rank."""
        # DeepSpeed hands flat buffers to its writers: the tensors are counted by the names that they have here.
        with (
            writes.counting_instead(lambda: pieces_of_live(self, is_first=self.is_global_zero)),
            raising_after_the_barriers(self.deepspeed_engine, writes),
        ):
            super().write_checkpoint(checkpoint, stage, storage_options, writes)

    def fitting_checkpoint(self, path: Path) -> Path:
        """The checkpoint, or what ``convert_checkpoint`` makes of one of another number of ranks.

        Raises:
            CheckpointMismatch: It is of another number of ranks, and nothing was asked to convert it; or it is a file.
        """
        if path.is_file() and not (self.load_full_weights and self.zero_stage_3):
            raise CheckpointMismatch(
                f"The checkpoint {path} is one file; DeepSpeed reads folders of its own shards. Go on with all that it "
                f"holds under ResilientDDP, ResilientFSDP or ResilientModelParallel, or take its weights alone: "
                f"--model.init_from {path} in a recipe, load_state_dict in a script."
            )
        num_ranks = num_shards(path)
        is_fitting = self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit"
        if num_ranks in (0, self.world_size) or not (is_fitting or self.zero_stage_3):
            return path
        if self.convert_checkpoint:
            log.info("%s is of %d ranks; it is converted for %d", path, num_ranks, self.world_size)
            return converted_beside(path)
        target = path.with_name(f"{path.stem}-universal{path.suffix}")
        raise CheckpointMismatch(
            f"The checkpoint {path} holds ZeRO's shards of {num_ranks} ranks; this run has {self.world_size}, which "
            "cannot read them. Convert it, and resume from the result (ResilientDeepSpeed(convert_checkpoint=True) "
            f"does so by itself): distplus export --universal {path} {target}"
        )

    def setup_environment(self) -> None:
        """Clears what a killed start has left in DeepSpeed's way, while the other ranks wait at the rendezvous."""
        if self.local_rank == 0:
            remove_abandoned_locks()
        with naming_builds(self.local_rank == 0):
            super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Names what DeepSpeed compiles for its optimizers on a GPU."""
        with naming_builds(self.local_rank == 0):
            super().setup(trainer)


# -- saves -------------------------------------------------------------------------------------------------------------


@contextmanager
def raising_after_the_barriers(engine: Any, writes: Writes) -> Iterator[None]:
    """Lets a save of ``engine`` in this block pass all of its barriers on every rank, and raises its error after them.

    ``DeepSpeedEngine.save_checkpoint`` (deepspeed 0.19.8, ``engine.py`` 4869-4966) begins and ends with barriers on the
    default group, where a rank whose write fails never arrives. The errors of its checkpoint engine are kept until
    then, and ``latest`` is written here instead. Another error between the barriers (a copy of the recovery scripts or
    of NVMe's files, a state dict) ends the save on this rank, which then meets the others at the last barrier.

    Raises:
        Exception: The first error on this rank; of writes that are kept, whoever does them raises it.
    """
    writer = _NotingWriter(engine.checkpoint_engine, writes)
    engine.checkpoint_engine = writer
    try:
        yield
    except DistplusError:
        raise  # another rank has failed: nobody is there to be met
    except Exception as error:
        if not writer.has_begun:
            raise
        writer.keep(error)
        _compat.end_deepspeed_save(engine)
    finally:
        engine.checkpoint_engine = writer.inner
    writer.finish(engine.global_rank)


class _NotingWriter:
    """A checkpoint engine that keeps the first error of another one instead of raising it."""

    def __init__(self, inner: Any, writes: Writes) -> None:
        self.inner = inner
        self._writes = writes
        self._info: Any = None
        self._error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def has_begun(self) -> bool:
        """Whether the first barrier is passed, and the last one is not."""
        return self._info is not None

    def keep(self, error: Exception) -> None:
        """Keeps an error for `finish`, if it is the first one."""
        self._error = self._error or error

    def create(self, info: Any) -> None:
        """Notes what is saved; a decoupled engine commits by itself, later."""
        self._info = info
        self._note(self.inner.create, info)

    def makedirs(self, *arguments: Any, **named: Any) -> None:
        self._note(self.inner.makedirs, *arguments, **named)

    def save(self, state_dict: Any, path: Any, **named: Any) -> None:
        self._note(self._writes.do, lambda state: self._save(state, path, named), state_dict)

    def _save(self, state: Any, path: Any, named: dict[str, Any]) -> None:
        if not _compat.calls_torch_save(self.inner):
            self.inner.save(state, path, **named)
            return
        with self._writes.open(Path(path)) as file, _compat.without_crc():
            self.inner.save(state, file, **named)

    def is_decoupled(self) -> bool:
        """Yes: so that the engine leaves the commit and the file ``latest`` to `finish`."""
        return True

    def finish(self, rank: int) -> None:
        """Does what the engine has left, and raises what went wrong."""
        if self._error is not None:
            raise self._error
        if self._info is not None and not self.inner.is_decoupled():
            self.inner.commit(self._info)
            if self._info.save_latest and rank == 0:
                (Path(self._info.save_dir) / "latest").write_text(self._info.tag)

    def _note(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        # After the first error nothing more is written: the stage is given up, and a full disk stays as it is.
        if self._error is None:
            try:
                method(*arguments, **named)
            except Exception as error:
                self.keep(error)


# -- locks of extension builds -----------------------------------------------------------------------------------------

# On these no other host can hold a file.
_LOCAL_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs", "zfs"})


def remove_abandoned_locks() -> list[Path]:
    """Removes the locks that no process holds.

    torch guards a build by a file ``lock``, which the builder keeps open and removes at the end (torch 2.13,
    ``file_baton.py``). A builder that is killed removes nothing, and everybody after it waits without end. DeepSpeed
    takes such a lock at each start. A lock on a file system that other hosts may share is only reported.
    """
    locks = _locks()
    removed = []
    for lock in sorted(locks - set(_open_files() if locks else ())):
        if _file_system_of(lock) not in _LOCAL_FILE_SYSTEMS:
            log.warning("%s may be left of a killed process; if no host builds extensions now, remove it", lock)
            continue
        lock.unlink(missing_ok=True)
        removed.append(lock)
        log.warning("removed %s: the process that held it is gone, and everybody would have waited for it", lock)
    return removed


@contextmanager
def naming_builds(is_first: bool, every_s: float = 10.0) -> Iterator[None]:
    """Says on the first rank of a host what DeepSpeed compiles in this block: its first start takes minutes there."""
    is_over, begin = threading.Event(), time.monotonic()

    def look() -> None:
        while is_first and not is_over.wait(every_s):
            for folder in (lock.parent for lock in _locks()):
                message = "DeepSpeed compiles %s, once for this host, for %.0f s now; the result stays in %s"
                log.info(message, folder.name, time.monotonic() - begin, folder)

    watcher = threading.Thread(target=look, name="distplus-builds", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _locks() -> set[Path]:
    """Those of builds, which lie in their folders."""
    root = Path(env.TORCH_EXTENSIONS_DIR.get() or get_default_build_root())
    return {path.resolve() for path in root.glob("**/lock")}


def _open_files() -> Iterator[Path]:
    """The files that processes of this user have open on this host."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            yield link.readlink()


def _file_system_of(path: Path) -> str:
    """The type of the file system on which a file lies; empty where this host does not tell."""
    longest, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount_point, found, *_ = line.split(" ")
            if path.is_relative_to(mount_point) and len(mount_point) >= len(longest):
                longest, kind = mount_point, found
    return kind
