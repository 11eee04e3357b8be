"""The recipes of the package, and a process as the shell would start it in the root of the repository."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_distplus import env, recipes

__all__ = ["RECIPES", "ROOT", "in_root"]

ROOT = Path(__file__).parents[1]
RECIPES = [f"{model}_{strategy}" for model in recipes.models() for strategy in recipes.strategies()]


@pytest.fixture(autouse=True)
def in_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For every test of a module that imports this."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", ["distplus"])
    before = env.snapshot()
    yield
    env.restore(before)
