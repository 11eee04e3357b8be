"""A host that cannot train or save: said before the first collective, on all ranks (row C3)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

from lightning_distplus.errors import ExitCode, PreflightError
from lightning_distplus.preflight import Facts, Finding, Status, run_checks
from lightning_distplus.preflight.agreement import as_message, merged
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.faults.folders import read_only

BOUND_S = 5.0


def fit(rank: int, folder: str, notes: str) -> None:
    begin = time.monotonic()
    try:
        jobs.fit("ResilientDDP", 2, folder, max_steps=1)
    except PreflightError as error:
        formed = torch.distributed.is_initialized()
        Path(notes, f"rank{rank}").write_text(f"{time.monotonic() - begin} {formed}\n{error}")
        raise


def test_a_folder_that_takes_no_file_ends_the_job_before_its_first_collective(tmp_path: Path) -> None:
    full = tmp_path / "full"
    with read_only(full):
        run = spawn(fit, 2, args=(str(full), str(tmp_path)), deadline="40s")
    assert run.exit_codes == dict.fromkeys(range(2), int(ExitCode.PREFLIGHT)), run.logs
    for rank in range(2):
        first, text = (tmp_path / f"rank{rank}").read_text().split("\n", 1)
        seconds, was_formed = first.split()
        assert float(seconds) < BOUND_S
        assert was_formed == "False"
        assert f"{full} cannot be written: Read-only file system" in text
        assert ", rank 0: writing into " in text
        assert '"disk": "off"' in text


def test_a_check_that_hangs_is_a_warning_and_the_others_are_made() -> None:
    ends = threading.Event()

    def hangs(facts: Facts) -> Iterator[Finding]:
        ends.wait(30)
        return iter(())

    def speaks(facts: Facts) -> Iterator[Finding]:
        yield Finding(status=Status.NOTE, subject="here")

    checks = {"speaks": speaks, "hangs": hangs}
    findings = run_checks(checks, Facts(variables={}), deadline=timedelta(seconds=0.5))
    ends.set()
    assert [(found.check, found.status) for found in findings] == [("speaks", Status.NOTE), ("hangs", Status.WARNING)]
    assert "'hangs' had not ended" in findings[1].subject


def test_what_several_ranks_find_is_said_once_with_the_host_of_the_lowest() -> None:
    low, other = (
        Finding(check="disk", status=Status.ERROR, subject=text, detail="4 MB/s") for text in ("slow", "full")
    )
    found = merged([as_message("a", []), as_message("b", [low]), as_message("c", [low, other]), as_message("d", [low])])
    assert [(one.subject, one.detail) for one in found] == [
        ("slow", "host b, rank 1: 4 MB/s (and ranks 2-3)"),
        ("full", "host c, rank 2: 4 MB/s"),
    ]
