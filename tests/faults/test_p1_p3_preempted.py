"""Rows P1 and P3: asked to stop at any moment, all ranks save one checkpoint at one step and exit with 143."""

from __future__ import annotations

import functools
import json
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus import PreemptionHandler
from lightning_distplus.checkpoint import newest_valid, read_manifest, verify
from lightning_distplus.events import read_events
from lightning_distplus.testing import SpawnResult, spawn
from tests.distributed import jobs
from tests.distributed.preemption_jobs import MOMENTS, STEPS, Asks, evaluate, make, train
from tests.pairs import kept

PREEMPTED = {0: 143, 1: 143}


@functools.cache
def undisturbed(name: str, **arguments: Any) -> dict[int, Any]:
    """Each rank's weights, or shard of them, and its counters, after the run that nobody asks to stop."""
    with tempfile.TemporaryDirectory() as folder:
        world_size = arguments.get("world_size", 2)
        run = spawn(train, world_size, args=(name, folder, None, arguments), deadline="120s").check()
    return {rank: {key: result[key] for key in ("weights", "counters")} for rank, result in run.results.items()}


def stop(name: str, folder: Path, asks: Asks, **arguments: Any) -> SpawnResult:
    mode = arguments.pop("mode", "forkserver")
    run = spawn(train, 2, args=(name, str(folder), asks, arguments), deadline="120s", mode=mode)
    assert run.exit_codes == PREEMPTED, "\n".join(run.logs.values())
    return run


def assert_one_checkpoint(folder: Path) -> int:
    """Returns the step of the one checkpoint of the preemption, which is the newest valid one."""
    (path,) = (folder / "checkpoints").glob("preempt-step=*")
    assert newest_valid(folder / "checkpoints") == path
    assert verify(path).ok
    ended = [event for event in read_events(folder / "distplus") if event["kind"] == "preempted"]
    (step,) = {event["global_step"] for event in ended}
    assert sorted(event["rank"] for event in ended) == [0, 1]
    assert path.name == f"preempt-step={step}.ckpt"
    assert not [event for event in read_events(folder / "distplus") if event["kind"] == "failed"]
    return int(step)


def assert_continues_exactly(name: str, folder: Path, step: int, **arguments: Any) -> None:
    args = (name, str(folder), None, dict(arguments))
    run = spawn(train, arguments.get("world_size", 2), args=args, deadline="120s").check()
    arguments.pop("num_workers", None)
    for rank, expected in undisturbed(name, **arguments).items():
        assert {key: run.results[rank][key] for key in expected} == expected
    last = arguments.get("max_steps", STEPS)
    assert {(result["step"], result["resumed_at"]) for result in run.results.values()} == {(last, step)}


@pytest.mark.parametrize(
    ("moment", "asked", "ranks", "stops"),
    [
        ("data", 3, (0,), {3, 4}),
        ("forward", 4, (1,), {5}),
        ("backward", 7, (0, 1), {8}),
        ("validation", 4, (1,), {3}),
        ("save", 4, (0,), {5}),
    ],
)
def test_a_signal_at_any_moment_leaves_one_checkpoint_from_which_the_run_continues_exactly(
    moment: str, asked: int, ranks: tuple[int, ...], stops: set[int], tmp_path: Path
) -> None:
    run = stop("ResilientDDP", tmp_path, Asks(moment, ranks, asked))
    step = assert_one_checkpoint(tmp_path)
    assert step in stops
    assert f"goes on from {tmp_path / 'checkpoints' / f'preempt-step={step}.ckpt'}\n" in run.logs[0]
    assert "weights_only" not in run.logs[0]
    assert_continues_exactly("ResilientDDP", tmp_path, step)


@pytest.mark.parametrize("asked", kept([5, 6, 7], [6]))
def test_the_counters_go_on_with_loaders_that_keep_no_state(asked: int, tmp_path: Path) -> None:
    """Stops after a validation, with the last batch of the epoch fetched, and between two epochs."""
    stop("ResilientDDP", tmp_path, Asks("backward", (0,), asked), is_stock=True)
    assert assert_one_checkpoint(tmp_path) == asked + 1
    run = spawn(train, 2, args=("ResilientDDP", str(tmp_path), None, {"is_stock": True}), deadline="120s").check()
    for rank, expected in undisturbed("ResilientDDP", is_stock=True).items():
        assert run.results[rank]["counters"] == expected["counters"]


def assert_nothing_saved(folder: Path) -> None:
    assert not list((folder / "checkpoints").glob("*.ckpt"))
    assert [event["path"] for event in read_events(folder / "distplus") if event["kind"] == "preempted"] == [None] * 2


def test_before_the_first_step_there_is_nothing_to_save_and_after_a_resume_nothing_new(tmp_path: Path) -> None:
    stop("ResilientDDP", tmp_path, Asks("sanity check", (1,), 4))
    assert_nothing_saved(tmp_path)
    stop("ResilientDDP", tmp_path, Asks("forward", (1,), 6))
    (saved,) = (tmp_path / "checkpoints").glob("preempt-step=7.ckpt")
    before = saved.stat().st_mtime_ns
    stop("ResilientDDP", tmp_path, Asks("train start", (0,), 7))
    assert saved.stat().st_mtime_ns == before
    assert_continues_exactly("ResilientDDP", tmp_path, 7)


@pytest.mark.parametrize("name", kept(jobs.STRATEGIES[1:], ["ResilientModelParallel", "ResilientDeepSpeed"]))
def test_every_strategy_stops_and_continues_exactly(name: str, tmp_path: Path) -> None:
    stop(name, tmp_path, Asks("optimizer", (1,), 6))
    assert assert_one_checkpoint(tmp_path) == 7
    assert_continues_exactly(name, tmp_path, 7)


@pytest.mark.parametrize("function", kept(["validate", "test", "predict"], ["test"]))
def test_an_evaluation_ends_on_all_ranks_with_nothing_to_save(function: str, tmp_path: Path) -> None:
    moment = {"validate": "validation"}.get(function, function)
    run = spawn(evaluate, 2, args=(function, str(tmp_path), Asks(moment, (1,))), deadline="60s")
    assert run.exit_codes == PREEMPTED, run.logs[0]
    assert not (tmp_path / "checkpoints").exists()
    assert {event["path"] for event in read_events(tmp_path / "distplus") if event["kind"] == "preempted"} == {None}


def test_signals_that_repeat_while_it_saves_tear_nothing(tmp_path: Path) -> None:
    asks = Asks("save", (0, 1), 4, signals=("SIGTERM", "SIGUSR1", "SIGTERM", "SIGUSR2", "SIGINT"))
    stop("ResilientDDP", tmp_path, asks)
    assert assert_one_checkpoint(tmp_path) == 5


def test_a_second_interrupt_ends_at_once_and_honestly(tmp_path: Path) -> None:
    asks = Asks("forward", (0, 1), 4, signals=("SIGINT", "SIGINT"))
    run = spawn(train, 2, args=("ResilientDDP", str(tmp_path), asks, {}), deadline="60s")
    assert run.exit_codes == {0: -2, 1: -2}
    assert not list((tmp_path / "checkpoints").glob("preempt*"))
    assert all("ends now, without a checkpoint" in log for log in run.logs.values())


def test_data_workers_outlive_a_signal_to_their_whole_group(tmp_path: Path) -> None:
    stop("ResilientDDP", tmp_path, Asks("group", (0, 1), 4), num_workers=1)
    assert assert_one_checkpoint(tmp_path) == 5
    assert_continues_exactly("ResilientDDP", tmp_path, 5)


def test_a_sigterm_after_the_death_of_a_peer_is_no_preemption(tmp_path: Path) -> None:
    """torchrun's agent sends one 16 to 120 ms later."""
    asks = Asks("death of rank 1", (0, 1), 4)
    run = spawn(train, 2, args=("ResilientDDP", str(tmp_path), asks, {}), deadline="60s")
    assert run.exit_codes == {0: 171, 1: -9}
    assert run.elapsed_s < 20
    assert not list((tmp_path / "checkpoints").glob("preempt*"))
    assert newest_valid(tmp_path / "checkpoints") is None


def test_a_notice_stops_the_run_and_a_grace_that_is_too_short_is_reported(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    handler = {"notice_file": str(notice), "notice_every": 0.02, "grace": 0.01}
    asks = Asks("notice", (0,), 4, signals=(str(notice),))
    run = stop("ResilientDDP", tmp_path, asks, handler=handler)
    assert assert_one_checkpoint(tmp_path) == 5
    assert "0.01 s after the notice file" in run.logs[0]
    kinds = [event["kind"] for event in read_events(tmp_path / "distplus") if event["rank"] == 0]
    assert kinds.index("preemption_late") < kinds.index("preempted")


def handlers_and_requests(folder: str) -> dict[str, Any]:
    """A run in which a user's own handler is called as well, and everything is put back."""
    received: list[str] = []
    watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    signal.signal(signal.SIGUSR1, lambda signum, frame: received.append(signal.Signals(signum).name))
    before = [signal.getsignal(number) for number in watched]
    trainer, model, data = make("ResilientDDP", folder, [PreemptionHandler()], max_steps=2)
    trainer.fit(model, datamodule=data)
    is_back = [signal.getsignal(number) for number in watched] == before
    trainer, model, data = make("ResilientDDP", folder, [PreemptionHandler(), Asks(signals=("SIGUSR1",))])
    with pytest.raises(SystemExit) as stopped:
        trainer.fit(model, datamodule=data)
    return {"is_back": is_back, "received": received, "code": stopped.value.code}


def test_handlers_are_chained_and_put_back(tmp_path: Path) -> None:
    run = spawn(handlers_and_requests, 2, args=(str(tmp_path),), deadline="60s").check()
    assert list(run.results.values()) == [{"is_back": True, "received": ["SIGUSR1"], "code": 143}] * 2


def test_the_launcher_passes_a_sigterm_on_and_a_run_of_one_process_stops_too(tmp_path: Path) -> None:
    asks = Asks("forward", (0,), 4, to_launcher=True)
    stop("ResilientDDP", tmp_path / "two", asks, mode="torchrun")
    assert_one_checkpoint(tmp_path / "two")
    alone = {"world_size": 1}
    for folder, one in (("one", Asks("backward", (0,), 4)), ("one", None), ("undisturbed", None)):
        arguments = ("ResilientDDP", str(tmp_path / folder), one, dict(alone))
        run = spawn(train, 1, args=arguments, deadline="60s")
        assert run.exit_codes == {0: 143 if one else 0}, run.logs[0]
        if folder == "one" and one is None:
            resumed = run.results[0]
    assert resumed["resumed_at"] == 5
    assert resumed["weights"] == run.results[0]["weights"]


def test_a_strategy_without_a_gate_is_refused_with_a_remedy(tmp_path: Path) -> None:
    run = spawn(train, 2, args=("DDPStrategy", str(tmp_path), None, {}), deadline="60s")
    assert set(run.exit_codes.values()) == {1}
    assert "Use ResilientDDP" in run.logs[0]


# -- over and over: at random instants of each phase -------------------------------------------------------------------

KINDS = ("one rank", "all", "subset", "launcher")
CHAINS = [*jobs.STRATEGIES, "ResilientDDP"]  # each is asked once in every moment: 35 stops of each kind
SOAK_STEPS = 40
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
    ended = [(event["rank"], event["global_step"]) for event in events if event["kind"] == "preempted"]
    steps = {rank: [step for other, step in ended if other == rank] for rank in range(world_size)}
    assert {len(one) for one in steps.values()} == {num_stops}, steps
    (step,) = {one[-1] for one in steps.values()}
    newest = newest_valid(folder / "checkpoints")
    if step == 0:
        assert newest is None
        return 0
    assert newest is not None
    assert verify(newest).ok
    assert (newest.name, read_manifest(newest).global_step) == (f"preempt-step={step}.ckpt", step)
    return step


def stop_at_random(name: str, folder: Path, asks: Asks, is_launched: bool, arguments: dict[str, Any]) -> int:
    """One attempt, which is asked to stop; the Trainer's step at that moment."""
    record, world_size = folder / "asked.jsonl", arguments["world_size"]
    num_before = len(record.read_text().splitlines()) if record.exists() else 0
    mode: Any = "torchrun" if is_launched else "forkserver"
    args = (name, str(folder), asks, {**arguments, "slow_s": STEP_S})
    run = spawn(train, world_size, args=args, deadline="100s", mode=mode)
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
    arguments: dict[str, Any] = {"max_steps": SOAK_STEPS, "world_size": 3 if kind == "subset" else 2}
    if kind == "subset" and name == "ResilientDDP":  # a sum of three depends on where gloo cuts a bucket
        arguments["keeps_buckets"] = True
    moments = ["sanity check", *chance.sample(MOMENTS[1:], len(MOMENTS) - 1)]  # a run that resumes has no sanity check
    step = 0
    for num_stops, moment in enumerate(moments, 1):
        asks = asks_of(kind, moment, step + 1, arguments["world_size"], chance)
        asked_at = stop_at_random(name, tmp_path, asks, kind == "launcher", arguments)
        step = assert_stopped_cleanly(tmp_path, num_stops, arguments["world_size"])
        latest = SOAK_STEPS - 1 if kind == "launcher" else asked_at + (moment != "sanity check")
        assert asked_at <= step <= latest, moment
    assert_continues_exactly(name, tmp_path, step, **arguments)
    print(f"soak: {kind}, {name}, chain {chain}: {len(moments)} clean stops, last at step {step}")
