from __future__ import annotations

import re

import pytest

from tests.anchors import ANCHOR, ROOT, rewritten

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
STORIES = re.findall(r"^\*\*(.+?)\.\*\*\n\n((?:- .*\n)+)", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize(("title", "steps"), STORIES, ids=[title for title, _ in STORIES])
def test_a_story_is_told_in_five_files(title: str, steps: str) -> None:
    files = [found["path"] for found in ANCHOR.finditer(steps)]
    assert len(files) == len(set(files)) == len(steps.splitlines()) == 5, title


def test_there_are_five_stories_and_their_lines_are_true() -> None:
    assert len(STORIES) == 5
    assert rewritten(PAGE) == PAGE, "run: python -m tests.anchors"


def test_words_of_our_own_are_at_most_twenty() -> None:
    rows = re.findall(r"^\| (?!word )\w.*\|$", (ROOT / "docs/understand/glossary.md").read_text(), flags=re.MULTILINE)
    assert 10 <= len(rows) <= 20
