from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lightning_distplus.preflight import Facts, Finding, Status
from lightning_distplus.preflight.agreement import compare, revision, state_of_process
from lightning_distplus.preflight.host import DEFECTS

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
