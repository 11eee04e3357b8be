"""The last lines of the terminal, as a person reads them: the verdict comes last, and nobody else is blamed.

Rows H1 and H2.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lightning_distplus.errors import ExitCode
from tests.faults.strangers import (
    EXCEPTION,
    HANG,
    NAN,
    line_of,
    run_script,
    script_of,
    terminal_of,
    verdict_at_the_end_of,
)  # fmt: skip
from tests.pairs import kept

NO_CHECKPOINT = {"max_epochs=3": "max_epochs=3, enable_checkpointing=False", "num_workers=2": "num_workers=0"}
TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node=2")
LAUNCHERS: dict[str, tuple[str, ...]] = {"python": (), "torchrun": TORCHRUN}
REDRAW = (
    "threading.Thread(daemon=True, target=lambda: [(self.trainer.progress_bar_callback.train_progress_bar.refresh(), "
    "time.sleep(1e-3)) for _ in iter(int, 1)]).start() if rank == 0 else time.sleep(10**6)"
)
FULL = {"DISTPLUS_TRACEBACK": "full"}
TOLD = {"DISTPLUS_ON_VERDICT": "cat > told.json"}


def told(folder: Path) -> tuple[str, list[int]]:
    """What the command of ``on_verdict`` has heard."""
    found = json.loads((folder / "told.json").read_text())
    return found["kind"], found["culprits"]


def lines_of(fault: str, says: str, launcher: str, code: int, folder: Path) -> tuple[list[str], list[str]]:
    """The lines of a script with this fault in front of its verdict, and those of the verdict, which comes last."""
    script = script_of(fault, 'timeout="4s"', changes=NO_CHECKPOINT)
    ended = run_script(folder, script, *LAUNCHERS[launcher], env=TOLD)
    lines = terminal_of(ended.stdout)
    block = verdict_at_the_end_of(lines)
    place = f"in training_step, train.py:{line_of(script, fault)}"
    assert re.fullmatch(rf"RANK 1 {says} \(host \S+, pid \d+\) {place}", block[0])
    assert ended.returncode == (code if launcher == "python" else 1)
    return lines[: -len(block)], block


@pytest.mark.parametrize("launcher", kept([*LAUNCHERS], ["torchrun"]))
def test_a_hang_ends_with_its_verdict(launcher: str, tmp_path: Path) -> None:
    lines, block = lines_of(HANG, "HANGS", launcher, ExitCode.HANG, tmp_path)
    assert block[1] == f"    {HANG}"
    assert lines.count("rank 1 stopped, exit 170") == 1
    assert told(tmp_path) == ("hang", [1])
    assert not any("Traceback" in line for line in lines + block)


@pytest.mark.soak
def test_a_bar_that_is_redrawn_meanwhile_does_not_come_behind_the_verdict(tmp_path: Path) -> None:
    ended = run_script(tmp_path, script_of(REDRAW, 'timeout="4s"', changes=NO_CHECKPOINT))
    verdict_at_the_end_of(terminal_of(ended.stdout))


@pytest.mark.parametrize("launcher", kept([*LAUNCHERS], ["python"]))
def test_an_exception_ends_with_its_verdict_and_is_shown_whole_once(launcher: str, tmp_path: Path) -> None:
    before, block = lines_of(EXCEPTION, "FAILED", launcher, ExitCode.PEER_LOST, tmp_path)
    assert "no checkpoint has been committed yet" in " ".join(block)
    assert before.count("ValueError: a bad sample,") == before.count("  of a long message") == 1
    assert sum(line.startswith("Traceback") for line in before + block) == 1
    assert any(re.match(r"    \.\.\. \d+ frames of .*lightning", line) for line in before)
    assert before.count("rank 0 stopped because of rank 1, exit 171") == 1
    assert told(tmp_path) == ("exception", [1])
    assert any(b"RANK 1 FAILED" in path.read_bytes() for path in tmp_path.rglob("events.out.*"))
    for rank in (0, 1):
        assert "Traceback" in (tmp_path / "distplus" / f"rank{rank:05d}.traceback").read_text()


def test_what_all_ranks_raise_alike_is_shown_once_and_without_frames(tmp_path: Path) -> None:
    changes = {**NO_CHECKPOINT, "DataLoader(Samples()": "DataLoader(TensorDataset(torch.rand(64, 4))"}
    ended = run_script(tmp_path, script_of("pass", 'timeout="4s"', changes=changes))
    lines = terminal_of(ended.stdout)
    assert ended.returncode == ExitCode.PREFLIGHT
    assert not any("Traceback" in line for line in lines)
    assert sum("content of the data set differs" in line for line in lines) == 1
    assert sum("PreflightError" in line for line in lines[-8:]) >= 1
    assert lines.count("rank 1 stopped with PreflightError, exit 173") <= 1


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["rank == 1 and sys.exit(0)", "if rank == 1: raise KeyboardInterrupt"])
def test_a_rank_that_leaves_the_others_without_an_error_is_named_without_frames_of_libraries(
    fault: str, tmp_path: Path
) -> None:
    lines = terminal_of(run_script(tmp_path, script_of(fault, changes=NO_CHECKPOINT)).stdout)
    assert not any("site-packages" in line for line in lines if line.startswith("  File"))
    if "exit" in fault:
        assert verdict_at_the_end_of(lines)[0].startswith("RANK 1 FAILED")
    else:
        assert lines[-1] == "KeyboardInterrupt"


@pytest.mark.soak
def test_all_tracebacks_are_shown_to_who_asks_for_them(tmp_path: Path) -> None:
    shown = run_script(tmp_path, script_of(EXCEPTION, changes=NO_CHECKPOINT), env=FULL).stdout
    assert shown.count("Traceback (most recent call last):") >= 3
    assert shown.rstrip().splitlines()[-1].startswith("  file:  ")


# -- a notebook, where Lightning forks the ranks -----------------------------------------------------------------------

# What a kernel does with a cell. It stands for one: the cells and their output are those of IPython.
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
shell.run_cell(open("first.py").read())
print("THE CELL HAS ENDED", flush=True)
shell.run_cell("raise ValueError('of the second cell')")
"""
FAULTS = {HANG: "RANK 1 HANGS", EXCEPTION: "RANK 1 FAILED", NAN: "RANK 1 DIFFERS in loss"}


@pytest.mark.parametrize("fault", kept(list(FAULTS), [EXCEPTION]), ids=FAULTS.get)
def test_a_cell_that_fails_ends_with_its_verdict_once(fault: str, tmp_path: Path) -> None:
    cell = script_of(fault, 'timeout="4s", start_method="fork"', changes=NO_CHECKPOINT)
    (tmp_path / "first.py").write_text(cell)
    ended = run_script(tmp_path, NOTEBOOK)
    first, _, second = ended.stdout.partition("THE CELL HAS ENDED")
    block = verdict_at_the_end_of(first.rstrip().splitlines())
    place = "" if fault == NAN else rf" .* in training_step, .*:{line_of(cell, fault)}"
    assert re.fullmatch(FAULTS[fault] + place, block[0]), ended.stdout
    assert "RANK" not in second
    assert "of the second cell" in second
