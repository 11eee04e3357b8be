"""What the tests of this folder share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def reset_sigchld() -> Iterator[None]:
    """torch sets a handler for SIGCHLD with its first worker, and never takes it back."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)
