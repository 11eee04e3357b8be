"""The signal handlers that Lightning and torch's data workers set."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lightning_distplus._compat.probing import warn_once

__all__ = [
    "add_to_worker_signals",
    "replace_sigterm_notifier",
    "replace_stock_signals",
    "restore_sigterm_notifier",
    "restore_worker_signals",
]

_WORKER_SIGNALS = "torch.utils.data._utils.signal_handling"


def replace_sigterm_notifier(trainer: Any, handler: Callable[[int, Any], None]) -> bool:
    """Puts ``handler`` in the place of Lightning's SIGTERM handler, which broadcasts inside the signal.

    Takes effect when the Trainer registers its handlers, after the strategy's set-up.

    Returns:
        Whether the handler was there to be replaced.
    """
    connector = getattr(trainer, "_signal_connector", None)
    if not callable(getattr(connector, "_sigterm_notifier_fn", None)):
        warn_once("_SignalConnector._sigterm_notifier_fn", "a SIGTERM may block this rank in a broadcast")
        return False
    connector._sigterm_notifier_fn = handler  # type: ignore[union-attr]
    return True


def restore_sigterm_notifier(trainer: Any) -> None:
    """Puts Lightning's SIGTERM handler back."""
    connector = getattr(trainer, "_signal_connector", None)
    if connector is not None:
        vars(connector).pop("_sigterm_notifier_fn", None)


def replace_stock_signals(trainer: Any, restore: Callable[[], None]) -> bool:
    """Keeps Lightning from registering signal handlers in the next run of this Trainer.

    Its SIGTERM handler broadcasts, and its Slurm handler saves, inside the signal (lightning 2.6.6,
    ``signal_connector.py`` 58-118).

    Args:
        trainer: The Trainer, before it registers its handlers, which it does after the strategy's set-up.
        restore: Called once, when the Trainer would put back the handlers that it found; Lightning's are back then.

    Returns:
        Whether the registration was there to be kept off.
    """
    connector = getattr(trainer, "_signal_connector", None)
    if not callable(getattr(connector, "register_signal_handlers", None)):
        warn_once("_SignalConnector.register_signal_handlers", "Lightning's own signal handlers stand before ours")
        return False

    def teardown() -> None:
        for name in ("register_signal_handlers", "teardown"):
            vars(connector).pop(name, None)
        restore()

    connector.received_sigterm = False  # type: ignore[union-attr]
    connector.register_signal_handlers = lambda: None  # type: ignore[union-attr]
    connector.teardown = teardown  # type: ignore[union-attr]
    return True


def add_to_worker_signals(also: Callable[[], None]) -> bool:
    """Calls ``also`` in each data worker that is forked from now on, once torch has set its signal handlers there.

    Torch's own handler ends a worker on SIGTERM, whoever sends it, and the step that needs its batch fails (torch
    2.13, ``signal_handling.py``).

    Returns:
        Whether the place was there.
    """
    module = importlib.import_module(_WORKER_SIGNALS)
    original = getattr(module, "_set_worker_signal_handlers", None)
    if not callable(original):
        warn_once(f"{_WORKER_SIGNALS}._set_worker_signal_handlers", "a SIGTERM to all processes ends data workers")
        return False

    def set_handlers() -> None:
        original()
        also()

    vars(module).setdefault("_distplus_original", original)
    setattr(module, "_set_worker_signal_handlers", set_handlers)  # noqa: B010  # mypy refuses the attribute
    return True


def restore_worker_signals() -> None:
    """Undoes ``add_to_worker_signals``."""
    module = importlib.import_module(_WORKER_SIGNALS)
    if original := vars(module).pop("_distplus_original", None):
        setattr(module, "_set_worker_signal_handlers", original)  # noqa: B010
