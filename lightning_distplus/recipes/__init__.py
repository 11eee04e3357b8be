"""Training recipes: files for ``--config recipe:NAME``, the model that they train, and the maker of a small corpus.

A recipe is a base file for a model (``tinyllama_1.1b``), a file for a strategy (``fsdp``), or both
(``tinyllama_1.1b_fsdp``). Importing this package loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["PREFIX", "expand", "files", "models", "strategies"]

PREFIX = "recipe:"

_FOLDER = Path(__file__).parent
_FLAGS = ("--config", "-c")


def models() -> list[str]:
    """The names of the base files."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def strategies() -> list[str]:
    """The names of the files of strategies."""
    return sorted(path.stem for path in (_FOLDER / "strategies").glob("*.yaml"))


def files(name: str) -> list[Path]:
    """The files of a recipe, the base first.

    Raises:
        ValueError: There is no such recipe.
    """
    for model in models():
        strategy = name.removeprefix(f"{model}_")
        if name == model:
            return [_FOLDER / f"{model}.yaml"]
        if strategy != name and strategy in strategies():
            return [_FOLDER / f"{model}.yaml", _overlay(strategy)]
    if name in strategies():
        return [_overlay(name)]
    raise ValueError(
        f"There is no recipe {name!r}. Models: {', '.join(models())}. Strategies: {', '.join(strategies())}. "
        f"Write one of each as one name, such as {PREFIX}tinyllama_1.1b_fsdp, or give --config twice."
    )


def expand(arguments: Sequence[str]) -> list[str]:
    """Replaces each ``--config recipe:NAME`` by its files.

    Raises:
        ValueError: There is no such recipe.
    """
    expanded: list[str] = []
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if flag == "--config" and value.startswith(PREFIX):
            expanded += [f"--config={path}" for path in files(value.removeprefix(PREFIX))]
        elif argument.startswith(PREFIX) and expanded and expanded[-1] in _FLAGS:
            flag = expanded.pop()
            expanded += [word for path in files(argument.removeprefix(PREFIX)) for word in (flag, str(path))]
        else:
            expanded.append(argument)
    return expanded


def _overlay(strategy: str) -> Path:
    return _FOLDER / "strategies" / f"{strategy}.yaml"
