"""The part of a strategy that saves: the parent's own save in a stage, committed by all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from lightning_distplus.checkpoint.catalog import link
from lightning_distplus.checkpoint.copies import Copier, Copies
from lightning_distplus.checkpoint.tensors import parameters_of_optimizers
from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import SaveFailed
from lightning_distplus.strategies.background import BackgroundSave, Writes
from lightning_distplus.strategies.comparing import ComparesLoadedState
from lightning_distplus.strategies.failing_saves import FailingSaves
from lightning_distplus.strategies.provenance import engine_of, layout_of
from lightning_distplus.strategies.restoring import Search, Verification
from lightning_distplus.strategies.saving import CommittedSaves
from lightning_distplus.strategies.staging import Staging
from lightning_distplus.strategies.streaming_io import StreamingCheckpointIO
from lightning_distplus.timeouts import Phase

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["CommitsCheckpoints"]


class CommitsCheckpoints(ComparesLoadedState, _Base):
    """Overrides every method of a strategy that writes or removes a checkpoint."""

    _failing_saves: FailingSaves
    async_save: bool
    copy_to: str | None
    verify: Verification
    search: Search | None = None
    """Where the ranks look further, together, when the checkpoint that they were given is damaged."""
    _staging: Staging | None = None
    _in_flight: BackgroundSave | None = None
    _configuration: str | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The parent's part. A save begins with it: callbacks then add their state, before anything is written."""
        self._marks.set("the model's state for a checkpoint")
        self.phases.enter(Phase.CHECKPOINT)
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Saves through the parent into a stage beside the target, and commits what all ranks have written.

        Raises:
            SaveFailed: A rank could not save, and ``on_save_failure`` is "raise" or no fit runs. What was there before
                is untouched.
        """
        self.settle_save()  # at most one is in flight
        step, began_at = checkpoint.get("global_step"), time.monotonic()
        self._marks.set(f"save {filepath}")
        try:
            with self._transfer.of("save"), self._writing() as writes:
                begun = self._committed_saves.save(
                    checkpoint,
                    filepath,
                    lambda stage: self._write(checkpoint, stage, storage_options, writes),
                    writes,
                    data=self._place_in_data(checkpoint),
                    layout=layout_of(self),
                    configuration=self._configuration,
                    deadlines_s=None if self._calibration is None else self._calibration.deadlines_s,
                    parameters=parameters_of_optimizers(self),
                )
        except SaveFailed as error:
            self._save_failed(str(filepath), step, error)
            return
        self._note_duration(Phase.CHECKPOINT, began_at)
        self._in_flight = begun
        if begun is None:
            self._saved(str(filepath), step)

    def settle_save(self) -> None:
        """Waits for the save in the background, if there is one, and hears how it went. All ranks call it together.

        Raises:
            SaveFailed: It failed, and ``on_save_failure`` is "raise".
        """
        begun, self._in_flight = self._in_flight, None
        if begun is None:
            return
        self._marks.set(f"wait until {begun.path} is saved")
        before = self.phases.current
        self.phases.enter(Phase.CHECKPOINT)
        try:
            begun.wait(self.phases.patience)
        except SaveFailed as error:
            self._save_failed(begun.path, begun.global_step, error)
            return
        finally:
            self.phases.current = max(before, Phase.CHECKPOINT, key=self.phases.patience_in)
        if self.is_global_zero:
            for checkpoint, name in begun.links:
                link(Path(checkpoint), Path(name))
        self._committed_saves.committed(begun.path)  # what it stands in for goes when no link leads there any more
        self._saved(begun.path, begun.global_step)

    def require_saved(self) -> None:
        """Waits for the save in the background, and raises where the last save has failed, whatever the policy.

        Raises:
            SaveFailed: None has succeeded since.
        """
        self.settle_save()
        self._failing_saves.require_saved()

    def _save_failed(self, path: str, step: int | None, error: SaveFailed) -> None:
        self.note("save_failed", path=path, global_step=step, error=str(error)[:1000])
        self._failing_saves.failed(path, error)

    def _saved(self, path: str, step: int | None) -> None:
        self._failing_saves.succeeded()
        self.note("saved", path=path, global_step=step)

    def _write(self, checkpoint: dict[str, Any], stage: Path, storage_options: Any, writes: Writes) -> None:
        """The parent's own save."""
        super().save_checkpoint(checkpoint, stage, storage_options)

    def _make_saves(self, plane: ControlPlane) -> CommittedSaves:
        moves = Lock()
        copies = None if self.copy_to is None else Copies(self.copy_to)
        return CommittedSaves(
            plane,
            self.phases,
            strategy=engine_of(type(self)),
            verification=self.verify,
            search=self.search,
            copies=copies,
            copier=None if copies is None else Copier(copies, self._note_copy),
            moves=moves,
        )

    def _note_copy(self, path: Path, error: str | None) -> None:
        self.note("checkpoint_copied" if error is None else "copy_failed", path=str(path), to=self.copy_to, error=error)

    @contextmanager
    def _writing(self) -> Iterator[Writes]:
        """In this block the parent's writes are noted; in a fit of a strategy with ``async_save`` kept for later."""
        if self.async_save and self._failing_saves.follows_a_fit:
            self._staging = self._staging or Staging(self._group_for_saves())
            writes = Writes(self._staging, is_first=self.is_global_zero)
        else:
            writes = Writes(None, is_first=self.is_global_zero)
        plugin = self.checkpoint_io
        try:
            if isinstance(plugin, StreamingCheckpointIO):
                plugin.writes = writes
            with writes.of_shards():
                yield writes
            if writes.are_kept and self._staging is not None:
                self._staging.end()
        finally:
            if isinstance(plugin, StreamingCheckpointIO):
                plugin.writes = None

    def _give_up_staging(self) -> None:
        """The run ends: a healthy one has waited for its save; what is still written is not committed in time."""
        if self._staging is not None and self._in_flight is None:
            self._staging.close()
        self._staging = self._saves_group = None

    def _place_in_data(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        module = self.lightning_module
        datamodule = None if module is None else getattr(module.trainer, "datamodule", None)
        return checkpoint.get(type(datamodule).__qualname__)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint together with its manifest; but not while saves fail, nor the last valid one."""
        if "://" in str(filepath):
            super().remove_checkpoint(filepath)
            return
        if self._failing_saves.is_failing and self._failing_saves.keep(str(filepath)):
            return
        if self.is_global_zero:
            postpone = self._failing_saves.is_failing or self._in_flight is not None
            self._committed_saves.remove(filepath, postpone=postpone or self._is_linked(Path(filepath)))

    def _link_checkpoint(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """In the place of ModelCheckpoint's for ``save_last="link"``: there is a link at every moment, to what is."""
        if self._in_flight is not None and Path(self._in_flight.path) == Path(filepath).absolute():
            self._in_flight.links.append((filepath, linkpath))
        elif self.is_global_zero:
            link(Path(filepath), Path(linkpath))
            if not self._failing_saves.is_failing:
                self._committed_saves.remove_postponed(Path(filepath))
        self.barrier("ModelCheckpoint.link")

    def _is_linked(self, path: Path) -> bool:
        """Whether a ModelCheckpoint's last.ckpt leads to a checkpoint: it is linked to the next one in a moment."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        names = [getattr(callback, "last_model_path", "") for callback in getattr(trainer, "checkpoint_callbacks", [])]
        return any(name and Path(name).is_symlink() and Path(name).resolve() == path.resolve() for name in names)

    @property
    def num_failed_saves(self) -> int:
        """How many saves have failed in the fit that runs, or ran last."""
        return self._failing_saves.num_failed
