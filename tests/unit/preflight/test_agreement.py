from __future__ import annotations

import json
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_distplus.preflight import Facts, Finding, Settings, Status
from lightning_distplus.preflight.agreement import (
    Disagreement,
    compare,
    disagreements,
    revision,
    state_before_engine,
    state_of_process,
)
from lightning_distplus.preflight.host import DEFECTS
from lightning_distplus.world import World

NAMES = [f"rank {rank}" for rank in range(41)]


def test_a_field_that_only_one_rank_has_is_unset_on_the_others() -> None:
    statements = [{"variables.NCCL_ALGO": "Ring"}, {}, {}]
    (finding,) = compare(statements, NAMES)
    assert (finding.check, finding.status) == ("variables", Status.ERROR)
    assert finding.subject == "NCCL_ALGO differs on rank 0."
    assert finding.detail == "rank 0: Ring; the other 2 ranks: unset"


@pytest.mark.parametrize(
    ("field", "values", "status"),
    [
        ("seed", ["1", "2", "3"], Status.WARNING),  # seed + rank is a style
        ("seed", ["1", "1", "3"], Status.ERROR),
        ("variables.NCCL_SOCKET_IFNAME", ["eth0", "eth0", "ib0"], Status.WARNING),  # each host has its own
        ("versions.torch", ["2.13.0", "2.13.0", "2.12.0"], Status.ERROR),
    ],
)
def test_what_may_differ_is_a_warning(field: str, values: list[str], status: Status) -> None:
    (finding,) = compare([{field: value} for value in values], NAMES)
    assert finding.status is status


def test_a_check_is_left_out_or_made_a_warning_by_its_name() -> None:
    (finding,) = compare([{"versions.torch": "1"}, {"versions.torch": "2"}], NAMES)
    told = [finding.under("warn"), finding.under("off"), finding.under(None)]
    assert [one and one.status for one in told] == [Status.WARNING, None, Status.ERROR]
    note = Finding.note("two interfaces").under("warn")
    assert note is not None
    assert note.status is Status.NOTE


def test_many_odd_ranks_are_counted_and_long_values_are_cut() -> None:
    statements = [{"revision": "a" * 500 if rank % 2 else "b"} for rank in range(41)]
    (finding,) = compare(statements, NAMES)
    assert "and 12 more" in finding.detail
    assert len(finding.detail) < 2500


def test_the_revision_is_that_of_git(tmp_path: Path) -> None:
    def git(*words: str, at: Path = tmp_path) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(at), *identity, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert revision(tmp_path) in ("none", revision(tmp_path.parent))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    (tmp_path / "deep").mkdir()
    assert revision(tmp_path / "deep") == git("rev-parse", "HEAD")
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git("commit", "-q", "--allow-empty", "-m", "two", at=tmp_path / "tree")
    assert revision(tmp_path / "tree") == git("rev-parse", "HEAD", at=tmp_path / "tree") != revision(tmp_path)
    git("pack-refs", "--all")
    assert revision(tmp_path) == git("rev-parse", "HEAD")


def test_a_process_states_versions_seed_and_the_variables_of_the_communication_libraries(tmp_path: Path) -> None:
    variables = {"PL_GLOBAL_SEED": "7", "NCCL_ALGO": "Ring", "HOME": "/root"}
    state = state_of_process(Facts(variables=variables, folder=tmp_path))
    assert (state["seed"], state["variables.NCCL_ALGO"]) == ("7", "Ring")
    assert state["versions.torch"]
    assert not any("HOME" in name for name in state)


def test_a_defect_is_that_of_its_releases_and_variables_only() -> None:
    (defect,) = [defect for defect in DEFECTS if defect.package == "torch"]
    here, elsewhere = Facts(variables=defect.variables), Facts(variables={})
    assert defect.is_here({"torch": "2.13.1+cpu"}, here)
    assert not defect.is_here({"torch": "2.13.1+cpu"}, elsewhere)
    assert not defect.is_here({"torch": "2.14.0"}, here)
    assert not defect.is_here({}, here)


# -- what a rank states of its Trainer, and how ranks find the first entry in which they differ ------------------------


class Plane:
    """What the ranks, which are threads, gather."""

    def __init__(self, rank: int, posted: dict[tuple[str, int], list[Any]], barrier: threading.Barrier) -> None:
        self.world = World(rank=rank, size=barrier.parties, host="here", pid=rank)
        self._posted, self._barrier = posted, barrier
        self._calls = 0

    def gather_json(self, name: str, value: dict[str, Any], deadline: timedelta) -> list[dict[str, Any]]:
        self._calls += 1
        told = self._posted.setdefault((name, self._calls), [None] * self._barrier.parties)
        told[self.world.rank] = json.dumps(value)
        self._barrier.wait(10)
        return [json.loads(one) for one in told]


def found_by_all(statements: list[dict[str, Any]], settings: Settings | None = None) -> list[Finding]:
    barrier, posted = threading.Barrier(len(statements)), {}

    def compared(rank: int) -> list[Finding]:
        plane: Any = Plane(rank, posted, barrier)
        return disagreements(plane, statements[rank], timedelta(seconds=10), settings or {}, device=f"gpu {rank // 2}")

    with ThreadPoolExecutor(len(statements)) as pool:
        first, *others = pool.map(compared, range(len(statements)))
    assert all(one == first for one in others)
    return first


def test_of_a_long_list_the_first_entry_that_differs_is_told() -> None:
    alike = [f"parameter {place}" for place in range(1000)]
    odd = [*alike[:700], "parameter x", *alike[701:]]
    shared, model = found_by_all([{"model": alike, "seed": 1}, {"model": odd, "seed": 1}, {"model": alike, "seed": 1}])
    assert shared.check == "devices"
    assert isinstance(model, Disagreement)
    assert model.values == {0: "parameter 700", 1: "parameter x", 2: "parameter 700"}
    assert (model.field, model.ranks, model.status) == ("model", [1], Status.ERROR)
    assert model.detail == "rank 1 (host here, pid 1): parameter x; the other 2 ranks: parameter 700"
    (longer,) = found_by_all([{"model": alike}, {"model": [*alike, "buffer"]}], {"devices": "off"})
    assert isinstance(longer, Disagreement)
    assert (longer.values, longer.ranks) == ({0: "nothing", 1: "buffer"}, [0, 1])
    assert found_by_all([{"model": alike}] * 2, {"devices": "off"}) == []


class Module(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, 3)
        self.net.bias.requires_grad = False
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))
        self.lazy = torch.nn.LazyLinear(2, bias=False)
        self.meta = torch.nn.Parameter(torch.empty(5, device="meta"))


def test_a_rank_states_its_settings_its_model_in_order_and_what_may_differ() -> None:
    trainer: Any = Trainer(accelerator="cpu", logger=False, val_check_interval="00:00:01:30", max_steps=7)
    trainer.strategy.connect(Module(lr=0.5))
    trainer.state.fn = TrainerFn.FITTING
    state = state_before_engine(trainer)
    assert (state["trainer.max_steps"], state["trainer.time between validations"]) == (7, 90)
    assert state["model"] == [
        "parameter meta: float32 [5], trainable",
        "parameter net.weight: float32 [3, 2], trainable",
        "parameter net.bias: float32 [3], frozen",
        "parameter lazy.weight: float32 of no shape yet, trainable",
        "buffer scale: float64 [4]",
    ]
    assert [line.partition(":")[0] for line in state["initial_weights"]] == ["net.weight", "net.bias"]
    assert state["hyperparameters.lr of the module"] == 0.5
    statements = [state, {**state, "hyperparameters.lr of the module": 0.1, "initial_weights": ["net.weight: x"]}]
    weights, rate = found_by_all(statements, {"devices": "off"})
    assert isinstance(weights, Disagreement)
    assert (weights.check, weights.status, weights.values[1]) == ("initial_weights", Status.NOTE, "net.weight: x")
    assert (rate.check, rate.status) == ("hyperparameters", Status.WARNING)


def test_a_list_that_differs_behind_what_is_compared_one_by_one_differs() -> None:
    many = ["p"] * 50_002
    (behind,) = found_by_all([{"model": many}, {"model": [*many[:-1], "q"]}], {"devices": "off"})
    assert behind.check == "model"
