from __future__ import annotations

import json
import logging
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

from lightning_distplus import PreemptionHandler, ResilientDDP
from lightning_distplus.report.health import FIGURES, RunHealth, metric_name
from lightning_distplus.strategies.defaults import Telemetry, batch_sizes, bring_callbacks, log_text
from tests.distributed import jobs

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("auto_requeue", "is_ours", "handles"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_lightnings_requeue_keeps_the_signals_of_a_slurm_job_that_we_have_not_submitted(
    auto_requeue: bool, is_ours: bool, handles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    if is_ours:
        monkeypatch.setenv("DISTPLUS_HOME_FILE", "home")
    strategy = ResilientDDP(cluster_environment=SLURMEnvironment(auto_requeue=auto_requeue))
    trainer = SimpleNamespace(callbacks=[], barebones=False, datamodule=None)
    assert any(isinstance(one, PreemptionHandler) for one in bring_callbacks(strategy, trainer)) == handles


class OwnBar(TQDMProgressBar):
    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        return {"ckpt": "mine", "loss": 1.0}


class Strategy:
    """As much of ours as the figures need."""

    def __init__(self) -> None:
        self.health = RunHealth()
        self.health.take("saved", {"stall_s": 0.1})


def telemetry() -> Any:
    return Telemetry(Strategy(), None, logs=True)


def test_a_name_of_the_users_in_the_bar_wins_and_the_bar_is_put_back() -> None:
    told, bar = telemetry(), OwnBar()
    told._extend_bar(bar)
    told._extend_bar(bar)  # training may start more than once
    assert bar.get_metrics(None, None) == {"ckpt": "mine", "loss": 1.0}
    told.teardown(None, None, "fit")
    assert "get_metrics" not in vars(bar)


def test_the_bar_of_tqdm_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    told: Any = telemetry()
    bar = TQDMProgressBar()
    bar._trainer = trainer = jobs.trainer("auto", 1, ".")
    told._extend_bar(bar)
    bar.train_progress_bar = bar.init_train_tqdm()
    bar.train_progress_bar.set_postfix(bar.get_metrics(trainer, None))
    bar.train_progress_bar.close()
    assert "ckpt=0 s ago" in capsys.readouterr().out


def test_a_method_that_the_user_has_put_into_a_bar_stays_and_other_bars_are_left_alone() -> None:
    told, bar = telemetry(), RichProgressBar()
    own = lambda trainer, pl_module: {"loss": 1.0}  # noqa: E731
    bar.get_metrics = own
    told._extend_bar(bar)
    assert bar.get_metrics(None, None) == {"ckpt": "0 s ago", "loss": 1.0}
    told.teardown(None, None, "fit")
    assert bar.get_metrics is own
    other = ProgressBar()
    told._extend_bar(other)
    told._extend_bar(None)
    assert "get_metrics" not in vars(other)


def test_a_port_that_is_taken_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    told: Any = telemetry()
    told._strategy.plane = type("Plane", (), {"run_id": "a"})
    with socket.socket() as taken, caplog.at_level(logging.WARNING):
        taken.bind(("", 0))
        taken.listen()
        told._serve(taken.getsockname()[1])
    assert "training goes on" in caplog.text
    assert told._endpoint is None


class Board:
    """A logger with a summary writer behind it."""

    def __init__(self) -> None:
        self.experiment = self
        self.texts: list[tuple[str, str, int]] = []

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append((name, text, step))


def test_a_verdict_is_text_where_a_logger_takes_text() -> None:
    board = Board()
    log_text(board, "distplus/hang-1", "RANK 1 HANGS\n  do: look", 7)
    assert board.texts == [("distplus/hang-1", "    RANK 1 HANGS\n      do: look", 7)]
    log_text(type("Plain", (), {"experiment": object()})(), "x", "y", 1)  # which takes none


def test_the_dashboard_and_the_guide_name_what_the_endpoint_serves() -> None:
    served = {metric_name(figure) for figure in FIGURES}
    dashboard = json.loads((DOCS / "assets" / "grafana.json").read_text())
    assert set(re.findall(r"distplus_\w+", json.dumps(dashboard))) == served
    listed = set(re.findall(r"^\| `\w+` \| `(distplus_\w+)` \|", (DOCS / "reference" / "figures.md").read_text(), re.M))
    assert listed == served


def test_a_step_trains_on_the_samples_of_all_ranks_and_on_tokens_where_the_data_knows_its_sequences() -> None:
    place = {"distributed_sampler_kwargs": {"rank": 1, "num_replicas": 8}, "accumulate_grad_batches": 2}
    of_tokens = SimpleNamespace(datamodule=SimpleNamespace(micro_batch=4, seq_len=128), **place)
    assert batch_sizes(of_tokens) == {"samples": 64, "tokens": 8192}
    stock = SimpleNamespace(datamodule=None, train_dataloader=DataLoader([0.0], batch_size=4), **place)
    assert batch_sizes(stock) == {"samples": 64}
    stock.train_dataloader = DataLoader([0.0], batch_size=None)
    assert batch_sizes(stock) == {}
