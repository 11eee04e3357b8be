"""The part of a strategy that loads: what all ranks agree on, verified, and compared with what is in memory then."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distplus import _compat, env
from lightning_distplus.checkpoint.catalog import asides_without_target
from lightning_distplus.checkpoint.fingerprints import Sums, differing, sums_of_pieces
from lightning_distplus.checkpoint.tensors import named_tensors, pieces_of_live
from lightning_distplus.strategies.calibrating import CalibratesDeadlines
from lightning_distplus.strategies.saving import CommittedSaves
from lightning_distplus.timeouts import Phase
from lightning_distplus.watchdog import Marks, Transfer

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["ComparesLoadedState"]

_WEIGHTS, _MOMENTS = "weights/", "optimizer "
_TRUE = ("1", "y", "yes", "true")  # to torch
_TRUST = (
    "If you know that class, declare it with torch.serialization.add_safe_globals; if you trust whoever wrote the "
    "checkpoint, resume with Trainer.fit(weights_only=False), or --weights_only=false on the command line."
)


def _last_ones_aside(callback: Any, trainer: Any, folder: str) -> set[str]:
    """What is called like the last checkpoint of a run of ours, and was left aside with nothing in its place."""
    if not isinstance(trainer.strategy, ComparesLoadedState) or "://" in folder:
        return set()
    found = asides_without_target(Path(folder))
    name, suffix = callback.CHECKPOINT_NAME_LAST, callback.FILE_EXTENSION
    return {str(path) for path in found if path.name.startswith(name) and path.suffix == suffix}


class ComparesLoadedState(CalibratesDeadlines, _Base):
    """Overrides every method of a strategy that reads a checkpoint."""

    compares_tensors = True
    """Whether a load with ``verify="full"`` also compares every tensor in memory with its fingerprint."""
    _marks: Marks
    _transfer: Transfer
    _saves: CommittedSaves | None
    _saves_group: dist.ProcessGroup | None = None
    _as_read: dict[str, tuple[ReferenceType[Tensor], int]] | None = None

    @property
    def _committed_saves(self) -> CommittedSaves:
        assert self._saves is not None
        return self._saves

    def _configure_launcher(self) -> None:
        """The parent's part, when the Trainer is made: before it looks for what ``ckpt_path="last"`` means."""
        _compat.find_more_last_checkpoints(_last_ones_aside)
        super()._configure_launcher()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads what rank 0 has chosen, after verifying it.

        Raises:
            CheckpointCorrupt: A file is torn, missing or changed, or what is in memory then is not what was saved.
            CheckpointUnsafe: A pickle in it might run code, and ``weights_only`` is not False.
            CheckpointMismatch: It was saved by a strategy whose layout this one cannot read.
        """
        self._marks.set(f"load {checkpoint_path}")
        with self._transfer.of("load"):
            checkpoint = self._committed_saves.load(
                checkpoint_path,
                partial(self._read, weights_only=weights_only),
                fitting=self._fitting_checkpoint,
                only_reads=self.lightning_restore_optimizer,
            )
        if self.lightning_restore_optimizer:
            self._as_read = _versions(checkpoint)  # what hooks change before it is restored is theirs
        else:
            self._compare((_WEIGHTS, _MOMENTS), are_shards=True)
        self._adopt_deadlines(self._committed_saves.loaded_deadlines_s)
        self.note("loaded", path=str(checkpoint_path), global_step=checkpoint.get("global_step"))
        return checkpoint

    def _read(self, path: Path, *, weights_only: bool | None) -> dict[str, Any]:
        """The parent's part, which runs no code of the checkpoint unless the caller, or torch's variable, trusts it."""
        if weights_only is False or env.TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.get() in _TRUE:
            return super().load_checkpoint(path, weights_only)
        with _compat.refusing_code(path, _TRUST):
            return super().load_checkpoint(path, weights_only)

    def _agree_on_resume(self, path: str | Path | None) -> str | None:
        """What rank 0 resumes from; its calibrated deadlines hold from here on, as the load itself has one."""
        chosen = self._committed_saves.agree_on_path(path)
        if chosen is not None and self._calibration is not None:
            self._adopt_deadlines(self._committed_saves.deadlines_in(chosen))
        return chosen

    def _fitting_checkpoint(self, path: Path) -> Path:
        """What this run can read of a verified checkpoint; rank 0 is asked.

        Raises:
            CheckpointMismatch: It is of another number of ranks, and the parent cannot redistribute it.
        """
        return path

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """The parent's part.

        Raises:
            CheckpointMismatch: The checkpoint is of another model.
            CheckpointCorrupt: The weights in memory are not those that were saved.
        """
        changed = self._changed_since_read(checkpoint)
        with self._committed_saves.refusing_another_model():
            super().load_model_state_dict(checkpoint, strict)
        if self.lightning_restore_optimizer:
            self._compare((_WEIGHTS,), changed)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The parent's part.

        Raises:
            CheckpointCorrupt: The moments in memory are not those that were saved.
        """
        changed = self._changed_since_read(checkpoint)
        super().load_optimizer_state_dict(checkpoint)
        if self.lightning_restore_optimizer:
            self._compare((_MOMENTS,), changed)

    def _changed_since_read(self, checkpoint: Mapping[str, Any]) -> set[str]:
        """The tensors that hooks have put in the place of what was read, or written to."""
        before, now = self._as_read or {}, _versions(checkpoint)
        return {
            name
            for name, (tensor, version) in before.items()
            if name not in now or now[name][0]() is not tensor() or now[name][1] != version
        }

    def _compare(self, kinds: tuple[str, ...], changed: Collection[str] = (), *, are_shards: bool = False) -> None:
        """Compares what is in memory with the manifest's fingerprints. All ranks call it together.

        Args:
            kinds: How the names begin.
            changed: What hooks have changed on purpose before it was restored.
            are_shards: Whether the ranks hold parts, which are added up.

        Raises:
            CheckpointCorrupt: On all ranks.
        """
        saves, module = self._committed_saves, self.lightning_module
        assert module is not None
        if module.trainer.state.fn != "fit":
            kinds = (_WEIGHTS,)
        expected = {name: text for name, text in saves.expected.items() if name.startswith(kinds)}
        if not expected or not self.compares_tensors:
            return
        self._marks.set("compare what is loaded with what was saved")
        expected = {name: text for name, text in expected.items() if name not in changed}
        total = sums_of_pieces(piece for piece in pieces_of_live(self) if piece.name in expected)
        if are_shards and self.world_size > 1:
            total = self._added_up(expected, total)
        odd = differing(expected, total).items() if self.is_global_zero or not are_shards else ()
        saves.hear(
            "checkpoint-tensors",
            saves.loaded,
            [f"{name}: expected fingerprint {want}, found {found} in memory" for name, (want, found) in odd],
            'Resume from another checkpoint. A model that changes its weights while it loads them needs verify="size".',
        )

    def _added_up(self, expected: Mapping[str, str], mine: Sums) -> Sums:
        """What all ranks hold together of the tensors that are expected."""
        facts = {name: (text.split()[0], int(text.split()[1])) for name, text in expected.items()}
        counts = torch.zeros(len(facts), 3, dtype=torch.int64)
        for row, (name, fact) in zip(counts, facts.items(), strict=True):
            if name in mine and mine[name][:2] == fact:
                row[:] = torch.tensor([number - (number >> 63 << 64) for number in mine[name][2:]])
        dist.all_reduce(counts, group=self._group_for_saves())
        return {
            name: (*fact, counted, first % (1 << 64), second % (1 << 64))
            for (name, fact), (counted, first, second) in zip(facts.items(), counts.tolist(), strict=True)
        }

    def _group_for_saves(self) -> dist.ProcessGroup | None:
        """A group whose time-out is always that of a checkpoint; its first use forms it, on all ranks."""
        if self.world_size > 1 and self._saves_group is None:
            self._saves_group = dist.new_group(backend="gloo", timeout=self.phases.patience_in(Phase.CHECKPOINT))
            self.phases.spare(self._saves_group)
        return self._saves_group


def _versions(checkpoint: Mapping[str, Any]) -> dict[str, tuple[ReferenceType[Tensor], int]]:
    """Each tensor, without keeping it in memory, and how often it was written to."""
    return {name: (ref(tensor), tensor._version) for name, tensor in named_tensors(checkpoint)}
