"""The store of the launchers: attempts are numbered for the whole job, and a host that comes late is let in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_distplus.launch.agent import HostsApart, Meeting
from lightning_distplus.process import Signals
from lightning_distplus.testing.spawning import free_port

FIRST, SECOND = 0, 1


def two_hosts() -> tuple[Meeting, Meeting]:
    """The launcher that serves the store, and another one."""
    endpoint = f"127.0.0.1:{free_port()}"
    return Meeting(endpoint, "job"), Meeting(endpoint, "job")


def test_the_attempts_are_those_of_the_job() -> None:
    hosts = two_hosts()
    assert [one.join() for one in hosts] == [FIRST, FIRST]
    for one in hosts:
        one.begin(FIRST, num_hosts=2)
    assert [one.next(FIRST) for one in hosts] == [SECOND, SECOND]
    assert hosts[1].next(FIRST) == SECOND  # asked once more


class Stopped(Signals):
    """Notes that the ranks are to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def stop_ranks(self) -> None:
        self.came.set()


def test_a_host_that_comes_late_says_so_and_takes_part_in_the_next_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    here, late = two_hosts()
    here.begin(here.join(), num_hosts=1)
    signals = Stopped()
    with ThreadPoolExecutor() as pool:
        with here.watched(FIRST, signals):
            joined = pool.submit(late.join)
            assert signals.came.wait(30)
        assert f"attempt {FIRST} is under way; this host asks to be let in, and waits" in capsys.readouterr().err
        assert here.newcomer(FIRST) is not None
        assert here.next(FIRST) == SECOND
        assert joined.result(timeout=30) == SECOND
    assert here.newcomer(SECOND) is None


def test_every_host_learns_who_failed_on_the_others() -> None:
    hosts = two_hosts()
    for number, one in [(one.join(), one) for one in hosts]:
        one.begin(number, num_hosts=2)
    with ThreadPoolExecutor() as pool:
        failures = ({0: 171}, {3: -9})
        shared = [pool.submit(one.share, FIRST, told, waits=True) for one, told in zip(hosts, failures, strict=True)]
        assert [one.result(timeout=30) for one in shared] == [{0: 171, 3: -9}] * 2


def test_the_others_hear_that_the_host_of_the_store_has_left() -> None:
    host, other = two_hosts()
    host.begin(host.join(), num_hosts=1)
    host.leave(FIRST)
    del host
    with pytest.raises(HostsApart, match=r"127\.0\.0\.1:\d+ is not there, or has ended"):
        other.next(FIRST)


def test_hosts_without_a_name_for_their_job_agree_on_one() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = Meeting(endpoint, ""), Meeting(endpoint, "")
    assert first.job == second.job != ""
    assert Meeting(endpoint, "job").job == "job"
    first._signed.set("job", b"../elsewhere")
    with pytest.raises(HostsApart, match=r"calls the job '\.\./elsewhere'; set DISTPLUS_SECRET"):
        Meeting(endpoint, "")
