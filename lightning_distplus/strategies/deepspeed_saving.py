"""A DeepSpeed save whose failure on one rank does not leave the others in DeepSpeed's own barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_distplus import _compat
from lightning_distplus.errors import DistplusError
from lightning_distplus.strategies.background import Writes

__all__ = ["raising_after_the_barriers"]


@contextmanager
def raising_after_the_barriers(engine: Any, writes: Writes) -> Iterator[None]:
    """Lets a save of ``engine`` in this block pass all of its barriers on every rank, and raises its error after them.

    ``DeepSpeedEngine.save_checkpoint`` (deepspeed 0.19.8, ``engine.py`` 4869-4966) begins and ends with barriers on the
    default group, where a rank whose write fails never arrives. The errors of its checkpoint engine are kept until
    then, and ``latest`` is written here instead. Another error between the barriers (a copy of the recovery scripts or
    of NVMe's files, a state dict) ends the save on this rank, which then meets the others at the last barrier.

    Args:
        engine: DeepSpeed's.
        writes: Where the writes go; those that are kept are raised by whoever does them.

    Raises:
        Exception: The first error on this rank.
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
        """Does what the engine has left, and raises what went wrong.

        Raises:
            Exception: The first error of a write on this rank.
        """
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
