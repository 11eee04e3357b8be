"""What a job looks at before its ranks depend on it: its hosts, and who else writes to its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_distplus.preflight import Facts, Finding, Status, raise_errors, run_checks
from lightning_distplus.preflight.host import HOST_CHECKS
from lightning_distplus.preflight.run_lock import RunLock
from lightning_distplus.preflight.together import gathered, run_in_time, spans_hosts
from lightning_distplus.strategies.starting import address_of, facts_of, settings_of

__all__ = ["check_folder", "check_host"]

_HOST_DEADLINE = timedelta(seconds=10)
_TRIAL_BYTES = 8 << 20  # 40 ms on the disk of a small machine


def check_host(strategy: Any, trainer: Any) -> None:
    """Makes the checks of the host once a host, before the first collective; all ranks call it.

    Raises:
        PreflightError: On all ranks, with host, evidence and remedy.
    """
    if strategy.preflight is False or trainer.state.fn != "fit":
        return
    facts = replace(
        facts_of(strategy),
        folder=_folder(trainer) or Path.cwd(),
        trial_bytes=_TRIAL_BYTES,
        spans_hosts=spans_hosts(strategy.plane),
    )
    is_first = strategy.local_rank == 0
    found = run_in_time(HOST_CHECKS, facts, settings_of(strategy), _HOST_DEADLINE) if is_first else []
    _raise_together(strategy, facts, found)


def check_folder(strategy: Any, trainer: Any) -> RunLock | None:
    """Takes the lock of the checkpoint folder.

    Returns:
        The lock, on rank 0 of a fit that saves checkpoints.

    Raises:
        PreflightError: On all ranks.
    """
    if strategy.preflight is False or trainer.state.fn != "fit":
        return None
    settings = settings_of(strategy)
    found: list[Finding] = []
    lock = _lock_of(strategy, trainer) if strategy.global_rank == 0 and settings.get("run_lock") != "off" else None
    if lock is not None:

        def take(facts: Facts) -> Iterator[Finding]:
            return lock.take()

        found += run_checks({"run_lock": take}, facts_of(strategy), settings)
    try:
        _raise_together(strategy, facts_of(strategy), found)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def _lock_of(strategy: Any, trainer: Any) -> RunLock | None:
    folder = _folder(trainer)
    if not trainer.checkpoint_callbacks or folder is None:
        return None
    address = address_of(strategy)
    job = "" if address.job == "none" else address.job  # torchrun's id where nobody gave one
    return RunLock(folder, job=job, attempt=address.attempt)


def _folder(trainer: Any) -> Path | None:
    """Where checkpoints go; None for a place that is no folder of this host."""
    callback = trainer.checkpoint_callback
    place = str(getattr(callback, "dirpath", None) or trainer.default_root_dir)
    return None if "://" in place else Path(place)


def _raise_together(strategy: Any, facts: Facts, found: list[Finding]) -> None:
    if strategy.world_size > 1:
        found = gathered(strategy.plane, found, strategy.phases.patience)
    if strategy.global_rank == 0:
        for finding in found:
            if finding.check == "run_lock" and finding.status is Status.NOTE:
                with suppress(OSError):
                    strategy.note("run_lock_taken_over", holder=finding.detail)
    raise_errors([one for one in found if one.status is Status.ERROR or strategy.global_rank == 0], facts)
