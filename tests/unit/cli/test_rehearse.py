from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from lightning_distplus.cli.rehearse import main, rates, reported_steps
from lightning_distplus.errors import ExitCode
from tests.recipes import RECIPES, in_root  # noqa: F401

pytest.importorskip("transformers")

BIG = "tinyllama_1.1b_deepspeed_stage2"
TINY = "tiny_cpu_ddp"


def rehearse(capsys: pytest.CaptureFixture[str], recipe: str, *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["--config", f"recipe:{recipe}", "--json", "--warn", "checkpoint", *options])
    printed = capsys.readouterr().out
    return code, json.loads(printed[printed.index("{\n") :])


def errors(report: dict[str, Any]) -> dict[str, str]:
    found = [finding for finding in report["findings"] if finding["status"] == "error"]
    return {finding["check"]: finding["subject"] + finding["detail"] for finding in found}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_rehearsed(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = rehearse(capsys, recipe)
    assert (code, errors(report)) == (0, {})
    is_big = "1.1b" in recipe
    assert report["ranks"] == (16 if is_big else 2)
    parameters = 1_100_048_384 if is_big else 1_836_160
    batch, steps = (1024, 1_430_512) if is_big else (8, 300)
    assert (report["batch"]["global_batch"], report["batch"]["steps"]) == (batch, steps)
    assert report["batch"]["accumulation"] == (8 if is_big else 1)
    # Weights and both moments; ZeRO adds a float32 copy, and has 16-bit weights in the big recipes.
    of_each = (14 if is_big else 16) if "deepspeed" in recipe else 12
    assert report["checkpoint"]["bytes"] == pytest.approx(parameters * of_each, rel=1e-3)
    peak = max(row["lr"][0] for row in report["schedule"])
    assert 0.9 * (4e-4 if is_big else 2e-3) < peak <= (4e-4 if is_big else 2e-3)


@pytest.mark.parametrize(
    ("options", "check", "words"),
    [
        (["--world", "48"], "batch", "global_batch_size=1024 is no multiple of micro_batch_size=8 x 48"),
        (["--world", "20"], "layout", "20 ranks do not fill nodes of 8"),
        (["--trainer.max_stepps", "3"], "config", "max_stepps"),
        (
            ["--trainer.strategy.init_args.timout", "5m"],
            "config",
            "built.trainer.strategy: Option 'timout' is not accep",
        ),
        (["--trainer.strategy", "resilient_dp"], "config", "built.there is no strategy 'resilient_dp'; did you mean "),
        (["--model.init_args.config.hidden_act", "nonsense"], "model", "nonsense"),
        (["--data.init_args.micro_batch_size", "0"], "config", "at least 1"),
    ],
)
def test_what_would_fail_after_the_queue_is_an_error_with_its_reason(
    options: list[str], check: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = rehearse(capsys, BIG, *options)
    assert code == ExitCode.PREFLIGHT
    assert words in errors(report)[check]
    if check == "layout":
        assert rehearse(capsys, BIG, *options, "--off", check, "--off", "batch")[0] == 0


@pytest.mark.parametrize(("batches", "steps"), [("1.0", 2), ("0.25", 1), ("17", 2), ("3", 1)])
def test_an_epoch_has_the_steps_that_lightning_makes_of_it(
    batches: str, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 batches; the last ones are a step as well, where they are fewer than are accumulated."""
    model = ["--model", "lightning.pytorch.demos.boring_classes.BoringModel", "--json", "--warn", "checkpoint"]
    limits = ["--trainer.accumulate_grad_batches=16", "--trainer.max_epochs=3", "--trainer.devices=2"]
    assert main([*model, *limits, f"--trainer.limit_train_batches={batches}"]) == 0
    printed = capsys.readouterr().out
    told = json.loads(printed[printed.index("{\n") :])
    assert (told["batch"]["steps_per_epoch"], told["batch"]["steps"]) == (steps, 3 * steps)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


SCHEDULES = {
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 50),
    "sequence": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, total_iters=5), lr_scheduler.ExponentialLR(one, 0.9)], [5]
    ),
    "one cycle": lambda one: lr_scheduler.OneCycleLR(one, max_lr=2.0, total_steps=60),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_of_rates_is_what_the_schedule_does(name: str) -> None:
    one = optimizer()
    schedule = SCHEDULES[name](one)
    stepped = []
    for _ in range(51):
        stepped.append(one.param_groups[0]["lr"])
        one.step()
        schedule.step()
    other = optimizer()
    config = SimpleNamespace(scheduler=SCHEDULES[name](other), interval="step", frequency=1, reduce_on_plateau=False)
    found, missing = rates(other, config, [0, 1, 10, 50], None)
    assert missing == ""
    assert {step: values[0] for step, values in found.items()} == pytest.approx(
        {step: stepped[step] for step in (0, 1, 10, 50)}
    )


def test_a_schedule_that_moves_by_epochs_needs_their_length() -> None:
    one = optimizer()
    config = SimpleNamespace(
        scheduler=lr_scheduler.StepLR(one, 1), interval="epoch", frequency=1, reduce_on_plateau=False
    )
    assert "length is not known" in rates(one, config, [0], None)[1]
    found, _ = rates(one, config, [0, 9, 10, 25], 10)
    assert [values[0] for values in found.values()] == pytest.approx([1.0, 1.0, 0.1, 0.01])


def test_a_long_schedule_is_not_stepped_through() -> None:
    one = optimizer()
    schedule = lr_scheduler.LambdaLR(one, lambda step: math.sqrt(step + 1))
    config = SimpleNamespace(scheduler=schedule, interval="step", frequency=1, reduce_on_plateau=False)
    assert rates(one, config, [10**9], None)[0][10**9] == pytest.approx([math.sqrt(10**9 + 1)])


def test_the_steps_in_the_table_are_few_and_end_with_the_last() -> None:
    assert reported_steps(300) == [0, 10, 75, 100, 150, 225, 299]
    assert reported_steps(1) == [0]
    assert reported_steps(0) == []
