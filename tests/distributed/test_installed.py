from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import tarfile
import textwrap
from importlib.metadata import PathDistribution, metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

import lightning_distplus
from benchmarks import first_resume
from lightning_distplus.errors import ExitCode
from tests.faults.strangers import script_of
from tests.installed import DEEPSPEED, ROOT, Environment, build, environment, run
from tests.processes import wait_until

# What the script of a stranger tells in the end, in one piece.
TELLS = """
assert {folder!r} in lightning_distplus.__file__, lightning_distplus.__file__
sys.stdout.write(f"steps {{trainer.global_step}} {{'deepspeed' in sys.modules}}\\n")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Without DeepSpeed, which the soak has."""
    return environment(tmp_path_factory.mktemp("installed"), without=DEEPSPEED)


def script(folder: Path, name: str, at: Environment) -> str:
    tells = TELLS.format(folder=str(at.bin.parent))
    changes = {"max_epochs=3": "max_steps=3, logger=False", 'print("the script goes on")': tells}
    (folder / "train.py").write_text(script_of("pass", 'timeout="1m"', name, changes))
    return str(folder / "train.py")


def test_the_installed_command_tells_its_version(installed: Environment, tmp_path: Path) -> None:
    assert installed.run("distplus", "--version", cwd=tmp_path).stdout == f"distplus {lightning_distplus.__version__}\n"


README = (ROOT / "README.md").read_text()
TYPED = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", TYPED)
def test_every_line_of_the_readme_runs_outside_the_checkout(line: str, installed: Environment, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "make":  # in the checkout; the suite does not start itself
        run("make", "--dry-run", *words[1:], cwd=ROOT)
    else:
        assert words[0] == "distplus"
        printed = installed.run(*words, cwd=tmp_path).stdout
        if "--print_config" in words:
            assert "class_path: lightning_distplus.recipes.model.TinyLlama" in printed
        if "init" in words:
            assert (tmp_path / "tiny_cpu.yaml").exists()


def test_the_script_of_the_readme_is_killed_and_goes_on_as_it_says(installed: Environment, tmp_path: Path) -> None:
    """Row P8: a script of a user, a SIGKILL, the same command again."""
    lines = dict(first_resume.follow(first_resume.Shell(tmp_path, installed.bin)))
    assert next(iter(lines)) == "distplus init"


def test_the_launcher_of_the_readme_restarts_its_script_from_the_newest_checkpoint(
    installed: Environment, tmp_path: Path
) -> None:
    """Row P8: its line, typed as it stands there; its output differs in numbers only."""
    section = README.partition("## Three more tasks")[2]
    line = next(line for line in first_resume.typed_in(section) if "train.py" in line)
    shown = re.search(r"^distplus launch: rank 1, .*$", section, flags=re.MULTILINE)
    assert shown is not None
    shell = first_resume.Shell(tmp_path, installed.bin)
    shell.run("distplus init")
    launched = shell.start(line)
    wait_until(lambda: launched.poll() is not None or list(tmp_path.glob("checkpoints/*.ckpt")))
    ledger = (tmp_path / "distplus" / "events-rank00001.jsonl").read_text()
    os.kill(json.loads(ledger.partition("\n")[0])["pid"], signal.SIGKILL)
    told = launched.communicate(timeout=100)[0]
    assert launched.returncode == 0, told
    assert re.search("^" + re.sub(r"\d+", r"\\d+", re.escape(shown[0])) + "$", told, flags=re.MULTILINE), told


def test_the_rank_of_the_readme_that_differs_is_named(installed: Environment, tmp_path: Path) -> None:
    """Row D1: its lines, typed as they stand there, and the verdict below them."""
    shown = re.search(r"^(\$ sed .*\n\$ python nan.py)\n(RANK 1 (?:.*\n)+?)```", README, flags=re.MULTILINE)
    assert shown is not None
    lines, verdict = shown.groups()
    shell = first_resume.Shell(tmp_path, installed.bin)
    shell.run("distplus init")
    plant, train = first_resume.typed_in(lines)
    shell.run(plant)
    trained = shell.start(train)
    told = trained.communicate(timeout=100)[0]
    assert trained.returncode == ExitCode.DIVERGENCE, told
    assert verdict in told, told


@pytest.mark.soak
@pytest.mark.deadline(900)
def test_from_pip_install_to_the_first_resumed_run_takes_less_than_three_minutes() -> None:
    (*_, total) = first_resume.run(quick=True)
    assert total.verdict == "yes", total


def test_every_module_but_the_strategy_of_deepspeed_is_imported_without_deepspeed(
    installed: Environment, tmp_path: Path
) -> None:
    code = """
        import importlib, pkgutil
        import lightning_distplus

        for found in pkgutil.walk_packages(lightning_distplus.__path__, "lightning_distplus."):
            if not found.name.endswith("__main__"):
                importlib.import_module(found.name)
        for name in lightning_distplus.__all__:
            getattr(lightning_distplus, name)
        try:
            import deepspeed
        except ModuleNotFoundError:
            print("without")
        try:
            lightning_distplus.ResilientDeepSpeed()
        except Exception as error:
            print(error)
    """
    ended = installed.run("python", "-W", "ignore", "-c", textwrap.dedent(code), cwd=tmp_path)
    first, second = ended.stdout.splitlines()[-2:]
    assert first == "without"
    assert "pip install" in second
    assert "deepspeed" in second


@pytest.mark.soak  # in each commit the script of the README trains in the same environment
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp2"])
def test_two_ranks_train_without_deepspeed(name: str, installed: Environment, tmp_path: Path) -> None:
    ended = installed.run("python", script(tmp_path, name, installed), cwd=tmp_path)
    assert ended.stdout.count("steps 3 False") == 2
    assert {path.name for path in (tmp_path / "checkpoints").iterdir() if path.suffix == ".ckpt"}


def test_a_corpus_is_prepared_without_deepspeed(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("a text of a few words\n" * 50)
    installed.run("distplus", "prepare", "note.txt", "--output", "tokens", "--vocab_size", "300", cwd=tmp_path)
    assert (tmp_path / "tokens.bin").stat().st_size > 0


def test_the_archives_hold_the_package_and_what_it_says_of_itself(tmp_path: Path) -> None:
    wheel, sdist = (build(tmp_path / kind, kind) for kind in ("wheel", "sdist"))
    ours = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "lightning_distplus").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with ZipFile(wheel) as opened:
        inside = {name for name in opened.namelist() if ".dist-info/" not in name}
        (folder,) = {name.split("/")[0] for name in opened.namelist() if ".dist-info/" in name}
        opened.extractall(tmp_path)
    assert inside == ours
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert ours | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names

    said = PathDistribution(tmp_path / folder).metadata
    assert said["Version"] == lightning_distplus.__version__
    classifiers = said.get_all("Classifier") or []
    assert f"Programming Language :: Python :: {sys.version_info.major}.{sys.version_info.minor}" in classifiers
    needed = {re.split(r"[^\w.-]", line)[0] for line in said.get_all("Requires-Dist") or [] if "extra ==" not in line}
    assert {"torch", "lightning", "deepspeed"} <= needed
    assert not needed & {"pyarrow", "tokenizers", "transformers"}
    assert not {"Home-page", "Project-URL", "Author-email"} & set(said)  # no address is invented


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line) for line in versions[1:])
    assert f"[{lightning_distplus.__version__}]" in text
    sections = set(re.findall(r"^### (.*)$", text, flags=re.MULTILINE))
    assert sections <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.soak
@pytest.mark.deadline(900)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_fresh_environment_trains_with_what_pip_brings(kind: str, tmp_path: Path) -> None:
    fresh = Environment(tmp_path / "venv", with_pip=True)
    torch = f"torch=={metadata('torch')['Version'].partition('+')[0]}"  # the kind of wheel that is offered here
    built = build(tmp_path / "dist", kind)
    fresh.run("python", "-m", "pip", "install", "--quiet", torch, f"{built}[data]", cwd=tmp_path, timeout=800)
    fresh.run("python", "-m", "pip", "check", cwd=tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    ended = fresh.run("python", script(work, "ddp", fresh), cwd=work)
    assert ended.stdout.count("steps 3") == 2
    fresh.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "deepspeed", cwd=tmp_path)
    ended = fresh.run("python", script(work, "fsdp", fresh), cwd=work)
    assert ended.stdout.count("steps 3 False") == 2
