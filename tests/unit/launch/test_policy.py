from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from lightning_distplus.cli.launch import parse, resuming
from lightning_distplus.launch.merged_log import MergedLog
from lightning_distplus.launch.policy import Attempt, Culprit, RestartPolicy, find_culprit


@pytest.mark.parametrize(
    ("failures", "named", "expected"),
    [
        ({0: 171, 1: -9}, [], (1, 137)),
        ({0: 171, 1: 1}, [], (1, 1)),
        ({0: 1, 1: -15}, [], (0, 1)),
        ({0: 171, 1: 171}, [], (0, 171)),
        ({0: 1, 1: 1}, [1], (1, 1)),
        ({0: 1, 1: 1}, [7], (0, 1)),  # the verdict names a rank of another host
    ],
)
def test_who_ended_because_of_a_peer_is_not_to_blame(
    failures: dict[int, int], named: list[int], expected: tuple[int, int]
) -> None:
    culprit = find_culprit(failures, named)
    assert (culprit.rank, culprit.exit_code) == expected


def test_a_culprit_that_its_agent_terminated_on_the_way_out_has_the_code_of_its_error() -> None:
    assert find_culprit({0: 171, 1: -15}, [1], {0: 171, 1: 1}).exit_code == 1
    assert find_culprit({0: 171, 1: -9}, [1], {0: 171}).exit_code == 137
    assert find_culprit({0: 171, 1: -15}, [], {1: 1}) == Culprit(rank=0, code=171)


def attempt(code: int = -9, *, step: int | None = 5, at: float = 0.0, has_started: bool = True) -> Attempt:
    culprit = Culprit(rank=0, code=code)
    return Attempt(number=0, culprit=culprit, ended_at=at, has_started=has_started, step=step)


def test_restarts_count_within_their_window() -> None:
    policy = RestartPolicy(max_restarts=2, window=timedelta(seconds=10), same_step=99)
    codes = [policy.refusal(attempt(at=at)) for at in (0, 5, 9, 30)]
    assert [refusal and refusal[0] for refusal in codes] == [None, None, 137, None]


def test_the_same_step_three_times_ends_the_job_and_any_progress_counts() -> None:
    policy = RestartPolicy(max_restarts=99)
    refusals = [policy.refusal(attempt(step=step)) for step in (3, 3, 4, 4, 2, 9)]
    assert [refusal and refusal[0] for refusal in refusals] == [None, None, None, None, 174, None]


@pytest.mark.parametrize("code", [143, 172, 173])
def test_some_ends_are_not_followed_by_a_restart(code: int) -> None:
    refusal = RestartPolicy(max_restarts=9).refusal(attempt(code))
    assert refusal is not None
    assert refusal[0] == code


def test_a_wrong_command_is_not_repeated_but_a_kill_at_the_start_is() -> None:
    policy = RestartPolicy(max_restarts=9)
    refusal = policy.refusal(attempt(2, has_started=False, step=None))
    assert refusal is not None
    assert refusal[0] == 2
    assert policy.refusal(attempt(-9, has_started=False, step=None)) is None


def test_auto_is_added_where_no_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = ["-m", "lightning_distplus.cli"]
    assert resuming(["fit", "--config", "x.yaml"])(False) == [
        *module,
        "fit",
        "--config",
        "x.yaml",
        "--ckpt_path",
        "auto",
    ]
    assert "adds --ckpt_path auto" in capsys.readouterr().err
    named = resuming(["fit", "--ckpt_path", "base.ckpt", "--seed_everything=1"])
    assert named(False) == [*module, "fit", "--ckpt_path", "base.ckpt", "--seed_everything=1"]
    assert named(True) == [*module, "fit", "--seed_everything=1", "--ckpt_path", "auto"]
    (tmp_path / "x.yaml").write_text("ckpt_path: base.ckpt\n")
    in_file = resuming(["fit", f"--config={tmp_path / 'x.yaml'}"])
    assert "auto" not in in_file(False)
    assert in_file(True)[-1] == "auto"
    assert resuming(["predict"])(True) == [*module, "predict"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc", "2"],
        ["--nproc", "0", "--", "fit"],
        ["--nnodes", "2", "--", "fit"],
        ["--nnodes", "3:2", "--", "fit"],
        ["--nnodes", "2", "--rdzv", "a:1", "--job-id", "x", "--quarantine", "--", "fit"],
    ],
)
def test_wrong_options_end_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2


def test_a_line_of_several_ranks_is_written_once_and_a_repeated_one_of_one_rank_twice(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("start\n[rank0]: Error: x\ntwice\ntwice\nno newline at the end")
    (tmp_path / "1").write_text("start\n[rank1]: Error: x\nonly here\n")
    written: list[str] = []
    log = MergedLog({tmp_path / "0": 0, tmp_path / "1": 1, tmp_path / "2": 2}, written.append)
    log.start()
    log.stop()
    assert written == [
        "[0] start\n", "[0] Error: x\n", "[0] twice\n", "[0] twice\n", "[0] no newline at the end\n", "[1] only here\n",
    ]  # fmt: skip
