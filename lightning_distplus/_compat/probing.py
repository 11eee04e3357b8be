"""The two ways to take hold of an upstream name, and the warning where it has vanished."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced", "restore_method", "warn_once", "wrap_method", "wrapped"]

log = logging.getLogger(__name__)

_warned: set[str] = set()


def warn_once(name: str, consequence: str) -> None:
    """Says once that an upstream name is gone and what follows from it."""
    if name not in _warned:
        _warned.add(name)
        log.warning("%s is not in this version of its library: %s. Training goes on.", name, consequence)


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any], consequence: str) -> bool:
    """Calls ``wrapper(method, *arguments)`` in the place of a method of this one object.

    Args:
        owner: A Trainer, a loop, a connector or a strategy.
        name: The method, private or not.
        wrapper: Gets the method as it was, and its arguments.
        consequence: What follows where the method is gone.

    Returns:
        Whether the method was there.
    """
    inner = getattr(owner, name, None)
    if not callable(inner):
        warn_once(f"{type(owner).__name__}.{name}", consequence)
        return False
    vars(owner)[name] = functools.partial(wrapper, inner)
    return True


def restore_method(owner: Any, name: str) -> None:
    """Undoes ``wrap_method``."""
    vars(owner).pop(name, None)


@contextmanager
def replaced(names: Iterable[str], attribute: str, value: Any, consequence: str) -> Iterator[None]:
    """Puts a value in the place of an attribute of each module in this block; says so where it is not there."""
    originals = []
    for module in map(importlib.import_module, names):
        if hasattr(module, attribute):
            originals.append((module, getattr(module, attribute)))
        else:
            warn_once(f"{module.__name__}.{attribute}", consequence)
    for module, _ in originals:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, original in originals:
            setattr(module, attribute, original)


@contextmanager
def wrapped(module: str, attribute: str, wrapper: Callable[..., Any], consequence: str) -> Iterator[None]:
    """Calls ``wrapper(function, *arguments)`` in the place of a module's function in this block."""
    original = getattr(importlib.import_module(module), attribute, None)
    with replaced((module,), attribute, functools.partial(wrapper, original), consequence):
        yield
