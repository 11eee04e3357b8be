"""Checks that end in a remedy, before a run can start wrong. Importing this package loads no torch.

A check is a function that takes ``Facts`` and returns ``Finding``s; it looks, and changes nothing. Read in this order:
``finding`` (what a check says), ``facts`` (what it is given), ``launch`` (the first ones), ``running`` (how they are
run).
"""

from lightning_distplus.preflight.facts import Facts
from lightning_distplus.preflight.finding import Finding, Status
from lightning_distplus.preflight.launch import LAUNCH_CHECKS
from lightning_distplus.preflight.running import Check, Settings, raise_errors, run_checks

__all__ = ["LAUNCH_CHECKS", "Check", "Facts", "Finding", "Settings", "Status", "raise_errors", "run_checks"]
