"""What all ranks hear of a checkpoint: rank 0's decisions, what each has found wrong, and which nodes lack it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_distplus.checkpoint.catalog import findings_in_share, place_of, read_manifest
from lightning_distplus.checkpoint.copies import Copies
from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointUnsafe, DistplusError
from lightning_distplus.phases import Phases
from lightning_distplus.timeouts import Phase

__all__ = ["SharedVerdicts"]

log = logging.getLogger(__name__)

_OTHER_COPY = "Resume from another checkpoint, or restore the file from a copy."
_SHOWN_FINDINGS = 3
_REFUSALS: dict[str, type[DistplusError]] = {
    error.__name__: error for error in (CheckpointCorrupt, CheckpointMismatch, CheckpointUnsafe)
}


class SharedVerdicts:
    """Decisions and findings about checkpoints that the ranks make and hear together.

    Args:
        plane: The control plane over which they meet.
        phases: The deadlines.
    """

    def __init__(self, plane: ControlPlane, phases: Phases) -> None:
        self._plane = plane
        self._phases = phases

    @property
    def _rank(self) -> int:
        return self._plane.world.rank

    def _agree(self, name: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0 decides; its answer, or its error, is that of all ranks."""
        mine: dict[str, Any] = {}
        error: DistplusError | None = None
        if self._rank == 0:
            try:
                mine = decide()
            except tuple(_REFUSALS.values()) as caught:
                error = caught
                mine = {"error": str(caught), "type": type(caught).__name__}
        answer = self._plane.gather_json(name, mine, self._phases.patience_in(Phase.RESUME))[0]
        if error is not None:
            raise error
        if "error" in answer:
            raise _REFUSALS[answer["type"]](f"Rank 0 refuses the checkpoint: {answer['error']}")
        return answer

    def hear(self, name: str, path: str | Path, findings: list[str], remedy: str = _OTHER_COPY) -> None:
        """Tells the other ranks what this one has found wrong with a checkpoint, and hears what they have.

        Raises:
            CheckpointCorrupt: On all ranks: one of them has found something.
        """
        if found := self._all_findings(name, findings):
            raise CheckpointCorrupt(
                f"The checkpoint {path} is committed and cannot be trusted: {found[0]} (and {len(found) - 1} more). "
                f"{remedy}"
            )

    def _all_findings(self, name: str, mine: list[str]) -> list[str]:
        """What all ranks have found, the first few of each in words."""
        message = {"findings": mine[:_SHOWN_FINDINGS], "count": len(mine)}
        heard = self._plane.gather_json(name, message, self._phases.patience_in(Phase.RESUME))
        shown = [f"rank {rank}: {finding}" for rank, one in enumerate(heard) for finding in one["findings"]]
        return shown + ["and others"] * (sum(one["count"] for one in heard) - len(shown))

    def _findings(self, path: Path) -> list[str]:
        """What is wrong with this rank's share of a checkpoint's bytes."""
        return self._look_for(path)()

    def _look_for(self, path: Path) -> Callable[[], list[str]]:
        """What reads this rank's share of a checkpoint's bytes, and says what is wrong with it, in any thread.

        Where nodes have folders of their own, their ranks share those; a node that has not rank 0's checkpoint there
        has nothing to read.
        """
        places = self._places("checkpoint-places", path)
        mine = places[self._rank]
        if mine is None or mine[0] != (places[0] or mine)[0]:
            return list
        sharers = [rank for rank, place in enumerate(places) if place == mine]
        manifest, rank, num_ranks = read_manifest(path), sharers.index(self._rank), len(sharers)
        return lambda: [str(found) for found in findings_in_share(path, manifest, rank=rank, num_ranks=num_ranks)]

    def _places(self, name: str, path: Path) -> list[list[Any] | None]:
        """For each rank what it sees at a path; alike where the ranks share the folder. None: no checkpoint."""
        message = {"place": place_of(path)}
        heard = self._plane.gather_json(name, message, self._phases.patience_in(Phase.RESUME))
        return [one["place"] for one in heard]

    def _fetch_where_it_lacks(self, path: Path, findings: list[str], copies: Copies) -> list[str]:
        """Fetches a copy on each node whose folder has not what rank 0 has chosen, or has it damaged.

        Returns:
            What is wrong then: why this rank could not fetch it.
        """
        for _ in self._plane.world.ranks:
            message = {"place": place_of(path), "host": self._plane.world.host, "is_damaged": bool(findings)}
            heard = self._plane.gather_json("checkpoint-nodes", message, self._phases.patience_in(Phase.RESUME))
            fetchers = _fetchers(heard)
            if not fetchers:
                break
            wanted = heard[0]["place"][0]
            if not any(one["is_damaged"] and one["place"] == heard[0]["place"] for one in heard):
                self._agree("checkpoint-upload", lambda: {"is_there": copies.ensure(path, wanted)})  # noqa: B023
            findings = []
            if self._rank in fetchers:
                log.warning(
                    "rank %d: %s is not here, or not as it was; it is fetched from %s", self._rank, path, copies.url
                )
                findings = copies.fetch(path, wanted)
            if self._all_findings("checkpoint-fetched", findings):
                break
        return findings


def _fetchers(heard: list[dict[str, Any]]) -> list[int]:
    """Of each host the lowest rank whose folder needs to be filled; several folders of a host take turns."""
    wanted = heard[0]["place"][:1]
    bad = [one["place"] for one in heard if one["is_damaged"]]
    lacking = [rank for rank, one in enumerate(heard) if (one["place"] or [None])[:1] != wanted or one["place"] in bad]
    return list({heard[rank]["host"]: rank for rank in reversed(lacking)}.values())
