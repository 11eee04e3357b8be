"""How checks are run: by name, each switched off or made a warning at will, and none of them ends a run by failing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from lightning_distplus.errors import PreflightError
from lightning_distplus.preflight.facts import Facts
from lightning_distplus.preflight.finding import Finding, Status

__all__ = ["Check", "Settings", "raise_errors", "run_checks"]

log = logging.getLogger(__name__)

Check = Callable[[Facts], Iterable[Finding]]
"""``def my_check(facts: Facts) -> Iterable[Finding]``; it looks, changes nothing, and needs at most a second."""

Settings = Mapping[str, Literal["off", "warn"]]
"""By the name of a check: not run at all, or its errors are warnings."""


def run_checks(checks: Mapping[str, Check], facts: Facts, settings: Settings | None = None) -> list[Finding]:
    """Runs the checks in their order and names each finding after its check.

    A check that raises is a warning, not the end of the run: it is our bug, or that of its author.
    """
    findings: list[Finding] = []
    for name, check in checks.items():
        wish = (settings or {}).get(name)
        if wish == "off":
            continue
        try:
            found = list(check(facts))
        except Exception as error:
            found = [_broken(name, error)]
        findings += [_named(name, finding, is_softened=wish == "warn") for finding in found]
    return findings


def _named(name: str, finding: Finding, *, is_softened: bool) -> Finding:
    status = Status.WARNING if is_softened and finding.status is Status.ERROR else finding.status
    return replace(finding, check=name, status=status)


def _broken(name: str, error: Exception) -> Finding:
    return Finding(
        status=Status.WARNING,
        subject=f"The check {name!r} could not be made.",
        detail=f"{type(error).__name__}: {error}",
        remedy=f'If it always fails here, switch it off: preflight={{"{name}": "off"}}.',
    )


def raise_errors(findings: Iterable[Finding], facts: Facts) -> None:
    """Logs what is no error, and raises one ``PreflightError`` with everything that is.

    Raises:
        PreflightError: What is wrong, the evidence, the remedy, and who this process is.
    """
    findings = list(findings)
    for finding in findings:
        if finding.status is Status.WARNING:
            log.warning("preflight (%s): %s", finding.check, finding)
        elif finding.status in (Status.ADVICE, Status.NOTE):
            log.info("preflight (%s): %s", finding.check, finding)
    errors = [finding for finding in findings if finding.status is Status.ERROR]
    if errors:
        names = ", ".join(f'"{name}": "off"' for name in dict.fromkeys(error.check for error in errors))
        told = "\n".join(map(str, errors))
        raise PreflightError(f"{told}\n  here: {facts.describe()}\n  (if this is a mistake: preflight={{{names}}})")
