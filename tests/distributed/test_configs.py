from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lightning_distplus.cli.__main__ import main
from lightning_distplus.cli.training import DistplusCLI
from tests.recipes import CONFIGS, ROOT, in_root  # noqa: F401

pytest.importorskip("transformers")

BIG = [path for path in CONFIGS if "1.1b" in path.name]
ON_ONE_CPU = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.num_nodes=1",
    "--trainer.precision=32-true",
]


def test_every_recipe_of_the_issue_is_there() -> None:
    tiny = {f"tiny_cpu_{name}" for name in ("ddp", "fsdp", "model_parallel", "deepspeed")}
    big = {f"tinyllama_1.1b_{name}" for name in ("fsdp", "model_parallel", "deepspeed_stage2", "deepspeed_stage3")}
    assert {path.stem for path in CONFIGS} == tiny | big


def build(path: Path, *options: str) -> DistplusCLI:
    return DistplusCLI(["--config", str(path), *options], run=False)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_is_printed_as_a_recipe_that_prints_the_same(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = print_config(path, capsys)
    (tmp_path / "printed.yaml").write_text(printed)
    assert print_config(tmp_path / "printed.yaml", capsys) == printed
    assert "$" + "{" not in printed


def print_config(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(path), "--print_config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_recipe_is_built_as_it_says(path: Path) -> None:
    cli = build(path, *(ON_ONE_CPU if path in BIG else []))
    settings = yaml.safe_load(path.read_text())
    wanted = settings["trainer"]["strategy"]["class_path"].rpartition(".")[2]
    assert type(cli.trainer.strategy).__name__ == wanted
    assert cli.trainer.max_steps == settings["trainer"]["max_steps"]
    assert cli.trainer.checkpoint_callback.dirpath.endswith(settings["trainer"]["default_root_dir"] + "/checkpoints")


@pytest.mark.parametrize("path", BIG, ids=lambda path: path.stem)
def test_the_real_model_has_its_published_size_on_the_meta_device(path: Path) -> None:
    cli = build(path, *ON_ONE_CPU)
    with torch.device("meta"):
        cli.model.configure_model()
    assert sum(parameter.numel() for parameter in cli.model.parameters()) == 1_100_048_384
    assert {parameter.device.type for parameter in cli.model.parameters()} == {"meta"}


@pytest.mark.parametrize("kind", ["1.1b", "tiny_cpu"])
def test_the_recipes_of_one_model_differ_in_strategy_and_folder_only(kind: str) -> None:
    rest = []
    for path in (path for path in CONFIGS if kind in path.name):
        settings = yaml.safe_load(path.read_text())
        del settings["trainer"]["strategy"], settings["trainer"]["default_root_dir"]
        rest.append(settings)
    assert all(settings == rest[0] for settings in rest)


def test_the_real_recipe_has_the_published_hyper_parameters() -> None:
    settings = yaml.safe_load((ROOT / "conf" / "tinyllama_1.1b_fsdp.yaml").read_text())
    model, data, trainer = settings["model"]["init_args"], settings["data"]["init_args"], settings["trainer"]
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [model["config"][name] for name in shape] == [22, 2048, 32, 4, 5632]
    assert (model["config"]["vocab_size"], model["config"]["max_position_embeddings"]) == (32000, 2048)
    assert (model["lr"], model["min_lr"], model["warmup_steps"]) == (4e-4, 4e-5, 2000)
    assert (model["betas"], model["weight_decay"], trainer["gradient_clip_val"]) == ([0.9, 0.95], 0.1, 1.0)
    assert [source["weight"] for source in data["sources"]] == [0.693584, 0.306416]


def test_the_learning_rate_warms_up_and_decays_to_its_floor() -> None:
    model = build(CONFIGS[0], "--trainer.max_steps=100", "--model.init_args.warmup_steps=10").model
    model.trainer = SimpleNamespace(max_steps=100)
    factors = [model._lr_factor(step) * model.lr for step in range(101)]
    assert factors[0] == pytest.approx(model.lr / 10)
    assert factors[9] == factors[10] == pytest.approx(model.lr)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(model.min_lr)
