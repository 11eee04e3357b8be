"""Ranks that are forked from a warm process are what an interpreter of their own would be, and end like it (row P5)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lightning_distplus import env
from lightning_distplus.launch import warm as warm_module
from lightning_distplus.launch.warm import PASSED_ON, Warm
from lightning_distplus.process import children
from tests.processes import ROOT, is_there, wait_until

JOB = ROOT / "tests" / "distributed" / "warm_rank.py"
SET_BY_MODULES = {
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
}
OWN_FRAMES = re.compile(r'  File "<frozen runpy>".*\n')  # python's own, above those of a module


@pytest.fixture(scope="module")
def heeds_signals() -> Iterator[None]:
    """A shell leaves SIGINT and SIGQUIT ignored in what it starts in the background, and so would be what we start."""
    ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="module", autouse=True)
def warm(heeds_signals: None) -> Iterator[Warm]:
    with env.changed(OMP_NUM_THREADS=1, PYTHONPATH=str(ROOT)):
        one = Warm()
    with one:
        yield one


def start(command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    """As torchrun's agent starts a rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, cwd=ROOT, start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(command: Sequence[str], **variables: str) -> tuple[int, str, str]:
    process = start(command, **variables)
    out, err = process.communicate("a line of input", timeout=120)
    return process.returncode, out, OWN_FRAMES.sub("", err)


def has_signal(pid: int, which: str, number: int) -> bool:
    """Whether a signal is among those that the kernel shows as caught (``SigCgt``) or pending (``ShdPnd``)."""
    (mask,) = re.findall(rf"^{which}:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    def write(text: str) -> list[str]:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return [str(path), "--one", ""]

    return write


@pytest.mark.parametrize(
    "command",
    [[str(JOB), "--one", "", "two words"], ["-m", "tests.distributed.warm_rank", "-x"]],
    ids=["script", "module"],
)
def test_a_warm_rank_finds_what_an_interpreter_of_its_own_finds(command: list[str], warm: Warm) -> None:
    seen = []
    for each in (warm.command(command), command):
        code, out, err = run(each, RANK="3", WITH_EQUALS="a=b\nc")
        assert code == 0, err
        first, end = out.splitlines()
        assert end == "at the end"
        seen.append(json.loads(first))
    is_warm, is_cold = seen
    assert set(is_warm["variables"]) - set(is_cold["variables"]) <= SET_BY_MODULES
    is_warm["variables"] = {name: is_warm["variables"].get(name) for name in is_cold["variables"]}
    assert is_warm == is_cold
    assert (is_warm["squares"], is_warm["input"]) == ([0, 1, 4, 9], "a line of input")


ENDINGS = {
    "the last line": "print('done')",
    "a code": "import sys; print('out'); sys.exit(3)",
    "a message": "import sys; sys.exit('what went wrong')",
    "none": "raise SystemExit",
    "at once": "import os; os._exit(5)",
    "an error": "def inner():\n    raise ValueError('of the user')\ninner()",
    "an error within another": "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise KeyError(1) from error",
    "an error of ours": "from lightning_distplus.errors import install_exit_codes\ninstall_exit_codes()\n"
    "from lightning_distplus.errors import PeerLost\nraise PeerLost([1], 'gone')",
    "a hook": "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, trace.tb_lineno)\n1/0",
    "a wrong line": "print('a'\n",
    "an interrupt": "raise KeyboardInterrupt",
    "SIGKILL": "import os; os.kill(os.getpid(), 9)",
    "SIGTERM": "import os; os.kill(os.getpid(), 15)",
    "SIGSEGV": "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), 11)",
    "a thread that goes on": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()\nprint('early')",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_warm_rank_ends_as_an_interpreter_of_its_own(
    name: str, warm: Warm, script: Callable[[str], list[str]]
) -> None:
    command = script(ENDINGS[name])
    code, out, err = run(warm.command(command))
    expected = run(command)
    if name == "an interrupt":  # the frames of whoever has called the script are shown
        assert "KeyboardInterrupt" in err
        err = expected[2]
    assert (code, out, err) == expected


@pytest.mark.parametrize("command", [["nowhere.py"], ["-m", "nowhere"], ["-m", "nowhere.at.all"]])
def test_a_command_that_is_not_there_is_refused_with_pythons_words(command: list[str], warm: Warm) -> None:
    code, out, err = run(warm.command(command))
    expected_code, expected_out, expected_err = run(command)
    assert (code, out) == (expected_code, expected_out)
    assert err.split(": ")[1:] == expected_err.split(": ")[1:]


def test_ranks_share_modules_but_not_chance_and_know_their_rank(warm: Warm, script: Callable[[str], list[str]]) -> None:
    command = script("""
        import sys
        held = {"torch", "lightning.pytorch", "lightning_distplus.strategies.engines"} & set(sys.modules)
        import random, numpy, torch
        from lightning.pytorch.utilities import rank_zero_only
        print(len(held), __import__("gc").isenabled(), rank_zero_only.rank, hash("text"),
              torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand())
        import os
        import lightning_distplus.cli.training
        print(*sorted(f"{name}={value!r}" for name, value in os.environ.items() if name != "RANK"))
    """)
    lines = [
        run(one, RANK=rank)[1].splitlines()
        for one, rank in zip((*[warm.command(command)] * 2, command), "121", strict=True)
    ]
    assert lines[0][1] == lines[1][1] == lines[2][1]  # the variables, with those that modules set
    first, second, cold = (line.split() for line, _ in lines)
    assert first[:3] == ["3", "True", "1"]
    assert second[:3] == ["3", "True", "2"]
    assert cold[:3] == ["0", "True", "1"]
    for chances in zip(first[4:], second[4:], cold[4:], strict=True):
        assert len(set(chances)) == 3
    assert first[3] == second[3]  # they have one hash seed


SLEEPER = """
    import os, signal, subprocess, sys, time
    told = []
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, lambda number, frame: told.append(number))
    child = subprocess.Popen(["sleep", "1000"])
    print(os.getpid(), child.pid, flush=True)
    while signal.SIGQUIT not in told:
        time.sleep(0.01)
    print(sorted(told))
    child.kill()
    sys.exit(7)
"""


def begin(warm: Warm, command: list[str]) -> tuple[subprocess.Popen[str], int, int]:
    process = start(warm.command(command))
    assert process.stdout is not None
    rank, child = map(int, process.stdout.readline().split())
    return process, rank, child


def test_signals_to_the_process_that_stands_in_reach_the_rank(warm: Warm, script: Callable[[str], list[str]]) -> None:
    process, _, _ = begin(warm, script(SLEEPER))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (7, "[1, 2, 3, 10, 12]", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_agents_last_signals_end_the_rank_and_what_it_has_started(
    number: signal.Signals, warm: Warm, script: Callable[[str], list[str]]
) -> None:
    process, rank, child = begin(warm, script(SLEEPER))
    os.killpg(process.pid, number)  # as torchrun's agent does
    process.communicate(timeout=60)
    assert process.returncode == -number
    wait_until(lambda: not is_there(rank) and not is_there(child), lambda: "something is left")


STOPS_WHO_ASKS = """
import os, signal, time
from pathlib import Path
forks = []

def stop_who_asks():
    forks.append(1)
    pid = Path(os.environ["PID_FILE"])
    while len(forks) > 1 and not pid.exists():  # the first fork is the server's own
        time.sleep(0.01)
    if len(forks) > 1:
        os.kill(int(pid.read_text()), signal.SIGSTOP)

os.register_at_fork(before=stop_who_asks)
"""


@pytest.fixture
def preloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Warm]:
    """A process that imports only a module with this source."""

    def begin(source: str) -> Warm:
        (tmp_path / "preloads.py").write_text(source)
        monkeypatch.setattr(warm_module, "PRELOADED", ())
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        return Warm(["preloads"])

    return begin


def test_a_signal_that_comes_while_the_rank_is_forked_reaches_it(
    preloading: Callable[[str], Warm], script: Callable[[str], list[str]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("PID_FILE", str(pid_file))
    with preloading(STOPS_WHO_ASKS) as warm:
        process = start(warm.command(script(SLEEPER)))
        (tmp_path / "written").write_text(str(process.pid))
        (tmp_path / "written").rename(pid_file)
        assert process.stdout is not None
        assert process.stdout.readline()  # the rank is there, and whoever has asked has not heard of it
        for number in (signal.SIGUSR1, signal.SIGQUIT, signal.SIGCONT):
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out.strip(), err) == (7, f"[{signal.SIGQUIT:d}, {signal.SIGUSR1:d}]", "")


ASKER = """
import os, signal, socket, sys, time
from pathlib import Path
when, server, name, script = sys.argv[1:]
link = socket.socket(socket.AF_UNIX)
link.connect(f"\\0{name}")
if when != "at once":
    assert link.recv(1) == b"?"
    if when == "before the fork":
        os.kill(int(server), signal.SIGSTOP)
    socket.send_fds(link, [b"+"], [0, 1, 2])
    if when == "after the fork":
        assert link.recv(1, socket.MSG_PEEK) == b"+"
        while not Path(script).with_suffix(".pid").exists():
            time.sleep(0.01)
link.close()  # with what the server has said unread
os.kill(int(server), signal.SIGCONT)
print("gone", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("when", ["at once", "before the fork", "after the fork"])
def test_whoever_asks_and_goes_takes_only_its_own_rank_along(
    when: str, warm: Warm, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    asker, pid_file = tmp_path / "asker.py", tmp_path / "script.pid"
    asker.write_text(ASKER)
    path, *_ = script("""
        import os, sys, time
        from pathlib import Path
        written = Path(__file__).with_suffix(".new")
        written.write_text(str(os.getpid()))
        written.rename(Path(__file__).with_suffix(".pid"))
        time.sleep(len(sys.argv) * 1000)
    """)
    asking = start([str(asker), when, str(server_of(warm).pid), warm._name, path])
    try:
        if when == "after the fork":
            wait_until(pid_file.exists, lambda: "no rank was forked")
            rank = int(pid_file.read_text())
            wait_until(lambda: not is_there(rank), lambda: "the rank is left")
        assert asking.stdout is not None
        assert asking.stdout.readline() == "gone\n"
        code, out, err = run(warm.command(["-m", "tests.distributed.warm_rank"]))
        assert code == 0, err
        assert out.endswith("at the end\n")
        wait_until(lambda: not children(server_of(warm).pid), lambda: "a rank is left")
        assert server_of(warm).poll() is None
    finally:
        asking.kill()
        asking.communicate()


def test_a_rank_starts_cold_where_the_imports_do_not_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_module, "_IMPORTS_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as link:
        listener.bind("")
        listener.listen()
        assert not warm_module._ask(link, os.fsdecode(listener.getsockname()[1:]))
    assert capfd.readouterr().err == (
        "distplus launch: what is imported beforehand has taken 0.2 s and goes on; this rank starts as an interpreter "
        "of its own\n"
    )


def test_a_killed_server_that_has_not_read_a_signal_ends_who_stands_in_like_a_killed_rank(
    preloading: Callable[[str], Warm], script: Callable[[str], list[str]]
) -> None:
    with preloading("") as one:
        process, rank, child = begin(one, script(SLEEPER))
        # Until it has heard that there is a rank, a signal ends the process that stands in.
        wait_until(lambda: has_signal(process.pid, "SigCgt", signal.SIGUSR1), lambda: "nobody passes signals on")
        os.kill(server_of(one).pid, signal.SIGSTOP)
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: not has_signal(process.pid, "ShdPnd", signal.SIGUSR1), lambda: "the signal is not taken")
        os.kill(server_of(one).pid, signal.SIGKILL)
        wait_until(lambda: not is_there(rank), lambda: "the rank is left")
        os.kill(child, signal.SIGKILL)  # which nobody ends, and which holds the streams
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (-signal.SIGKILL, "")


def server_of(warm: Warm) -> subprocess.Popen[bytes]:
    return warm._server


def test_the_process_that_forks_has_one_thread_and_no_device(warm: Warm) -> None:
    pid = server_of(warm).pid
    assert run(warm.command(["-m", "tests.distributed.warm_rank"]))[0] == 0  # it serves by now
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
    held = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    assert not [name for name in held if name.startswith("/dev/") and name != "/dev/null"]
    assert "libcuda" not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(
    ("source", "says", "is_forked"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
         "have started 1 threads; each rank starts as an interpreter of its own", False),
        ("opened = open('/dev/full')", "", True),
        ("raise RuntimeError('no licence')", "cannot import preloads beforehand: RuntimeError: no licence", True),
        ("import os; os._exit(1)", "", False),
        ("import subprocess; child = subprocess.Popen(['true'])", "", True),
    ],
    ids=["thread", "nothing", "error", "crash", "child"],
)  # fmt: skip
def test_a_module_that_forbids_the_fork_costs_one_warning_and_the_rank_starts_cold(
    source: str, says: str, is_forked: bool, script: Callable[[str], list[str]], preloading: Callable[[str], Warm],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    command = script("import os; print('launch.warm' in open('/proc/self/cmdline').read())")
    with preloading(source) as one:
        answers = [run(one.command(command))[:2] for _ in range(2)]
    assert answers == [(0, f"{is_forked}\n")] * 2
    err = capfd.readouterr().err
    assert err.count("distplus launch: ") == bool(says), err
    assert says in err


def test_a_server_that_was_killed_is_replaced_for_the_next_attempt(
    script: Callable[[str], list[str]], preloading: Callable[[str], Warm]
) -> None:
    command = script("print('launch.warm' in open('/proc/self/cmdline').read())")
    with preloading("") as one:
        for _ in range(2):
            assert run(one.command(command))[:2] == (0, "True\n")
            server_of(one).kill()
            server_of(one).wait()


def test_a_device_that_is_open_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_module, "_DEVICES", ("/dev/full",))
    with Path("/dev/full").open():
        assert "has opened /dev/full, which a forked rank could not use" in warm_module.why_not()


LAUNCHER = """
    import subprocess, sys, time
    from lightning_distplus.launch import warm
    warm.PRELOADED = ()
    one = warm.Warm()
    command = [sys.executable, *one.command(sys.argv[1:])]
    process = subprocess.Popen(command, start_new_session=True)
    print(one._server.pid, process.pid, flush=True)
    time.sleep(1000)
"""


def test_nothing_outlives_the_launcher(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    launcher_file = tmp_path / "launcher.py"
    launcher_file.write_text(textwrap.dedent(LAUNCHER))
    launcher = start([str(launcher_file), *script("import os, time; print(os.getpid(), flush=True); time.sleep(1000)")])
    assert launcher.stdout is not None
    server, stand_in = map(int, launcher.stdout.readline().split())
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    time.sleep(0.2)
    assert is_there(rank)  # as under torchrun it ends when it misses its store
    os.kill(rank, signal.SIGTERM)
    wait_until(lambda: not any(map(is_there, (rank, stand_in, server))), lambda: "something is left")
    launcher.communicate()
