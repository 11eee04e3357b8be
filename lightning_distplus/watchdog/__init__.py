"""Who hangs: progress marks of the training thread, and a thread beside it that names the rank which stands still.

Read in this order: ``marks``, ``pace`` and ``transfer`` (what the training thread does), ``board`` and ``slate`` (what
the ranks tell each other), ``evidence`` and ``witness`` (what is known of a rank: ``stacks``, ``far_stacks``,
``flight_recorder``), ``wait_graph``, ``judging`` and ``verdict`` (who is to blame), ``failure`` (the verdict on a rank
that has raised or is gone), ``watchdog`` (the thread that finds out), ``telling`` and ``leaving`` (the word to others,
and the end of processes), ``aborting`` and ``timing_out`` (the end that C++ decides, and a collective that gives up);
``dumps`` reads the files that torch's recorder leaves behind, and has them judged by the same rules.
"""

from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.failure import place_of_failure
from lightning_distplus.watchdog.marks import Mark, Marks
from lightning_distplus.watchdog.pace import Progress
from lightning_distplus.watchdog.transfer import Transfer
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts, name_incident
from lightning_distplus.watchdog.watchdog import Watchdog

__all__ = [
    "Evidence",
    "Mark",
    "Marks",
    "Progress",
    "Transfer",
    "Verdict",
    "Watchdog",
    "find_verdicts",
    "name_incident",
    "place_of_failure",
]
