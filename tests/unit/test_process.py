"""The load of this host: what the system says, in one line, and never an error; and who has started a rank."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_distplus import process
from lightning_distplus.events import InHand
from lightning_distplus.process import HostLoad, introduce_starter, launcher_has_ended, starter_has_ended
from tests.processes import run_source


def test_the_load_of_this_host_is_plausible_and_quickly_told() -> None:
    start = time.perf_counter()
    load = HostLoad.now()
    assert time.perf_counter() - start < 2  # 1 ms on the machine of the benchmarks; a GPU tool has half a second
    assert load.num_cores is not None
    assert load.memory_bytes is not None
    assert load.memory_used_bytes is not None
    assert 0 < load.memory_used_bytes < load.memory_bytes
    assert load.num_files is not None
    with Path(__file__).open():
        assert (HostLoad.now().num_files or 0) == load.num_files + 1


def test_it_reads_as_one_line() -> None:
    load = HostLoad(
        load_1m=7.06,
        num_cores=2,
        memory_used_bytes=61 << 30,
        memory_bytes=64 << 30,
        disk_wait_percent=81.2,
        num_files=900,
        max_files=1024,
        gpus=[{"index": 0.0, "used_percent": 3.0, "memory_used_bytes": 2 << 30, "memory_bytes": 8 << 30}],
    )
    assert load.describe() == (
        "load 7.1 on 2 cores, memory 61.0 of 64.0 GiB, disk wait 81 %, 900 of 1024 files open, "
        "GPU 0 3 % busy, 2.0 of 8.0 GiB"
    )


def test_what_the_system_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> None:
        raise OSError("no /proc here")

    for name in ("_memory", "_shared_memory", "_disks", "_files"):
        monkeypatch.setattr(process, name, refuses)
    load = HostLoad.now()
    assert load.memory_bytes is None
    assert load.describe().startswith("load ")


def test_workers_that_are_ended_raise_nothing_in_a_process_that_ends() -> None:
    ended = run_source("""
        import multiprocessing
        from torch.utils.data import DataLoader
        from lightning_distplus.process import end_workers

        batches = iter(DataLoader(range(8), num_workers=2))
        next(batches)
        workers = multiprocessing.active_children()
        end_workers()
        for worker in workers:
            worker.join(10)
        print(len(workers), [worker.exitcode for worker in workers], flush=True)
    """)
    assert ended.stdout == "2 [-9, -9]\n", ended.stderr
    assert "killed by signal" not in ended.stderr
    assert ended.returncode == 0


# -- who has started this rank -----------------------------------------------------------------------------------------


def test_a_rank_knows_whether_its_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTPLUS_IN_HAND", "")
    assert not launcher_has_ended()  # nobody has started it
    launcher = InHand(2)
    assert not launcher_has_ended()
    launcher.close()
    assert not launcher_has_ended()  # its process is there
    os.environ["DISTPLUS_IN_HAND"] = "/proc/4194305/fd/3"  # no number of a process is as high
    assert launcher_has_ended()


def test_a_job_knows_whether_its_starter_has_ended_and_one_of_a_launcher_does_not_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DISTPLUS_STARTER", "")
    assert not starter_has_ended("")
    introduce_starter()
    mine = os.environ["DISTPLUS_STARTER"]
    assert not starter_has_ended(mine)
    gone = f"{os.getpid()}:1"  # the number was another process's before
    assert not starter_has_ended(gone)
    os.environ["DISTPLUS_STARTER"] = gone
    assert starter_has_ended(gone)
    assert not starter_has_ended("of torchrun")
    assert not starter_has_ended("")
