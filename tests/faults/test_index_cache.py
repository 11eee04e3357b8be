"""The index of documents: built by one of several processes, also where builders are killed; never a wrong sample."""

from __future__ import annotations

import logging
import os
import signal
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_distplus.data import stream
from lightning_distplus.data.index_cache import shared_index
from lightning_distplus.data.tokens import MegatronTokens
from lightning_distplus.testing import spawn

NUM_DOCUMENTS = 300_000  # more than the number from which an index is kept
SEQ_LEN = 16


def write_pair(prefix: Path, seed: int = 0) -> np.ndarray:
    """Documents of 1 to 5 tokens, written byte by byte; returns where they begin."""
    lengths = np.random.default_rng(seed).integers(1, 6, NUM_DOCUMENTS, dtype="<i4")
    begins = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8")])
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, NUM_DOCUMENTS, NUM_DOCUMENTS + 1)
    marks = np.arange(NUM_DOCUMENTS + 1, dtype="<i8")
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + (2 * begins).tobytes() + marks.tobytes())
    prefix.with_suffix(".bin").write_bytes((np.arange(lengths.sum()) % 60_000).astype("<u2").tobytes())
    return begins


def documents_of(prefix: Path, samples: np.ndarray) -> np.ndarray:
    return MegatronTokens(prefix, SEQ_LEN).documents(samples)


def expected_documents(begins: np.ndarray, samples: np.ndarray) -> np.ndarray:
    first = samples[:, None] * SEQ_LEN
    document = np.searchsorted(begins, first + np.arange(SEQ_LEN), side="right")
    return document - document[:, :1]


def index_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ".distplus-index").iterdir() if path.suffix != ".lock")


SAMPLES = np.array([0, 1, 777, 40_000])


class DiesInTheMiddle(MegatronTokens):
    """Its process is killed while it builds, or while it writes what it has built, once for each kind."""

    def _read_document_starts(self) -> Any:
        fate = Path(os.environ["FATE"])
        if _claim(fate / "building"):
            os.kill(os.getpid(), signal.SIGKILL)
        if _claim(fate / "writing"):
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        return super()._read_document_starts()


def _claim(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def open_at_once(prefix: str, dies: str | None) -> list[list[int]]:
    logging.getLogger("lightning_distplus").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s", force=True)
    kind: Any = MegatronTokens
    if dies is not None:
        os.environ["FATE"], kind = dies, DiesInTheMiddle
    return kind(prefix, SEQ_LEN).documents(SAMPLES).tolist()


def test_one_of_four_processes_builds_the_index_and_all_read_it(tmp_path: Path) -> None:
    begins = write_pair(tmp_path / "corpus")
    run = spawn(open_at_once, 4, args=(str(tmp_path / "corpus"), None), deadline="50s").check()
    expected = expected_documents(begins, SAMPLES).tolist()
    assert all(found == expected for found in run.results.values())
    assert "".join(run.logs.values()).count("built the index") == 1
    assert len(index_files(tmp_path)) == 1


def test_the_next_process_builds_where_builders_are_killed_while_they_build_and_write(tmp_path: Path) -> None:
    begins = write_pair(tmp_path / "corpus")
    (tmp_path / "fate").mkdir()
    run = spawn(open_at_once, 4, args=(str(tmp_path / "corpus"), str(tmp_path / "fate")), deadline="50s")
    killed = [rank for rank, code in run.exit_codes.items() if code == -signal.SIGKILL]
    assert len(killed) == 2, "both faults have struck"
    expected = expected_documents(begins, SAMPLES).tolist()
    assert [run.results[rank] for rank in range(4) if rank not in killed] == [expected, expected]
    assert "".join(run.logs.values()).count("built the index") == 1
    assert len(index_files(tmp_path)) == 1, "what the killed one has left is gone"


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "flipped":
        data[len(data) // 2] ^= 1
    elif kind == "torn":
        del data[-8:]
    elif kind == "empty":
        data.clear()
    elif kind == "foreign":
        data[:8] = b"DPINDEX9"
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["flipped", "torn", "empty", "foreign"])
def test_a_damaged_index_is_built_again_with_one_line(kind: str, tmp_path: Path, caplog: Any) -> None:
    begins = write_pair(tmp_path / "corpus")
    documents_of(tmp_path / "corpus", SAMPLES)
    (name,) = index_files(tmp_path)
    path = tmp_path / ".distplus-index" / name
    whole = path.read_bytes()
    damage(path, kind)
    with caplog.at_level(logging.WARNING):
        found = documents_of(tmp_path / "corpus", SAMPLES)
        documents_of(tmp_path / "corpus", SAMPLES)
    assert (found == expected_documents(begins, SAMPLES)).all()
    (line,) = [record.getMessage() for record in caplog.records if "index" in record.getMessage()]
    assert f"the index {path} is damaged: " in line
    assert path.read_bytes() == whole


def test_other_data_of_the_same_size_has_another_index(tmp_path: Path) -> None:
    write_pair(tmp_path / "corpus")
    documents_of(tmp_path / "corpus", SAMPLES)
    path = tmp_path / "corpus.idx"
    before = path.read_bytes()
    lengths = np.frombuffer(before, "<i4", NUM_DOCUMENTS, offset=34)[::-1]
    begins = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8")])
    marks = np.arange(NUM_DOCUMENTS + 1, dtype="<i8")
    path.write_bytes(before[:34] + lengths.tobytes() + (2 * begins).tobytes() + marks.tobytes())
    assert path.stat().st_size == len(before)
    found = documents_of(tmp_path / "corpus", SAMPLES)
    assert (found == expected_documents(begins, SAMPLES)).all()
    assert len(index_files(tmp_path)) == 2


def test_few_documents_leave_no_file_and_a_folder_that_cannot_be_written_is_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = write_pair(tmp_path / "corpus")
    with monkeypatch.context() as patch:
        patch.setattr(stream, "_SHARED_FROM", NUM_DOCUMENTS + 1)
        documents_of(tmp_path / "corpus", SAMPLES)
    assert not (tmp_path / ".distplus-index").exists()
    (tmp_path / ".distplus-index").write_text("a file, where the folder would be")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    found = documents_of(tmp_path / "corpus", SAMPLES)
    assert (found == expected_documents(begins, SAMPLES)).all()
    (own,) = (tmp_path / "temporary").iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in own.iterdir()].count(".lock") == 1


def hold_for_ever(path: str, ready: str) -> None:
    def build() -> Any:
        Path(ready).touch()
        signal.pause()

    shared_index(Path(path), 7, build)


def test_a_builder_that_is_stuck_does_not_hold_the_others_up_for_ever(tmp_path: Path, caplog: Any) -> None:
    import multiprocessing

    stuck = multiprocessing.get_context("spawn").Process(
        target=hold_for_ever, args=(str(tmp_path / "data"), str(tmp_path / "ready"))
    )
    stuck.start()
    try:
        while not (tmp_path / "ready").exists():
            assert stuck.is_alive()
            stuck.join(0.02)
        found = shared_index(tmp_path / "data", 7, lambda: np.arange(3), patience_s=0.2)
    finally:
        stuck.kill()
        stuck.join()
        stuck.close()
    assert found.tolist() == [0, 1, 2]
    assert "was not built within" in caplog.text
