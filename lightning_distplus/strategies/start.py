"""Starts a run: checks arguments and launch, meets all ranks, forms the default group, compares what must be equal."""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_distplus import _compat, env, errors
from lightning_distplus.checkpoint.manifest import Manifest
from lightning_distplus.control import Address, ControlPlane, connect, connect_over, connected, has_own_store
from lightning_distplus.control.secret import words_of
from lightning_distplus.preflight import LAUNCH_CHECKS, Facts, Finding, Settings, Status, raise_errors, run_checks
from lightning_distplus.preflight.agreement import (
    AGREEMENT_CHECKS,
    Disagreement,
    Statement,
    disagreements,
    gathered,
    spans_hosts,
    state_before_engine,
    state_before_training,
    state_of_process,
)
from lightning_distplus.preflight.host import HOST_CHECKS, RunLock
from lightning_distplus.process import boot_id, running_time
from lightning_distplus.run_access import Phases
from lightning_distplus.timeouts import Phase
from lightning_distplus.watchdog import Marks
from lightning_distplus.world import World

log = logging.getLogger(__name__)

# -- arguments and launcher --------------------------------------------------------------------------------------------

JOB_CHECKS = (*LAUNCH_CHECKS, *HOST_CHECKS, "run_lock", *AGREEMENT_CHECKS)
"""The names of the checks that a strategy makes."""

_ATTEMPTS = (env.DISTPLUS_ATTEMPT, env.TORCHELASTIC_RESTART_COUNT, env.SLURM_RESTART_COUNT)


def refuse_unknown_arguments(cls: Any, names: Iterable[str]) -> None:
    """Refuses a misspelt argument now; the parents that pass ``**kwargs`` on would accept it until set-up.

    The strategy's ``wrapper_class`` takes what the parents do not know.
    """
    classes = [base for base in (*cls.__mro__, cls.wrapper_class) if base not in (object, None)]
    known = {name for base in classes for name in inspect.signature(base).parameters}
    errors.refuse_unknown_arguments(cls.__name__, names, known - {"self", "args", "kwargs", "module"})


def read_preflight(settings: object) -> Settings | Literal[False]:
    """The checks that are off, or warnings, by the argument ``preflight`` of a strategy; False: none is made.

    As a wish for one check False stands for "off", as which YAML reads a bare ``off``.

    Raises:
        TypeError: It is neither a bool nor a mapping.
        ValueError: It names a check that there is not, or something else than "off" or "warn".
    """
    if isinstance(settings, bool):
        return {} if settings else False
    if not isinstance(settings, Mapping):
        raise TypeError(
            f'preflight is {settings!r}; it is True, False, or a mapping of checks to "off" or "warn", for example '
            '{"loopback": "off"}.'
        )
    wishes: dict[str, Any] = {name: "off" if wish is False else wish for name, wish in settings.items()}
    for name, wish in wishes.items():
        if name not in JOB_CHECKS:
            near = difflib.get_close_matches(str(name), JOB_CHECKS, n=1)
            hint = f"did you mean {near[0]!r}? They are" if near else "they are"
            raise ValueError(f"preflight has no check {name!r}; {hint} {', '.join(JOB_CHECKS)}.")
        errors.require_choice(f"preflight[{name!r}]", wish, Literal["off", "warn"])
    return wishes


def check_launch(strategy: Any, *, tells_warnings: bool = True) -> None:
    """Refuses a launch that contradicts itself, or that started another number of processes than the Trainer expects.

    The check is made twice, and logs what is no error once.

    Raises:
        PreflightError: What is wrong, the evidence, and the command to run.
    """
    if strategy.preflight is False:
        return
    facts = facts_of(strategy)
    findings = run_checks(LAUNCH_CHECKS, facts, strategy.preflight)
    raise_errors([finding for finding in findings if tells_warnings or finding.status is Status.ERROR], facts)


def facts_of(strategy: Any) -> Facts:
    """What the checks may look at, before a process group is formed."""
    environment = strategy.cluster_environment
    devices = strategy.parallel_devices or []
    is_lightnings = isinstance(environment, LightningEnvironment)
    started = rank = None
    if environment.creates_processes_externally:
        # Lightning's knows the product only, unless a launcher set the size.
        started = env.WORLD_SIZE.integer() if is_lightnings else int(environment.world_size())
    with suppress(KeyError):  # a variable of the launcher is missing; the checks say which
        first = environment.node_rank() * len(devices)  # of this host
        rank = first + environment.local_rank() if is_lightnings else int(environment.global_rank())
    return Facts(
        devices=len(devices),
        num_nodes=strategy.num_nodes,
        environment=type(environment).__name__,
        started=started,
        rank=rank,
        accelerator=devices[0].type if devices else "",
    )


_NUM_READINGS = 3


def meet(strategy: Any) -> ControlPlane:
    """Waits until all ranks are here; set-up begins when they are.

    A default group that is there already, of a stock fit or of the user, holds the port: they meet over its store.

    Raises:
        RendezvousError, PeerMissing: Some ranks have not come by the deadline; ``.ranks`` names them.
    """
    strategy.phases.enter(Phase.RENDEZVOUS)
    folder = None if strategy.lightning_module is None else strategy.home
    deadline = strategy.phases.patience_in(Phase.RENDEZVOUS)
    world, address = World.of(strategy), address_of(strategy)
    if dist.is_initialized() and not has_own_store() and not address.is_served_by_launcher:
        plane = connect_over(world, _compat.default_store(), deadline)
    else:
        plane = connect(world, address, deadline, folder)
    strategy.phases.enter(Phase.SETUP)
    return plane


def clock_offset(plane: ControlPlane, deadline: timedelta, clock: Callable[[], float] = time.time) -> float:
    """Seconds by which the clock of this host is ahead of rank 0's; all ranks call it together.

    They read their clocks when they leave an exchange, which they do within milliseconds of each other: the median of
    three such readings. The ranks of one host have one clock, and are not asked.
    """
    if plane.world.num_nodes == 1:
        return 0.0
    own = []
    for _ in range(_NUM_READINGS):
        plane.gather("clock", b"", deadline)
        own.append(clock())
    first = plane.gather_json("clock readings", {"times": own}, deadline)[0]["times"]
    return round(float(median(mine - other for mine, other in zip(own, first, strict=True))), 4)


def form_default_group(strategy: Any) -> None:
    """Forms the default group on our store, so that a group of an earlier attempt cannot be heard."""
    if dist.is_initialized():
        return
    environment = strategy.cluster_environment
    env.MASTER_ADDR.set(environment.main_address)
    env.MASTER_PORT.set(environment.main_port)
    _compat.init_default_group(
        strategy._get_process_group_backend(),
        store=strategy.plane.store_for("default-group"),
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        timeout=strategy.phases.group_timeout,
        device=strategy.root_device,
    )


def tell_launcher(home: Path, on_verdict: str | None) -> None:
    """Tells ``distplus launch``, where it has started this rank, where the artefacts are, and who gets verdicts."""
    if file := env.DISTPLUS_HOME_FILE.get():
        stage = Path(f"{file}.{os.getpid()}")
        stage.write_text(json.dumps({"home": str(home.absolute()), "on_verdict": on_verdict}))
        stage.rename(file)


def samples_in_hand(trainer: Any) -> list[Any]:
    """The ids of the batch at which this rank stands, where its data module knows them; never raises."""
    try:
        data = trainer.datamodule
        if hasattr(data, "samples_in_hand"):
            return list(data.samples_in_hand())
        return list(data.sample_ids(trainer.fit_loop.epoch_loop.batch_idx))
    except Exception:  # on the way out, with whatever data module the user has
        return []


def address_of(strategy: Any) -> Address:
    """Where the job's store is, by its launcher's variables."""
    environment = strategy.cluster_environment
    has_agent = env.TORCHELASTIC_RUN_ID.get() is not None
    return Address(
        host=environment.main_address,
        port=environment.main_port,
        is_served_by_launcher=env.TORCHELASTIC_USE_AGENT_STORE.get() == "True",
        job=job_of_launcher() or (env.DISTPLUS_STARTER.get() if strategy.num_nodes == 1 else None) or "",
        is_counted_apart=has_agent,
        attempt=next(filter(None, (variable.integer() for variable in _ATTEMPTS)), 0),
    )


def job_of_launcher() -> str:
    """The launcher's own name of the job; "" where it gives none."""
    return env.TORCHELASTIC_RUN_ID.get() or env.SLURM_JOB_ID.get() or ""


# -- hosts and folder --------------------------------------------------------------------------------------------------

_HOST_DEADLINE = timedelta(seconds=10)
_TRIAL_BYTES = 8 << 20  # 40 ms on the disk of a small machine


def check_host(strategy: Any, trainer: Any) -> None:
    """Makes the checks of the host once a host, before the first collective; all ranks call it."""
    if strategy.preflight is False or trainer.state.fn != "fit":
        return
    folder, is_spread = _folder(trainer) or Path.cwd(), spans_hosts(strategy.plane)
    facts = replace(facts_of(strategy), folder=folder, trial_bytes=_TRIAL_BYTES, spans_hosts=is_spread)
    is_first = strategy.local_rank == 0
    found = run_checks(HOST_CHECKS, facts, strategy.preflight, deadline=_HOST_DEADLINE) if is_first else []
    # What is only noted, such as the speed of a disk, is for `distplus preflight` to say.
    _raise_together(strategy, facts, [one for one in found if one.status is not Status.NOTE])


def check_folder(strategy: Any, trainer: Any) -> RunLock | None:
    """Takes the lock of the checkpoint folder, on rank 0 of a fit that saves checkpoints."""
    if strategy.preflight is False or trainer.state.fn != "fit":
        return None
    settings, facts = strategy.preflight, facts_of(strategy)
    folder = _folder(trainer) if trainer.checkpoint_callbacks and settings.get("run_lock") != "off" else None
    found: list[Finding] = []
    lock = None
    if strategy.global_rank == 0 and folder is not None:
        job = job_of_launcher()  # torchrun's is "none" where nobody gave one
        lock = RunLock(folder, job="" if job == "none" else job, attempt=strategy.plane.attempt)
        found = run_checks({"run_lock": lambda _: lock.take()}, facts, settings)
    try:
        _raise_together(strategy, facts, found)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def _folder(trainer: Any) -> Path | None:
    """Where checkpoints go; None for a place that is no folder of this host."""
    callback = trainer.checkpoint_callback
    place = str(getattr(callback, "dirpath", None) or trainer.default_root_dir)
    return None if "://" in place else Path(place)


def _raise_together(strategy: Any, facts: Facts, found: list[Finding]) -> None:
    if strategy.world_size > 1:
        found = gathered(strategy.plane, found, strategy.phases.patience)
    for finding in found if strategy.global_rank == 0 else ():
        if finding.check == "run_lock" and finding.status is Status.NOTE:
            with suppress(OSError):
                strategy.note("run_lock_taken_over", holder=finding.detail)
    _raise(strategy, facts, found)


def _raise(strategy: Any, facts: Facts, found: Iterable[Finding]) -> None:
    """All ranks have found the same; one of them logs what is no error."""
    raise_errors([one for one in found if one.status is Status.ERROR or strategy.global_rank == 0], facts)


# -- what the ranks compare --------------------------------------------------------------------------------------------

# All ranks call it; where they differ, a PreflightError names the odd rank, the field and both values on all of them.


def check_agreement(strategy: Any, trainer: Any) -> None:
    """Compares processes, settings and models, before the engine wraps the model."""
    mine = state_of_process(facts_of(strategy)) | state_before_engine(trainer)
    _compare(strategy, mine, device=_device(strategy.root_device))


def check_data(strategy: Any, trainer: Any) -> None:
    """Compares where the run stands, and its data, once they are known."""
    _compare(strategy, state_before_training(trainer))


def _compare(strategy: Any, mine: Statement, *, device: str = "") -> None:
    if strategy.preflight is False or strategy.world_size == 1:
        return
    found = disagreements(strategy.plane, mine, strategy.phases.patience, strategy.preflight, device=device)
    for one in found:
        if isinstance(one, Disagreement) and one.status is not Status.ERROR:
            strategy.note("difference", field=one.field, ranks=one.ranks, values=one.values)
    _raise(strategy, facts_of(strategy), [one for one in found if one.status is not Status.NOTE])


def _device(device: torch.device) -> str:
    """A GPU by its unique name; two hosts may both have a GPU 0."""
    if device.type != "cuda":
        return ""
    return f"{boot_id()[:8]}/{getattr(torch.cuda.get_device_properties(device), 'uuid', device.index)}"


# -- what a manifest tells of the run ----------------------------------------------------------------------------------

_PACKAGE = "lightning_distplus."
_SIGNS = {
    "zero_stage": "ResilientDeepSpeed",
    "sharding": "ResilientFSDP",
    "tensor_parallel": "ResilientModelParallel",
}  # in a layout; the first one that is there tells


def engine_of(strategy: type) -> str:
    """The name of our strategy that a class is or derives from: a subclass reads and writes its parent's shards."""
    return next(one.__name__ for one in strategy.__mro__ if one.__module__.startswith(_PACKAGE))


def engine_in(manifest: Manifest) -> str:
    """The name of our strategy whose shards a checkpoint holds; early releases named the user's subclass."""
    if manifest.strategy in _SIGNS.values():
        return manifest.strategy
    return next((engine for sign, engine in _SIGNS.items() if sign in manifest.layout), manifest.strategy)


def layout_of(strategy: Any) -> dict[str, Any]:
    """How the ranks share the model and the data: sizes by the name of the axis, and what is sharded.

    ``{"data_parallel": 4}`` of DDP; FSDP adds ``"sharding": "FULL_SHARD"``, ZeRO ``"zero_stage": 2``; the axes of a
    device mesh come under their own names.
    """
    mesh = getattr(strategy, "_device_mesh", None)
    if mesh is not None and mesh.mesh_dim_names:
        layout: dict[str, Any] = dict(zip(mesh.mesh_dim_names, map(int, mesh.shape), strict=True))
    else:
        layout = {"data_parallel": int((strategy.distributed_sampler_kwargs or {}).get("num_replicas", 1))}
    if sharding := getattr(strategy, "sharding_strategy", None):
        layout["sharding"] = getattr(sharding, "name", str(sharding))
    zero = (getattr(strategy, "config", None) or {}).get("zero_optimization")
    if zero is not None:
        layout["zero_stage"] = int(zero.get("stage", 0))
    return layout


# -- prepare_data ------------------------------------------------------------------------------------------------------

_SAY_EVERY_S = 10.0

# Keeps the barriers of one process apart, whatever Trainers they belong to; all ranks count alike.
_barriers = itertools.count(1)


def report_progress(text: str) -> None:
    """Tells the ranks that wait for this one's ``prepare_data`` what it is doing; call it as often as you like.

    The text, for example ``"tokenized 3 of 40 files"``, is cut after 500 characters.
    """
    if (plane := connected()) is not None:
        progress = {"text": text[:500], "at": time.time()}
        plane.send(f"preparing/progress/{plane.world.rank}", json.dumps(progress).encode())


@contextmanager
def preparation_barrier(plane: ControlPlane, phases: Phases, marks: Marks) -> Iterator[None]:
    """Takes the place of the barrier of 10,000 days that Lightning puts around ``prepare_data``.

    A rank that prepares nothing comes to its end at once and waits. An error inside reaches all ranks without a wait.

    Raises:
        PeerMissing: Some ranks are still in ``prepare_data`` after the deadline and its margin (the watchdog's verdict
            comes first); ``.ranks`` names them.
        PeerFailed: ``prepare_data`` raised on a peer.
        PeerLost: A peer's process is gone.
    """
    key, since = f"preparing/{next(_barriers)}/arrived", running_time()
    say_at = since + _SAY_EVERY_S
    marks.set("prepare_data")
    phases.enter(Phase.DATA)

    def is_complete() -> bool:
        nonlocal say_at
        missing, now = sorted(set(plane.world.ranks) - arrived()), running_time()
        if missing and now >= say_at:
            say_at = now + _SAY_EVERY_S
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            limit = "" if phases.deadline is None else f" of at most {phases.deadline.total_seconds():g} s"
            message = "rank %d waits for prepare_data on %s%s, for %.0f s%s; %s"
            progress = _progress_of(plane, missing[0])
            log.info(message, plane.world.rank, plane.describe_rank(missing[0]), others, now - since, limit, progress)
        return not missing

    try:
        yield
        plane.raise_if_peer_failed()  # those who have given up waiting have left their names here
        deadline = phases.patience_in(Phase.DATA)
        plane.sign_in(key)
        arrived = partial(plane.signed_in, key, plane.secret.entries(key))
        plane.poll(is_complete, deadline, what="prepare_data on another rank", arrived=arrived)
    except BaseException as error:
        plane.report_failure(error)
        raise
    phases.enter_after_meeting(Phase.SETUP)


def _progress_of(plane: ControlPlane, rank: int) -> str:
    found = plane.read(f"preparing/progress/{rank}")
    if found is None:
        return "it has reported no progress (lightning_distplus.strategies.report_progress does)"
    progress = words_of(found)
    return f"it reported {max(0.0, time.time() - progress['at']):.0f} s ago: {progress['text']}"
