"""Runs torchrun in this process and writes down how each rank ended, which its own exit code does not tell.

``python -m lightning_distplus.testing.torchrun OUTCOME [torchrun's arguments]``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

__all__ = ["main"]


def main() -> None:
    """Leaves ``{rank: exit code}`` of the ranks that failed in the last attempt; a signal is a negative code."""
    outcome = Path(sys.argv[1])
    failures: dict[int, int] = {}
    try:
        run(parse_args(sys.argv[2:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
    outcome.write_text(json.dumps(failures), encoding="utf-8")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
