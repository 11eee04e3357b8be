"""Who hangs: progress marks of the training thread, and a thread beside it that names the rank which stands still.

Read in this order: ``marks`` (what the training thread says), ``stacks`` (where it stands), ``verdict`` (who is to
blame), ``watchdog`` (the thread that finds out, and the end of the process).
"""

from lightning_distplus.watchdog.marks import Mark, Marks
from lightning_distplus.watchdog.verdict import Evidence, Verdict
from lightning_distplus.watchdog.watchdog import Watchdog

__all__ = ["Evidence", "Mark", "Marks", "Verdict", "Watchdog"]
