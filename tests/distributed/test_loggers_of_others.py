"""The figures and the verdict of a run in W&B and MLflow, offline, as a user installs them (row D1)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.errors import ExitCode
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.distributed.test_telemetry import OURS, Model

BEGIN = 18  # when rank 1 leaves; the loggers are told every eighth step


class Diverging(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == BEGIN and self.global_rank == 1:
            next(self.parameters()).data.add_(1.0)


def train(rank: int, kind: str, libraries: str, folder: str) -> None:
    """Ends with the divergence; notes on rank 0 which metrics the logger has."""
    sys.path.append(libraries)  # behind ours
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

    if kind == "wandb":
        logger: Any = WandbLogger(project="ours", save_dir=folder, offline=True)
    else:
        logger = MLFlowLogger("ours", tracking_uri=f"sqlite:///{folder}/runs{rank}.db", artifact_location=folder)
    strategy = jobs.strategy("ResilientDDP", monitor=True, log_figures=True)
    trainer = jobs.trainer(
        strategy, 2, folder, max_steps=200, log_every_n_steps=8, logger=logger, use_distributed_sampler=True
    )
    try:
        trainer.fit(Diverging(), jobs.loader(num_samples=2 * 4 * 200))
    finally:
        if rank == 0:
            if kind == "wandb":
                metrics = dict(logger.experiment.summary)
                logger.experiment.finish()
            else:
                metrics = logger.experiment.get_run(logger.run_id).data.metrics
            Path(folder, "metrics").write_text(json.dumps(sorted(metrics)))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "wandb", "mlflow"]
    subprocess.run(command, check=True, timeout=500)
    return folder


@pytest.mark.soak
@pytest.mark.deadline(700)
@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_logger_of_others_gets_the_figures_and_the_verdict(kind: str, libraries: Path, tmp_path: Path) -> None:
    run = spawn(train, 2, args=(kind, str(libraries), str(tmp_path)), deadline="150s")

    assert set(run.exit_codes.values()) == {ExitCode.DIVERGENCE}, run.logs
    metrics = json.loads((tmp_path / "metrics").read_text())
    assert {f"distplus/{name}" for name in OURS} & set(metrics), metrics
    assert "loss_step" in metrics
    files = [
        path for path in tmp_path.rglob("*.*") if path.is_file() and path.relative_to(tmp_path).parts[0] != "distplus"
    ]
    texts = [path.read_text(errors="replace") for path in files if path.suffix in (".json", ".txt")]
    assert any("RANKS 0-1 DIFFER in parameters" in text for text in texts), texts
