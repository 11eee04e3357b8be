from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_distplus import env
from lightning_distplus.checkpoint import newest_valid, read_manifest
from lightning_distplus.cli.__main__ import main
from lightning_distplus.testing import spawn

BORING = "lightning.pytorch.demos.boring_classes"
DDP = {"class_path": "lightning_distplus.ResilientDDP"}


class Scaled(BoringModel):
    """A model with an argument."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lightning leaves its seeds in the environment, and looks at the arguments of the process."""
    monkeypatch.setattr(sys, "argv", ["distplus"])
    before = env.snapshot()
    yield
    env.restore(before)


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Writes a configuration with changes and returns the arguments that name it."""

    def write(**changes: Any) -> list[str]:
        trainer = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "default_root_dir": str(tmp_path / "run"),
            **changes.pop("trainer", {}),
        }
        document = {
            "seed_everything": 1,
            "trainer": trainer,
            "model": {"class_path": f"{BORING}.BoringModel"},
            "data": {"class_path": f"{BORING}.BoringDataModule"},
            **changes,
        }
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(document))
        return ["--config", str(path)]

    return write


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["fit", *argv, "--print_config"])
    assert ended.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code not in (0, None)
    return capsys.readouterr().err


def test_interpolation_follows_an_option_of_the_command_line(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"class_path": f"{__name__}.Scaled", "init_args": {"scale": "${trainer.max_steps}"}}
    found = printed([*config(model=model), "--trainer.max_steps=7"], capsys)
    assert found["model"]["init_args"]["scale"] == 7


def test_the_number_of_hosts_is_the_launchers_where_it_may_change(
    config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = config(trainer={"num_nodes": 2})
    for variables, expected in (({"DISTPLUS_ELASTIC": 1}, 3), ({}, 2)):
        with env.changed(GROUP_WORLD_SIZE=3, **variables):
            assert printed(arguments, capsys)["trainer"]["num_nodes"] == expected


def test_an_interpolation_that_leads_nowhere_is_named(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"class_path": f"{__name__}.Scaled", "init_args": {"scale": "${trainer.nothing}"}}
    assert "trainer.nothing" in refused(["fit", *config(model=model)], capsys)


@pytest.mark.parametrize(
    ("changes", "first", "accepted"),
    [
        (
            {"trainer": {"max_stepz": 3}},
            "Subcommand 'fit' does not accept option 'trainer.max_stepz'; did you mean trainer.max_steps?",
            "trainer.max_epochs",
        ),
        (
            {"trainer": {"strategy": {**DDP, "init_args": {"timout": "5m"}}}},
            "strategy: Option 'timout' is not accepted; did you mean timeout? (lightning_distplus.ResilientDDP)",
            "timeout, preflight",
        ),
        (
            {"trainer": {"strategy": {**DDP, "init_args": {"find_unused_parameter": True}}}},
            "'find_unused_parameter' is not accepted; did you mean find_unused_parameters?",
            "timeout, preflight",
        ),
        (
            {"trainer": {"strategy": {**DDP, "init_args": {"on_hang": "repot"}}}},
            "trainer.strategy.on_hang: repot is none of 'abort', 'report' (lightning_distplus.ResilientDDP)",
            "",
        ),
        ({"modle": {"class_path": "x"}}, "does not accept option 'modle.class_path'; did you mean model?", "config, "),
        ({"model": {"class_path": f"{BORING}.BoringModel", "init_args": {"widht": 3}}}, "Option 'widht'", ""),
        ({"trainer": {"max_steps": "x"}}, "trainer.max_steps: x is no int", ""),
        ({"trainer": {"precision": "x"}}, "trainer.precision: x is none of 'transformer-engine', ", ""),
        (
            {"trainer": {"strategy": "resilient_dp"}},
            "there is no strategy 'resilient_dp'; did you mean resilient_ddp?",
            "resilient_ddp, ",
        ),
    ],
)
def test_an_error_is_its_cause_the_accepted_names_and_one_line_of_context(
    changes: dict[str, Any], first: str, accepted: str, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = refused(["fit", *config(**changes)], capsys).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("distplus"))
    assert first in lines[begin]
    assert lines[begin + 1].startswith("  accepted: ") == bool(accepted)
    assert accepted in lines[begin + 1]
    assert "--help" in lines[-1]
    assert len(lines) - begin == 2 + bool(accepted)


def test_an_argument_of_a_class_that_is_not_named_asks_for_it(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(["fit", *config(), "--trainer.strategy.timeout", "5m"], capsys)
    assert "trainer.strategy: timeout is an argument of a class, and none is named; such as lightning_dist" in error
    assert "NestedArg" not in error


TOKENS = {"class_path": "lightning_distplus.TokenDataModule", "init_args": {"sources": "x", "seq_len": 4}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer": {"strategy": "resilient_dp"}}, "there is no strategy 'resilient_dp'"),
        ({"trainer": {"strategy": {**DDP, "init_args": {"timeout": "5q"}}}}, "'5q', which is no duration"),
        ({"data": {**TOKENS, "init_args": {**TOKENS["init_args"], "micro_batch_size": 0}}}, "batch size is 0"),
    ],
)
def test_a_configuration_is_printed_only_where_its_values_are_accepted(
    changes: dict[str, Any], says: str, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(["fit", *config(**changes), "--print_config"], capsys)
    assert not capsys.readouterr().out


def test_a_configuration_without_a_model_is_printed_to_be_filled_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed([], capsys)["trainer"]["max_steps"] == -1


def test_help_says_what_auto_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert "--ckpt_path auto: goes on from the newest valid checkpoint" in capsys.readouterr().out


def test_a_missing_configuration_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refused(["fit", "--config", "nowhere.yaml"], capsys)


def test_fit_saves_the_configuration_and_a_second_start_keeps_a_different_one(config: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["fit", *config(), "--trainer.logger=false"]) == 0
    first = (run / "config.yaml").read_text()
    assert main(["fit", *config(), "--trainer.logger=false"]) == 0
    assert [path.name for path in run.glob("config*.yaml")] == ["config.yaml"]
    assert main(["fit", *config(), "--trainer.max_steps=3"]) == 0
    assert (run / "config-1.yaml").read_text() == first
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 3


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_the_other_loops_run(subcommand: str, config: Any) -> None:
    assert main([subcommand, *config(trainer={"limit_val_batches": 1})]) == 0


def test_auto_is_refused_where_a_checkpoint_is_needed(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no checkpoint to validate" in refused(["validate", *config(), "--ckpt_path", "auto"], capsys)


def test_auto_refuses_checkpoints_that_cannot_be_trusted_unless_told(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "old.ckpt").write_bytes(b"foreign")
    arguments = ["fit", *config(), "--ckpt_path", "auto"]
    assert "--allow_fresh" in refused(arguments, capsys)
    assert main([*arguments, "--allow_fresh"]) == 0


def fit_twice(arguments: list[str]) -> list[int]:
    sys.argv = ["distplus"]
    return [main(["fit", *arguments, f"--trainer.max_steps={steps}"]) for steps in (2, 4)]


def test_auto_continues_a_run_of_a_resilient_strategy(config: Any, tmp_path: Path) -> None:
    trainer = {"strategy": "resilient_ddp", "devices": 2}
    arguments = [*config(trainer=trainer), "--ckpt_path", "auto"]
    run = spawn(fit_twice, 2, args=(arguments,)).check()
    assert run.results[0] == [0, 0]
    (log,) = (log for log in run.logs.values() if "Restoring states" in log)
    assert log.index("`max_steps=2` reached") < log.index("Restoring states")
    newest = newest_valid(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert read_manifest(newest).global_step == 4
