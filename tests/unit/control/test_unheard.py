"""Notes in the folder of a run: heard by those who wait, and never those of an earlier start or of another run."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from lightning_distplus.control import Address, connect
from lightning_distplus.control.joining import await_port
from lightning_distplus.control.unheard import Unheard
from lightning_distplus.errors import RendezvousError
from lightning_distplus.testing import spawn
from lightning_distplus.testing.spawning import free_port
from lightning_distplus.world import World

MEETING = "distplus/job/0 node-zero:29500"


def nobody(rank: int) -> bool:
    return False


def test_what_a_rank_leaves_is_heard_by_rank_0_until_that_rank_comes(tmp_path: Path) -> None:
    waiting, lost = Unheard(tmp_path / "run", MEETING, 0), Unheard(tmp_path / "run", MEETING, 3)
    assert waiting.look(0.0) is None
    lost.leave("rank 3 gets no answer")
    assert waiting.look(0.1) is None  # it looks four times a second
    assert waiting.look(0.3, lambda rank: rank == 3) is None
    assert waiting.look(0.6, nobody) == "rank 3 gets no answer"


def test_a_note_of_an_earlier_start_counts_at_the_deadline_and_is_taken_away_by_its_rank(tmp_path: Path) -> None:
    Unheard(tmp_path, MEETING, 1).leave("rank 1 gets no answer")
    waiting = Unheard(tmp_path, MEETING, 0)
    assert waiting.look(0.0) is None
    assert waiting.last_word(nobody) == "rank 1 gets no answer"
    again = Unheard(tmp_path, MEETING, 1)
    assert waiting.last_word(nobody) is None
    again.leave("rank 1 gets no answer")  # the same words, and another start
    assert waiting.look(1.0) == "rank 1 gets no answer"


def test_no_other_run_hears_it_and_the_others_hear_rank_0_only(tmp_path: Path) -> None:
    other = Unheard(tmp_path, "distplus/job/0 node-zero:29501", 0)
    second = Unheard(tmp_path, MEETING, 2)
    Unheard(tmp_path, MEETING, 1).leave("rank 1")
    assert (other.look(0.0), other.last_word(nobody), second.look(0.0)) == (None, None, None)
    Unheard(tmp_path, MEETING, 0).leave("rank 0 cannot listen")
    assert second.look(1.0) == "rank 0 cannot listen"


def test_a_folder_that_takes_no_file_and_a_broken_note_are_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = Unheard(tmp_path / "file", MEETING, 1)
    nowhere.leave("nobody hears it")
    assert nowhere.last_word(nobody) is None
    Unheard(None, MEETING, 1).leave("nobody hears it")
    writes = Unheard(tmp_path, MEETING, 1)
    writes.leave("soon torn")
    (note,) = tmp_path.glob("unmet-*")
    note.write_text("{")
    assert Unheard(tmp_path, MEETING, 0).last_word(nobody) is None


def meet(rank: int, port: int, folder: str) -> None:
    """Ranks 0 and 2 of three; rank 1 has left a note before any of them began."""
    world = World(rank=2 * rank, size=3)
    connect(world, Address(host="127.0.0.1", port=port), timedelta(seconds=1), Path(folder))


def test_at_the_deadline_all_who_came_say_what_the_missing_rank_has_left(tmp_path: Path) -> None:
    port = free_port()
    address = Address(host="127.0.0.1", port=port)
    Unheard(tmp_path, f"{address.prefix} {address.host}:{port}", 1).leave("Rank 1 on b gets no answer.")
    run = spawn(meet, 2, args=(port, str(tmp_path)), deadline="40s")
    assert run.exit_codes == {0: 1, 1: 1}
    for log in run.logs.values():  # PeerMissing would end a run with another code
        assert "RendezvousError: The ranks cannot meet, because one process" in log
        assert "Rank 1 on b gets no answer." in log


def test_an_unheard_rank_0_ends_those_who_wait_for_its_port(tmp_path: Path) -> None:
    """Nobody listens at the port."""
    port = free_port()
    address = Address(host="127.0.0.1", port=port)
    meeting = f"{address.prefix} {address.host}:{port}"
    world = World(rank=1, size=2)
    unheard = Unheard(tmp_path, meeting, 1)
    Unheard(tmp_path, meeting, 0).leave("Rank 0 on a cannot listen.")
    with pytest.raises(RendezvousError, match=r"cannot reach the store\. Rank 0 on a cannot listen\."):
        await_port(world, "127.0.0.1", port, timedelta(seconds=30), unheard)
