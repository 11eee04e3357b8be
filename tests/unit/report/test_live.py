from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lightning_distplus.cli.report import LiveRun
from tests.unit.report.ledgers import BEGAN, Job


def shown(live: LiveRun, now: float) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as captured:
        console.print(live.show(now))
    return captured.get()


def test_what_a_run_appends_is_shown_and_a_new_attempt_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    live = LiveRun(job.home)
    live.refresh()
    assert "nothing in" in shown(live, BEGAN)
    job.start(0)
    job.train(10, 0, 20, data_s=1.0)
    job.tell(30, "saved", path="a.ckpt", global_step=20)
    with (job.home / "events-rank00000.jsonl").open("a") as file:
        file.write('{"time": ')  # a line that is being written
    live.refresh()
    text = shown(live, BEGAN + 40)
    assert "run a, attempt 0: 2 ranks, step 20, 1.00 steps/s, checkpoint of step 20 committed 10 s ago" in text
    assert not live.is_over
    with (job.home / "events-rank00000.jsonl").open("a") as file:
        file.write("torn\n")
    job.start(50, attempt=1)
    job.tell(60, "end", attempt=1, failed=False)
    live.refresh()
    assert "attempt 1: 2 ranks, step 0, checkpoint of step 20" in shown(live, BEGAN + 60)
    assert live.is_over


def test_the_speed_is_in_tokens_where_the_ledger_knows_them_else_in_samples(tmp_path: Path) -> None:
    job = Job(tmp_path)
    live = LiveRun(job.home)
    for attempt, per_step in enumerate(({"samples": 40}, {"samples": 40, "tokens": 81_920})):
        job.start(20 * attempt, attempt=attempt)
        for rank in range(2):
            fields = per_step if rank == 0 else {}
            job.tell(19, "steps", attempt=attempt, ranks=[rank], global_step=10, steps=10, seconds=5.0, **fields)
        live.refresh()
        wanted = ("8 samples/s, no checkpoint", "16,384 tokens/s, no checkpoint")[attempt]
        assert f"step 10, 2.00 steps/s, {wanted} yet" in shown(live, BEGAN + 50)


def test_many_ranks_are_a_line_for_each_host_with_its_slowest_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, num_ranks=1024)
    for rank in range(1024):
        job.tell(1, "start", ranks=[rank], host=f"node{rank // 8:03d}", world_size=1024)
        job.tell(9, "steps", ranks=[rank], global_step=8, steps=8, seconds=8.0, data_s=4.0 if rank == 77 else 0.1)
    live = LiveRun(job.home)
    live.refresh()
    lines = shown(live, BEGAN + 10).splitlines()
    assert len(lines) == 3 + 128
    (slow,) = (line for line in lines if "slowest 77 " in line)
    assert "node009" in slow
    assert "500.0" in slow


def test_a_ledger_that_is_rotated_while_it_is_watched_is_read_on(tmp_path: Path) -> None:
    job = Job(tmp_path, num_ranks=1)
    job.start(0)
    job.train(10, 0, 50)
    live = LiveRun(job.home)
    live.refresh()
    ledger = job.home / "events-rank00000.jsonl"
    ledger.rename(ledger.with_suffix(".1.jsonl"))
    ledger.symlink_to(tmp_path / "nowhere")  # the new one, before it is there
    live.refresh()
    ledger.unlink()
    job.train(60, 50, 60)
    live.refresh()
    assert "step 60, 1.00 steps/s" in shown(live, BEGAN + 70)
