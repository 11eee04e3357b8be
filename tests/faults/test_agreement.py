"""One rank starts with something else than the others: named before the first step, on all ranks (row S7)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_distplus import env
from lightning_distplus.errors import ExitCode, PreflightError
from lightning_distplus.testing import spawn
from tests.distributed import jobs

ODD = 1
BOUND_S = 5.0


class OtherModel(jobs.Model):
    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.nn.Sequential(torch.nn.Linear(jobs.NUM_FEATURES, 12), torch.nn.Linear(12, 1))


def _version(folder: Path, package: str, version: str) -> str:
    information = folder / f"{package}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return str(folder)


def _checked_out(folder: Path, revision: str) -> None:
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text(f"{revision}\n")


def fit(rank: int, fault: str, folder: str, strategy: str) -> None:
    """Trains three ranks, of which one is odd in one thing."""
    is_odd = rank == ODD
    here = Path(folder, f"checkout{rank}")
    _checked_out(here, ("b" if is_odd and fault == "revision" else "a") * 40)
    variables: dict[str, Any] = {"NCCL_ALGO": "Tree" if is_odd and fault == "variable" else "Ring"}
    variables["PL_GLOBAL_SEED"] = 43 if is_odd and fault == "seed" else 42
    if is_odd and fault == "version":
        import sys

        sys.path.insert(0, _version(here, "torchdata", "0.1.0"))
    num_samples = 60 if is_odd and fault == "data" else 64
    data_seed = 8 if is_odd and fault == "content" else 7
    samples = torch.randn(num_samples, jobs.NUM_FEATURES, generator=torch.Generator().manual_seed(data_seed))
    loader = DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, num_replicas=3, rank=rank))
    steps = 5 if is_odd and fault == "setting" else 4
    begin = time.monotonic()
    try:
        import os

        os.chdir(here)
        with env.changed(**variables):
            trainer = jobs.trainer(strategy, 3, folder, max_steps=steps)
            trainer.fit(OtherModel() if is_odd and fault == "model" else jobs.Model(), loader)
    except PreflightError as error:
        Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - begin} {trainer.global_step}\n{error}")
        raise


@pytest.mark.parametrize(
    ("fault", "strategy", "says"),
    [
        ("version", "ResilientDDP", ("The version of torchdata differs on rank 1.", ": 0.1.0; the other 2 ranks: 0.1")),
        ("revision", "ResilientDDP", ("The git revision differs on rank 1.", "b" * 40, "2 ranks: " + "a" * 40)),
        ("seed", "ResilientDDP", ("The seed differs on rank 1.", ": 43; the other 2 ranks: 42")),
        ("variable", "ResilientDDP", ("NCCL_ALGO differs on rank 1.", ": Tree; the other 2 ranks: Ring")),
        ("setting", "ResilientFSDP", ("Trainer: max_steps differs on rank 1.", ": 5; the other 2 ranks: 4")),
        ("model", "ResilientFSDP", ("Model: net.0.weight differs on rank 1.", "(12, 8)", "the other 2 ranks: (16, 8)")),
        ("content", "ResilientDDP", ("Data: content of the data set differs on rank 1.",)),
        ("data", "ResilientDDP", ("length of the data set differs on rank 1.", ": 60; the other 2 ranks: 64")),
    ],
)  # fmt: skip
def test_the_odd_rank_is_named_before_the_first_step(
    fault: str, strategy: str, says: tuple[str, ...], tmp_path: Path
) -> None:
    run = spawn(fit, 3, args=(fault, str(tmp_path), strategy), deadline="40s")

    assert run.exit_codes == dict.fromkeys(range(3), ExitCode.PREFLIGHT), run.logs
    texts = set()
    for rank in range(3):
        first, text = (tmp_path / f"rank{rank}").read_text().split("\n", 1)
        seconds, step = first.split()
        assert float(seconds) < BOUND_S
        assert step == "0"
        texts.add(text.partition("  here:")[0])
        for words in says:
            assert words in text
    assert len(texts) == 1


@pytest.mark.parametrize("fault", ["nothing"])
def test_ranks_that_agree_have_no_finding(fault: str, tmp_path: Path) -> None:
    run = spawn(fit, 3, args=(fault, str(tmp_path), "ResilientDDP"), deadline="40s").check()
    assert jobs.findings_of_preflight(run) == []


def fit_without_validation_on_one_rank(rank: int, folder: str, strategy: str) -> None:
    """The settings are not compared, and rank 1 has validation switched off."""
    arguments = {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 0 if rank == ODD else 1}
    arguments["num_sanity_val_steps"] = 0  # rank 0 would be named for it before
    jobs.fit(strategy, 2, folder, data=(jobs.loader(), jobs.loader()), preflight={"trainer": "off"}, **arguments)


@pytest.mark.parametrize("strategy", ["ResilientDDP", pytest.param("ResilientFSDP", marks=pytest.mark.soak)])
def test_validation_on_one_rank_only_is_named_where_the_settings_are_not_compared(
    strategy: str, tmp_path: Path
) -> None:
    run = spawn(fit_without_validation_on_one_rank, 2, args=(str(tmp_path), strategy), deadline="60s")
    assert run.exit_codes == dict.fromkeys(range(2), ExitCode.DIVERGENCE), run.logs
    for log in run.logs.values():
        assert "rank 0" in log
        assert "val_dataloader" in log
        assert "rank 1" in log
        assert "the start of training" in log


def preflight(rank: int, odd: bool) -> int:
    from lightning_distplus.cli.preflight import run_preflight as main

    with env.changed(NCCL_PROTO="LL" if odd and rank == ODD else "Simple"):
        return main(["--json", "--off", "torch", "--warn", "disk", "--devices", "3", "--deadline", "20s"])


@pytest.mark.parametrize(("odd", "code"), [(True, ExitCode.PREFLIGHT), (False, ExitCode.DONE)])
def test_distplus_preflight_meets_all_ranks_and_rank_0_prints_what_differs(odd: bool, code: ExitCode) -> None:
    run = spawn(preflight, 3, args=(odd,), deadline="40s").check()
    assert run.results == dict.fromkeys(range(3), int(code)), run.logs
    report = json.loads(run.logs[0][run.logs[0].index("{\n") : run.logs[0].rindex("}") + 1])
    assert report["ranks"] == 3
    found = {finding["check"]: finding for finding in report["findings"] if finding["status"] == "error"}
    assert list(found) == (["variables"] if odd else [])
    if odd:
        assert found["variables"]["subject"] == "NCCL_PROTO differs on rank 1."
    assert '"version": 1' not in run.logs[1] + run.logs[2]
