"""Rows P4 and P5: under ``distplus launch`` a killed rank comes back, and a batch that always fails ends the job."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_distplus import newest_valid
from lightning_distplus.data.audit import audit_folder
from lightning_distplus.events import read_events
from lightning_distplus.process import children
from lightning_distplus.report import PAGE, describe_runs, read_ledgers
from lightning_distplus.testing import FaultPlan
from lightning_distplus.testing.spawning import free_port
from tests.distributed.launch_jobs import JOB, launch, planted, results, undisturbed
from tests.distributed.preemption_jobs import STEPS
from tests.faults.hosts import several_hosts
from tests.pairs import kept
from tests.processes import LAUNCH, start, wait_until

KILLS = 5  # of one job in the soak


def assert_comes_back(folder: Path, *kills: tuple[int, int, str], how: str = "warm") -> None:
    plan = FaultPlan()
    for rank, step, where in kills:
        plan = plan.kill(rank, step=step, where=where)
    code, log = launch(folder, plan=plan, options=("--max-restarts", str(len(kills)), "--start", how))
    assert code == 0, log
    assert [path.read_text() for path in folder.glob("began-*")] == [how] * 2 * (1 + len(kills))
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
    for number, (rank, *_) in enumerate(kills, 2):
        restart = rf"rank {rank}, killed by SIGKILL, at step \d+: restarting from what the script chooses, "
        assert re.search(f"{restart}attempt {number} of {len(kills) + 1}$", log, re.MULTILINE)


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
    assert_comes_back(tmp_path, (1, 4, "batch_start"), how="cold")


@pytest.mark.deadline(150)
def test_ranks_whose_launcher_is_killed_before_they_meet_do_not_outlive_it(tmp_path: Path) -> None:
    ranks: list[int] = []

    def kill(launcher: subprocess.Popen[str]) -> None:
        def both() -> list[int]:
            found = children(launcher.pid)
            return [one for one in found if b"launch_jobs" in Path(f"/proc/{one}/cmdline").read_bytes()]

        ranks.extend(wait_until(lambda: found if len(found := both()) == 2 else []))
        launcher.kill()

    code, _ = launch(tmp_path, options=("--start", "cold"), then=kill)
    assert code == -signal.SIGKILL
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))  # they import first
    logs = sorted((tmp_path / "logs").rglob("*.err"))
    assert len(logs) == 2
    for log in logs:
        assert "'distplus launch', which has started this rank and served the store at 127.0.0.1:" in log.read_text()


@pytest.mark.deadline(150)
def test_a_batch_that_kills_every_time_ends_the_job_with_its_samples(tmp_path: Path) -> None:
    code, log = launch(tmp_path, "0", "2", "kill", options=("--max-restarts", "9", "--same-step", "2"))
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
    code, log = launch(tmp_path, "0", "2", options=("--max-restarts", "9", "--same-step", "2", "--quarantine"))
    assert code == 0, log
    # The rank that raised shows the error of each attempt once; the other one says because of whom it stopped.
    assert len(re.findall(r"^\[1\] ArithmeticError: this batch is poison$", log, flags=re.MULTILINE)) == 2
    assert len(re.findall(r"^\[0\] rank 0 stopped because of rank 1, exit 171$", log, flags=re.MULTILINE)) == 2
    (event,) = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "quarantine"]
    assert (event["culprit"], event["global_step"]) == (1, 2)
    assert int((tmp_path / "poison").read_text()) in event["samples"]
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    apart = torch.load(newest, weights_only=True)["ResumableDataModule"]["quarantine"]
    assert apart == sorted(event["samples"])
    report = audit_folder(tmp_path / "distplus" / "audit")
    assert report.ok, report  # each other sample once, and where the order has it
    assert report.num_apart >= len(apart)


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", kept(["SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"], ["SIGTERM"]))
def test_a_signal_to_the_launcher_stops_all_ranks_with_one_checkpoint(name: str, tmp_path: Path) -> None:
    def ask(launcher: subprocess.Popen[str]) -> None:
        wait_until(lambda: launcher.poll() is not None or list(tmp_path.glob("checkpoints/*step=2.ckpt")))
        launcher.send_signal(getattr(signal, name))

    code, log = launch(tmp_path, "0.2", then=ask)
    assert code == 143, log
    (saved,) = (tmp_path / "checkpoints").glob("preempt-step=*.ckpt")
    ended = [event for event in read_events(tmp_path / "distplus") if event["kind"] == "preempted"]
    assert [event["path"] for event in ended] == [str(saved)] * 2
    assert ended[0]["global_step"] < STEPS


# -- several hosts, each with a launcher and one rank ------------------------------------------------------------------


class Launchers:
    """One job on several hosts, which this one plays, or which are network namespaces; all are gone behind a block.

    Args:
        folder: Of the run, and of a log for each launcher.
        command: That of a launcher, by its name and the node on which it starts, and what stands before it.
        variables: Of all of them.
    """

    def __init__(
        self, folder: Path, command: Callable[[str, int], tuple[list[str], list[str]]], variables: dict[str, str]
    ) -> None:
        self.folder, self.command, self.variables = folder, command, variables
        self.launchers: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, node: int = 0) -> None:
        prefix, command = self.command(name, node)
        log = self.folder / f"{name}.log"
        self.launchers[name] = start(*command, prefix=prefix, log=log, env=self.variables)

    def kill(self, name: str) -> None:
        """The host is gone, launcher and rank."""
        for pid in (self.launchers[name].pid, *children(self.launchers[name].pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launchers[name].wait()

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.launchers:
            self.kill(name)

    def end(self, *names: str) -> list[int]:
        return [self.launchers[name].wait(timeout=200) for name in names]

    def wait_until(self, is_so: Callable[[], object]) -> None:
        wait_until(is_so, self.logs)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: list((self.folder / "checkpoints").glob(f"*step={step}.ckpt")))

    def wait_for_two_saves(self) -> None:
        known = set(self.folder.glob("checkpoints/*.ckpt"))
        self.wait_until(lambda: len(set(self.folder.glob("checkpoints/*.ckpt")) - known) >= 2)

    def starts(self, what: str) -> list[int]:
        """What the starts of all ranks say, oldest first."""
        folder = self.folder / "distplus"
        return [one[what] for one in (read_events(folder) if folder.exists() else []) if one["kind"] == "start"]

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in self.folder.glob("*.log"))

    def require_all_samples_once(self) -> None:
        assert json.loads((self.folder / "result-0.json").read_text())["step"] == STEPS  # dropout depends on the ranks
        report = audit_folder(self.folder / "distplus" / "audit")
        assert (report.ok, report.num_steps, report.num_samples) == (True, STEPS, 4 * STEPS), report


@contextlib.contextmanager
def launched(
    folder: Path, num_nodes: str, *job: str, options: tuple[str, ...] = (), plan: FaultPlan | None = None
) -> Iterator[Launchers]:
    """``distplus launch`` on each host; the first one serves the store: if it dies, the job ends."""
    port = free_port()
    common = ["--nnodes", num_nodes, "--rdzv", f"127.0.0.1:{port}", "--job-id", "some", "--nproc", "1", "--join", "1s"]

    def command(name: str, node: int) -> tuple[list[str], list[str]]:
        logs = str(folder / "logs" / name)
        return [], [*LAUNCH, "--log-dir", logs, *common, *options, *JOB, str(folder), *job]

    def is_served() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    with Launchers(folder, command, planted(plan, folder)) as hosts:
        hosts.start("first")
        hosts.wait_until(is_served)
        yield hosts


@pytest.mark.soak
@pytest.mark.deadline(150)
def test_launchers_of_two_hosts_restart_together(tmp_path: Path) -> None:
    with launched(tmp_path, "2", plan=FaultPlan().kill(1, step=6)) as hosts:
        hosts.start("second")
        assert hosts.end("first", "second") == [0, 0], hosts.logs()
    assert results(tmp_path) == undisturbed()


@pytest.mark.soak
@pytest.mark.deadline(150)
@pytest.mark.parametrize("culprit", [0, 1])
def test_every_host_returns_the_culprits_exit_code(culprit: int, tmp_path: Path) -> None:
    plan = FaultPlan().kill(culprit, step=4)
    with launched(tmp_path, "2", options=("--max-restarts", "0"), plan=plan) as hosts:
        hosts.start("second")
        assert hosts.end("first", "second") == [137, 137], hosts.logs()
    for name in ("first", "second"):
        log = (tmp_path / f"{name}.log").read_text()
        assert f"rank {culprit}, killed by SIGKILL; no restart is left of the 0 allowed" in log


@pytest.mark.soak
@pytest.mark.deadline(240)
def test_hosts_come_and_go_and_the_samples_of_each_step_stay(tmp_path: Path) -> None:
    with launched(tmp_path, "1:2", "0.3") as hosts:
        hosts.wait_for_step(1)
        hosts.start("second")
        hosts.wait_until((tmp_path / "logs" / "second" / "attempt-1" / "rank00001.err").exists)
        (joined_at,) = (event for event in read_events(tmp_path / "distplus") if event["kind"] == "regroup")
        hosts.wait_for_step(joined_at["global_step"] + 2)
        hosts.kill("second")
        assert hosts.end("first") == [0], hosts.logs()
    hosts.require_all_samples_once()
    assert hosts.starts("world_size") == [1, 2, 2, 1]


@pytest.mark.soak
@pytest.mark.deadline(240)
def test_a_host_is_replaced_and_the_job_goes_on(tmp_path: Path) -> None:
    with launched(tmp_path, "2", "0.3") as hosts:
        hosts.start("second")
        hosts.wait_for_step(2)
        hosts.kill("second")
        hosts.start("another")
        assert hosts.end("first", "another") == [0, 0], hosts.logs()
    assert results(tmp_path) == undisturbed()


@contextlib.contextmanager
def torchrun(folder: Path, num_nodes: str, *job: str, **variables: str) -> Iterator[Launchers]:
    """torchrun's own agents, each on a host of its own; node 0 serves the store in which they meet."""
    with several_hosts(2) as spaces:

        def command(name: str, node: int) -> tuple[list[str], list[str]]:
            options = {
                "--nnodes": num_nodes, "--nproc-per-node": "1", "--max-restarts": "9", "--rdzv-id": "some",
                "--rdzv-backend": "c10d", "--rdzv-endpoint": f"{spaces.addresses[0]}:29400",
                "--rdzv-conf": f"last_call_timeout=1,keep_alive_interval=1,is_host={1 - node}",
                "--local-addr": spaces.addresses[node], "--monitor-interval": "0.1",
            }  # fmt: skip
            words = [word for pair in options.items() for word in pair]
            program = ["-m", "torch.distributed.run", *words, *JOB[1:], str(folder), *job]
            return ["ip", "netns", "exec", spaces.names[node]], program

        of_all = {"DISTPLUS_SECRET": "of both hosts", "GLOO_SOCKET_IFNAME": "eth0"}
        with Launchers(folder, command, {**os.environ, **of_all, **variables}) as hosts:
            yield hosts


@pytest.mark.soak
@pytest.mark.deadline(300)
def test_a_host_of_torchrun_dies_and_another_joins_and_each_sample_counts_once(tmp_path: Path) -> None:
    """The agent that stayed has counted a restart, the one that joins has not."""
    with torchrun(tmp_path, "1:2", "1.5", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as hosts:
        hosts.start("first")
        hosts.start("second", node=1)
        hosts.wait_until(lambda: hosts.starts("world_size")[-2:] == [2, 2])
        hosts.wait_for_two_saves()
        hosts.kill("second")
        hosts.wait_until(lambda: hosts.starts("world_size")[-1] == 1)
        hosts.wait_for_two_saves()
        hosts.start("third", node=1)
        assert hosts.end("first", "third") == [0, 0], hosts.logs()
    assert hosts.starts("world_size")[-5:] == [2, 2, 1, 2, 2]
    assert hosts.starts("attempt")[-2:] == [1, 1]
    hosts.require_all_samples_once()


@pytest.mark.soak
@pytest.mark.deadline(240)
def test_a_rank_of_torchrun_is_killed_and_both_hosts_meet_again_at_the_same_store(tmp_path: Path) -> None:
    """Only the agent of the killed rank counts a restart, where the other one sees the new round first."""
    plan = planted(FaultPlan().kill(1, step=4), tmp_path)["DISTPLUS_FAULTS"]
    with torchrun(tmp_path, "2", DISTPLUS_FAULTS=plan) as hosts:
        hosts.start("first")
        hosts.start("second", node=1)
        assert hosts.end("first", "second") == [0, 0], hosts.logs()
    assert hosts.starts("attempt") == [0, 0, 1, 1]
    assert results(tmp_path) == undisturbed()
