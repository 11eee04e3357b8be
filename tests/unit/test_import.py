from __future__ import annotations

import importlib

import pytest

import lightning_distplus
from tests.processes import run_source


def run(script: str) -> str:
    ended = run_source(script)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_importing_the_package_does_nothing() -> None:
    run("""
        import atexit, gc, logging, os, signal, sys, threading
        handlers = lambda: {number: signal.getsignal(number) for number in signal.valid_signals()}
        before = dict(os.environ), threading.enumerate(), handlers(), sys.excepthook
        import lightning_distplus
        assert (dict(os.environ), threading.enumerate(), handlers(), sys.excepthook) == before
        assert not logging.root.handlers and not logging.root.manager.loggerDict
        heavy = {"torch", "lightning", "deepspeed", "transformers", "numpy", "omegaconf", "rich"} & set(sys.modules)
        assert not heavy, heavy
    """)


def test_importing_the_package_takes_a_few_milliseconds() -> None:
    script = """
        import time
        begin = time.perf_counter()
        import lightning_distplus
        print(time.perf_counter() - begin)
    """
    assert min(float(run(script)) for _ in range(5)) < 0.15


def test_errors_time_outs_and_launch_values_need_no_torch() -> None:
    run("""
        import sys
        from lightning_distplus import DistplusError, ExitCode, Timeouts
        import lightning_distplus.env, lightning_distplus.events, lightning_distplus.world
        import lightning_distplus.cli.launch, lightning_distplus.launch.warm  # the signals of a job come first (P7)
        assert not {"torch", "lightning", "deepspeed"} & set(sys.modules)
    """)


def test_the_strategies_are_registered_when_lightning_is_there_and_deepspeed_waits_until_it_is_used() -> None:
    printed = run("""
        import sys
        import lightning.pytorch as pl
        from lightning.pytorch.strategies import StrategyRegistry
        import lightning_distplus
        lightning_distplus.register_strategies()
        print(*sorted(name for name in StrategyRegistry.available_strategies() if name.startswith("resilient")))
        strategy = pl.Trainer(accelerator="cpu", strategy="resilient_ddp", logger=False).strategy
        print(type(strategy).__name__)
        lightning_distplus.ResilientFSDP, lightning_distplus.ResilientModelParallel
        assert "deepspeed" not in sys.modules
    """)
    names, strategy = printed.splitlines()
    assert names.split() == [
        "resilient_ddp", "resilient_deepspeed", "resilient_deepspeed_stage_1", "resilient_deepspeed_stage_2",
        "resilient_deepspeed_stage_3", "resilient_fsdp", "resilient_model_parallel",
    ]  # fmt: skip
    assert strategy == "ResilientDDP"


def test_strategies_and_callbacks_say_in_one_sentence_that_the_trainer_is_another_lightnings() -> None:
    printed = run("""
        import pytorch_lightning as pl
        from pytorch_lightning.demos.boring_classes import BoringModel
        import lightning_distplus as ours
        def fit(**used):
            try:
                pl.Trainer(accelerator="cpu", fast_dev_run=True, enable_model_summary=False, **used).fit(BoringModel())
            except TypeError as error:
                print("refused:", error)
        for strategy in (ours.ResilientDDP(), "resilient_ddp"):
            fit(devices=2, strategy=strategy)
        for kind in (ours.RankDivergenceMonitor, ours.StragglerMonitor, ours.PreemptionHandler, ours.SampleAudit):
            fit(callbacks=[kind()])
    """)
    told = [line for line in printed.splitlines() if line.startswith("refused:")]
    assert len(told) == 6
    assert all("import lightning.pytorch as pl" in line for line in told)


@pytest.mark.parametrize("name", lightning_distplus.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(lightning_distplus, name) is not None
    assert name in lightning_distplus._HOMES


@pytest.mark.parametrize("package", ["control", "strategies", "errors"])
def test_every_name_in_all_is_there(package: str) -> None:
    module = importlib.import_module(f"lightning_distplus.{package}")
    assert module.__all__ == sorted(module.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    for name in module.__all__:
        assert hasattr(module, name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lightning_distplus' has no attribute 'ResilientPFSD'"):
        lightning_distplus.ResilientPFSD  # noqa: B018
