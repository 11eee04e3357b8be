"""What a run has: bytes of every rank, the deadline of its phase on every group, the state of its generators."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_distplus import _compat
from lightning_distplus.control import ControlPlane, connect_over, connected
from lightning_distplus.control.plane import MAX_MESSAGE_BYTES
from lightning_distplus.process import running_time
from lightning_distplus.timeouts import OnHang, Phase, Timeouts, group_timeout
from lightning_distplus.world import World

_DEFAULTS = Timeouts()
MAX_BYTES = 256 * MAX_MESSAGE_BYTES
"""Of a value that ``gather_bytes`` takes."""


# -- every rank's bytes on every rank ----------------------------------------------------------------------------------


def gather_bytes(strategy: Any, name: str, value: bytes, *, phase: Phase = Phase.CHECKPOINT) -> list[bytes]:
    """Every rank's value, in rank order; all ranks call it at the same point of the run.

    Under a Resilient strategy the messages travel through its control plane with the deadline of the phase,
    otherwise through the store of torch's default process group with the same deadline. No collective is issued.

    A value has at most 256 MiB; what is larger than 1 MiB goes in several messages.

    Raises:
        ValueError: The value is too large.
        PeerMissing, PeerFailed, PeerLost: A peer did not come; ``.ranks`` names it.
    """
    if len(value) > MAX_BYTES:
        raise ValueError(
            f"The {name} of this rank has {len(value)} bytes; at most {MAX_BYTES} are gathered from each rank. "
            "Let its state hold positions, not data."
        )
    plane, deadline = _plane_of(strategy, phase)
    if plane is None:
        return [value]
    sizes = [int(size) for size in plane.gather(f"{name}-size", str(len(value)).encode(), deadline)]
    values: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, max(sizes), MAX_MESSAGE_BYTES):
        for parts, piece in zip(
            values, plane.gather(name, value[start : start + MAX_MESSAGE_BYTES], deadline), strict=True
        ):
            parts.append(piece)
    return [b"".join(parts) for parts in values]


def _plane_of(strategy: Any, phase: Phase) -> tuple[ControlPlane | None, timedelta]:
    phases = getattr(strategy, "phases", None)
    if isinstance(phases, Phases) and (plane := connected()) is not None:
        return plane, phases.patience_in(phase)
    deadline = _DEFAULTS.deadline(phase)
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None, deadline
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    return connect_over(world, _compat.default_store(), deadline), deadline


# -- the phase a run is in, and its deadline on every process group ----------------------------------------------------

_TORCHS_PATIENCE = timedelta(minutes=30)  # torch.distributed's own default for a group


class Phases:
    """Gives the phase's deadline, plus a margin, to every process group, also to those that a library makes.

    A deadline may grow at any moment: a rank that waits longer than its peers harms nobody. It may shrink only where
    all ranks have just met; otherwise a rank that is early would time out on one that is still in the longer phase.

    Args:
        timeouts: The deadlines; None leaves torch's time-outs alone.
        on_hang: With ``"report"`` the groups wait for a day.
        on_left: Told each phase that has ended, and how long it was, in seconds.
    """

    def __init__(
        self,
        timeouts: Timeouts | None,
        on_hang: OnHang = "abort",
        on_left: Callable[[Phase, float], None] = lambda phase, seconds: None,
    ) -> None:
        self._timeouts = timeouts
        self._on_hang = on_hang
        self._on_left = on_left
        self._current = Phase.SETUP
        self._since = running_time()
        self._in_force = self._deadline_of(self._current)
        self._spared: list[dist.ProcessGroup] = []

    @property
    def current(self) -> Phase:
        """The phase in which this rank is."""
        return self._current

    @current.setter
    def current(self, phase: Phase) -> None:
        if phase is not self._current:
            left, since = self._current, self._since
            self._current, self._since = phase, running_time()
            self._on_left(left, self._since - since)

    @property
    def patience(self) -> timedelta:
        """How long a rank waits for its peers in this phase, at a gate and in any message of the control plane.

        As long as the process groups: the deadline and a margin, so that the verdict comes first; a day with
        ``on_hang="report"``. With ``timeout=None`` as long as torch waits.
        """
        return self.patience_in(self._current)

    def patience_in(self, phase: Phase) -> timedelta:
        """How long a rank waits for its peers in another phase."""
        if phase is Phase.RENDEZVOUS:  # nobody can report on a rank that is not there yet
            return (self._timeouts or _DEFAULTS).deadline(phase)
        if self._timeouts is None:
            return _TORCHS_PATIENCE
        return group_timeout(self._deadline_of(phase), self._on_hang)

    @property
    def deadline(self) -> timedelta | None:
        """The longest silence in this phase; None: no verdict is ever given."""
        return None if self._timeouts is None else self._deadline_of(self._current)

    @property
    def last_deadline(self) -> timedelta | None:
        """The longest silence at the end of a run, where nobody awaits this rank: no shorter than that of a step."""
        return None if self._timeouts is None else self._deadline_of(Phase.TEARDOWN)

    def _deadline_of(self, phase: Phase) -> timedelta:
        timeouts = self._timeouts or _DEFAULTS
        deadline = timeouts.deadline(phase)
        return max(deadline, timeouts.deadline(Phase.STEP)) if phase is Phase.TEARDOWN else deadline

    @property
    def group_timeout(self) -> timedelta | None:
        """What a group gets now; None where torch's default stays. Above the phase's, until all ranks have met."""
        return None if self._timeouts is None else group_timeout(self._in_force, self._on_hang)

    def expect_people(self) -> None:
        """From now on groups and the control plane wait for a day: somebody may stop a rank by hand.

        The verdict keeps its deadline. It knows a debugger, and a process that was paused; a group's time-out does not.
        """
        self._on_hang = "report"
        self._set()

    def replace(self, timeouts: Timeouts) -> None:
        """Takes other deadlines from now on. All ranks have just met."""
        self._timeouts = timeouts
        self._set()

    def enter(self, phase: Phase) -> None:
        """Enters a phase, from any rank at any moment; the groups' time-outs only grow."""
        self.current = phase
        if self._deadline_of(phase) > self._in_force:
            self._set()

    def enter_after_meeting(self, phase: Phase) -> None:
        """Enters a phase when all ranks have just met: the groups' time-outs grow or shrink."""
        self.current = phase
        if self._deadline_of(phase) != self._in_force:
            self._set()

    def _set(self) -> None:
        self._in_force = self._deadline_of(self._current)
        self.apply()

    def apply(self) -> None:
        """Sets the phase's time-out on every group of this process; call it again after groups were made."""
        if (timeout := self.group_timeout) is not None:
            for group in _compat.process_groups():
                if group not in self._spared:
                    _compat.set_group_timeout(group, timeout)

    def spare(self, group: dist.ProcessGroup) -> None:
        """Leaves a group the time-out that it has: what runs on it does not follow the phases."""
        self._spared.append(group)


# -- the state of every random number generator ------------------------------------------------------------------------


def rng_state() -> dict[str, bytes]:
    """The global generators of python, numpy and torch (CPU, and the current CUDA device where there is one).

    About 20 KB; ``weights_only``-safe.
    """
    numpys: dict[str, Any] = np.random.get_state(legacy=False)
    inner, gauss = numpys["state"], [numpys["has_gauss"], numpys["gauss"]]
    state = {
        "python": json.dumps(random.getstate()).encode(),
        "numpy": json.dumps([numpys["bit_generator"], inner["key"].tolist(), int(inner["pos"]), *gauss]).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return state


def set_rng_state(state: dict[str, bytes]) -> None:
    """Puts back what ``rng_state`` returned; a CUDA state is put back where a CUDA device is in use."""
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = json.loads(state["numpy"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
