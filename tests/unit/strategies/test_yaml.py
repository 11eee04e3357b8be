"""The ``timeout`` argument from YAML and from the command line, through the stock LightningCLI."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

CLASSES = ("ResilientDDP", "ResilientFSDP", "ResilientModelParallel", "ResilientDeepSpeed")


def cli(arguments: list[str], mode: str = "yaml") -> LightningCLI:
    """Parses and builds the Trainer, and runs nothing."""
    return LightningCLI(
        BoringModel,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args=arguments,
        parser_kwargs={"parser_mode": mode},
        trainer_defaults={"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    )


def config(tmp_path: Path, timeout: str, cls: str = "ResilientFSDP", more: str = "") -> str:
    path = tmp_path / "config.yaml"
    path.write_text(
        "trainer:\n  strategy:\n"
        f"    class_path: lightning_distplus.{cls}\n    init_args:\n      timeout: {timeout}\n{more}"
    )
    return str(path)


def step_of(trainer: pl.Trainer) -> timedelta:
    return trainer.strategy.timeouts.step


@pytest.mark.parametrize("mode", ["yaml", "omegaconf"])
@pytest.mark.parametrize(
    ("written", "step"),
    [
        ("30m", timedelta(minutes=30)),
        ("600", timedelta(minutes=10)),
        ("90.5", timedelta(seconds=90.5)),
        ("1:00:00", timedelta(hours=1)),
        ('"0:30:00"', timedelta(minutes=30)),
        ('"2h"', timedelta(hours=2)),
        ("{step: 2m}", timedelta(minutes=2)),
        ("{step: 1:30:00, checkpoint: 90}", timedelta(minutes=90)),
    ],
)
def test_every_form_of_a_timeout_is_read_from_yaml(mode: str, written: str, step: timedelta, tmp_path: Path) -> None:
    assert step_of(cli(["--config", config(tmp_path, written)], mode).trainer) == step


@pytest.mark.parametrize("cls", CLASSES)
def test_every_strategy_takes_a_mapping_of_phases_by_class_path(cls: str, tmp_path: Path) -> None:
    trainer = cli(["--config", config(tmp_path, "{step: 2m, checkpoint: 1h}", cls)]).trainer
    assert type(trainer.strategy).__name__ == cls
    assert step_of(trainer) == timedelta(minutes=2)


def test_null_in_yaml_leaves_torchs_own_time_outs(tmp_path: Path) -> None:
    assert cli(["--config", config(tmp_path, "null")]).trainer.strategy.timeouts is None


@pytest.mark.parametrize("option", ["--trainer.strategy.timeout=5m", "--trainer.strategy.init_args.timeout=300"])
def test_the_command_line_sets_the_timeout(option: str, tmp_path: Path) -> None:
    assert step_of(cli(["--config", config(tmp_path, "30m"), option]).trainer) == timedelta(minutes=5)


def test_a_phase_on_the_command_line_keeps_the_other_phases_of_the_file(tmp_path: Path) -> None:
    arguments = ["--config", config(tmp_path, "{rendezvous: 7m}"), "--trainer.strategy.init_args.timeout.step=5m"]
    timeouts = cli(arguments).trainer.strategy.timeouts
    assert (timeouts.rendezvous, timeouts.step) == (timedelta(minutes=7), timedelta(minutes=5))


@pytest.mark.parametrize(
    ("timeout", "more", "named"),
    [("{stepp: 2m}", "", "stepp"), ("30m", "      timout: 3m\n", "timout"), ("{step: 5q}", "", "5q")],
)
def test_a_mistake_in_yaml_is_named(
    timeout: str, more: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        cli(["--config", config(tmp_path, timeout, more=more)])
    assert named in capsys.readouterr().err + str(caught.value)


def test_a_scalar_that_is_no_duration_is_refused_with_the_accepted_forms(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'30q.*"90s"'):
        cli(["--config", config(tmp_path, "30q")])


def test_the_parents_arguments_are_read_from_yaml(tmp_path: Path) -> None:
    more = "      sharding_strategy: SHARD_GRAD_OP\n      state_dict_type: full\n"
    strategy: Any = cli(["--config", config(tmp_path, "30m", more=more)]).trainer.strategy
    assert strategy.sharding_strategy.name == "SHARD_GRAD_OP"
    assert strategy._state_dict_type == "full"


def test_a_printed_config_reads_back_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for written in ("600", "30m", "{step: 2m, checkpoint: 1h}"):
        with pytest.raises(SystemExit):
            cli(["--config", config(tmp_path, written), "--print_config"])
        printed = tmp_path / "printed.yaml"
        printed.write_text(capsys.readouterr().out)
        again = cli(["--config", str(printed)]).trainer
        assert step_of(again) == step_of(cli(["--config", config(tmp_path, written)]).trainer)
