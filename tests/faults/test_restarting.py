"""Rows P4 and P5: under ``distplus launch`` a killed rank comes back, and a batch that always fails ends the job."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_distplus import newest_valid
from lightning_distplus.data.audit import audit_folder
from lightning_distplus.events import read_events
from lightning_distplus.process import children
from lightning_distplus.report import PAGE, describe_runs, read_ledgers
from lightning_distplus.testing import FaultPlan, spawn
from tests.distributed.preemption_jobs import STEPS, train
from tests.faults.hosts import Hosts, several_hosts

ROOT = Path(__file__).parents[2]
KILLS = 5  # of one job in the soak
LAUNCH = [sys.executable, "-m", "lightning_distplus.cli", "launch"]
JOB = ["--no-resume", "-m", "tests.distributed.launch_jobs"]  # it finds its checkpoint by itself


def launch(
    folder: Path,
    *job: str,
    options: tuple[str, ...] = (),
    plan: FaultPlan | None = None,
    then: Callable[[subprocess.Popen[str]], None] = lambda launcher: None,
    name: str = "launcher",
) -> tuple[int, str]:
    """Exit code, and what the launcher wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if plan is not None:
        environment["DISTPLUS_FAULTS"] = FaultPlan(plan.faults, str(folder / "faults")).to_json()
    log, logs = folder / f"{name}.log", str(folder / "logs" / name)
    with log.open("w") as file:
        launcher = subprocess.Popen(
            [*LAUNCH, "--nproc", "2", "--log-dir", logs, *options, *JOB, *job],
            cwd=ROOT, env=environment, stdout=file, stderr=file, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            then(launcher)
            code = launcher.wait(timeout=380)
        finally:
            launcher.kill()
    return code, log.read_text()


def results(folder: Path) -> list[dict[str, object]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]


@functools.cache
def undisturbed() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        run = spawn(train, 2, args=("ResilientDDP", folder, None, {}), deadline="120s").check()
    return [{"weights": run.results[rank]["weights"], "step": STEPS} for rank in (0, 1)]


def assert_comes_back(folder: Path, *kills: tuple[int, int, str], start: str = "warm") -> None:
    plan = FaultPlan()
    for rank, step, where in kills:
        plan = plan.kill(rank, step=step, where=where)
    options = ("--max-restarts", str(len(kills)), "--start", start)
    code, log = launch(folder, str(folder), plan=plan, options=options)
    assert code == 0, log
    assert [path.read_text() for path in folder.glob("began-*")] == [start] * 2 * (1 + len(kills))
    assert (folder / "faults").read_text().count("\n") == len(kills)
    assert results(folder) == undisturbed()
    events = read_events(folder / "distplus")
    restarts = [event for event in events if event["kind"] == "restart"]
    assert [(event["culprit"], event["exit_code"]) for event in restarts] == [(rank, 137) for rank, *_ in kills]
    (told,) = describe_runs(read_ledgers(folder / "distplus"))
    assert [one["has_failed"] for one in told["attempts"]] == [True] * len(kills) + [False]
    assert len(told["goodput"]["incidents"]) == len(kills)
    assert f'"step":{STEPS}' in (folder / "distplus" / PAGE).read_text()
    resumed = [event["attempt"] for event in events if event["kind"] == "loaded" and event["rank"] == 0]
    assert resumed == list(range(1, len(kills) + 1))
    for number, (rank, *_) in enumerate(kills, 1):
        assert re.search(
            rf"rank {rank}, killed by SIGKILL, at step \d+: restarting from what the script chooses, "
            rf"attempt {number + 1} of {len(kills) + 1}$",
            log,
            re.MULTILINE,
        )


@pytest.mark.deadline(240)  # three starts of two interpreters
def test_killed_ranks_come_back_and_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    assert_comes_back(tmp_path, (1, 2, "before_optimizer_step"), (0, 6, "after_backward"))


@pytest.mark.soak
@pytest.mark.deadline(400)  # six starts of two interpreters
@pytest.mark.parametrize("number", range(50 // KILLS))
def test_ranks_killed_at_random_come_back(number: int, tmp_path: Path) -> None:
    chance = random.Random(f"kills {number}")
    places = ("batch_start", "before_backward", "after_backward", "before_optimizer_step", "batch_end")
    steps = sorted(chance.sample(range(1, STEPS), KILLS))
    assert_comes_back(tmp_path, *((chance.choice((0, 1)), step, chance.choice(places)) for step in steps))
    print(f"soak: distplus launch, run {number}: {KILLS} kills at steps {steps}, weights bit for bit equal")


@pytest.mark.soak
@pytest.mark.deadline(150)
def test_ranks_that_start_cold_come_back_too(tmp_path: Path) -> None:
    assert_comes_back(tmp_path, (1, 4, "batch_start"), start="cold")


@pytest.mark.deadline(150)
def test_ranks_whose_launcher_is_killed_before_they_meet_do_not_outlive_it(tmp_path: Path) -> None:
    ranks: list[int] = []

    def kill(launcher: subprocess.Popen[str]) -> None:
        until = time.monotonic() + 100
        while len(ranks) < 2:
            assert time.monotonic() < until
            ranks[:] = [
                one for one in children(launcher.pid) if b"launch_jobs" in Path(f"/proc/{one}/cmdline").read_bytes()
            ]
            time.sleep(0.02)
        launcher.kill()

    code, _ = launch(tmp_path, str(tmp_path), options=("--start", "cold"), then=kill)
    assert code == -signal.SIGKILL
    until = time.monotonic() + 100  # they import first
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < until
        time.sleep(0.1)
    for log in sorted((tmp_path / "logs" / "launcher").rglob("*.err")):
        assert "'distplus launch', which has started this rank and served the store at 127.0.0.1:" in log.read_text()


@pytest.mark.deadline(150)
def test_a_batch_that_kills_every_time_ends_the_job_with_its_samples(tmp_path: Path) -> None:
    code, log = launch(tmp_path, str(tmp_path), "0", "2", "kill", options=("--max-restarts", "9", "--same-step", "2"))
    assert code == 174, log
    assert "2 attempts in a row ended at step 2" in log
    (named,) = re.findall(r"^  rank 1: the samples in hand were (.+)$", log, flags=re.MULTILINE)
    assert (tmp_path / "poison").read_text() in named.split(", ")
    assert "rank 0: the samples in hand" not in log
    (verdict,) = (tmp_path / "distplus").glob("verdict-no-progress-*.json")
    written = json.loads(verdict.read_text())
    assert (written["kind"], written["culprits"], written["global_step"]) == ("no_progress", [1], 2)


@pytest.mark.deadline(240)  # three starts of two interpreters
def test_samples_that_fail_every_time_are_set_apart_and_the_order_of_all_others_stays(tmp_path: Path) -> None:
    options = ("--max-restarts", "9", "--same-step", "2", "--quarantine")
    code, log = launch(tmp_path, str(tmp_path), "0", "2", options=options)
    assert code == 0, log
    # The rank that raised shows the error of each attempt once; the other one says because of whom it stopped.
    assert len(re.findall(r"^\[1\] ArithmeticError: this batch is poison$", log, flags=re.MULTILINE)) == 2
    assert len(re.findall(r"^\[0\] rank 0 stopped because of rank 1, exit 171$", log, flags=re.MULTILINE)) == 2
    events = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "quarantine"]
    ((samples, where),) = [(event["samples"], (event["culprit"], event["global_step"])) for event in events]
    assert where == (1, 2)
    assert int((tmp_path / "poison").read_text()) in samples
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    assert torch.load(newest, weights_only=True)["ResumableDataModule"]["quarantine"] == sorted(samples)
    report = audit_folder(tmp_path / "distplus" / "audit")
    assert report.ok, report  # each other sample once, and where the order has it
    assert report.num_apart >= len(samples)


class Launchers:
    """Launchers of one job on several hosts, which this one plays, each with one rank."""

    def __init__(self, folder: Path, num_nodes: str, *job: str, plan: FaultPlan | None = None) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        self.port = port
        self.options = (
            "--nnodes", num_nodes, "--rdzv", f"127.0.0.1:{port}", "--job-id", "some", "--nproc", "1", "--join", "1s"
        )  # fmt: skip
        self.folder, self.job, self.plan = folder, (str(folder), *job), plan
        self.ended: dict[str, tuple[int, str]] = {}
        self.launchers: dict[str, subprocess.Popen[str]] = {}
        self.threads: dict[str, threading.Thread] = {}

    def start(self, name: str) -> None:
        def run() -> None:
            keep = functools.partial(self.launchers.__setitem__, name)
            self.ended[name] = launch(
                self.folder, *self.job, options=self.options, plan=self.plan, name=name, then=keep
            )

        self.threads[name] = threading.Thread(target=run)
        self.threads[name].start()

    def start_serving(self, name: str) -> None:
        """The first launcher on the host that --rdzv names serves the store; if it dies, the job ends."""
        self.start(name)
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert time.monotonic() < until, self.logs()
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """The host is gone, launcher and rank."""
        pid = self.launchers[name].pid
        for one in (pid, *children(pid)):
            os.kill(one, signal.SIGKILL)

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + 120
        while not list((self.folder / "checkpoints").glob(f"*step={step}.ckpt")):
            assert time.monotonic() < until, self.logs()
            time.sleep(0.02)

    def wait(self, name: str) -> int:
        self.threads[name].join()
        return self.ended[name][0]

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in self.folder.glob("*.log"))


@pytest.mark.soak
@pytest.mark.deadline(150)
def test_launchers_of_two_hosts_restart_together(tmp_path: Path) -> None:
    hosts = Launchers(tmp_path, "2", plan=FaultPlan().kill(1, step=6))
    hosts.start("first")
    hosts.start("second")
    assert [hosts.wait("first"), hosts.wait("second")] == [0, 0], hosts.logs()
    assert results(tmp_path) == undisturbed()


@pytest.mark.soak
@pytest.mark.deadline(150)
@pytest.mark.parametrize("culprit", [0, 1])
def test_every_host_returns_the_culprits_exit_code(culprit: int, tmp_path: Path) -> None:
    hosts = Launchers(tmp_path, "2", plan=FaultPlan().kill(culprit, step=4))
    hosts.options += ("--max-restarts", "0")
    hosts.start_serving("first")
    hosts.start("second")
    assert [hosts.wait("first"), hosts.wait("second")] == [137, 137], hosts.logs()
    for _, log in hosts.ended.values():
        assert f"rank {culprit}, killed by SIGKILL; all 0 restarts are spent" in log


@pytest.mark.soak
@pytest.mark.deadline(240)
def test_hosts_come_and_go_and_the_samples_of_each_step_stay(tmp_path: Path) -> None:
    hosts = Launchers(tmp_path, "1:2", "0.3")
    hosts.start_serving("first")
    hosts.wait_for_step(1)
    hosts.start("second")
    until = time.monotonic() + 120
    while not (tmp_path / "logs" / "second" / "attempt-1" / "rank00001.err").exists():
        assert time.monotonic() < until, hosts.logs()
        time.sleep(0.02)
    (joined_at,) = (event for event in read_events(tmp_path / "distplus") if event["kind"] == "regroup")
    hosts.wait_for_step(joined_at["global_step"] + 2)
    hosts.kill("second")
    assert hosts.wait("second") == -signal.SIGKILL
    assert hosts.wait("first") == 0, hosts.logs()
    assert json.loads((tmp_path / "result-0.json").read_text())["step"] == STEPS  # dropout depends on the ranks
    report = audit_folder(tmp_path / "distplus" / "audit")
    assert (report.ok, report.num_steps, report.num_samples) == (True, STEPS, 4 * STEPS), report
    sizes = [event["world_size"] for event in read_events(tmp_path / "distplus") if event["kind"] == "start"]
    assert sizes == [1, 2, 2, 1]


@pytest.mark.soak
@pytest.mark.deadline(240)
def test_a_host_is_replaced_and_the_job_goes_on(tmp_path: Path) -> None:
    hosts = Launchers(tmp_path, "2", "0.3")
    hosts.start_serving("first")
    hosts.start("second")
    hosts.wait_for_step(2)
    hosts.kill("second")
    hosts.start("another")
    assert [hosts.wait("first"), hosts.wait("another")] == [0, 0], hosts.logs()
    assert results(tmp_path) == undisturbed()


# -- torchrun's own agents, each on a host of its own ------------------------------------------------------------------


class Agents:
    """``torchrun`` on two hosts, with one rank each; node 0 serves the store in which the agents meet."""

    def __init__(self, folder: Path, hosts: Hosts, num_nodes: str, *job: str, **variables: str) -> None:
        self.folder, self.hosts, self.num_nodes, self.job = folder, hosts, num_nodes, (str(folder), *job)
        self.variables = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DISTPLUS_SECRET": "of both hosts",
            "GLOO_SOCKET_IFNAME": "eth0", **variables,
        }  # fmt: skip
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.started:
            self.kill(agent)

    def start(self, node: int) -> subprocess.Popen[bytes]:
        settings = f"last_call_timeout=1,keep_alive_interval=1,is_host={1 - node}"
        with (self.folder / f"agent-{len(self.started)}.log").open("wb") as log:
            agent = subprocess.Popen(
                [
                    "ip", "netns", "exec", self.hosts.names[node], sys.executable, "-m", "torch.distributed.run",
                    "--nnodes", self.num_nodes, "--nproc-per-node", "1", "--max-restarts", "9", "--rdzv-id", "some",
                    "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.hosts.addresses[0]}:29400",
                    "--rdzv-conf", settings, "--local-addr", self.hosts.addresses[node], "--monitor-interval", "0.1",
                    "-m", "tests.distributed.launch_jobs", *self.job,
                ],
                env=self.variables, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.started.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        for pid in (agent.pid, *children(agent.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        until = time.monotonic() + 100
        while not is_done():
            assert time.monotonic() < until, self.logs()
            time.sleep(0.05)

    def starts(self, what: str) -> list[int]:
        """What the starts of all ranks say, oldest first."""
        folder = self.folder / "distplus"
        return [one[what] for one in (read_events(folder) if folder.exists() else []) if one["kind"] == "start"]

    def has_gone_on(self) -> Callable[[], bool]:
        """Tells whether two further checkpoints have been committed."""
        known = set(self.folder.glob("checkpoints/*.ckpt"))
        return lambda: len(set(self.folder.glob("checkpoints/*.ckpt")) - known) >= 2

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("agent-*.log")))


@pytest.mark.soak
@pytest.mark.deadline(300)
def test_a_host_of_torchrun_dies_and_another_joins_and_each_sample_counts_once(tmp_path: Path) -> None:
    """The agent that stayed has counted a restart, the one that joins has not."""
    with (
        several_hosts(2) as hosts,
        Agents(tmp_path, hosts, "1:2", "1.5", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as agents,
    ):
        first, second = agents.start(0), agents.start(1)
        agents.wait_until(lambda: agents.starts("world_size")[-2:] == [2, 2])
        agents.wait_until(agents.has_gone_on())
        agents.kill(second)
        agents.wait_until(lambda: agents.starts("world_size")[-1] == 1)
        agents.wait_until(agents.has_gone_on())
        third = agents.start(1)
        assert [first.wait(timeout=150), third.wait(timeout=150)] == [0, 0], agents.logs()
        assert agents.starts("world_size")[-5:] == [2, 2, 1, 2, 2]
        assert agents.starts("attempt")[-2:] == [1, 1]
    assert json.loads((tmp_path / "result-0.json").read_text())["step"] == STEPS
    report = audit_folder(tmp_path / "distplus" / "audit")
    assert (report.ok, report.num_steps, report.num_samples) == (True, STEPS, 4 * STEPS), report


@pytest.mark.soak
@pytest.mark.deadline(240)
def test_a_rank_of_torchrun_is_killed_and_both_hosts_meet_again_at_the_same_store(tmp_path: Path) -> None:
    """Only the agent of the killed rank counts a restart, where the other one sees the new round first."""
    plan = FaultPlan(FaultPlan().kill(1, step=4).faults, str(tmp_path / "faults")).to_json()
    with several_hosts(2) as hosts, Agents(tmp_path, hosts, "2", DISTPLUS_FAULTS=plan) as agents:
        started = [agents.start(0), agents.start(1)]
        assert [agent.wait(timeout=200) for agent in started] == [0, 0], agents.logs()
        assert agents.starts("attempt") == [0, 0, 1, 1]
    assert results(tmp_path) == undisturbed()


@pytest.mark.deadline(120)
@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(n, marks=pytest.mark.soak) for n in ("SIGHUP", "SIGUSR1", "SIGINT"))]
)
def test_a_signal_to_the_launcher_stops_all_ranks_with_one_checkpoint(name: str, tmp_path: Path) -> None:
    def ask(launcher: subprocess.Popen[str]) -> None:
        until = time.monotonic() + 120
        while not list((tmp_path / "checkpoints").glob("*step=2.ckpt")):
            assert launcher.poll() is None, (tmp_path / "launcher.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        launcher.send_signal(getattr(signal, name))

    code, log = launch(tmp_path, str(tmp_path), "0.2", then=ask)
    assert code == 143, log
    (saved,) = (tmp_path / "checkpoints").glob("preempt-step=*.ckpt")
    ended = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "preempted"]
    assert [event["path"] for event in ended] == [str(saved)] * 2
    assert ended[0]["global_step"] < STEPS
