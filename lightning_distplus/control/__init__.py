"""The control plane: messages between ranks without a collective, which would hang exactly when it is needed.

Read in this order: ``rendezvous`` (how the ranks find one store), ``plane`` (keys, waits that name who is missing, the
calls of all ranks), ``exchange`` (small records of all ranks: the gate of each step), ``collective_check`` (the calls
of Lightning in which all ranks take part), ``first_error``, and ``secret`` (who may say what ends a job).
"""

from lightning_distplus.control.collective_check import Point, Points, Waits, active_points, beat_key
from lightning_distplus.control.exchange import GateRecord, StepGate, Wish
from lightning_distplus.control.plane import ControlPlane, Watcher
from lightning_distplus.control.rendezvous import Address, connect, connect_over, connected, disconnect, has_own_store

__all__ = [
    "Address",
    "ControlPlane",
    "GateRecord",
    "Point",
    "Points",
    "StepGate",
    "Waits",
    "Watcher",
    "Wish",
    "active_points",
    "beat_key",
    "connect",
    "connect_over",
    "connected",
    "disconnect",
    "has_own_store",
]
