"""The control plane: messages between ranks without a collective, which would hang exactly when it is needed.

Read in this order: ``rendezvous`` (how the ranks find one store), ``plane`` (barrier, gather, first error), ``record``
and ``gate`` (the one check of each step).
"""

from lightning_distplus.control.gate import StepGate
from lightning_distplus.control.plane import ControlPlane
from lightning_distplus.control.record import GateRecord, Wish
from lightning_distplus.control.rendezvous import Address, connect, connected, disconnect

__all__ = ["Address", "ControlPlane", "GateRecord", "StepGate", "Wish", "connect", "connected", "disconnect"]
