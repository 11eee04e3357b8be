"""The documentation is true where it can be run: its python blocks, its YAML, its links, its lists of names."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_distplus
from lightning_distplus import env, errors, recipes
from lightning_distplus.checkpoint import Manifest
from lightning_distplus.cli.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
MOST_WORDS = 16_000  # without the reference


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def test_the_module_of_the_guide_to_testing_passes_as_it_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = blocks("guides/testing.md", "python")
    (tmp_path / "module_of_the_guide.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))  # the ranks import it by its name
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module("module_of_the_guide")
    tests = [name for name in vars(module) if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        getattr(module, name)()


def test_every_other_python_block_runs(tmp_path: Path) -> None:
    found = {page: blocks(page, "python") for page in PAGES if page != "guides/testing.md"}
    source = "\n".join(f"# {page}\n{block}" for page, parts in found.items() for block in parts)
    command = [sys.executable, "-W", "ignore", "-c", source]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=55, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_manifest_is_one_that_can_be_read() -> None:
    (manifest,) = blocks("reference/manifest.md", "json")
    assert Manifest.from_json(manifest).world_size == 8


def test_the_yaml_of_the_timeouts_is_a_strategy_with_its_deadlines(tmp_path: Path) -> None:
    from tests.unit.strategies.test_yaml import cli

    (block,) = (found for found in blocks("reference/yaml.md", "yaml") if "timeout" in found)
    (tmp_path / "config.yaml").write_text(block)
    timeouts = cli(["--config", str(tmp_path / "config.yaml")]).trainer.strategy.timeouts
    assert (str(timeouts.step), str(timeouts.checkpoint)) == ("0:02:00", "1:00:00")


def test_the_yaml_of_the_token_files_names_sources() -> None:
    from lightning_distplus.data import TokenDataModule

    (block,) = blocks("reference/token-files.md", "yaml")
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
def test_file_and_command_line_mix_as_the_page_on_yaml_says(
    written: str, option: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    from tests.unit.strategies.test_yaml import cli, config

    timeouts = cli(["--config", config(tmp_path, written), option]).trainer.strategy.timeouts
    assert (str(timeouts.step), str(timeouts.validation)) == expected


# -- the site ----------------------------------------------------------------------------------------------------------


def in_navigation(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else in_navigation(target)


def slug(heading: str) -> str:
    """As Python-Markdown's toc makes one."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(in_navigation(navigation)) == sorted(PAGES)
    for page, text in PAGES.items():
        assert text.isascii(), page
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            other = str((DOCS / page).parent.joinpath(path).resolve().relative_to(DOCS)) if path else page
            headings = re.findall(r"^#+ (.*)$", PAGES[other], flags=re.MULTILINE)
            assert not anchor or anchor in map(slug, headings), f"{page}: {target}"


def test_the_guides_can_be_read_in_an_hour() -> None:
    prose = [
        re.sub(r"```.*?```|\]\([^)]*\)", "", text, flags=re.DOTALL)
        for page, text in PAGES.items()
        if not page.startswith("reference/")
    ]
    assert sum(len(re.findall(r"[^\s|]*\w[^\s|]*", text)) for text in prose) <= MOST_WORDS


def test_every_file_that_the_stories_name_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGES["understand/stories.md"])
    assert len(named) >= 5 * 5
    assert [name for name in named if not (ROOT / "lightning_distplus" / name).is_file()] == []


# -- the reference -----------------------------------------------------------------------------------------------------


def test_every_environment_variable_is_listed_with_its_meaning() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGES["reference/environment.md"], flags=re.MULTILINE))
    assert rows == {value.name: value.meaning for value in vars(env).values() if isinstance(value, env.Variable)}


def test_every_kind_of_event_is_listed() -> None:
    written = re.compile(r'(?:\bnote|_note|events\.write)\(\s*(?:home, number, )?"([a-z_]+)",')
    sources = (path.read_text() for path in (ROOT / "lightning_distplus").rglob("*.py"))
    kinds = {kind for source in sources for kind in written.findall(source)} - {"kind"}
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGES["reference/events.md"], flags=re.MULTILINE))
    assert kinds - listed == set()
    assert len(kinds) > 15


def test_every_exit_code_and_error_is_listed() -> None:
    page = PAGES["reference/exit-codes.md"]
    rows = set(re.findall(r"^\| (\d+) \| `(\w+)`", page, flags=re.MULTILINE))
    assert rows == {(str(int(code)), code.name) for code in errors.ExitCode}
    assert [name for name, value in vars(errors).items() if is_error(value) and name not in page] == []


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, errors.DistplusError)


@pytest.mark.parametrize("command", [name for name, one in COMMANDS.items() if not one.keeps_name] + ["launch slurm"])
def test_the_help_of_a_command_is_on_its_page(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "94")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    (section,) = re.findall(rf"^## distplus {command}\n(.*?)(?=^## |\Z)", PAGES["reference/cli.md"], re.DOTALL | re.M)
    assert capsys.readouterr().out.strip() in section


def test_every_recipe_is_listed() -> None:
    page = PAGES["reference/yaml.md"]
    assert [name for name in (*recipes.models(), *recipes.strategies()) if f"`{name}`" not in page] == []


def documented(module: str, names: list[str]) -> Iterator[str]:
    """Public names, and public methods of public classes, without a docstring."""
    for name in names:
        value = getattr(importlib.import_module(module), name)
        if not (inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value)):
            continue
        if not (value.__doc__ or "").strip():
            yield f"{module}.{name}"
        if inspect.isclass(value):
            for method, code in vars(value).items():
                function = getattr(code, "fget", None) or getattr(code, "__func__", code)
                if not method.startswith("_") and inspect.isfunction(function) and not inspect.getdoc(function):
                    yield f"{module}.{name}.{method}"


PUBLIC = ["", ".checkpoint", ".data", ".divergence", ".errors", ".events", ".preflight", ".recipes", ".testing"]


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_a_docstring(package: str) -> None:
    module = f"lightning_distplus{package}"
    assert list(documented(module, importlib.import_module(module).__all__)) == []


def test_every_name_of_the_contract_is_on_a_page_of_the_api() -> None:
    pages = "\n".join(text for page, text in PAGES.items() if page.startswith("reference/api/"))
    shown = set(re.findall(r"^::: lightning_distplus\.(\w+)$", pages, flags=re.MULTILINE))
    in_errors = {name for name in lightning_distplus.__all__ if name in errors.__all__}
    assert set(lightning_distplus.__all__) - in_errors <= shown


@pytest.mark.soak
@pytest.mark.deadline(300)
def test_the_site_is_built_without_torch_and_asks_nobody(tmp_path: Path) -> None:
    """Needs an index of packages; the environment of ``make docs`` has neither torch nor this package."""
    variables = {name: value for name, value in env.snapshot().items() if not name.startswith("MAKE")}
    python = tmp_path / "venv" / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(tmp_path / "venv")],
        [str(python), "-m", "pip", "install", "--quiet", "-r", str(DOCS / "requirements.txt")],
        [str(python), "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
    ):
        ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not list((tmp_path / "venv").rglob("torch"))
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text()
        assert len(text.encode()) < 300_000, page
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="?(?:https?:)?//', text), page
