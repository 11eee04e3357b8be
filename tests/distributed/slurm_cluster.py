"""A Slurm of two nodes on this host: munge, the controller and two daemons on ports of their own, without systemd."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_distplus.testing.spawning import free_port
from tests.processes import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"

_CONFIGURATION = """
ClusterName=distplus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
ReturnToService=2
KillWait=15
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} Gres=gpu:1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Which programs of Slurm and munge this host lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


@dataclass(frozen=True)
class Cluster:
    """A running Slurm."""

    folder: Path
    environment: dict[str, str]

    def call(self, *command: str, **variables: str) -> str:
        """What a program of Slurm prints."""
        ended = subprocess.run(
            command, env={**self.environment, **variables}, cwd=self.folder, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}: {ended.stderr}"
        return ended.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str, deadline_s: float = 120) -> dict[str, str]:
        """Waits until the job is in one of the states; returns its fields."""
        wait_until(lambda: self.job(number)["JobState"] in states, self.logs, deadline_s)
        return self.job(number)

    def logs(self) -> str:
        """The end of everything that the daemons and the jobs have written."""
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.rglob("*.log")))


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """Sets a Slurm up in a folder, and takes it down."""
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    for name in ("state", "n1", "n2", "munge"):
        (folder / name).mkdir(parents=True, mode=0o700)
    (folder / "munge" / "key").write_bytes(os.urandom(256))
    (folder / "munge" / "key").chmod(0o400)
    host, cpus = socket.gethostname().partition(".")[0], os.cpu_count()
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    text = _CONFIGURATION.format(folder=folder, host=host, user=user, ports=[free_port() for _ in range(3)], cpus=cpus)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")  # a number that it hands out, no device
    files = ("key-file", "socket", "pid-file", "seed-file")
    munge = [f"--{name}={folder}/munge/{name.partition('-')[0]}" for name in files]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--force", "--foreground", *munge, f"--log-file={folder}/munge/daemon.log"],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n1"],
            ["slurmd", "-D", "-N", "n2"],
        ):
            daemons.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        cluster = Cluster(folder, environment)
        _wait_until_idle(cluster)
        yield cluster
        _end_jobs(cluster)
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _wait_until_idle(cluster: Cluster) -> None:
    def is_idle() -> bool:
        with contextlib.suppress(AssertionError):
            return cluster.call("scontrol", "--oneliner", "show", "node").count("State=IDLE ") == 2
        return False

    wait_until(is_idle, cluster.logs)


def _end_jobs(cluster: Cluster) -> None:
    """The processes of a job do not end with the daemons."""
    cluster.call("scancel", "--signal=KILL", "--full", "--me")
    cluster.call("scancel", "--me")
    wait_until(lambda: not cluster.call("squeue", "--noheader"), cluster.logs)
