"""Every row of the failure table has a test that names it, and every file of ``tests/faults`` is named by its rows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
LAST = {"S": 13, "H": 14, "D": 15, "R": 16, "C": 11, "P": 8}
ROWS = {f"{letter}{number}" for letter, last in LAST.items() for number in range(1, last + 1)}


def rows_in(text: str) -> set[str]:
    """Those behind the word "row": one, several, or from one to another."""
    found: set[str] = set()
    for words in re.findall(r"\b[Rr]ows? ((?:[A-Z]\d+(?:, | and | to |-)?)+)", text):
        found |= set(re.findall(r"[A-Z]\d+", words))
        for letter, first, last in re.findall(r"([A-Z])(\d+)(?: to |-)[A-Z](\d+)", words):
            found |= {f"{letter}{number}" for number in range(int(first), int(last))}
    return found


def rows_of_name(path: Path) -> set[str]:
    """Those in the name of a fault test: ``test_h1_h2_last_lines`` or ``test_d1_to_d15_quiet_runs``."""
    (ids,) = re.findall(r"^test_((?:(?:[a-z]\d+|to)_)+)", path.stem)
    return rows_in("rows " + ids.upper().replace("_TO_", " to ").replace("_", ", "))


def test_every_row_has_a_test_and_no_row_is_unknown() -> None:
    named = {path: rows_in(path.read_text()) for path in TESTS.rglob("test_*.py") if path != Path(__file__)}
    assert ROWS - set().union(*named.values()) == set()
    assert {path.name: rows - ROWS for path, rows in named.items() if rows - ROWS} == {}


def test_every_fault_test_has_the_rows_of_its_name() -> None:
    for path in (TESTS / "faults").glob("test_*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert rows_in(docstring) == rows_of_name(path), path.name


def test_rows_are_read_as_people_write_them() -> None:
    rows = {"H1", "H2", "H3", "S1", "S2", "S3", "R5"}
    assert rows_in("Rows H1 to H3 and R5, a row S2; (rows S1-S3). Throws C4") == rows
