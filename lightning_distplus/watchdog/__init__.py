"""Who hangs: progress marks of the training thread, and a thread beside it that names the rank which stands still.

Read in this order: ``progress`` (what the training thread does), ``heartbeat`` (what the ranks tell each other),
``evidence`` (what is known of a rank: ``stacks``, ``flight_recorder``), ``verdict`` (who is to blame, and how that is
told), ``watchdog`` (the thread that finds out, tells and ends).
"""

from lightning_distplus.watchdog.evidence import Evidence
from lightning_distplus.watchdog.progress import Mark, Marks, Progress, Transfer
from lightning_distplus.watchdog.verdict import PlaceOfFailure, Verdict, find_verdicts, name_incident
from lightning_distplus.watchdog.watchdog import Watchdog

__all__ = [
    "Evidence",
    "Mark",
    "Marks",
    "PlaceOfFailure",
    "Progress",
    "Transfer",
    "Verdict",
    "Watchdog",
    "find_verdicts",
    "name_incident",
]
