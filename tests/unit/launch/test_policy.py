from __future__ import annotations

import io
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_distplus.cli.launch import following, parse, resuming
from lightning_distplus.launch.agent import RankOutput
from lightning_distplus.launch.supervisor import Culprit, History, RestartPolicy, find_culprit


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
    culprit = find_culprit(failures, History(culprits=named))
    assert (culprit.rank, culprit.exit_code) == expected


def test_a_culprit_that_its_agent_terminated_on_the_way_out_has_the_code_of_its_error() -> None:
    assert find_culprit({0: 171, 1: -15}, History(culprits=[1], codes={0: 171, 1: 1})).exit_code == 1
    assert find_culprit({0: 171, 1: -9}, History(culprits=[1], codes={0: 171})).exit_code == 137
    assert find_culprit({0: 171, 1: -15}, History(codes={1: 1})) == Culprit(rank=0, code=171)


def refuse(
    policy: RestartPolicy, code: int = -9, *, step: int | None = 5, at: float = 0.0, has_started: bool = True
) -> tuple[int, str] | None:
    return policy.refusal(Culprit(rank=0, code=code), History(has_started=has_started, step=step), at)


def test_restarts_count_within_their_window() -> None:
    policy = RestartPolicy(max_restarts=2, window=timedelta(seconds=10), same_step=99)
    codes = [refuse(policy, at=at) for at in (0, 5, 9, 30)]
    assert [refusal and refusal[0] for refusal in codes] == [None, None, 137, None]


def test_the_same_step_three_times_ends_the_job_and_any_progress_counts() -> None:
    policy = RestartPolicy(max_restarts=99)
    refusals = [refuse(policy, step=step) for step in (3, 3, 4, 4, 2, 9)]
    assert [refusal and refusal[0] for refusal in refusals] == [None, None, None, None, 174, None]


@pytest.mark.parametrize("code", [143, 172, 173])
def test_some_ends_are_not_followed_by_a_restart(code: int) -> None:
    refusal = refuse(RestartPolicy(max_restarts=9), code)
    assert refusal is not None
    assert refusal[0] == code


def test_a_wrong_command_is_not_repeated_but_a_kill_at_the_start_is() -> None:
    policy = RestartPolicy(max_restarts=9)
    refusal = refuse(policy, 2, has_started=False, step=None)
    assert refusal is not None
    assert refusal[0] == 2
    assert refuse(policy, -9, has_started=False, step=None) is None


def test_auto_is_added_where_no_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["fit", "--config", "x.yaml", "--ckpt_path", "auto"]
    assert resuming(["fit", "--config", "x.yaml"]) == (auto, auto)
    assert "adds --ckpt_path auto" in capsys.readouterr().err
    first, after_save = resuming(["fit", "--ckpt_path", "base.ckpt", "--seed_everything=1"])
    assert first == ["fit", "--ckpt_path", "base.ckpt", "--seed_everything=1"]
    assert after_save == ["fit", "--seed_everything=1", "--ckpt_path", "auto"]
    (tmp_path / "x.yaml").write_text("ckpt_path: base.ckpt\n")
    first, after_save = resuming(["fit", f"--config={tmp_path / 'x.yaml'}"])
    assert "auto" not in first
    assert after_save[-1] == "auto"
    assert resuming(["predict"]) == (["predict"], ["predict"])


def test_a_command_of_distplus_is_run_as_its_module_and_a_script_chooses_its_checkpoint_itself(tmp_path: Path) -> None:
    module = ["-m", "lightning_distplus.cli"]
    first, after_save = following(*parse(["--", "fit", "--ckpt_path", "base.ckpt"]))
    assert first == [*module, "fit", "--ckpt_path", "base.ckpt"]
    assert after_save == [*module, "fit", "--ckpt_path", "auto"]
    assert following(*parse(["--no-resume", "--", "fit"])) == ([*module, "fit"], [*module, "fit"])
    (tmp_path / "train.py").touch()
    script = [str(tmp_path / "train.py"), "--lr", "1"]
    assert following(*parse(script)) == (script, script)


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc", "2"],
        ["--nproc", "2", "--module"],
        ["--nproc", "0", "--", "fit"],
        ["--nnodes", "2", "--", "fit"],
        ["--nnodes", "3:2", "--", "fit"],
        ["fit", "--config", "x.yaml"],
        ["--", "nowhere.py"],
        ["--rdzv_backend", "etcd", "--", "fit"],
        ["--no-such-option", "1", "--", "fit"],
        ["--nnodes", "2", "--rdzv", "a:1", "--job-id", "x", "--quarantine", "--", "fit"],
    ],
)
def test_wrong_options_end_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(argv)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("argv", "command", "is_own"),
    [
        ("--nproc 2 train.py --nproc 4 -- --x", ["train.py", "--nproc", "4", "--", "--x"], False),
        ("--nproc=2 -m pkg.train -m x", ["-m", "pkg.train", "-m", "x"], False),
        ("-m --nproc 2 pkg.train", ["-m", "pkg.train"], False),
        ("--nproc 2 -- fit --config x.yaml", ["fit", "--config", "x.yaml"], True),
        ("--nproc 2 -- train.py fit", ["train.py", "fit"], False),
        ("--standalone --no_resume --nproc 2 train.py", ["train.py"], False),
        ("-t 3 -r3 --role=x --nproc 2 train.py", ["train.py"], False),
    ],
)
def test_what_is_started_stands_behind_the_options(
    argv: str, command: list[str], is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    arguments, found = parse(argv.split())
    assert (found, arguments.is_own, arguments.nproc) == (command, is_own, 2)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--nproc-per-node 4 --max-restarts 2", {"nproc": 4, "max_restarts": 2, "nnodes": (1, 1)}),
        ("--nproc_per_node=4 --nnodes=1:4 --rdzv_endpoint=h:1 --rdzv_id=x", {"rdzv": "h:1", "job_id": "x"}),
        ("--nnodes 2 --rdzv-endpoint h --rdzv-backend c10d", {"rdzv": "h:29400", "nnodes": (2, 2)}),
        ("--nnodes 2 --master_addr h --master_port 7 --node_rank 1", {"rdzv": "h:7"}),
        ("--nnodes 2 --standalone", {"nnodes": (1, 1)}),
        ("--nproc_per_node cpu", {"nproc": os.cpu_count()}),
    ],
)
def test_torchruns_spellings_are_understood(argv: str, expected: dict[str, object]) -> None:
    arguments, _ = parse([*argv.split(), "--", "fit"])
    assert {name: getattr(arguments, name) for name in expected} == expected


def test_options_of_torchrun_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    parse(["--tee", "3", "--node-rank", "1", "--", "fit"])
    assert "--node-rank, --tee: options of torchrun without effect here" in capsys.readouterr().err


def test_the_place_of_the_next_attempt_is_told() -> None:
    policy = RestartPolicy(max_restarts=10)
    assert refuse(policy) is None
    assert policy.place_of_next() == "attempt 2 of 11"
    policy = RestartPolicy(max_restarts=10, window=timedelta(days=1))
    assert refuse(policy) is None
    assert policy.place_of_next() == "restart 1 of 10 within 1 day, 0:00:00"


def test_each_line_of_a_rank_is_shown_once_with_its_rank(tmp_path: Path) -> None:
    file, terminal = tmp_path / "1", io.StringIO()
    output = RankOutput(file, 1, terminal)
    output.look()  # it is not there yet
    with file.open("wb", buffering=0) as rank:
        for part in (b"start\n[rank1]: Error: x\r\nunfin", b"ished\ntwice\ntwice\r", b"\n\nno newline at the end"):
            rank.write(part)
            output.look()
    output.close()
    shown = ["start", "Error: x", "unfinished", "twice", "twice", "", "no newline at the end"]
    assert terminal.getvalue() == "".join(f"[1] {line}\n" for line in shown)


def test_a_progress_bar_is_shown_about_once_a_second_and_its_last_line_whole(tmp_path: Path) -> None:
    file, terminal = tmp_path / "0", io.StringIO()
    output = RankOutput(file, 0, terminal)
    begun = time.monotonic()
    with file.open("wb", buffering=0) as rank:
        for number in range(20_000):
            rank.write(f"\rEpoch 0: {number}/20000".encode())
            if number % 10 == 0:
                output.look()
        output.look()
        taken_s = time.monotonic() - begun
        rank.write(b"\rEpoch 0: done\nnext\n")
    output.close()
    written = terminal.getvalue().splitlines()
    assert written[0].startswith("[0] Epoch 0: ")
    assert written[-2:] == ["[0] Epoch 0: done", "[0] next"]
    assert len(written) <= taken_s + 4
