"""What a person reads when a run ends: the verdict, once per host and last; one line from every other rank.

Each rank writes its whole traceback to ``rank00000.traceback``. On the terminal the rank that raised shows its own
frames, a rank that stopped because of another one says so in a line, and the lowest rank of the host that still runs
waits for the others there and prints the verdict. Below ``distplus launch`` the launcher does,
after its own lines.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.text import Text

from lightning_distplus import _compat, env
from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import DistplusError, ExitCode, message_of, show_errors_with, stop_showing_errors_with
from lightning_distplus.events import ledger_files, read_ledger
from lightning_distplus.watchdog.stacks import fold_traceback, ignore_signal
from lightning_distplus.watchdog.verdict import MOST_LINES, Verdict, find_verdicts
from lightning_distplus.world import name_ranks

if TYPE_CHECKING:
    from lightning_distplus.watchdog.watchdog import Telling

__all__ = ["Ending", "describe_next", "duration_in_words", "print_block", "show_after_cells", "shown_mark"]

_LABEL = re.compile(r"  (\w+): ")


# -- the block that comes last -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Committed:
    """The newest checkpoint of a run, as its ledger tells."""

    path: str = ""
    step: int = 0
    at: float = 0.0
    """Unix time of the commit; of the start of the run where nothing has been committed."""


def describe_next(folder: Path, run_id: str, global_step: int, ended_at: float) -> str:
    """Tells how to go on, from which checkpoint, and what is lost.

    Args:
        folder: The artefacts of the run.
        run_id: ``ControlPlane.run_id``.
        global_step: The optimizer step at which the run ended.
        ended_at: Unix time of that, seconds.
    """
    last = _last_commit(folder, run_id)
    lost = f"{max(global_step - last.step, 0)} steps, {duration_in_words(ended_at - last.at)} of work lost"
    if not last.path:
        begun = f"from step {last.step} again" if last.step else "at the beginning"
        return f"no checkpoint has been committed yet; the same command starts {begun} ({lost})"
    how = 'the same command with fit(..., ckpt_path="auto")'
    if Path(sys.argv[0]).name in ("distplus", "__main__.py"):  # the launcher chooses the newest one by itself
        how = "the same command" if sys.argv[1:2] == ["launch"] else "the same command with --ckpt_path auto"
    return f"{how} goes on from {last.path} (step {last.step}; {lost})"


def _last_commit(folder: Path, run_id: str) -> _Committed:
    files = ledger_files(folder, has_launcher=False)
    lowest = [file for file in files if file.name[:16] == files[0].name[:16]]  # the ranks commit together
    events = [one for file in lowest for one in read_ledger(file) if one["run_id"] == run_id]
    last = _Committed(at=events[0]["time"] if events else time.time())
    for event in events:
        if event["kind"] == "saved" or event["kind"] == "loaded":
            last = _Committed(path=event["path"], step=event["global_step"] or 0, at=event["time"])
        elif event["kind"] == "start" and not last.path:
            last = _Committed(at=event["time"])
    return last


def duration_in_words(seconds: float) -> str:
    """Seconds in the unit that a person would say: ``"12 s"``, ``"14 min"``, ``"2 h 30 min"``."""
    seconds = max(round(seconds), 0)
    if seconds < 120:
        return f"{seconds} s"
    minutes, hours = seconds // 60, seconds // 3600
    return f"{minutes} min" if hours < 2 else f"{hours} h {minutes % 60} min"


def print_block(verdict: Verdict, path: Path, stream: TextIO | None = None) -> None:
    """Prints a verdict and what to do next, 30 lines at most; coloured and as wide as the terminal, where one is."""
    stream = stream or sys.stderr
    console = Console(file=stream, soft_wrap=True, highlight=False)
    goes_on = describe_next(path.parent, verdict.run_id, verdict.global_step, path.stat().st_mtime)
    lines = [*verdict.render().splitlines(), f"  next:  {goes_on}", f"  file:  {path}"]
    wrapped = [part for line in lines for part in _wrap(line, console.width)] if console.is_terminal else lines
    if len(wrapped) > MOST_LINES:  # long paths: better broken by the terminal than cut off here
        wrapped = lines
    text = Text("\n")
    for number, line in enumerate(wrapped):
        text.append(f"{line}\n", style="bold red" if number == 0 else "bold" if _LABEL.match(line) else "")
    with suppress(OSError, ValueError):
        console.print(text, end="")
        stream.flush()


def _wrap(line: str, width: int) -> list[str]:
    label = _LABEL.match(line)
    if label is None or label[1] == "file" or len(line) <= width:
        return [line]
    return textwrap.wrap(
        line, width, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False, tabsize=1
    )


# -- the end of this process -------------------------------------------------------------------------------------------


_at_exit: list[multiprocessing.util.Finalize] = []
"""Shows the verdict on the last run where no hook is asked: in a script that goes on."""


def _cancel_at_exit() -> None:
    while _at_exit:
        _at_exit.pop().cancel()


def _notebook() -> Any:
    """The shell of IPython that runs this process or has forked it, as a notebook's does; None elsewhere."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


_after_cells: list[Callable[[Any], None]] = []


def show_after_cells(folder: Path) -> None:
    """In a notebook, a cell that fails ends with the verdict that its ranks, which are forked from it, have left.

    Args:
        folder: Where the artefacts of the run are.
    """
    if (shell := _notebook()) is None:
        return
    began_at = time.time()

    def end_cell(result: Any) -> None:
        with suppress(Exception):  # the error of the cell has been shown
            for told in [] if result.success else find_verdicts(folder, since=began_at)[-1:]:
                shown_mark(told["path"]).touch(exist_ok=False)
                print_block(Verdict.from_json(told["path"].read_bytes()), told["path"])

    while _after_cells:  # of an earlier Trainer
        shell.events.unregister("post_run_cell", _after_cells.pop())
    shell.events.register("post_run_cell", end_cell)
    _after_cells.append(end_cell)


def shown_mark(verdict: Path) -> Path:
    """The file that is there once a verdict has been shown."""
    return verdict.with_name(f".{verdict.stem}.shown")


def _silence_stdout() -> None:
    """Lets nothing more of this process, which ends, reach standard output, where a thread may redraw a bar."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        if sys.stdout.fileno() == 1:  # else a notebook's, or one that somebody reads
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Ending:
    """Shows how the run ends on this rank.

    Args:
        plane: The control plane, which knows the first error of the job.
        telling: Knows the verdict, and who speaks for this host.
        on_shown: Told the file of the verdict once it is printed; it takes little time and never raises.
    """

    def __init__(
        self, plane: ControlPlane, telling: Telling, on_shown: Callable[[Path], None] = lambda path: None
    ) -> None:
        self._plane = plane
        self._rank = plane.world.rank
        self._telling = telling
        self._on_shown = on_shown
        self._is_over = False

    def arm(self) -> None:
        """From now on, uncaught errors of this process are shown here."""
        self._is_over = False
        show_errors_with(self)
        _compat.stop_child_observer()
        _cancel_at_exit()  # of an earlier run
        _at_exit.append(multiprocessing.util.Finalize(None, self.show_block, kwargs={"waits": False}, exitpriority=0))

    def disarm(self) -> None:
        """The run has ended well: nothing is left to show."""
        stop_showing_errors_with(self)
        self._is_over = True
        _cancel_at_exit()  # it would hold what this run has held

    @property
    def is_full(self) -> bool:
        """Whether the user wants every traceback on the terminal."""
        return env.DISTPLUS_TRACEBACK.get() == "full"

    def show(self, error: BaseException, printed: str) -> None:
        """Shows an uncaught error; the verdict, or what all ranks raise alike, comes last.

        Args:
            error: The error.
            printed: What the hooks of others have printed of it.
        """
        if not hasattr(sys, "ps1"):  # this process ends
            ignore_signal(signal.SIGTERM)  # which an agent sends to the others as soon as one rank has ended
        own = error if isinstance(error, DistplusError) else error.__cause__
        known = own if isinstance(own, DistplusError) else None
        if self.is_full:
            text = ""
        else:
            path = self._telling.leave_traceback(printed)
            text = fold_traceback(printed) if known is None else self._line(known.exit_code, known)
            if known is None and path is not None:
                text += f"\n(whole traceback: {path})"
        found = self._find_verdict()
        if known is None:
            _say(text)
        elif found is None:
            if self._telling.speaks_for_host():
                self._telling.await_others()
                text = "" if self.is_full else f"\n{type(known).__name__}: {message_of(known)}"
            _say(text)
        elif not self._telling.is_shown(found[1]) and not self._says_all(found[0]):  # the verdict comes last
            _say(text)
        self.show_block()

    def leave(self, code: ExitCode) -> None:
        """Shows the end of a process that ends now, without its training thread."""
        ignore_signal(signal.SIGTERM)  # as above
        _silence_stdout()
        if self.show_block():
            return
        found = self._find_verdict()
        if found is None or not self._telling.is_shown(found[1]):
            _say(self._line(code))

    def _find_verdict(self) -> tuple[Verdict, Path] | None:
        """The verdict on this run; None where there is none, or where it cannot be read."""
        with suppress(Exception):  # the process ends
            return self._telling.find_verdict()
        return None

    def _says_all(self, verdict: Verdict) -> bool:
        """Whether the verdict, which this rank prints, leaves nothing for its own line."""
        return not self._culprits() and self._telling.speaks_for_host(verdict.silent)

    def _culprits(self) -> list[int]:
        """The other ranks because of which this one stops."""
        first = self._plane.first_error
        return [] if first is None else [rank for rank in first.ranks if rank != self._rank]

    def _line(self, code: ExitCode, error: BaseException | None = None) -> str:
        """What a rank says that has nothing to tell but that it ends."""
        culprits = self._culprits()
        why = f"because of {name_ranks(culprits)}" if culprits else f"with {type(error).__name__}" if error else ""
        return f"rank {self._rank} stopped {why}, exit {int(code)}".replace(" ,", ",")

    def show_block(self, *, waits: bool = True) -> bool:
        """Prints the verdict on the rank that speaks for its host, once; whether it has. Never raises."""
        if self._is_over or env.DISTPLUS_HOME_FILE.get():  # distplus launch prints it
            return False
        self._is_over = True
        with suppress(Exception):  # the process ends
            found = self._find_verdict()
            if found is not None and self._telling.speaks_for_host(found[0].silent):
                if waits:
                    self._telling.await_others(found[0].silent)
                if multiprocessing.parent_process() is not None and _notebook() is not None:
                    self._on_shown(found[1])  # the notebook prints it
                elif self._telling.claim_showing(found[1]):
                    print_block(*found)
                    self._on_shown(found[1])
                    return True
        return False


def _say(text: str) -> None:
    if text:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
