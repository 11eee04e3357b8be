"""What a run has left behind, as data, in a terminal, and as one HTML page."""

from lightning_distplus.report.page import PAGE, leave_page, render_page, write_page
from lightning_distplus.report.run import artefacts_of, describe_job, describe_runs, read_ledgers
from lightning_distplus.report.webhook import after_verdict

__all__ = [
    "PAGE",
    "after_verdict",
    "artefacts_of",
    "describe_job",
    "describe_runs",
    "leave_page",
    "read_ledgers",
    "render_page",
    "write_page",
]
