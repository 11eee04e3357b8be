from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.report import after_verdict
from tests.unit.report.ledgers import a_job_that_hung_once


@pytest.fixture
def verdict(tmp_path: Path) -> Path:
    (path,) = a_job_that_hung_once(tmp_path).home.glob("verdict-*.json")
    return path


class Host:
    """A host that hears verdicts, and answers after a while."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.status, self.may_answer = 200, threading.Event()
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                host.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                host.may_answer.wait(20)
                self.send_response(host.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(10)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


def after(path: Path, on_verdict: str) -> float:
    """Seconds that the end of the run waits."""
    began = time.monotonic()
    after_verdict(path, on_verdict)
    return time.monotonic() - began


def test_a_url_gets_the_verdict_once_per_incident_with_the_text_as_it_was_printed(verdict: Path, host: Host) -> None:
    host.may_answer.set()
    assert after(verdict, host.url) < 2
    assert after(verdict, host.url) < 2  # as a second host with the same folder would
    (told,) = host.told
    assert (told["kind"], told["culprits"], told["path"]) == ("hang", [1], str(verdict))
    assert told["text"].startswith("RANK 1 HANGS")
    assert (verdict.parent / "report.html").exists()


def test_a_command_gets_the_verdict_as_its_input(verdict: Path, tmp_path: Path) -> None:
    after(verdict, f"cat > {tmp_path}/told.json")
    assert json.loads((tmp_path / "told.json").read_text())["kind"] == "hang"


def test_a_webhook_that_hangs_or_refuses_delays_an_ending_by_two_seconds_at_most(
    verdict: Path, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    assert after(verdict, host.url) < 2.5
    (verdict.parent / next(verdict.parent.glob(".verdict-*.sent"))).unlink()
    host.status = 500
    host.may_answer.set()
    with caplog.at_level(logging.WARNING):
        assert after(verdict, host.url) < 2
    assert "on_verdict has failed (HTTPError" in caplog.text


@pytest.mark.parametrize(("command", "says"), [("exit 3", "CalledProcessError"), ("sleep 60 & wait", "TimeoutExpired")])
def test_a_command_that_fails_or_hangs_ends_nothing_and_leaves_no_process(
    verdict: Path, caplog: pytest.LogCaptureFixture, command: str, says: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert after(verdict, command) < 2.5
    assert f"on_verdict has failed ({says}" in caplog.text
