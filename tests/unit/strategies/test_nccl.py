from __future__ import annotations

from typing import Any

import pytest

from lightning_distplus.errors import PreflightError
from lightning_distplus.strategies.nccl import NcclSettings


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_BUFFSIZE", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_settings_become_variables_and_equal_ones_may_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    settings = NcclSettings(buffer_size_bytes=1 << 23, debug="INFO")
    assert settings.apply() == {"NCCL_BUFFSIZE": "8388608", "NCCL_DEBUG": "INFO"}
    assert settings.apply() == {"NCCL_BUFFSIZE": "8388608", "NCCL_DEBUG": "INFO"}
    assert NcclSettings().apply() == {}


def test_a_different_value_in_the_environment_is_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    with pytest.raises(PreflightError, match=r"NCCL_SOCKET_IFNAME=ib0.*eth0"):
        NcclSettings(interface="eth0", debug="WARN").apply()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"buffer_size_bytes": 1000}, "power of two"),
        ({"buffer_size_bytes": 3 << 20}, "power of two"),
        ({"interface": "^"}, "names interfaces"),
        ({"debug": "LOUD"}, "LOUD"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NcclSettings(**arguments)
