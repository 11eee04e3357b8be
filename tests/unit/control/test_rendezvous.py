"""Rendezvous: where rank 0 listens, whether an address leads there, and the notes of those who do not come."""

from __future__ import annotations

import errno
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from lightning_distplus import env
from lightning_distplus.control import Address, ControlPlane, connect
from lightning_distplus.control.rendezvous import Notes, _Meeting, explain_silence, is_local, listen_on
from lightning_distplus.errors import RendezvousError
from lightning_distplus.testing import spawn
from lightning_distplus.testing.spawning import free_port
from lightning_distplus.world import World

NOWHERE = "no-such-host.invalid"  # a name that RFC 2606 keeps out of every name service
ELSEWHERE = "192.0.2.1"  # an address that RFC 5737 keeps for documents
ALL_INTERFACES = ("0.0.0.0", "::")


def place_of(host: str) -> str:
    with listen_on(host, 0) as listener:
        return str(listener.getsockname()[0])


def test_rank_0_listens_at_its_main_address() -> None:
    assert place_of("127.0.0.1") == "127.0.0.1"


def test_rank_0_listens_on_all_interfaces_where_the_main_address_is_none_of_its_own() -> None:
    assert place_of(ELSEWHERE) in ALL_INTERFACES


@pytest.mark.deadline(120)  # a resolver may take its time over a name that it does not know
def test_only_in_kubernetes_may_the_main_name_not_resolve_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KUBERNETES_SERVICE_HOST.name, raising=False)
    with pytest.raises(socket.gaierror):
        listen_on(NOWHERE, 0)
    monkeypatch.setenv(env.KUBERNETES_SERVICE_HOST.name, "10.0.0.1")  # its service gets the name when this pod is ready
    assert place_of(NOWHERE) in ALL_INTERFACES


# -- where the main address leads, and processes that are refused ------------------------------------------------------


def test_who_still_waits_a_while_after_a_refusal_says_why(later: timedelta) -> None:
    """Rank 2 of three never comes, and rank 1 comes twice."""
    store = HashStore()

    def come(rank: int, pid: int) -> tuple[str, float]:
        begin = time.monotonic()
        meeting = _Meeting(World(rank=rank, size=3, pid=pid), Address(host="127.0.0.1", port=1), later)
        with pytest.raises(RendezvousError, match="Two processes call themselves rank 1 of 3") as refused:
            meeting.meet(store)
        return str(refused.value), time.monotonic() - begin

    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(come, rank, rank + 1) for rank in (0, 1)]
        while not store.check(["distplus//0/hello/1"]):
            time.sleep(0.01)
        text, seconds = come(1, 3)
        assert not text.startswith("The ranks cannot meet")
        assert seconds < 1.5
        (text, last), (told, first) = (one.result() for one in waiting)
    assert text.startswith("The ranks cannot meet, because one process was refused. Two processes")
    assert told == f"{text} (Told by rank 0, host {socket.gethostname()}, pid 1.)"
    assert min(first, last) > 1.5


def test_who_serves_the_store_says_which_job_is_right_also_where_a_stray_rank_came_first(later: timedelta) -> None:
    store = HashStore()

    def enter(rank: int, **own: Any) -> ControlPlane:
        address = Address(host="127.0.0.1", port=1, job="ours")
        return _Meeting(World(rank=rank, size=2), replace(address, **own), later)._introduce(store, leads=rank == 0)

    with ThreadPoolExecutor() as pool:
        stray = pool.submit(enter, 1, job="killed")
        time.sleep(0.1)
        first = enter(0)
        with pytest.raises(RendezvousError, match="job is 'killed' here and 'ours' there"):
            stray.result()
    with pytest.raises(RendezvousError, match="attempt is 1 here and 0 there"):
        enter(1, attempt=1)
    assert enter(1, attempt=1, is_counted_apart=True).run_id == first.run_id
    first.stop_listening()


def test_an_address_is_local_where_it_can_be_bound() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")  # reserved for documentation
    assert not is_local("no-such-host.invalid")


REFUSED = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
OF_TWO = World(rank=1, size=2, num_nodes=2, node_rank=1, host="b")


@pytest.mark.parametrize(
    ("error", "host", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "nowhere", "cannot resolve MASTER_ADDR=nowhere"),
        (TimeoutError("timed out"), "192.0.2.1", "gets no answer from 192.0.2.1:29500, not even a refusal"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "192.0.2.1", "or that host is down"),
    ],
)  # fmt: skip
def test_an_address_that_leads_nowhere_is_explained(error: OSError, host: str, words: str) -> None:
    assert words in str(explain_silence(OF_TWO, host, 29500, error))


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_a_refusal_to_connect_is_no_reason_to_give_up(host: str) -> None:
    assert explain_silence(OF_TWO, host, 29500, REFUSED) is None


def test_in_kubernetes_and_on_one_host_waiting_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TimeoutError("timed out")
    assert explain_silence(World(rank=1, size=2), "192.0.2.1", 29500, error) is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert explain_silence(OF_TWO, "192.0.2.1", 29500, error) is None


# -- notes in the folder of a run: heard by those who wait, and never those of an earlier start or of another run ------


MEETING = "distplus/job/0 node-zero:29500"


def nobody(rank: int) -> bool:
    return False


def test_what_a_rank_leaves_is_heard_by_rank_0_until_that_rank_comes(tmp_path: Path) -> None:
    waiting, lost = Notes(tmp_path / "run", MEETING, 0), Notes(tmp_path / "run", MEETING, 3)
    assert waiting.look(0.0) is None
    lost.leave("rank 3 gets no answer")
    assert waiting.look(0.1) is None  # it looks four times a second
    assert waiting.look(0.3, lambda rank: rank == 3) is None
    assert waiting.look(0.6, nobody) == "rank 3 gets no answer"


def test_a_note_of_an_earlier_start_counts_at_the_deadline_and_is_taken_away_by_its_rank(tmp_path: Path) -> None:
    Notes(tmp_path, MEETING, 1).leave("rank 1 gets no answer")
    (note,) = tmp_path.glob("unmet-*")
    os.utime(note, (1000.0, 1000.0))
    waiting = Notes(tmp_path, MEETING, 0, before=2000.0)
    assert waiting.look(0.0) is None
    assert waiting.last_word(nobody) == "rank 1 gets no answer"
    again = Notes(tmp_path, MEETING, 1)
    assert waiting.last_word(nobody) is None
    again.leave("rank 1 gets no answer")
    assert waiting.look(1.0) == "rank 1 gets no answer"


def test_a_rank_that_comes_a_moment_later_hears_a_note_of_its_own_start(later: timedelta, tmp_path: Path) -> None:
    name = "/0 127.0.0.1:1"
    Notes(tmp_path, name, 0).leave("Rank 0 on a cannot listen.")
    late = _Meeting(World(rank=1, size=2), Address(host="127.0.0.1", port=1), later, tmp_path)
    with pytest.raises(RendezvousError, match=r"cannot reach the store\. Rank 0 on a cannot listen\."):
        late.open_store()


def test_no_other_run_hears_it_and_the_others_hear_rank_0_only(tmp_path: Path) -> None:
    other = Notes(tmp_path, "distplus/job/0 node-zero:29501", 0)
    second = Notes(tmp_path, MEETING, 2)
    Notes(tmp_path, MEETING, 1).leave("rank 1")
    assert (other.look(0.0), other.last_word(nobody), second.look(0.0)) == (None, None, None)
    Notes(tmp_path, MEETING, 0).leave("rank 0 cannot listen")
    assert second.look(1.0) == "rank 0 cannot listen"


def test_a_folder_that_takes_no_file_and_a_broken_note_are_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = Notes(tmp_path / "file", MEETING, 1)
    nowhere.leave("nobody hears it")
    assert nowhere.last_word(nobody) is None
    Notes(None, MEETING, 1).leave("nobody hears it")
    writes = Notes(tmp_path, MEETING, 1)
    writes.leave("soon torn")
    (note,) = tmp_path.glob("unmet-*")
    note.write_bytes(b"\xff")
    assert Notes(tmp_path, MEETING, 0).last_word(nobody) is None


def meet(rank: int, port: int, folder: str) -> None:
    """Ranks 0 and 2 of three; rank 1 has left a note before any of them began."""
    world = World(rank=2 * rank, size=3)
    connect(world, Address(host="127.0.0.1", port=port), timedelta(seconds=1), Path(folder))


def test_at_the_deadline_all_who_came_say_what_the_missing_rank_has_left(tmp_path: Path) -> None:
    port = free_port()
    Notes(tmp_path, f"/0 127.0.0.1:{port}", 1).leave("Rank 1 on b gets no answer.")
    run = spawn(meet, 2, args=(port, str(tmp_path)), deadline="40s")
    assert run.exit_codes == {0: 1, 1: 1}
    for log in run.logs.values():  # PeerMissing would end a run with another code
        assert "RendezvousError: The ranks cannot meet, because one process" in log
        assert "Rank 1 on b gets no answer." in log
