from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_distplus.cli.__main__ import main
from lightning_distplus.preflight import Status, agreement
from lightning_distplus.report import leave_page, render_page, write_page
from lightning_distplus.report.run import describe_runs, read_ledgers
from tests.unit.report.ledgers import BEGAN, Job, a_job_that_hung_once


def test_the_page_stands_alone_and_text_of_the_run_cannot_become_markup(tmp_path: Path) -> None:
    job = a_job_that_hung_once(tmp_path)
    page = write_page(job.home).read_text()
    assert list(job.home.glob(".report*")) == []
    assert page.count("</script>") == 2
    assert "<script>alert" not in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
    assert "default-src 'none'" in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    (told,) = json.loads(data)
    assert told["verdicts"][0]["stacks"]["1"] == "<script>alert(1)</script>"
    assert [one["end"] for one in told["attempts"]] == ["hang", "done"]
    assert told["steps"]["rows"][0]["ranks"] == [0]
    assert [line["attempt"] for line in told["loss"]] == [0, 1]


def test_values_that_are_not_finite_leave_the_page_readable(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    job.tell(20, "steps", global_step=10, steps=10, seconds=10.0, loss=float("nan"))
    job.tell(21, "not_finite", global_step=11, what="loss", value=float("inf"))
    page = render_page(describe_runs(read_ledgers(job.home)))
    data = page.partition('id="data">')[2].partition("</script>")[0]
    json.loads(data, parse_constant=pytest.fail)


def test_a_line_torn_in_the_middle_loses_only_itself(tmp_path: Path) -> None:
    job = a_job_that_hung_once(tmp_path)
    ledger = job.home / "events-rank00000.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    torn = next(index for index, line in enumerate(lines) if b'"steps"' in line)
    lines[torn] = lines[torn][:40] + b"\n"
    ledger.write_bytes(b"".join(lines) + b'{"time": 17')
    found = read_ledgers(job.home)
    assert len(found.windows["a", 0][0]) == 5
    assert len(found.windows["a", 0][1]) == 6


def test_the_clocks_of_hosts_are_those_of_rank_0(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for rank, offset_s in ((0, 0.0), (1, 3600.0)):
        began = BEGAN + offset_s
        job.tell(2 + offset_s, "start", ranks=[rank], began_at=began, clock_offset_s=offset_s, function="fit")
        job.tell(12 + offset_s, "steps", ranks=[rank], global_step=10, steps=10, seconds=10.0)
        job.tell(13 + offset_s, "end", ranks=[rank], failed=False)
    (told,) = describe_runs(read_ledgers(job.home))
    assert (told["began"], told["last"]) == (BEGAN, BEGAN + 13)
    assert told["goodput"]["wall_s"] == pytest.approx(13)
    assert told["goodput"]["share"] == pytest.approx(10 / 13)


def test_the_error_of_a_rank_that_stopped_because_of_another_is_no_failure(tmp_path: Path) -> None:
    job = a_job_that_hung_once(tmp_path)
    job.tell(90, "failed", ranks=[0], error="PeerLost: the process of rank 1 is gone", exit_code=171)
    job.tell(150, "failed", attempt=1, ranks=[1], error="RuntimeError: its own", exit_code=1)
    (told,) = describe_runs(read_ledgers(job.home))
    assert [(one["rank"], one["error"]) for one in told["failures"]] == [(1, "RuntimeError: its own")]


def test_what_the_protections_cost_is_that_of_the_last_measurement(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    for at, steps in ((20, 64), (30, 100)):
        job.tell(at, "costs", steps=steps, gate_us=200.0 - at, monitor_us=100.0, watchdog_us=30.0, ledger_us=10.0)
    job.tell(31, "saved", path="/gone/a.ckpt", global_step=100, stall_s=0.5)
    (told,) = describe_runs(read_ledgers(job.home))
    assert (told["costs"]["rank"], told["costs"]["steps"]) == (0, 100)
    assert {one["name"]: one["microseconds"] for one in told["costs"]["parts"]} == {
        "gate": 170.0, "monitor": 100.0, "watchdog": 30.0, "ledger": 10.0, "checkpoints": 5000.0,
    }  # fmt: skip


def test_a_page_that_cannot_be_written_delays_and_ends_nothing(tmp_path: Path) -> None:
    job = a_job_that_hung_once(tmp_path)
    (job.home / "report.html").mkdir()
    began = time.monotonic()
    leave_page(job.home)
    leave_page(tmp_path / "nowhere")
    assert time.monotonic() - began < 4
    assert list(job.home.glob(".report*")) == []


def test_the_command_prints_writes_and_dumps_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_job_that_hung_once(tmp_path)
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html"), "--follow"]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("The run is done, at step 140.\n")
    assert "attempt 0: hang, known after 20.0 s, trained again 20.0 s later, 10 steps lost (10.0 s)" in shown
    assert "goodput 58.8 % of 3 min trained the model" in shown
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["checkpoints"][0]["state"] == "missing"
    assert (tmp_path / "page.html").stat().st_size < 4_000_000


def test_a_checkpoint_that_the_run_has_removed_is_rotated_and_not_missing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.start(0)
    for at, step in enumerate((1, 2, 3), 10):
        job.tell(at, "saved", path=f"/gone/step={step}.ckpt", global_step=step)
    job.tell(20, "removed", ranks=[0], path="/gone/step=1.ckpt")
    job.tell(20, "removed", ranks=[0], path="/gone/step=2.ckpt")
    job.tell(21, "saved", path="/gone/step=2.ckpt", global_step=2)  # again: what is gone now, somebody else has taken
    (told,) = describe_runs(read_ledgers(job.home))
    assert {one["step"]: one["state"] for one in told["checkpoints"]} == {1: "rotated", 2: "missing", 3: "missing"}


@pytest.mark.parametrize(
    ("phase", "then"), [("step", "starts at the beginning"), ("resume", "loads the same checkpoint")]
)
def test_a_run_that_has_committed_nothing_says_what_the_same_command_does(
    phase: str, then: str, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    job.start(0)
    job.hang(30, silence_s=5, step=0, phase=phase)
    (told,) = describe_runs(read_ledgers(job.home))
    assert f"the same command {then}" in told["todo"]


def test_a_slow_part_of_one_rank_is_named_with_its_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(tmp_path, num_ranks=4)
    job.start(0)
    for rank in range(4):
        for window in range(1, 6):
            parts = {"data_s": 4.2, "backward_s": 1.0} if rank == 2 else {"data_s": 2.0, "backward_s": 3.2}
            fields = {"global_step": 10 * window, "steps": 10, "seconds": 10.0, "forward_s": 3.0, **parts}
            job.tell(10.0 * window, "steps", ranks=[rank], **fields)
    (harmless,) = (field for field, status in agreement._STATUS.items() if status is Status.NOTE)
    job.tell(60, "difference", field=harmless)
    assert main(["report", str(tmp_path)]) == 0
    assert "rank 2 (host node0) is slow: data takes 420 ms, 2.1 x the median of the others\n" in capsys.readouterr().out
    (told,) = describe_runs(read_ledgers(job.home))
    assert [row["own_s"][0] for row in told["steps"]["rows"]] == [0.68, 0.68, 0.9, 0.68]
    assert told["notices"] == []  # weights that no seed has made equal, the strategy has


def test_a_job_that_is_even_has_no_straggler(tmp_path: Path) -> None:
    assert describe_runs(read_ledgers(a_job_that_hung_once(tmp_path).home))[0]["stragglers"] == []


# Uses the page as a person does, and leaves in its title what happened.
PERSON = """
<script>
const told = [];
addEventListener("error", (event) => told.push(`error: ${event.message}`));
document.addEventListener("securitypolicyviolation", (event) => told.push(`request: ${event.blockedURI}`));
for (const svg of document.querySelectorAll("svg")) {
  const output = svg.parentElement.querySelector("output");
  svg.focus();
  svg.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
  told.push(output.textContent);
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 9 }));
  told.push(output.textContent);
}
const folded = document.querySelectorAll("details")[0];
folded.querySelector("summary").click();
told.push(`open: ${folded.open}`, `sections: ${document.querySelectorAll("section").length}`);
told.push(`requests: ${performance.getEntriesByType("resource").length}`);
told.push(`wider than the screen: ${document.documentElement.scrollWidth > document.documentElement.clientWidth}`);
document.title = told.join(" | ");
</script>
"""


@pytest.mark.soak  # needs Chromium
@pytest.mark.parametrize("size", ["1280,900", "390,844"])
def test_a_person_can_use_the_page_in_a_browser(size: str, tmp_path: Path) -> None:
    page = write_page(a_job_that_hung_once(tmp_path).home)
    page.write_text(page.read_text().replace("</body>", f"{PERSON}</body>"))
    browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run(
        [*browser, "--enable-logging=stderr", f"--window-size={size}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in shown.stderr
    title = re.findall("<title>(.*?)</title>", shown.stdout)[0]
    told = title.split(" | ")
    assert [text for text in told if text.startswith(("error", "request:"))] == []
    assert told[-4:] == ["open: true", "sections: 7", "requests: 0", "wider than the screen: false"]
    assert re.fullmatch(
        r"rank 0, 1970-01-12 13:\d\d:\d\d UTC: (\d+ ms a step, \d+ ms without backward and gate|no steps)", told[0]
    )
    assert told[0] != told[1]
    assert re.fullmatch(r"step \d+: loss 0\.\d+", told[2])
    assert told[2] != told[3]


LARGE = """
import sys, time, resource
from pathlib import Path
from lightning_distplus.report import write_page
began = time.process_time()
path = write_page(Path(sys.argv[1]))
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, path.stat().st_size)
"""


@pytest.mark.soak
def test_64_ranks_of_100_000_steps_take_5_seconds_and_1_gb(tmp_path: Path) -> None:
    job = Job(tmp_path, num_ranks=64)
    job.start(0)
    head = '"run_id": "a", "attempt": 0, "seq": 1, "kind": "steps", "steps": 30, "seconds": 30.0'
    parts = '"data_s": 0.31, "forward_s": 9.5, "backward_s": 19.1, "optimizer_s": 1.0, "wait_s": 0.2, "loss": 1.25'
    for rank in range(64):
        with (job.home / f"events-rank{rank:05d}.jsonl").open("a") as file:
            for step in range(30, 100_000, 30):
                own = f'"time": {BEGAN + step}, "rank": {rank}, "global_step": {step}'
                file.write(f"{{{own}, {head}, {parts}}}\n")
    ended = subprocess.run([sys.executable, "-c", LARGE, str(job.home)], capture_output=True, text=True, check=True)
    cpu_s, peak_gb, size = map(float, ended.stdout.split())
    print(f"{cpu_s:.1f} s, {peak_gb:.2f} GB, page of {size / 1e3:.0f} kB")
    assert cpu_s < 5
    assert peak_gb < 1
    assert size < 4_000_000
