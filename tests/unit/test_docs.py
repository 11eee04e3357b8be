"""The documentation is true where it can be run: its python blocks, its YAML, its links."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_distplus.checkpoint import Manifest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def test_the_module_in_testing_md_passes_as_it_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("testing.md", "python")
    (tmp_path / "module_of_testing_md.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))  # the ranks import it by its name
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("module_of_testing_md")
    tests = [name for name in vars(module) if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        getattr(module, name)()


def test_every_other_python_block_runs(tmp_path: Path) -> None:
    pages = {page.name: blocks(page.name, "python") for page in PAGES if page.name != "testing.md"}
    source = "\n".join(f"# {name}\n{block}" for name, found in pages.items() for block in found)
    command = [sys.executable, "-W", "ignore", "-c", source]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_manifest_in_checkpoints_md_is_one_that_can_be_read() -> None:
    (manifest,) = blocks("checkpoints.md", "json")
    assert Manifest.from_json(manifest).world_size == 8


def test_the_yaml_in_timeouts_md_is_a_strategy_with_its_deadlines(tmp_path: Path) -> None:
    from tests.unit.strategies.test_yaml import cli

    (block,) = blocks("timeouts.md", "yaml")
    (tmp_path / "config.yaml").write_text(block)
    timeouts = cli(["--config", str(tmp_path / "config.yaml")]).trainer.strategy.timeouts
    assert (str(timeouts.step), str(timeouts.checkpoint)) == ("0:02:00", "1:00:00")


def test_the_yaml_in_data_md_names_sources() -> None:
    from lightning_distplus.data import TokenDataModule

    (block,) = blocks("data.md", "yaml")
    data = TokenDataModule(**yaml.safe_load(block), seq_len=4, micro_batch_size=1)
    assert [source.split for source in data._sources["train"]] == [(0.0, 1.0), (0.0, 0.99)]
    assert [source.split for source in data._sources["val"]] == [(0.99, 1.0)]


@pytest.mark.parametrize(
    ("written", "option", "expected"),
    [
        ("{validation: 45m}", "--trainer.strategy.timeout.step=5m", ("0:05:00", "0:45:00")),
        ("{validation: 45m}", "--trainer.strategy.timeout=5m", ("0:05:00", "0:30:00")),
        ("45m", "--trainer.strategy.timeout.checkpoint=90m", ("0:10:00", "0:30:00")),
    ],
)
def test_file_and_command_line_mix_as_timeouts_md_says(
    written: str, option: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    from tests.unit.strategies.test_yaml import cli, config

    timeouts = cli(["--config", config(tmp_path, written), option]).trainer.strategy.timeouts
    assert (str(timeouts.step), str(timeouts.validation)) == expected


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(page for entry in navigation for page in entry.values()) == [page.name for page in PAGES]
    for page in PAGES:
        text = page.read_text()
        assert text.isascii()
        for name, anchor in re.findall(r"\]\(([\w-]+\.md)(?:#([\w-]+))?\)", text):
            headings = re.findall(r"^#+ (.*)$", (DOCS / name).read_text(), flags=re.MULTILINE)
            assert not anchor or anchor in [re.sub(r"\W+", "-", heading.lower()) for heading in headings]
