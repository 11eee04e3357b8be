"""Who hangs: progress marks of the training thread, and a thread beside it that names the rank which stands still.

Read in this order: ``progress`` (what the training thread does), ``heartbeat`` (what the ranks tell each other),
``evidence`` (what is known of a rank: ``stacks``, ``flight_recorder``), ``wait_graph`` and ``verdict`` (who is to
blame), ``watchdog`` (the thread that finds out, tells and ends); ``dumps`` reads the files that torch's recorder leaves
behind, and has them judged by the same rules.
"""

from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.progress import Mark, Marks, Progress, Transfer
from lightning_distplus.watchdog.verdict import Verdict, find_verdicts, name_incident, place_of_failure
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
