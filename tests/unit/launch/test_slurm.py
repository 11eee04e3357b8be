from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_distplus.cli.__main__ import main
from lightning_distplus.launch.slurm import SlurmJob


def run(script: str, folder: Path, *, rank_code: int, scontrol: str | None, **variables: str) -> tuple[int, list[str]]:
    """Runs the script with bash; srun and scontrol are programs that note how they were called."""
    tools = {"srun": f'echo "srun $*" >> {folder}/calls; exit {rank_code}', "sleep": "exit 0", "scontrol": scontrol}
    for name, body in tools.items():
        if body is not None:
            (folder / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / name).chmod(0o755)
    ended = subprocess.run(
        ["/bin/bash", "-c", script], env={"PATH": str(folder), "SLURM_JOB_ID": "77", **variables},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    calls = (folder / "calls").read_text().splitlines()
    return ended.returncode, [*calls, *ended.stderr.splitlines()]


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


@pytest.mark.parametrize(("code", "requeues"), [(143, 1), (170, 1), (171, 1), (0, 0), (1, 0), (172, 0), (174, 0)])
def test_a_job_is_requeued_exactly_once_and_only_where_that_makes_sense(
    code: int, requeues: int, tmp_path: Path
) -> None:
    note = f'echo "scontrol $*" >> {tmp_path}/calls'
    ended, said = run(JOB.script(), tmp_path, rank_code=code, scontrol=note)
    assert ended == code
    assert said == ["srun --kill-on-bad-exit=0 distplus fit --config a b.yaml", *["scontrol requeue 77"] * requeues]


def test_an_array_task_is_requeued_by_its_own_name_and_a_limit_holds(tmp_path: Path) -> None:
    note = f'echo "scontrol $*" >> {tmp_path}/calls'
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    assert run(JOB.script(), tmp_path, rank_code=143, scontrol=note, **array)[1][-1] == "scontrol requeue 70_3"
    (tmp_path / "calls").unlink()
    ended, said = run(JOB.script(), tmp_path, rank_code=143, scontrol=note, SLURM_RESTART_COUNT="100")
    assert (ended, len(said)) == (143, 1)


def test_a_missing_scontrol_is_reported(tmp_path: Path) -> None:
    ended, said = run(JOB.script(), tmp_path, rank_code=143, scontrol=None)
    assert ended == 143
    assert "the job is not requeued; submit it again" in said[-1]


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="nodes is 0"):
        SlurmJob(command=["fit"], nodes=0)
