from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BY_NAME_ONLY, NAMES, main
from benchmarks.figures import Figure, bootstrap_ci95

ROOT = Path(__file__).parents[2]


def test_quick_benchmarks_print_their_figures_and_write_them_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "order_cost", "import_cost"]
    ended = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    document = json.loads((tmp_path / "figures.json").read_text())
    figures = {figure["name"]: figure for of_one in document["figures"].values() for figure in of_one}
    assert sorted(document["figures"]) == ["import_cost", "order_cost"]
    assert document["quick"] is True
    assert "torch" in document["machine"]
    assert all(name in ended.stdout for name in figures)
    assert figures["order, blocks of 4096"]["value"] > 0
    assert figures["order, memory"]["verdict"] == "yes"
    assert figures["torch.randperm, memory"]["value"] == 8
    assert figures["torch is loaded"]["verdict"] == "yes"


def test_every_module_that_measures_is_in_the_list() -> None:
    helpers = {"__init__", "__main__", "figures", "hang_job", "hang_torchft", "jobs", "rival_jobs", "rivals"}
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - helpers == {*NAMES, *BY_NAME_ONLY}


def test_an_unknown_benchmark_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["speed"])
    assert "there is no benchmark speed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "ci95", "target", "verdict"),
    [
        (5.0, None, None, ""),
        (5.0, None, 5.0, "yes"),
        (5.1, None, 5.0, "no"),
        (3.0, (2.0, 4.0), 5.0, "yes"),
        (6.0, (5.5, 7.0), 5.0, "no"),
        (4.0, (2.0, 6.0), 5.0, "within noise"),
    ],
)
def test_a_target_is_met_only_where_the_interval_says_so(
    value: float, ci95: tuple[float, float] | None, target: float | None, verdict: str
) -> None:
    assert Figure(name="x", value=value, unit="us", ci95=ci95, target=target).verdict == verdict


def test_the_interval_holds_the_median_and_is_the_same_again() -> None:
    values = [float(value) for value in range(101)]
    low, high = bootstrap_ci95(values)
    assert 30 < low < 50 < high < 70
    assert bootstrap_ci95(values) == (low, high)
