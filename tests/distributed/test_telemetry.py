"""The figures of a run in the Trainer's own loggers, its progress bar and Prometheus, in two processes."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_distplus.errors import ExitCode
from lightning_distplus.events import read_events
from lightning_distplus.report.health import FIGURES, metric_name
from lightning_distplus.strategies.defaults import Telemetry
from lightning_distplus.testing import spawn
from tests.distributed import jobs

STEPS = 24
OURS = FIGURES.keys() - {"global_step"}


class Model(jobs.Model):
    """Logs what a user logs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.05)  # a window of steps lasts half a second at least
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def train(folder: str, bar: type, **arguments: Any) -> dict[str, Any]:
    """In the last step the endpoint is scraped and the bar read."""
    found: dict[str, Any] = {"bar": {}, "page": ""}

    def look(trainer: Any, module: Any, *_: Any) -> None:
        (ours,) = (one for one in trainer.callbacks if isinstance(one, Telemetry))
        found["bar"] = dict(trainer.progress_bar_callback.get_metrics(trainer, module))
        url = f"http://127.0.0.1:{ours._endpoint.port}/metrics"
        found["page"] = urllib.request.urlopen(url, timeout=10).read().decode()

    looks = [jobs.At("on_train_batch_end", look, rank=0, step=STEPS - 1)] if arguments["log_figures"] else []
    options = {"max_steps": STEPS, "log_every_n_steps": 8, "enable_progress_bar": True, "use_distributed_sampler": True}
    options["logger"] = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="board")]
    options["callbacks"] = [bar(), *looks, ModelCheckpoint(every_n_train_steps=10)]
    data = jobs.loader(num_samples=2 * 4 * STEPS)
    trainer = jobs.fit("ResilientDDP", 2, folder, Model(), data, monitor=True, **arguments, **options)
    return {
        **found,
        "after": "get_metrics" in vars(trainer.progress_bar_callback),
        "logged": {name: value.item() for name, value in trainer.logged_metrics.items()},
        "callback": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "left": [type(one).__name__ for one in trainer.callbacks],
    }


def train_all(folder: str) -> dict[str, dict[str, Any]]:
    """With the figures and without them, in the same processes."""
    return {
        "with": train(f"{folder}/with", RichProgressBar, log_figures=True, metrics_port=0),
        "without": train(f"{folder}/without", TQDMProgressBar, log_figures=False),
    }


def columns(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_loggers_bar_and_prometheus_have_the_figures_and_the_users_metrics_are_as_they_were(tmp_path: Path) -> None:
    told = spawn(train_all, 2, args=(str(tmp_path),), deadline="120s").check().results
    for rank in (0, 1):
        assert told[rank]["with"]["logged"] == told[rank]["without"]["logged"]
        assert told[rank]["with"]["callback"] == told[rank]["without"]["callback"]
        assert "Telemetry" not in told[rank]["with"]["left"]

    rows = columns(tmp_path / "with")
    ours = [row for row in rows if row["distplus/restarts"]]
    assert [int(row["step"]) for row in ours] == [8, 16, 24]  # at the loggers' own cadence
    last = {name: float(ours[-1][f"distplus/{name}"]) for name in OURS}
    assert 0 < last["goodput"] <= 1
    assert 0 < last["step_p50_s"] <= last["step_p95_s"] < 5
    assert last["restarts"] == 0
    assert last["divergence_checks"] == 24
    assert last["checkpoint_age_s"] < 60
    plain = [{name: value for name, value in row.items() if name in ("step", "loss_step")} for row in rows]
    assert [row for row in plain if row["loss_step"]] == [
        {name: row[name] for name in ("step", "loss_step")} for row in columns(tmp_path / "without") if row["loss_step"]
    ]
    assert not any("goodput" in name for name in columns(tmp_path / "without")[0])
    (board,) = (tmp_path / "with" / "board").rglob("events.out.*")
    assert b"distplus/slowest_excess_s" in board.read_bytes()

    found = told[0]["with"]
    assert re.fullmatch(r"\d+ s ago", found["bar"]["ckpt"])
    assert "v_num" in found["bar"]
    assert not found["after"]
    for figure in OURS:
        assert f"\n{metric_name(figure)}{{run_id=" in found["page"], figure
    assert told[1]["with"]["page"] == ""

    events = [event for event in read_events(tmp_path / "with" / "distplus") if event["rank"] == 0]
    (costs,) = (event for event in events if event["kind"] == "costs")
    assert all(0 < costs[f"{name}_us"] < 50_000 for name in ("gate", "monitor", "watchdog", "ledger"))
    assert next(event["clock_offset_s"] for event in events if event["kind"] == "start") == 0  # both are on this host


# -- W&B and MLflow, offline, as a user installs them (row D1) ---------------------------------------------------------

BEGIN = 18  # when rank 1 leaves; the loggers are told every eighth step


class Diverging(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == BEGIN and self.global_rank == 1:
            next(self.parameters()).data.add_(1.0)


def train_into_a_divergence(rank: int, kind: str, libraries: str, folder: str) -> None:
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
    run = spawn(train_into_a_divergence, 2, args=(kind, str(libraries), str(tmp_path)), deadline="150s")

    assert set(run.exit_codes.values()) == {ExitCode.DIVERGENCE}, run.logs
    metrics = json.loads((tmp_path / "metrics").read_text())
    assert {f"distplus/{name}" for name in OURS} & set(metrics), metrics
    assert "loss_step" in metrics
    files = [
        path for path in tmp_path.rglob("*.*") if path.is_file() and path.relative_to(tmp_path).parts[0] != "distplus"
    ]
    texts = [path.read_text(errors="replace") for path in files if path.suffix in (".json", ".txt")]
    assert any("RANKS 0-1 DIFFER in parameters" in text for text in texts), texts
