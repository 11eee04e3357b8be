"""Rows P1 and P3, over and over: a run is asked to stop at random instants of each phase, and comes back each time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.checkpoint import newest_valid, read_manifest, verify
from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.distributed.preemption_jobs import MOMENTS, Asks, train, train_until_asked
from tests.faults.test_preempted import undisturbed

KINDS = ("one rank", "all", "subset", "launcher")
CHAINS = [*jobs.STRATEGIES, "ResilientDDP"]  # each is asked once in every moment: 35 stops of each kind
STEPS = 40
STEP_S = 0.06  # so that a signal is sent and received within a step or two
WITHIN_S = 0.2
FIRST_S = 0.04  # the latest instant of the first signal: the moment lasts 50 ms


def asks_of(kind: str, moment: str, step: int, world_size: int, chance: random.Random) -> Asks:
    """The first signal arrives within the moment, the others within 200 ms."""
    if kind == "launcher":
        return Asks(moment, (0,), step, to_launcher=True, delays_s={0: chance.uniform(0.0, FIRST_S)})
    sizes = {"one rank": 1, "all": world_size, "subset": chance.randint(1, world_size)}
    ranks = chance.sample(range(world_size), sizes[kind])
    delays_s = {rank: chance.uniform(0.0, FIRST_S if rank == ranks[0] else WITHIN_S) for rank in ranks}
    return Asks(moment, ranks, step, delays_s=delays_s)


def assert_stopped_cleanly(folder: Path, num_stops: int, world_size: int) -> int:
    """Returns the one step at which all ranks have stopped, whose state is the newest valid checkpoint."""
    events = read_events(folder / "distplus")
    assert not [event for event in events if event["kind"] == "failed"]
    ended: dict[int, list[int]] = {rank: [] for rank in range(world_size)}
    for event in events:
        if event["kind"] == "preempted":
            ended[event["rank"]].append(event["global_step"])
    assert {len(steps) for steps in ended.values()} == {num_stops}, ended
    (step,) = {steps[-1] for steps in ended.values()}
    newest = newest_valid(folder / "checkpoints")
    if step == 0:
        assert newest is None
        return 0
    assert newest is not None
    assert verify(newest).ok
    assert (newest.name, read_manifest(newest).global_step) == (f"preempt-step={step}.ckpt", step)
    return step


def stop(name: str, folder: Path, asks: Asks, is_launched: bool, arguments: dict[str, Any]) -> int:
    """One attempt, which is asked to stop; the Trainer's step at that moment."""
    record = folder / "asked.jsonl"
    num_before = len(record.read_text().splitlines()) if record.exists() else 0
    world_size = arguments["world_size"]
    run = spawn(
        train_until_asked,
        world_size,
        args=(name, str(folder), asks, {**arguments, "slow_s": STEP_S}),
        deadline="100s",
        mode="torchrun" if is_launched else "forkserver",
    )
    assert run.exit_codes == dict.fromkeys(range(world_size), 143), "\n".join([*run.logs.values(), run.launcher_log])
    asked = [json.loads(line) for line in record.read_text().splitlines()[num_before:]]
    assert asked, "no signal was sent"
    assert {(moment, rank in asks.ranks) for moment, rank, _ in asked} == {(asks.moment, True)}
    return min(at for _, _, at in asked)


@pytest.mark.soak
@pytest.mark.deadline(600)
@pytest.mark.parametrize("chain", range(len(CHAINS)))
@pytest.mark.parametrize("kind", KINDS)
def test_signals_at_random_instants_of_every_phase(kind: str, chain: int, tmp_path: Path) -> None:
    chance = random.Random(f"{kind} {chain}")
    name = CHAINS[chain]
    arguments: dict[str, Any] = {"max_steps": STEPS, "world_size": 3 if kind == "subset" else 2}
    if kind == "subset" and name == "ResilientDDP":  # a sum of three depends on where gloo cuts a bucket
        arguments["keeps_buckets"] = True
    moments = ["sanity check", *chance.sample(MOMENTS[1:], len(MOMENTS) - 1)]  # a run that resumes has no sanity check
    step = 0
    for num_stops, moment in enumerate(moments, 1):
        asks = asks_of(kind, moment, step + 1, arguments["world_size"], chance)
        asked_at = stop(name, tmp_path, asks, kind == "launcher", arguments)
        step = assert_stopped_cleanly(tmp_path, num_stops, arguments["world_size"])
        latest = STEPS - 1 if kind == "launcher" else asked_at + (moment != "sanity check")
        assert asked_at <= step <= latest, moment
    run = spawn(
        train, arguments["world_size"], args=(name, str(tmp_path), None, dict(arguments)), deadline="120s"
    ).check()
    for rank, expected in undisturbed(name, **arguments).items():
        assert {key: run.results[rank][key] for key in expected} == expected
    assert {(result["step"], result["resumed_at"]) for result in run.results.values()} == {(STEPS, step)}
    print(f"soak: {kind}, {name}, chain {chain}: {len(moments)} clean stops, last at step {step}")
