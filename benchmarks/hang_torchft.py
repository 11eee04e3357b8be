"""The job of ``benchmarks.hangs`` with torchft, without Lightning: ``hang_torchft.py FAULT FOLDER SECONDS``.

torchft replaces no process: the replica that is left trains on alone. It runs in the environment of the rivals.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

FAULT_STEP = 12
GUILTY = 1
_STEP_S = 0.1
_NUM_STEPS = 1000


def launch(fault: str, folder: Path, deadline_s: str) -> None:
    """A lighthouse, and two replicas of one process each; ends them when it is told to end."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    command = [sys.executable, __file__, fault, str(folder), deadline_s]
    replicas = [subprocess.Popen([*command, str(replica), address]) for replica in range(2)]

    def end(*_: Any) -> None:
        for replica in replicas:
            replica.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    replicas[1 - GUILTY].wait()
    end()


def train(fault: str, folder: Path, deadline_s: float, replica: int, lighthouse: str) -> None:
    """One replica: what ``hang_job`` trains, with torchft's manager around the optimizer."""
    import torch
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    net = torch.nn.Linear(8, 8)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=deadline_s)),
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        min_replica_size=1,
        timeout=timedelta(seconds=deadline_s),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{replica}",
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.01))
    journal = folder / f"journal-{replica}"

    def write(what: str, step: int) -> None:
        with journal.open("a") as file:
            file.write(f"{time.time()} {what} {replica} {int(step > FAULT_STEP)} {step}\n")

    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        time.sleep(_STEP_S)
        try:
            model(torch.randn(4, 8)).pow(2).mean().backward()
            optimizer.step()
        except (RuntimeError, TimeoutError):
            write("error", manager.current_step())
            continue
        if manager.errored() is not None:
            write("error", manager.current_step())
        if manager.num_participants() < 2 and manager.current_step() <= FAULT_STEP:  # they have not met yet
            continue
        write("step", manager.current_step())
        if replica == GUILTY and manager.current_step() == FAULT_STEP:
            write("fault", FAULT_STEP)
            if fault == "hang":
                time.sleep(10_000)
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[fault])


if __name__ == "__main__":
    if len(sys.argv) > 4:
        train(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        launch(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
