from __future__ import annotations

import inspect
import re

import pytest

from lightning_distplus import errors
from lightning_distplus.errors import DistplusError, DivergenceError, ExitCode, PeerError, PeerLost

CLASSES = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
ALL = [getattr(errors, name) for name in sorted(CLASSES - {"ExitCode"})]


def test_the_tree_in_the_docstring_is_the_tree_of_the_code() -> None:
    drawn = re.findall(r"^(?:[|`\- ]*)(\w+)(?: \((\w+)\))? {2,}.*?(\d+)?$", errors.__doc__ or "", re.MULTILINE)
    found = {name: (base, code) for name, base, code in drawn if name in CLASSES}
    assert set(found) == CLASSES - {"ExitCode"}
    for name, (base, code) in found.items():
        error = getattr(errors, name)
        if base:
            assert base in {parent.__name__ for parent in error.__mro__}
        if code:
            assert error.exit_code == int(code)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error_has_an_exit_code_and_one_root(error: type[BaseException]) -> None:
    assert isinstance(error.exit_code, ExitCode)
    assert issubclass(error, DistplusError | SystemExit)
    assert inspect.getdoc(error)


def test_mistakes_of_the_user_are_value_errors() -> None:
    for name in ("PreflightError", "CheckpointMismatch", "DatasetMismatch"):
        assert issubclass(getattr(errors, name), ValueError)


def test_a_peer_error_names_each_rank_once_and_in_order() -> None:
    error = PeerLost("gone", [3, 1, 3])
    assert error.ranks == [1, 3]
    assert str(error) == "gone"
    assert PeerError("unknown").ranks == []


def test_a_divergence_carries_field_and_values() -> None:
    error = DivergenceError("differ", ranks=[2, 1], field="epoch", values={1: 0, 2: 5})
    assert (error.ranks, error.field, error.values, error.exit_code) == ([1, 2], "epoch", {1: 0, 2: 5}, 172)
    assert DivergenceError("differ").values == {}


def test_exit_codes_are_those_of_the_contract_and_three_are_worth_a_retry() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0, "FAILED": 1, "PREEMPTED": 143, "HANG": 170, "PEER_LOST": 171, "DIVERGENCE": 172, "PREFLIGHT": 173,
        "NO_PROGRESS": 174,
    }  # fmt: skip
    assert [int(code) for code in ExitCode if code.is_retryable] == [143, 170, 171]
