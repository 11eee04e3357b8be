"""Checks that end in a remedy, before a run can start wrong. Importing this package loads no torch.

A check is a function that takes ``Facts`` and returns ``Finding``s; it looks, and changes nothing.
"""

from lightning_distplus.preflight.check import Check, Facts, Finding, Settings, Status, raise_errors, run_checks
from lightning_distplus.preflight.launch import LAUNCH_CHECKS

__all__ = ["LAUNCH_CHECKS", "Check", "Facts", "Finding", "Settings", "Status", "raise_errors", "run_checks"]
