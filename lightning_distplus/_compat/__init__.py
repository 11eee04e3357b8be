"""The one place that touches private names of torch, Lightning and DeepSpeed. Each is probed before it is used.

When an upstream name has vanished, the feature behind it is switched off with one warning and training goes on.
``tests/unit/test_compat.py`` fails loudly for every name, so that we hear of it first. Here are the ways to take hold
of a name, and the warning; each module of this package has the names of one library.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)

_warned: set[str] = set()


def warn_once(name: str, consequence: str) -> None:
    """Says once that an upstream name is gone and what follows from it."""
    if name not in _warned:
        _warned.add(name)
        log.warning("%s is not in this version of its library: %s. Training goes on.", name, consequence)


def probed(owner: Any, name: str, consequence: str) -> Any:
    """An attribute of an upstream object, class or module; None, and said once, where it is gone."""
    found = getattr(owner, name, None)
    if found is None:
        warn_once(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}", consequence)
    return found


def replace_method(owner: Any, name: str, method: Callable[..., Any], consequence: str) -> bool:
    """Puts a function in the place of a method of this one object; returns whether the method was there."""
    if probed(owner, name, consequence) is None:
        return False
    vars(owner)[name] = method
    return True


def restore_method(owner: Any, name: str) -> None:
    """Undoes ``replace_method`` and ``wrap_method``."""
    if owner is not None:
        vars(owner).pop(name, None)


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any], consequence: str) -> bool:
    """Calls ``wrapper(method, *arguments)`` in its place on this one object; returns whether the method was there."""
    return replace_method(owner, name, functools.partial(wrapper, getattr(owner, name, None)), consequence)


def wrap_class(owner: Any, name: str, wrapper: Callable[..., Any], consequence: str) -> bool:
    """Calls ``wrapper(method, self, *arguments)`` in the place of a class's method, for good; the first one stays."""
    method = probed(owner, name, consequence)
    if method is None:
        return False
    if not hasattr(method, "is_wrapped"):

        @functools.wraps(method)
        def extended(*arguments: Any, **named: Any) -> Any:
            return wrapper(method, *arguments, **named)

        extended.is_wrapped = True  # type: ignore[attr-defined]
        setattr(owner, name, extended)
    return True


@contextmanager
def replaced(owners: Iterable[Any], attribute: str, value: Any, consequence: str) -> Iterator[None]:
    """Puts a value in the place of an attribute of each owner in this block; says so where it is not there.

    An owner is an object, or the name of a module.
    """
    found = [importlib.import_module(one) if isinstance(one, str) else one for one in owners]
    owners = [one for one in found if probed(one, attribute, consequence) is not None]
    originals = [getattr(one, attribute) for one in owners]
    for one in owners:
        setattr(one, attribute, value)
    try:
        yield
    finally:
        for one, original in zip(owners, originals, strict=True):
            setattr(one, attribute, original)


@contextmanager
def wrapped(module: str, attribute: str, wrapper: Callable[..., Any], consequence: str) -> Iterator[None]:
    """Calls ``wrapper(function, *arguments)`` in the place of a module's function in this block."""
    original = getattr(importlib.import_module(module), attribute, None)
    with replaced((module,), attribute, functools.partial(wrapper, original), consequence):
        yield


from lightning_distplus._compat.engines import *
from lightning_distplus._compat.lightning import *
from lightning_distplus._compat.torch import *
