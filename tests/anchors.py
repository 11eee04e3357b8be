"""The lines of ARCHITECTURE.md's stories: where each name stands. ``python -m tests.anchors`` writes them anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ANCHOR = re.compile(
    r"\[`(?P<shown>[\w/.]+)` `(?P<name>[\w.]+)`\]\(lightning_distplus/(?P<path>[\w/.]+)#L(?P<line>\d+)\)"
)


def lines_of(path: Path) -> dict[str, int]:
    """The line of each class and function of a module, by its qualified name."""
    return dict(_names(ast.parse(path.read_text()), ""))


def _names(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield prefix + child.name, child.lineno
            yield from _names(child, f"{prefix}{child.name}.")


def rewritten(text: str) -> str:
    """The text with the lines as they are today.

    Raises:
        KeyError: A file has no such name any more.
    """

    def anchor(found: re.Match[str]) -> str:
        path, name = found["path"], found["name"]
        line = lines_of(ROOT / "lightning_distplus" / path)[name]
        return f"[`{path}` `{name}`](lightning_distplus/{path}#L{line})"

    return ANCHOR.sub(anchor, text)


if __name__ == "__main__":
    page = ROOT / "ARCHITECTURE.md"
    page.write_text(rewritten(page.read_text()))
