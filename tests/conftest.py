"""The police of the test suite: a test that leaks something, or exceeds its deadline, fails by name.

Self-contained, because its own tests copy it into a scratch folder and run pytest there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings

from lightning_distplus.testing import preload

DEFAULT_DEADLINE_S = 150.0
TEARDOWN_S = 10.0  # what a teardown gets at least, after a call that used up the deadline
BACKSTOP_S = 10.0  # how long after the deadline a test that no signal handler can interrupt ends the whole run
GRACE_S = 2.0  # how long a thread or a process that is on its way out may take

# Set by upstream packages when they are imported or first used; nobody reads them to tell ranks apart.
UPSTREAM_VARIABLES = {
    "CRC32C_SW_MODE",  # tensorboardX
    "CUDA_MODULE_LOADING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}
OF_EVERY_RANK = (
    "data",
    "divergence",
    "preemption",
    "strategies.engines",
    "testing.oracles",
)
OWN_LOGGERS = ("root", "lightning_distplus", "tests")
KEPT_BY_MULTIPROCESSING = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")

settings.register_profile("suite", deadline=None, derandomize=True, max_examples=100, database=None)
settings.load_profile("suite")

stderr_fd: int | None = None  # standard error outside pytest's capture
checkout: Path | None = None
listings: dict[str, tuple[int, set[str], list[str]]] = {}
TICK_NS = 100_000_000
MADE_BY_TOOLS = ("__pycache__", "build", "dist", "site")  # and hidden ones


Thing = tuple[str, Any]
"""A kind of thing that a test can leave behind, and the one that it is."""


@dataclass(frozen=True)
class Belongings:
    """What a test could leave behind, at one moment."""

    variables: dict[str, str]
    handlers: dict[int, Any]
    """Of signals."""
    modules: set[str]
    things: dict[Thing, str]
    """What is there or is not, as it is told."""

    @classmethod
    def now(cls) -> Belongings:
        things: dict[Thing, str] = {}
        if _process_group_exists():
            things["process group", ""] = "the default process group of torch.distributed"
        things |= {("thread", one): f"thread {one.name!r}" for one in threading.enumerate() if _counts(one)}
        things |= {("process", pid): f"process {pid}: {command}" for pid, command in _descendants().items()}
        things |= {("log handler", one): f"log handler {one[1]!r} of logger {one[0]!r}" for one in _log_handlers()}
        things |= {("socket", key): f"socket that listens on {port}" for key, port in _listening_sockets().items()}
        things |= {("file", name): f"file in the checkout: {name}" for name in sorted(_files_of_the_checkout())}
        return cls(
            variables={name: value for name, value in os.environ.items() if name not in UPSTREAM_VARIABLES},
            handlers={number: signal.getsignal(number) for number in signal.valid_signals()},
            modules=set(sys.modules),
            things=things,
        )

    def since(self, before: Belongings) -> dict[Thing, str]:
        """What has come or has changed since then.

        Upstream packages may add log handlers in the test that is the first to import them.
        """
        found: dict[Thing, str] = {}
        for name in sorted(set(before.variables) | set(self.variables)):
            was, now = before.variables.get(name), self.variables.get(name)
            if was != now:
                found["variable", name] = f"environment variable {name}: {was!r} before, {now!r} now"
        for number, handler in self.handlers.items():
            if handler != (was := before.handlers[number]):
                found["signal", number] = f"handler of {signal.Signals(number).name}: {was!r} before, {handler!r} now"
        has_imported = any(name.partition(".")[0] not in OWN_LOGGERS for name in self.modules - before.modules)
        for (kind, one), text in self.things.items():
            is_upstreams = kind == "log handler" and one[0].partition(".")[0] not in OWN_LOGGERS and has_imported
            if (kind, one) not in before.things and not is_upstreams:
                found[kind, one] = text
        return found

    def put_back(self, leaked: Iterable[Thing]) -> None:
        """So that the next test is not blamed for this one. Files stay: somebody may have written one by hand."""
        for kind, one in leaked:
            match kind:
                case "variable" if one in self.variables:
                    os.environ[one] = self.variables[one]
                case "variable":
                    os.environ.pop(one, None)
                case "signal":
                    signal.signal(one, self.handlers[one])
                case "process group":
                    sys.modules["torch.distributed"].destroy_process_group()
                case "process":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
                case "log handler":
                    logging.getLogger(None if one[0] == "root" else one[0]).removeHandler(one[1])


@pytest.fixture(autouse=True)
def police() -> Iterator[None]:
    """Fails the test that leaves something behind. The first fixture of each test, so the last to be torn down."""
    before = Belongings.now()
    yield
    until = time.monotonic() + GRACE_S
    while (leaked := Belongings.now().since(before)) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    if leaked:
        before.put_back(leaked)
        pytest.fail("The test leaks\n  " + "\n  ".join(leaked.values()), pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    global checkout, stderr_fd
    checkout = config.rootpath
    config.addinivalue_line("markers", "deadline(seconds): how long the test may take (default 150)")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "soak: long repetition, run by `make chaos`")
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        stderr_fd = os.dup(2)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &`: the tests of Ctrl-C would wait for nothing
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Stock torch asks for the name of each address to which a store connects: five seconds where no answer comes.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    preload_engines()


def preload_engines() -> None:
    """Lets the forkserver import once what every rank of these tests imports, this package included.

    DeepSpeed imports torch's compiler at its first step: six seconds for each rank, or once. It also chooses its device
    when it is imported; where there is a GPU that must wait until a rank has said that it wants the CPU.
    """
    preload("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.utils.data.distributed", "xxhash")
    preload("pytest", *(f"lightning_distplus.{module}" for module in OF_EVERY_RANK))
    if not Path("/dev/nvidiactl").exists():
        preload("deepspeed.runtime.engine", "torch._inductor.compile_fx")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("deadline")
    item.stash[DEADLINE] = Deadline(item.nodeid, float(marker.args[0]) if marker else DEFAULT_DEADLINE_S)
    with item.stash[DEADLINE]:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with item.stash[DEADLINE]:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    item.stash[DEADLINE].extend(TEARDOWN_S)
    with item.stash[DEADLINE]:
        return (yield)


class Deadline:
    """The end of one test. SIGALRM fails it; where no handler can run, faulthandler ends the whole run."""

    def __init__(self, test: str, seconds: float) -> None:
        self.test = test
        self.seconds = seconds
        self.until = time.monotonic() + seconds

    def extend(self, least_s: float) -> None:
        self.until = max(self.until, time.monotonic() + least_s)

    def __enter__(self) -> None:
        left_s = max(self.until - time.monotonic(), 0.001)
        self._previous = signal.signal(signal.SIGALRM, self._expire)
        signal.setitimer(signal.ITIMER_REAL, left_s)
        faulthandler.dump_traceback_later(left_s + BACKSTOP_S, exit=True, file=stderr_fd or 2)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous)
        faulthandler.cancel_dump_traceback_later()

    def _expire(self, number: int, frame: FrameType | None) -> None:
        os.write(stderr_fd or 2, f"\n{self.test} exceeds its deadline of {self.seconds:g} s. All stacks:\n".encode())
        faulthandler.dump_traceback(file=stderr_fd or 2, all_threads=True)
        pytest.fail(f"{self.test} exceeds its deadline of {self.seconds:g} s (@pytest.mark.deadline changes it)")


DEADLINE = pytest.StashKey[Deadline]()


def _process_group_exists() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _counts(thread: threading.Thread) -> bool:
    """tqdm keeps one monitor thread for the process; a dummy thread belongs to C code."""
    return not isinstance(thread, threading._DummyThread) and type(thread).__name__ != "TMonitor"


def _descendants() -> dict[int, str]:
    """Living children, grandchildren and so on, without what multiprocessing keeps for the length of this process."""
    commands: dict[int, str] = {}
    family = [os.getpid()]
    for parent in family:
        for child in _children(parent):
            try:
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
            except (OSError, IndexError):
                continue
            family.append(child)
            if state not in "ZX" and not (
                parent == os.getpid() and any(name in command for name in KEPT_BY_MULTIPROCESSING)
            ):
                commands[child] = command
    return commands


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def _log_handlers() -> list[tuple[str, logging.Handler]]:
    """Each with the name of its logger."""
    loggers = {
        name: logger for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)
    }
    return [
        (name, handler)
        for name, logger in {**loggers, "root": logging.root}.items()
        for handler in logger.handlers
        if not type(handler).__module__.startswith("_pytest")
    ]


def _files_of_the_checkout() -> set[str]:
    """Those of the folder in which the tests run: a run that is told no folder writes there."""
    found: set[str] = set()
    folders = [str(checkout or ".")]
    for folder in folders:
        names, below = _listed(folder)
        found |= names
        folders += below
    return found


def _listed(folder: str) -> tuple[set[str], list[str]]:
    """Files and folders in a folder, read again only when the folder has changed."""
    try:
        changed = Path(folder).stat().st_mtime_ns
        if listings.get(folder, (0,))[0] != changed:
            if time.time_ns() - changed < TICK_NS:  # a file of this very moment may leave the time as it is
                changed = 0
            with os.scandir(folder) as entries:
                visible = [entry for entry in entries if not entry.name.startswith(".")]
            listings[folder] = (
                changed,
                {entry.path for entry in visible if not entry.is_dir(follow_symlinks=False)},
                [e.path for e in visible if e.is_dir(follow_symlinks=False) and e.name not in MADE_BY_TOOLS],
            )
    except OSError:  # it has just been removed
        return set(), []
    return listings[folder][1:]


def _listening_sockets() -> dict[str, str]:
    """TCP sockets of this process that listen, by inode."""
    listening: dict[str, str] = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing is gone
            link = str(descriptor.readlink())
            if not link.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as opened:
                if opened.family != socket.AF_UNIX and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening[link] = f"port {opened.getsockname()[1]}"
    return listening
