"""The part of a strategy that saves and loads: the parent's own save in a stage, committed by all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_distplus.checkpoint.linking import link
from lightning_distplus.errors import SaveFailed
from lightning_distplus.strategies.background import BackgroundSave, Staging
from lightning_distplus.strategies.calibrating import CalibratesDeadlines
from lightning_distplus.strategies.failing_saves import FailingSaves
from lightning_distplus.strategies.provenance import layout_of
from lightning_distplus.strategies.saving import CommittedSaves
from lightning_distplus.strategies.streaming_io import StreamingCheckpointIO
from lightning_distplus.timeouts import Phase
from lightning_distplus.watchdog import Marks, Transfer

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

__all__ = ["CommitsCheckpoints"]


class CommitsCheckpoints(CalibratesDeadlines, _Base):
    """Overrides every method of a strategy that writes, reads or removes a checkpoint."""

    _marks: Marks
    _transfer: Transfer
    _saves: CommittedSaves | None
    _failing_saves: FailingSaves
    async_save: bool
    _staging: Staging | None = None
    _in_flight: BackgroundSave | None = None
    _configuration: str | None = None

    @property
    def _committed_saves(self) -> CommittedSaves:
        assert self._saves is not None
        return self._saves

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
            with self._transfer.of("save"), self._staging_where_asked() as staging:
                begun = self._committed_saves.save(
                    checkpoint,
                    filepath,
                    lambda stage: super(CommitsCheckpoints, self).save_checkpoint(checkpoint, stage, storage_options),
                    data=self._place_in_data(checkpoint),
                    layout=layout_of(self),
                    configuration=self._configuration,
                    deadlines_s=None if self._calibration is None else self._calibration.deadlines_s,
                    staging=staging,
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
        self._committed_saves.committed(begun.path)
        if self.is_global_zero:
            for checkpoint, name in begun.links:
                link(Path(checkpoint), Path(name))
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

    @contextmanager
    def _staging_where_asked(self) -> Iterator[Staging | None]:
        """In this block the parent's writes are kept for later, in a fit of a strategy with ``async_save``."""
        if not (self.async_save and self._failing_saves.follows_a_fit):
            yield None
            return
        if self._staging is None:
            self._staging = Staging(self._group_for_saves())
        plugin = self.checkpoint_io
        try:
            if isinstance(plugin, StreamingCheckpointIO):
                plugin.staging = self._staging
            with self._staging.of_shards():
                yield self._staging
        finally:
            if isinstance(plugin, StreamingCheckpointIO):
                plugin.staging = None

    def _group_for_saves(self) -> dist.ProcessGroup | None:
        """A group whose time-out is always that of a checkpoint; the first save forms it, on all ranks."""
        if self.world_size == 1:
            return None
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self.phases.patience_in(Phase.CHECKPOINT))
        self.phases.spare(group)
        return group

    def _give_up_staging(self) -> None:
        """The run ends: a healthy one has waited for its save; what is still written is not committed in time."""
        if self._staging is not None and self._in_flight is None:
            self._staging.close()
        self._staging = None

    def _place_in_data(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        module = self.lightning_module
        datamodule = None if module is None else getattr(module.trainer, "datamodule", None)
        return checkpoint.get(type(datamodule).__qualname__)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads what rank 0 has chosen, after verifying it.

        Raises:
            CheckpointCorrupt: A file is torn, missing or changed.
            CheckpointMismatch: It was saved by a strategy whose layout this one cannot read.
        """
        self._marks.set(f"load {checkpoint_path}")
        with self._transfer.of("load"):
            checkpoint = self._committed_saves.load(
                checkpoint_path,
                lambda path: super(CommitsCheckpoints, self).load_checkpoint(path, weights_only),
                fitting=self._fitting_checkpoint,
            )
        self._adopt_deadlines(self._committed_saves.loaded_deadlines_s)
        self.note("loaded", path=str(checkpoint_path), global_step=checkpoint.get("global_step"))
        return checkpoint

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
        """
        with self._committed_saves.refusing_another_model():
            super().load_model_state_dict(checkpoint, strict)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint together with its manifest; but not while saves fail, nor the last valid one."""
        if "://" in str(filepath):
            super().remove_checkpoint(filepath)
            return
        if self._failing_saves.is_failing and self._failing_saves.keep(str(filepath)):
            return
        if self.is_global_zero:
            postpone = self._failing_saves.is_failing or self._in_flight is not None
            self._committed_saves.remove(filepath, postpone=postpone)

    def _link_checkpoint(self, trainer: Trainer, filepath: str, linkpath: str) -> None:
        """In the place of ModelCheckpoint's for ``save_last="link"``: there is a link at every moment, to what is."""
        if self._in_flight is not None and Path(self._in_flight.path) == Path(filepath).absolute():
            self._in_flight.links.append((filepath, linkpath))
        elif self.is_global_zero:
            link(Path(filepath), Path(linkpath))
        self.barrier("ModelCheckpoint.link")

    @property
    def num_failed_saves(self) -> int:
        """How many saves have failed in the fit that runs, or ran last."""
        return self._failing_saves.num_failed
