"""Saves that fail while a fit runs: training goes on, and ModelCheckpoint forgets what is not there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus.errors import SaveFailed, require_choice

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["FailingSaves", "OnSaveFailure"]

log = logging.getLogger(__name__)

OnSaveFailure = Literal["continue", "raise"]


class FailingSaves:
    """Follows the saves of one fit. All ranks call it alike: whether a save has failed is agreed before.

    Args:
        policy: ``"continue"``: a failed save is logged and the next one is the retry; what still is not saved when
            training ends is an error. ``"raise"``: the first failure ends the run.
    """

    def __init__(self, policy: OnSaveFailure) -> None:
        require_choice("on_save_failure", policy, OnSaveFailure)
        self.policy: OnSaveFailure = policy
        self.num_failed = 0
        """Saves that have failed in this fit."""
        self._unsaved: SaveFailed | None = None
        self._trainer: Trainer | None = None
        self._known: dict[int, _Books] = {}

    @property
    def is_failing(self) -> bool:
        """Whether the last save has failed."""
        return self._unsaved is not None

    @property
    def follows_a_fit(self) -> bool:
        """Whether a fit runs, in which a failed save can be tried again."""
        return self._trainer is not None

    def begin(self, trainer: Trainer) -> None:
        """A fit begins."""
        self._trainer, self._unsaved, self.num_failed = trainer, None, 0
        self._read_books()

    def succeeded(self) -> None:
        """A save is committed."""
        self._unsaved = None
        self._read_books()

    def failed(self, path: str, error: SaveFailed) -> None:
        """A save has failed on all ranks' word.

        Raises:
            SaveFailed: By policy, or because no fit runs that could try again.
        """
        if self._trainer is None or self.policy == "raise":
            raise error
        self.num_failed += 1
        self._unsaved = error
        for saver in _savers(self._trainer):
            self._known[id(saver)].forget(saver, path)
        log.error(
            "training goes on without the checkpoint %s, and the next save is the retry (failed in this run: %d): %s",
            path,
            self.num_failed,
            error,
        )

    def keep(self, path: str) -> bool:
        """Puts a checkpoint that ModelCheckpoint rotates out back into its books; False where it is in none."""
        if self._trainer is None:
            return False
        kept = [self._known[id(saver)].reinstate(saver, path) for saver in _savers(self._trainer)]
        return any(kept)

    def end(self) -> None:
        """The training is complete: there is no further interval that could retry.

        Raises:
            SaveFailed: The last save failed, and none has succeeded since.
        """
        self._trainer = None
        self.require_saved()

    def require_saved(self) -> None:
        """Raises where the last save has failed.

        Raises:
            SaveFailed: None has succeeded since.
        """
        if self._unsaved is not None:
            raise SaveFailed(
                f"The training ends, but its last checkpoint is not saved ({self.num_failed} saves failed in this "
                f"run). The last failure: {self._unsaved}",
                self._unsaved.ranks,
            ) from self._unsaved

    def abandon(self) -> None:
        """The fit ends in an error of its own."""
        self._trainer = None

    def _read_books(self) -> None:
        if self._trainer is not None:
            self._known = {id(saver): _Books(saver) for saver in _savers(self._trainer)}


class _Books:
    """What one ModelCheckpoint knew when the last save was committed."""

    def __init__(self, saver: ModelCheckpoint) -> None:
        self._scores: dict[str, Any] = dict(saver.best_k_models)
        self._best, self._last = saver.best_model_path, saver.last_model_path

    def forget(self, saver: ModelCheckpoint, path: str) -> None:
        """Takes a path out that was entered before its save failed."""
        if path not in self._scores and saver.best_k_models.pop(path, None) is not None:
            _rank(saver)
        if saver.best_model_path == path:
            saver.best_model_path = self._best
        if saver.last_model_path == path:
            saver.last_model_path = self._last

    def reinstate(self, saver: ModelCheckpoint, path: str) -> bool:
        """Enters a path again that is still there; whether this saver answers for it."""
        if path in self._scores and path not in saver.best_k_models:
            saver.best_k_models[path] = self._scores[path]
            _rank(saver)
        return path in saver.best_k_models or path in (saver.best_model_path, saver.last_model_path)


def _rank(saver: ModelCheckpoint) -> None:
    """Finds best and worst again, as ModelCheckpoint does after each save."""
    scores = saver.best_k_models
    by_score = sorted(scores, key=lambda path: float(scores[path]), reverse=saver.mode == "max")
    saver.best_model_path = by_score[0] if by_score else ""
    saver.best_model_score = scores[by_score[0]] if by_score else None
    saver.kth_best_model_path = by_score[-1] if by_score else ""
    if by_score:
        saver.kth_value = scores[by_score[-1]]


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
