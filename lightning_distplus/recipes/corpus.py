"""Text that is on every machine with Python: sources as "code"; docstrings, licences and package texts as "prose".

``python -m lightning_distplus.recipes.corpus FOLDER [MEGABYTES]`` writes both.
"""

import argparse
import ast
import json
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

__all__ = ["DEFAULT_MB", "build_corpus", "main"]

CODE_BYTES = 16_000_000
PROSE_BYTES = 6_000_000
DEFAULT_MB = (CODE_BYTES + PROSE_BYTES) / 1e6
MIN_CHARACTERS = 200  # a shorter text teaches nothing

_PROSE_SUFFIXES = {".md", ".rst", ".txt"}
_PROSE_NAMES = ("METADATA", "LICENSE", "LICENCE", "NOTICE", "COPYING", "AUTHORS")


def main(arguments: Sequence[str]) -> int:
    """Writes the corpus into the folder that the first argument names; a second one limits its megabytes."""
    parser = argparse.ArgumentParser(prog="python -m lightning_distplus.recipes.corpus")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="gets code.jsonl and prose.jsonl")
    parser.add_argument("megabytes", type=float, nargs="?", default=DEFAULT_MB, metavar="MEGABYTES")
    told = parser.parse_args(arguments)
    paths = build_corpus(told.folder, told.megabytes)
    print(*paths.values(), sep="\n")
    return 0


def build_corpus(folder: Path, megabytes: float = DEFAULT_MB) -> dict[str, Path]:
    """Writes ``code.jsonl`` and ``prose.jsonl``, the same for the same installed packages; returns their paths."""
    share = megabytes / DEFAULT_MB
    folder.mkdir(parents=True, exist_ok=True)
    sources = {"code": (_python_texts(), int(CODE_BYTES * share)), "prose": (_prose_texts(), int(PROSE_BYTES * share))}
    paths = {}
    for name, (texts, limit) in sources.items():
        paths[name] = folder / f"{name}.jsonl"
        _write_jsonl(paths[name], texts, limit)
    return paths


def _write_jsonl(path: Path, texts: Iterable[str], limit: int) -> None:
    """Ends before the text that would exceed ``limit`` bytes."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            size += len(text.encode())
            if size > limit:
                break
            file.write(json.dumps({"text": text}) + "\n")


def _python_texts() -> Iterator[str]:
    yield from _texts_of(lambda path: path.suffix == ".py")


def _prose_texts() -> Iterator[str]:
    """First the texts that come with packages, then docstrings: both sorted by path."""
    yield from _texts_of(lambda path: path.suffix in _PROSE_SUFFIXES or path.name.startswith(_PROSE_NAMES))
    for source in _python_texts():
        yield from filter(_is_long_enough, _docstrings(source))


def _texts_of(accept: Callable[[Path], bool]) -> Iterator[str]:
    seen: set[Path] = set()  # where Python is not a virtual environment, one folder lies inside the other
    for root in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")):
        for path in sorted(path for path in Path(root).rglob("*") if accept(path) and path.is_file()):
            if path in seen:
                continue
            seen.add(path)
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # the standard library tests its parser with files that are no UTF-8
            if _is_long_enough(text):
                yield text


def _docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in other people's sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


def _is_long_enough(text: str) -> bool:
    return len(text) >= MIN_CHARACTERS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
