from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_distplus import env
from lightning_distplus.data import MegatronWriter
from tests.processes import ROOT, wait_until

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

DRIVER = [sys.executable, str(ROOT / "examples" / "tinyllama" / "pretrain.py"), "--corpus-mb", "0.3"]
SMALLER = [
    "--model.init_args.config.hidden_size=32",
    "--model.init_args.config.intermediate_size=64",
    "--model.init_args.config.num_hidden_layers=2",
    "--data.init_args.micro_batch_size=2",
]


def write_tokens(folder: Path) -> None:
    """What the driver would prepare of its corpus, which the soak leaves to it."""
    for name, begin in (("code", 0), ("prose", 2048)):
        with MegatronWriter(folder / name) as writer:
            for document in range(100):
                writer.add_document([(begin + 37 * document + token) % 4096 for token in range(640)])


def prove(strategy: str, out: Path) -> None:
    command = [*DRIVER, "--strategy", strategy, "--steps", "24", "--seed", "7", "--out", str(out), *SMALLER]
    command += ["--data", str(out.parent / "data")]
    variables = {**env.snapshot(), "COLUMNS": "200"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=170, env=variables, cwd=out.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = dict(re.findall(r"│ ([\w/ ]+?) +│ (.*?) +│", run.stdout))
    assert rows["strategy"] == strategy
    assert (rows["steps"], rows["samples"]) == ("24", "96")
    assert (rows["samples repeated"], rows["samples missed"]) == ("0", "0")
    assert rows["weights identical"].startswith("yes")
    assert re.fullmatch(r"rank [01] by SIGKILL in step \d+, resumed at step \d+", rows["killed"])
    assert float(rows["seconds lost"]) > 0
    assert (out / "loss.png").stat().st_size > 10_000
    records = {path.name for path in (out / "killed" / "record").glob("rank0-*")}
    assert records == {"rank0-start0.jsonl", "rank0-start1.jsonl"}


@pytest.mark.deadline(180)
def test_a_killed_pretraining_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    write_tokens(tmp_path / "data")
    prove("fsdp", tmp_path / "run")


@pytest.mark.soak
@pytest.mark.deadline(180)
@pytest.mark.parametrize("strategy", ["ddp", "model_parallel", "deepspeed"])
def test_a_killed_pretraining_is_exact_under_the_other_strategies(strategy: str, tmp_path: Path) -> None:
    prove(strategy, tmp_path / "run")


@pytest.mark.soak
@pytest.mark.deadline(240)
def test_control_c_ends_every_process_of_a_pretraining(tmp_path: Path) -> None:
    out, data = tmp_path / "run", tmp_path / "data"
    write_tokens(data)
    command = [*DRIVER, "--strategy", "ddp", "--steps", "1000", "--out", str(out), "--data", str(data), *SMALLER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        wait_until((out / "killed" / "record" / "rank1-start0.jsonl").exists)
        os.kill(driver.pid, signal.SIGINT)
        output, _ = driver.communicate(timeout=20)
    assert driver.returncode == 130, output
    assert "interrupted" in output
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert str(out).encode() not in path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--steps", "3"], "at least 6"), (["--strategy", "magic"], "invalid choice"), (["--out", "."], "exists")],
)
def test_wrong_options_are_one_message(arguments: list[str], words: str) -> None:
    run = subprocess.run([*DRIVER, *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert words in run.stderr
    assert "Traceback" not in run.stderr
