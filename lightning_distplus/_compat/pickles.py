"""What is unpickled of a checkpoint: tensors, plain data, and the classes that torch's DCP and DeepSpeed write."""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.api import CheckpointException

from lightning_distplus._compat.probing import replaced
from lightning_distplus.errors import CheckpointUnsafe

__all__ = ["refusing_code"]

_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_METADATA = "torch.distributed.checkpoint.metadata"
_OF_DCP = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    # torch 2.0 to 2.2
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
    (_FILESYSTEM, "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    # where the checkpoint was saved to
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}
_OF_DEEPSPEED = (
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
_NAMED_BY_TORCH = re.compile(r"(?:GLOBAL|class) ([\w.]+)")
_CONSEQUENCE = "a checkpoint's pickle may run code"


@contextmanager
def refusing_code(path: Path | str, remedy: str) -> Iterator[None]:
    """Refuses what might run code of what this thread unpickles in this block, whoever asks for it.

    DeepSpeed's loaders and torch's DCP unpickle without any restriction (deepspeed 0.19.8, torch 2.13 in
    ``filesystem.py`` 930 and ``default_planner.py`` 387). Here ``torch.load`` is that of ``weights_only=True``, with
    what was given to ``torch.serialization.add_safe_globals``, and ``.metadata`` may name the classes of DCP.

    Args:
        path: The checkpoint.
        remedy: How to go past the refusal.

    Raises:
        CheckpointUnsafe: A pickle names something else; nothing of it was run.
    """
    guard = _Guard(path, remedy)
    with (
        replaced(("torch", "torch.serialization"), "load", guard.load, _CONSEQUENCE),
        replaced((_FILESYSTEM,), "pickle", _PickleOfMetadata(guard), _CONSEQUENCE),
    ):
        try:
            yield
        except (Exception, CheckpointException) as error:
            refusal = guard.refusal or _refusal_of_a_peer(error)
            if refusal is None or refusal is error:
                raise
            raise refusal from error  # torch and Lightning tell it in words of their own, or only a part of it


class _Guard:
    def __init__(self, path: Path | str, remedy: str) -> None:
        self.refusal: CheckpointUnsafe | None = None
        self._path, self._remedy = path, remedy
        self._thread = threading.get_ident()
        self._load: Callable[..., Any] = torch.load

    @property
    def watches(self) -> bool:
        """Whether it is the guarded thread that asks: others go on as they are."""
        return threading.get_ident() == self._thread

    def load(self, f: Any, map_location: Any = None, pickle_module: Any = None, **named: Any) -> Any:
        """``torch.load``."""
        if not self.watches:
            return self._load(f, map_location, pickle_module, **named)
        try:
            with torch.serialization.safe_globals(_missing_of_deepspeed()):
                return self._load(f, map_location, **{**named, "weights_only": True})
        except pickle.UnpicklingError as error:
            found = _NAMED_BY_TORCH.search(str(error))
            self.refuse(_name_of(f), found[1] if found else None, error)

    def load_metadata(self, file: Any) -> Any:
        """``pickle.load`` of DCP's ``.metadata``."""
        unpickler = _MetadataUnpickler(file)
        try:
            return unpickler.load()
        except pickle.UnpicklingError as error:
            self.refuse(_name_of(file), unpickler.refused, error)

    def refuse(self, file: str, name: str | None, cause: Exception) -> NoReturn:
        """Raises what is said of a pickle.

        Raises:
            CheckpointUnsafe: Always.
        """
        why = f"names {name}" if name else f"is no plain pickle ({str(cause).splitlines()[-1][:200]})"
        self.refusal = CheckpointUnsafe(
            f"The checkpoint {self._path} is refused: {file} {why}. Tensors and plain data are read, and what else a "
            f"pickle names may run any code; nothing of it was run. {self._remedy}"
        )
        raise self.refusal from cause


class _MetadataUnpickler(pickle.Unpickler):
    """Finds the classes of DCP and the types of tensors, and nothing else."""

    refused: str | None = None

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) not in _OF_DCP:
            self.refused = f"{module}.{name}"
            raise pickle.UnpicklingError(f"{self.refused} is not a class of torch.distributed.checkpoint")
        return super().find_class(module, name)


class _PickleOfMetadata:
    """The module ``pickle``, as the module that reads ``.metadata`` sees it."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard

    def load(self, file: Any) -> Any:
        return self._guard.load_metadata(file) if self._guard.watches else pickle.load(file)

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


def _missing_of_deepspeed() -> list[Any]:
    """DeepSpeed's classes as far as it is imported, but for those that somebody has declared safe for good."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in _OF_DEEPSPEED]
    declared = torch.serialization.get_safe_globals()
    return [one for one in found if one is not None and one not in declared]


def _name_of(file: Any) -> str:
    name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    return "a value in a shard" if name is None else os.fspath(name)


def _refusal_of_a_peer(error: BaseException) -> CheckpointUnsafe | None:
    """A refusal by which something else has failed, here or, in DCP, on another rank."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CheckpointUnsafe):
            return seen
        failures = seen.failures.values() if isinstance(seen, CheckpointException) else ()
        for failure, _ in failures:
            if isinstance(failure, CheckpointUnsafe):
                return failure
        seen = seen.__cause__
    return None
