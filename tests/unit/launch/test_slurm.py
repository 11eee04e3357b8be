from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.cli.__main__ import main
from lightning_distplus.events import EventLog, read_events
from lightning_distplus.launch.slurm import SlurmJob, end_of_start
from lightning_distplus.launch.supervisor import RestartPolicy


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an scontrol that notes how it was called, and the variables of a job."""
    program(tmp_path, "scontrol", f'echo "scontrol $*" >> {tmp_path}/calls')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for name in (
        "SLURM_RESTART_COUNT",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_ARRAY_TASK_ID",
        "DISTPLUS_HOME_FILE",
        "DISTPLUS_RUN_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("lightning_distplus.launch.slurm._SLURM_ENDS_THIS_S", 0)
    return tmp_path


@pytest.fixture
def home(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks have said that the artefacts are."""
    (slurm / "told").write_text(json.dumps({"home": str(slurm / "home")}))
    monkeypatch.setenv("DISTPLUS_HOME_FILE", str(slurm / "told"))
    return slurm / "home"


def end(code: int, *, max_restarts: int = 100) -> int:
    return end_of_start(code, RestartPolicy(max_restarts=max_restarts))


def calls(folder: Path) -> list[str]:
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


def ledger(home: Path, *starts: dict[str, Any]) -> None:
    """What the starts of a job have left: the step at which each ended, and by what."""
    for number, start in enumerate(starts):
        with EventLog(home, 0, attempt=number) as events:
            events.write("start")
            events.write(start.get("kind", "failed"), error="PeerLost: rank 1", **start["fields"])


JOB = SlurmJob(command=["fit", "--config", "a b.yaml"], nodes=2, ranks_per_node=8, gpus_per_node=8)


def test_every_line_of_the_script_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--gpus-per-node", "8", "--grace", "120", "--srun=--container-image=x"]
    assert main(["launch", "slurm", *options, "--", "fit", "--config", "x.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("#SBATCH", "export", "srun")):
            assert lines[number - 1].startswith("# "), line
    assert "#SBATCH --ntasks-per-node=8" in lines
    assert "#SBATCH --signal=USR1@120" in lines
    assert "srun --kill-on-bad-exit=0 --container-image=x distplus fit --config x.yaml --ckpt_path auto" in lines


def test_the_script_hands_on_what_srun_returns(slurm: Path) -> None:
    program(slurm, "srun", f'echo "srun $*" >> {slurm}/calls; exit 143')
    program(slurm, "distplus", f'echo "distplus $*" >> {slurm}/calls; exit 9')
    ended = subprocess.run(["/bin/bash", "-c", JOB.script()], env={**os.environ}, timeout=20, check=False)
    assert ended.returncode == 9
    assert calls(slurm) == [
        "srun --kill-on-bad-exit=0 distplus fit --config a b.yaml",
        "distplus launch slurm --ended 143 --max-requeues 100 --same-step 3",
    ]


@pytest.mark.parametrize(
    ("code", "requeues"), [(143, 1), (138, 1), (170, 1), (171, 1), (0, 0), (1, 0), (172, 0), (174, 0)]
)
def test_a_job_is_requeued_exactly_once_and_only_where_that_makes_sense(code: int, requeues: int, slurm: Path) -> None:
    assert end(code) == (143 if code == 138 else code)
    assert calls(slurm) == ["scontrol requeue 77"] * requeues


def test_an_error_of_one_rank_does_not_hide_behind_the_code_of_its_peers(slurm: Path, home: Path) -> None:
    """srun returns the highest code."""
    ledger(home, {"fields": {"exit_code": 1, "global_step": 4}})
    assert end(171) == 1
    assert calls(slurm) == []


def test_starts_that_end_at_the_same_step_end_the_job(slurm: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"fields": {"exit_code": 171, "global_step": 4}}
    stopped = {"kind": "preempted", "fields": {"global_step": 4}}
    ledger(home, lost, lost, lost)  # another job in the same folder
    for number, starts in enumerate([(lost,), (lost, stopped), (lost, stopped, lost)]):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        ledger(home, *starts)
        assert end(143 if starts[-1] is stopped else 171) == (143 if starts[-1] is stopped else 171)
    ledger(home, lost, stopped, lost, lost)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert end(171) == 174
    assert calls(slurm) == ["scontrol requeue 77"] * 3
    kinds = [event["kind"] for event in read_events(home) if event["rank"] == -1]
    assert kinds == ["requeue", "requeue", "requeue", "launch_end"]


def test_an_array_task_is_requeued_by_its_own_name_and_a_limit_holds(
    slurm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert end(143) == 143
    assert calls(slurm) == ["scontrol requeue 70_3"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert end(143, max_restarts=2) == 143
    assert len(calls(slurm)) == 1
    assert "requeued 2 times" in capsys.readouterr().err


@pytest.mark.parametrize(("body", "said"), [(None, "scontrol is not installed"), ("echo no >&2; exit 1", "(no)")])
def test_a_requeue_that_fails_is_reported(
    body: str | None, said: str, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "scontrol").unlink()
    if body:
        program(slurm, "scontrol", body)
    assert end(143) == 143
    error = capsys.readouterr().err
    assert said in error
    assert "submit it again" in error


def test_a_job_is_submitted_with_what_sbatch_is_to_be_told(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program(slurm, "sbatch", f'/bin/cat > {slurm}/script; echo "sbatch $*" >> {slurm}/calls; echo 12')
    options = ["--submit", "--name", "llama", "--sbatch=--partition=big"]
    assert main(["launch", "slurm", *options, "--", "fit"]) == 0
    assert calls(slurm) == ["sbatch --parsable"]
    assert capsys.readouterr().out == "distplus launch slurm: submitted job 12; its log is llama-12.log\n"
    assert "#SBATCH --partition=big" in (slurm / "script").read_text().splitlines()


@pytest.mark.parametrize(
    ("body", "said"), [(None, "sbatch is not found"), ("echo no such partition >&2; exit 1", "no such partition")]
)
def test_a_job_that_is_not_submitted_says_why(
    body: str | None, said: str, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if body:
        program(slurm, "sbatch", body)
    assert main(["launch", "slurm", "--submit", "--", "fit"]) == 1
    assert said in capsys.readouterr().err
