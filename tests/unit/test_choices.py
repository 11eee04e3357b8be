"""Arguments that nothing takes are refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

import lightning_distplus
from lightning_distplus import RankDivergenceMonitor, ResumableDataModule, TokenDataModule, errors
from lightning_distplus.data.prepare import prepare
from lightning_distplus.strategies import start


def _source(**arguments: Any) -> Any:
    return TokenDataModule([{"path": "x", **arguments}], seq_len=8, micro_batch_size=2)  # type: ignore[list-item]


_source.__name__ = "Source"
REMOVED = {
    lightning_distplus.ResilientDDP: {
        "digest": "sha256sum",
        "gradient_compression": "ddp_comm_hook",
        "nccl": "environment variables",
        "read_back_saves": "distplus verify",
        "scrub_every": "distplus verify",
    },
    prepare: {"num_workers": "datatrove", "shard_bytes": "datatrove"},
    _source: {"column": "datasets library"},
    RankDivergenceMonitor: {"on_spike": "SpikeDetection", "replay_suspects": "SpikeDetection"},
    ResumableDataModule: {
        "scale_lr": "distplus rehearse",
        "base_global_batch_size": "distplus rehearse",
        "combine": "data set that returns a dict",
        "weights": r"samplers\.weighted",
        "replacement": r"samplers\.weighted",
        "num_samples": r"samplers\.weighted",
        "lengths": r"samplers\.by_length",
    },
    TokenDataModule: {
        "scale_lr": "distplus rehearse",
        "base_global_batch_size": "distplus rehearse",
        "rampup_batch_size": "constant.*scheduler",
        "max_epochs_per_source": "steps of the run",
    },
}
NEEDED: dict[Any, dict[str, Any]] = {
    prepare: {"inputs": ["x"], "output": "y"},
    ResumableDataModule: {"batch_size": 2},
    TokenDataModule: {"sources": "x", "seq_len": 8, "micro_batch_size": 2},
}


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [(owner, name, instead) for owner, names in REMOVED.items() for name, instead in names.items()],
)
def test_an_argument_that_was_removed_is_refused_with_what_to_do_instead(owner: Any, name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=f"{owner.__name__} takes no argument '{name}' any more: .*{instead}"):
        owner(**NEEDED.get(owner, {}), **{name: True})


def test_every_sentence_for_a_removed_argument_is_tested() -> None:
    assert {name for names in REMOVED.values() for name in names} == set(errors._REMOVED)


def test_a_misspelt_argument_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"ResilientDDP takes no argument 'timout'; did you mean 'timeout'\?"):
        lightning_distplus.ResilientDDP(timout="30m")
    with pytest.raises(TypeError, match=r"argument 'every_n_step'; did you mean 'every_n_steps'\?"):
        RankDivergenceMonitor(every_n_step=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"preflight": "off"}, "preflight is 'off'; it is True, False, or a mapping of checks"),
        ({"preflight": {"slurmm": "off"}}, "preflight has no check 'slurmm'; did you mean 'slurm'"),
        ({"preflight": {"slurm": "no"}}, 'is \'no\'; it is "off" or "warn"'),
        ({"preflight": 1}, "preflight is 1; it is True, False"),
        ({"copy_to": 3}, "copy_to is 3; it is a text or None"),
        ({"async_save": "yes"}, "async_save is 'yes'; it is True or False"),
        ({"on_hang": "ignore"}, 'on_hang is \'ignore\'; it is "abort" or "report"'),
        ({"on_save_failure": "stop"}, "on_save_failure is 'stop'"),
        ({"verify": True}, "verify is True"),
        ({"timeout": "half an hour"}, "timeout is 'half an hour', which is no duration"),
        ({"timeout": {"stepp": "1m"}}, "timeout has no phase 'stepp'"),
    ],
)
def test_a_wrong_argument_of_a_strategy_is_refused_when_it_is_made(given: dict[str, Any], words: str) -> None:
    for owner in (lightning_distplus.ResilientDDP, lightning_distplus.ResilientFSDP):
        with pytest.raises((TypeError, ValueError), match=re.escape(words)):
            owner(**given)


def test_every_check_of_a_job_can_be_switched_off() -> None:
    wishes = dict.fromkeys(start.JOB_CHECKS, "off")
    assert lightning_distplus.ResilientDDP(preflight=wishes).preflight == wishes
    assert lightning_distplus.ResilientDDP(preflight={"slurm": False}).preflight == {"slurm": "off"}, "YAML's off"
    assert {"slurm", "disk", "run_lock", "versions", "data", "devices"} <= set(wishes)
