"""Row S9: the ranks that wait for rank 0's ``prepare_data`` say so and pass; its error ends all of them at once."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule

from lightning_distplus.errors import ExitCode, PeerError, PeerFailed
from lightning_distplus.strategies import start
from lightning_distplus.testing import spawn
from tests.distributed import jobs

WORLD_SIZE = 3
TIMEOUTS = {"data": "20s", "step": "1s", "setup": "20s"}


class Prepares(LightningDataModule):
    """Takes its time on rank 0, and then may raise."""

    def __init__(self, seconds: float, *, fails: bool = False, progress: bool = True) -> None:
        super().__init__()
        self.seconds, self.fails, self.progress = seconds, fails, progress

    def prepare_data(self) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            if self.progress:
                start.report_progress("tokenized 3 of 40 files")
            time.sleep(0.1)
        if self.fails:
            raise OSError("the corpus is not there")

    def train_dataloader(self) -> Any:
        return jobs.loader()


def fit(folder: str, timeouts: dict[str, str], data: dict[str, Any]) -> tuple[str, str, list[int], float, float]:
    logging.getLogger("lightning_distplus").setLevel(logging.INFO)
    logging.basicConfig(force=True)
    start._SAY_EVERY_S = 0.5
    begin = time.time()
    try:
        jobs.fit("ResilientDDP", WORLD_SIZE, folder, data=Prepares(**data), timeout=timeouts, max_steps=2)
    except (PeerError, OSError) as error:
        return type(error).__name__, str(error), getattr(error, "ranks", []), begin, time.time()
    return "finished", "", [], begin, time.time()


def test_preparation_of_three_step_deadlines_is_waited_for_and_told(tmp_path: Path) -> None:
    data = {"seconds": 3.0}
    run = spawn(fit, WORLD_SIZE, args=(str(tmp_path), TIMEOUTS, data), deadline="50s").check()
    assert {outcome for outcome, *_ in run.results.values()} == {"finished"}
    for rank in (1, 2):
        said = re.findall(
            rf"rank {rank} waits for prepare_data on rank 0 \(.*\), for (\d+) s of at most 20 s; (.*)", run.logs[rank]
        )
        assert len(said) >= 3, run.logs[rank]
        assert any(re.fullmatch(r"it reported \d+ s ago: tokenized 3 of 40 files", progress) for _, progress in said)
    assert "waits for prepare_data" not in run.logs[0]


def test_error_in_prepare_data_ends_all_ranks_with_its_traceback(tmp_path: Path) -> None:
    data = {"seconds": 1.0, "fails": True}
    run = spawn(fit, WORLD_SIZE, args=(str(tmp_path), TIMEOUTS, data), deadline="50s")
    outcomes = run.results
    assert outcomes[0][0] == "OSError"
    for rank in (1, 2):
        outcome, text, ranks, _, end = outcomes[rank]
        assert (outcome, ranks) == (PeerFailed.__name__, [0])
        assert "in prepare_data" in text
        assert "OSError: the corpus is not there" in text
        assert end - outcomes[0][3] < 1.0 + 5.0


def test_preparation_past_its_deadline_ends_with_a_verdict_on_the_rank(tmp_path: Path) -> None:
    data = {"seconds": 30.0, "progress": False}
    run = spawn(fit, WORLD_SIZE, args=(str(tmp_path), {**TIMEOUTS, "data": "2s"}, data), deadline="50s")
    assert set(run.exit_codes.values()) == {int(ExitCode.HANG)}
    verdict = jobs.verdict_in(tmp_path, "hang", [0], [1, 2])
    assert (verdict["phase"], verdict["operation"]) == ("data", "prepare_data")
    assert verdict["location"].startswith(f"{__file__}:")
    assert "it has reported no progress" in run.logs[1]


def test_progress_is_for_nobody_where_no_job_is_connected() -> None:
    start.report_progress("alone")


class PreparesPerNode(Prepares):
    """Notes who prepares."""

    def __init__(self, folder: str, *, per_node: bool) -> None:
        super().__init__(0.3)
        self.folder, self.prepare_data_per_node = folder, per_node

    def prepare_data(self) -> None:
        super().prepare_data()
        Path(self.folder, f"prepared-by-{os.environ['NODE_RANK']}").touch()


def fit_on_nodes(rank: int, folder: str, per_node: bool) -> list[str]:
    """Two nodes of one rank each."""
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    strategy = jobs.strategy("ResilientDDP", timeout=TIMEOUTS, preflight=False)
    jobs.fit(strategy, 1, folder, data=PreparesPerNode(folder, per_node=per_node), max_steps=1, num_nodes=2)
    return sorted(path.name for path in Path(folder).glob("prepared-by-*"))


@pytest.mark.parametrize("per_node", [False, True])
def test_data_is_prepared_on_rank_0_or_once_on_each_node_before_any_rank_goes_on(
    per_node: bool, tmp_path: Path
) -> None:
    run = spawn(fit_on_nodes, 2, args=(str(tmp_path), per_node), deadline="50s").check()
    prepared = ["prepared-by-0", "prepared-by-1"] if per_node else ["prepared-by-0"]
    assert run.results == {0: prepared, 1: prepared}
