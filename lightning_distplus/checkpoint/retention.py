"""Retention: which checkpoints of a folder may go. The last valid one never does."""

from __future__ import annotations

from pathlib import Path

from lightning_distplus.checkpoint.catalog import Report, committed_in, remove, verify

__all__ = ["is_last_valid", "rotate"]


def is_last_valid(path: str | Path) -> bool:
    """Whether a folder would hold no valid checkpoint any more without this one; sizes are compared, nothing is read.

    A link, and what is not committed, is never the last valid one.
    """
    path = Path(path)
    if path.is_symlink() or not verify(path, "size").ok:
        return False
    mine = path.absolute()
    others = (report for report in committed_in(path.parent) if report.path.absolute() != mine)
    return not any(verify(other.path, "size").ok for other in others)


def rotate(directory: str | Path, *, keep_last: int, keep_every_n_steps: int | None = None) -> list[Path]:
    """Removes the older checkpoints of a folder. Torn and unmanifested ones are left alone.

    It works beside a ModelCheckpoint with ``save_top_k=-1``, which removes nothing itself. One process calls it.

    Args:
        directory: The folder; its direct children are looked at.
        keep_last: How many of the newest valid ones stay, at least 1.
        keep_every_n_steps: Those whose global step is a multiple of this stay for ever.

    Returns:
        What was removed, the oldest first.

    Raises:
        ValueError: A number is smaller than 1.
    """
    if keep_last < 1 or (keep_every_n_steps is not None and keep_every_n_steps < 1):
        raise ValueError(
            f"keep_last is {keep_last} and keep_every_n_steps is {keep_every_n_steps}; both are at least 1."
        )
    newest_first = committed_in(Path(directory))
    valid = [report for report in newest_first if verify(report.path, "size").ok]
    kept = {report.path for report in valid[:keep_last]}
    kept |= {report.path for report in valid if keep_every_n_steps and _step(report) % keep_every_n_steps == 0}
    removed = [report.path for report in reversed(valid) if report.path not in kept]
    for path in removed:
        remove(path)
    return removed


def _step(report: Report) -> int:
    assert report.manifest is not None
    return report.manifest.global_step
