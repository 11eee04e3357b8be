"""How a rank introduces itself, and what a peer on the same host can find out about it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from lightning_distplus.control.secret import words_of
from lightning_distplus.process import ProcessState, address_towards, boot_id, process_state, signal_of, start_time
from lightning_distplus.world import World

__all__ = ["Peer"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The process behind a rank."""

    host: str
    pid: int
    started: int | None = None
    """``process.start_time`` of the process."""
    boot: str = ""
    """``process.boot_id`` of its host."""
    address: str = ""
    """Of its host, on the way to the job's store."""

    @classmethod
    def of(cls, world: World, store_host: str = "") -> Peer:
        """This process."""
        return cls(
            host=world.host,
            pid=world.pid,
            started=start_time(world.pid),
            boot=boot_id(),
            address=address_towards(store_host) if store_host else "",
        )

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host."""
        return bool(self.boot) and self.boot == boot_id()

    @classmethod
    def from_json(cls, data: bytes | str) -> Peer:
        """Reads an introduction."""
        return cls(**words_of(data))

    def to_json(self) -> str:
        """The introduction."""
        return json.dumps(asdict(self))

    def state(self) -> ProcessState:
        """What this host's system says of it; UNKNOWN for a process of another host."""
        if not self.is_here:
            return ProcessState.UNKNOWN
        return process_state(self.pid, self.started)

    def ended_by(self) -> str:
        """The signal that has ended it, as long as its host's system knows."""
        return signal_of(self.pid, self.started) if self.is_here else ""

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"
