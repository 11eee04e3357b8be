"""What a run has left behind, as data, in a terminal, and as one HTML page."""

from lightning_distplus.report.page import PAGE, after_verdict, leave_page, render_page, write_page
from lightning_distplus.report.run import artefacts_of, describe_job, describe_runs, read_ledgers

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
