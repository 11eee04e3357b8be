"""The store of the launchers: attempts are numbered for the whole job, and a host that comes late is let in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_distplus.launch.agent import HostsApart, Meeting
from lightning_distplus.testing.spawning import free_port

FIRST, SECOND = 0, 1


def two_hosts() -> tuple[Meeting, Meeting]:
    """The launcher that serves the store, and another one."""
    endpoint = f"127.0.0.1:{free_port()}"
    return Meeting(endpoint, "job"), Meeting(endpoint, "job")


def never(text: str) -> None:
    raise AssertionError(text)


def test_the_attempts_are_those_of_the_job() -> None:
    hosts = two_hosts()
    assert [one.join(never) for one in hosts] == [FIRST, FIRST]
    for one in hosts:
        one.begin(FIRST, num_hosts=2)
    assert [one.next(FIRST) for one in hosts] == [SECOND, SECOND]
    assert hosts[1].next(FIRST) == SECOND  # asked once more


def test_a_host_that_comes_late_says_so_and_takes_part_in_the_next_attempt() -> None:
    here, late = two_hosts()
    here.begin(here.join(never), num_hosts=1)
    told: list[str] = []
    came = threading.Event()
    with ThreadPoolExecutor() as pool:
        with here.watched(FIRST, came.set):
            joined = pool.submit(late.join, told.append)
            assert came.wait(30)
        assert told == [f"attempt {FIRST} is under way; this host asks to be let in, and waits"]
        assert here.newcomer(FIRST) is not None
        assert here.next(FIRST) == SECOND
        assert joined.result(timeout=30) == SECOND
    assert here.newcomer(SECOND) is None


def test_every_host_learns_who_failed_on_the_others() -> None:
    hosts = two_hosts()
    for number, one in [(one.join(never), one) for one in hosts]:
        one.begin(number, num_hosts=2)
    with ThreadPoolExecutor() as pool:
        failures = ({0: 171}, {3: -9})
        shared = [pool.submit(one.share, FIRST, told, waits=True) for one, told in zip(hosts, failures, strict=True)]
        assert [one.result(timeout=30) for one in shared] == [{0: 171, 3: -9}] * 2


def test_the_others_hear_that_the_host_of_the_store_has_left() -> None:
    host, other = two_hosts()
    host.begin(host.join(never), num_hosts=1)
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
