from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_distplus import recipes
from lightning_distplus.cli.__main__ import main
from lightning_distplus.cli.training import DistplusCLI
from lightning_distplus.data import MegatronWriter
from lightning_distplus.testing import spawn
from tests.pairs import kept, kept_rows
from tests.recipes import RECIPES, in_root  # noqa: F401

pytest.importorskip("transformers")

BIG = [name for name in RECIPES if "1.1b" in name]
ON_ONE_CPU = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.num_nodes=1",
    "--trainer.precision=32-true",
]


def settings(recipe: str) -> Any:
    merged = OmegaConf.merge(*(OmegaConf.load(path) for path in recipes.files(recipe)))
    return OmegaConf.to_container(merged, resolve=True)


def build(recipe: str, *options: str) -> DistplusCLI:
    return DistplusCLI(["--config", f"recipe:{recipe}", *options], run=False)


def test_there_is_a_recipe_for_every_strategy() -> None:
    assert recipes.models() == ["tiny_cpu", "tinyllama_1.1b"]
    assert recipes.strategies() == ["ddp", "deepspeed_stage2", "deepspeed_stage3", "fsdp", "model_parallel"]


def test_a_recipe_is_its_files() -> None:
    base, overlay = (str(path) for path in recipes.files("tiny_cpu_fsdp"))
    assert recipes.expand(["fit", "--config", "recipe:tiny_cpu_fsdp"]) == ["fit", "--config", base, "--config", overlay]
    assert recipes.expand(["--config=recipe:tiny_cpu"]) == [f"--config={base}"]
    assert recipes.expand(["-c", "recipe:fsdp", "--x", "recipe:y"]) == ["-c", overlay, "--x", "recipe:y"]


def test_a_recipe_that_is_not_there_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "recipe:tinyllama_1.1b_fdsp"]) == 2
    told = capsys.readouterr().err
    assert "There is no recipe 'tinyllama_1.1b_fdsp'" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("recipe", kept([*recipes.models(), *RECIPES], ["tiny_cpu", "tinyllama_1.1b_fsdp"]))
def test_every_recipe_is_printed_as_a_recipe_that_prints_the_same(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = print_config(f"recipe:{recipe}", capsys)
    (tmp_path / "printed.yaml").write_text(printed)
    assert print_config(str(tmp_path / "printed.yaml"), capsys) == printed
    assert "$" + "{" not in printed


def print_config(config: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", config, "--print_config"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_built_as_it_says(recipe: str) -> None:
    cli = build(recipe, *(ON_ONE_CPU if recipe in BIG else []))
    wanted = settings(recipe)["trainer"]
    assert type(cli.trainer.strategy).__name__ == wanted["strategy"]["class_path"].rpartition(".")[2]
    assert cli.trainer.strategy.async_save
    assert cli.trainer.max_steps == wanted["max_steps"]
    saves = cli.trainer.checkpoint_callback
    assert saves.dirpath.endswith(wanted["default_root_dir"] + "/checkpoints")
    assert (saves.monitor, saves.mode, saves.save_top_k) == ("step", "max", 3)
    names = {type(callback).__name__ for callback in cli.trainer.callbacks}
    assert {"RankDivergenceMonitor", "PreemptionHandler"} <= names
    assert type(cli.trainer.logger).__name__ == "CSVLogger"


@pytest.mark.parametrize("recipe", BIG)
def test_the_real_model_has_its_published_size_on_the_meta_device(recipe: str) -> None:
    cli = build(recipe, *ON_ONE_CPU)
    with torch.device("meta"):
        cli.model.configure_model()
    assert sum(parameter.numel() for parameter in cli.model.parameters()) == 1_100_048_384
    assert {parameter.device.type for parameter in cli.model.parameters()} == {"meta"}


def test_the_files_of_strategies_name_nothing_but_the_strategy() -> None:
    for name in recipes.strategies():
        (path,) = recipes.files(name)
        content = OmegaConf.to_container(OmegaConf.load(path))
        assert list(content) == ["trainer"]
        assert list(content["trainer"]) == ["strategy"]


def test_the_real_recipe_has_the_published_hyper_parameters() -> None:
    recipe = settings("tinyllama_1.1b_fsdp")
    model, data, trainer = recipe["model"]["init_args"], recipe["data"]["init_args"], recipe["trainer"]
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [model["config"][name] for name in shape] == [22, 2048, 32, 4, 5632]
    assert (model["config"]["vocab_size"], model["config"]["max_position_embeddings"]) == (32000, 2048)
    assert (model["lr"], model["min_lr"], model["warmup_steps"]) == (4e-4, 4e-5, 2000)
    assert (model["betas"], model["weight_decay"], trainer["gradient_clip_val"]) == ([0.9, 0.95], 0.1, 1.0)
    assert [source["weight"] for source in data["sources"]] == [0.693584, 0.306416]


def test_the_learning_rate_warms_up_and_decays_to_its_floor() -> None:
    model = build(RECIPES[0], "--trainer.max_steps=100", "--model.init_args.warmup_steps=10").model
    model.trainer = SimpleNamespace(max_steps=100)
    factors = [model._lr_factor(step) * model.lr for step in range(101)]
    assert factors[0] == pytest.approx(model.lr / 10)
    assert factors[9] == factors[10] == pytest.approx(model.lr)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(model.min_lr)


TRAINED: list[tuple[str, list[str]]] = [
    ("deepspeed_stage2", []),
    ("fsdp", []),  # in each commit by test_pretrain
    ("ddp", []),
    ("model_parallel", []),
    ("deepspeed_stage3", []),
    ("fsdp", ["--model.init_args.compile=true", "--model.init_args.activation_checkpointing=true"]),
    ("model_parallel", ["--model.init_args.compile=true"]),
]


def train_and_resume(folder: str, command: list[str]) -> list[tuple[int, list[str]]]:
    """The code of each of two commands, and the checkpoints that it leaves."""
    os.chdir(folder)
    ended = []
    for steps in (4, 6):
        code = main([*command, f"--trainer.max_steps={steps}"])
        ended.append((code, sorted(path.name for path in Path("runs/tiny_cpu/checkpoints").glob("step=*.ckpt"))))
    return ended


@pytest.mark.deadline(240)
@pytest.mark.parametrize(("strategy", "options"), kept_rows(TRAINED, TRAINED[:1]))
def test_every_recipe_trains_validates_and_resumes(strategy: str, options: list[str], tmp_path: Path) -> None:
    for name in ("code", "prose"):
        (tmp_path / "data").mkdir(exist_ok=True)
        with MegatronWriter(tmp_path / "data" / name) as writer:
            for begin in range(0, 64_000, 640):
                writer.add_document([token % 4096 for token in range(begin, begin + 640)])
    command = ["fit", "--ckpt_path=auto", f"--config=recipe:tiny_cpu_{strategy}"]
    command += [
        "--model.init_args.config.num_hidden_layers=2",
        "--model.init_args.config.hidden_size=32",
        "--model.init_args.config.intermediate_size=64",
    ]
    command += [*options, "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
    command += ["--trainer.callbacks.init_args.every_n_train_steps=1", "--data.init_args.micro_batch_size=2"]
    ended = spawn(train_and_resume, 2, args=(str(tmp_path), command), deadline="150s").check().results[0]
    assert ended == [(0, [f"step={step}.ckpt" for step in kept]) for kept in ((2, 3, 4), (4, 5, 6))]
    logs = sorted((tmp_path / "runs" / "tiny_cpu").rglob("metrics.csv"))
    assert "val_loss" in logs[0].read_text()
    if "deepspeed" in strategy:
        assert_other_programs_get_it(tmp_path, tmp_path / "runs" / "tiny_cpu" / "checkpoints" / "step=6.ckpt")


def assert_other_programs_get_it(folder: Path, saved: Path) -> None:
    """Shards of ZeRO as a folder of Hugging Face, and as one file with weights, moments and step."""
    from safetensors.torch import load_file

    assert main(["export", "--to", "hf", str(saved), str(folder / "hf")]) == 0
    assert main(["import", "--from", "deepspeed", str(saved), "--to", str(folder / "in.ckpt")]) == 0
    weights = load_file(folder / "hf" / "model.safetensors")
    imported = torch.load(folder / "in.ckpt", weights_only=True)
    state = imported["optimizer_states"][0]["state"]
    assert imported["global_step"] == 6
    assert {f"model.{name}" for name in weights} == imported["state_dict"].keys() == state.keys()
    assert all(torch.equal(one, imported["state_dict"][f"model.{name}"]) for name, one in weights.items())
    assert all(bool(one["exp_avg_sq"].any()) and int(one["step"]) == 6 for one in state.values())
