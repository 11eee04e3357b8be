"""How a strategy finds its place before it meets the others: its arguments, its launcher, its rank and the store."""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_distplus import _compat, env, errors
from lightning_distplus.control import Address, ControlPlane, connect, connect_over, has_own_store
from lightning_distplus.preflight import LAUNCH_CHECKS, Facts, Settings, Status, raise_errors, run_checks
from lightning_distplus.preflight.agreement import AGREEMENT_CHECKS
from lightning_distplus.preflight.host import HOST_CHECKS
from lightning_distplus.timeouts import Phase
from lightning_distplus.world import World

__all__ = [
    "address_of",
    "check_launch",
    "facts_of",
    "form_default_group",
    "meet",
    "read_preflight",
    "refuse_unknown_arguments",
    "samples_in_hand",
    "settings_of",
    "tell_launcher",
    "world_of",
]


JOB_CHECKS = (*LAUNCH_CHECKS, *HOST_CHECKS, "run_lock", *AGREEMENT_CHECKS)
"""The names of the checks that a strategy makes."""

_ATTEMPTS = (env.DISTPLUS_ATTEMPT, env.TORCHELASTIC_RESTART_COUNT, env.SLURM_RESTART_COUNT)


def refuse_unknown_arguments(cls: Any, names: Iterable[str]) -> None:
    """Refuses a misspelt argument now; the parents that pass ``**kwargs`` on would accept it until set-up.

    Args:
        cls: The strategy; its ``wrapper_class`` takes what the parents do not know.
        names: The arguments given.

    Raises:
        TypeError: No class takes the argument.
    """
    classes = [base for base in (*cls.__mro__, cls.wrapper_class) if base not in (object, None)]
    known = {name for base in classes for name in inspect.signature(base).parameters}
    errors.refuse_unknown_arguments(cls.__name__, names, known - {"self", "args", "kwargs", "module"})


def read_preflight(settings: object) -> bool | dict[str, Literal["off", "warn"]]:
    """Reads the argument ``preflight`` of a strategy; False stands for "off", as which YAML reads a bare ``off``.

    Raises:
        TypeError: It is neither a bool nor a mapping.
        ValueError: It names a check that there is not, or something else than "off" or "warn".
    """
    if isinstance(settings, bool):
        return settings
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

    Args:
        strategy: One of ours, with its cluster environment.
        tells_warnings: Whether to log what is no error; the check is made twice.

    Raises:
        PreflightError: What is wrong, the evidence, and the command to run.
    """
    if strategy.preflight is False:
        return
    facts = facts_of(strategy)
    findings = run_checks(LAUNCH_CHECKS, facts, settings_of(strategy))
    raise_errors([finding for finding in findings if tells_warnings or finding.status is Status.ERROR], facts)


def settings_of(strategy: Any) -> Settings:
    """Which checks are off, or warnings."""
    return {} if isinstance(strategy.preflight, bool) else strategy.preflight


def facts_of(strategy: Any) -> Facts:
    """What the checks may look at, before a process group is formed."""
    environment = strategy.cluster_environment
    devices = strategy.parallel_devices or []
    return Facts(
        devices=len(devices),
        num_nodes=strategy.num_nodes,
        environment=type(environment).__name__,
        started=_started_by_launcher(environment),
        rank=_rank_by_launcher(environment, len(devices)),
        accelerator=devices[0].type if devices else "",
    )


def _started_by_launcher(environment: Any) -> int | None:
    if not environment.creates_processes_externally:
        return None
    if isinstance(environment, LightningEnvironment):  # it knows the product only, unless a launcher set the size
        return env.WORLD_SIZE.integer()
    return int(environment.world_size())


def _rank_by_launcher(environment: Any, devices: int) -> int | None:
    if isinstance(environment, LightningEnvironment):
        return environment.node_rank() * devices + environment.local_rank()
    try:
        return int(environment.global_rank())
    except KeyError:  # a variable of the launcher is missing; the checks say which
        return None


def world_of(strategy: Any) -> World:
    """This process, as the strategy's cluster environment sees it."""
    return World(
        rank=strategy.global_rank,
        size=strategy.world_size,
        local_rank=strategy.local_rank,
        node_rank=strategy.node_rank,
        num_nodes=strategy.num_nodes,
    )


def meet(strategy: Any) -> ControlPlane:
    """Waits until all ranks are here; set-up begins when they are.

    A default group that is there already, of a stock fit or of the user, holds the port: they meet over its store.

    Raises:
        RendezvousError, PeerMissing: Some ranks have not come by the deadline; ``.ranks`` names them.
    """
    strategy.phases.enter(Phase.RENDEZVOUS)
    folder = None if strategy.lightning_module is None else strategy.home
    deadline = strategy.phases.patience_in(Phase.RENDEZVOUS)
    world, address = world_of(strategy), address_of(strategy)
    if dist.is_initialized() and not has_own_store() and not address.is_served_by_launcher:
        plane = connect_over(world, _compat.default_store(), deadline)
    else:
        plane = connect(world, address, deadline, folder)
    strategy.phases.enter(Phase.SETUP)
    return plane


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


def tell_launcher(home: Path) -> None:
    """Tells ``distplus launch``, where it has started this rank, in which folder the artefacts are."""
    if file := env.DISTPLUS_HOME_FILE.get():
        stage = Path(f"{file}.{os.getpid()}")
        stage.write_text(json.dumps({"home": str(home.absolute())}))
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
    return Address(
        host=environment.main_address,
        port=environment.main_port,
        is_served_by_launcher=env.TORCHELASTIC_USE_AGENT_STORE.get() == "True",
        job=env.TORCHELASTIC_RUN_ID.get() or env.SLURM_JOB_ID.get() or "",
        attempt=next(filter(None, (variable.integer() for variable in _ATTEMPTS)), 0),
    )
