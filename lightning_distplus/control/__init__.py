"""The control plane: messages between ranks without a collective, which would hang exactly when it is needed.

Read in this order: ``rendezvous`` (how the ranks find one store), ``line`` (keys, and waits that name who is missing),
``plane`` (the calls of all ranks), ``record`` and ``gate`` (the one check of each step), ``points`` with ``tally`` and
``shared_tally`` (the calls of Lightning in which all ranks take part), ``parting`` (the end of a run).
"""

from lightning_distplus.control.gate import StepGate
from lightning_distplus.control.parting import end_together, part
from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.control.points import Points, WatchedGate, active_points, beat_key
from lightning_distplus.control.record import GateRecord, Wish
from lightning_distplus.control.rendezvous import Address, connect, connect_over, connected, disconnect, has_own_store
from lightning_distplus.control.whereabouts import Point

__all__ = [
    "Address",
    "ControlPlane",
    "GateRecord",
    "Point",
    "Points",
    "StepGate",
    "WatchedGate",
    "Wish",
    "active_points",
    "beat_key",
    "connect",
    "connect_over",
    "connected",
    "disconnect",
    "end_together",
    "has_own_store",
    "part",
]
