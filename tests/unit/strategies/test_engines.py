"""What stands between a Resilient strategy and Lightning's."""

from __future__ import annotations

import pytest

from lightning_distplus import ResilientDDP, ResilientDeepSpeed, ResilientFSDP, ResilientModelParallel


@pytest.mark.parametrize("strategy", [ResilientDDP, ResilientFSDP, ResilientModelParallel, ResilientDeepSpeed])
def test_at_most_two_classes_of_ours_stand_above_lightnings_parent(strategy: type) -> None:
    own = [one.__name__ for one in strategy.__mro__[1:] if one.__module__.startswith("lightning_distplus")]
    assert [own[0], len(own)] == ["ResilientStrategy", 2]
