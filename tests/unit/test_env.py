from __future__ import annotations

import os

import pytest

from lightning_distplus import env


def test_every_public_variable_has_its_own_name_and_a_meaning() -> None:
    for name, variable in vars(env).items():
        if isinstance(variable, env.Variable):
            assert variable.name == name
            assert variable.meaning


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    assert env.RANK.get() is None
    assert env.RANK.integer() is None
    monkeypatch.setenv("RANK", "3")
    assert (env.RANK.get(), env.RANK.integer()) == ("3", 3)


def test_a_value_that_is_no_integer_is_refused_with_name_meaning_and_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match=r"WORLD_SIZE \(number of processes .* is 'two', which is not an integer"):
        env.WORLD_SIZE.integer()


def test_changes_last_for_a_block_also_when_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    seen = []

    def change_and_fail() -> None:
        with env.changed(RANK=None, LOCAL_RANK=5):
            seen.append((os.environ.get("RANK"), os.environ.get("LOCAL_RANK")))
            raise LookupError

    with pytest.raises(LookupError):
        change_and_fail()
    assert seen == [(None, "5")]
    assert os.environ["RANK"] == "3"
    assert "LOCAL_RANK" not in os.environ


def test_the_whole_environment_is_put_back() -> None:
    before = env.snapshot()
    try:
        env.Variable("NEW_HERE", "a test").set(7)
        assert os.environ["NEW_HERE"] == "7"
        del os.environ["PATH"]
    finally:
        env.restore(before)
    assert dict(os.environ) == before
