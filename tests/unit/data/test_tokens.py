"""Megatron token files: byte for byte the format, refused when damaged, written whole or not at all."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_distplus.data.tokens import MegatronTokens, MegatronWriter, dtype_for

DOCUMENTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15]]
TOKENS = [token for document in DOCUMENTS for token in document]


def index_bytes(code: int = 8, item_bytes: int = 2) -> bytes:
    """The index of DOCUMENTS as Megatron-LM's _IndexWriter writes it, field by field."""
    lengths = [len(document) for document in DOCUMENTS]
    pointers = [0, lengths[0] * item_bytes, (lengths[0] + lengths[1]) * item_bytes]
    return b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<Q", 1),
            struct.pack("<B", code),
            struct.pack("<Q", len(lengths)),
            struct.pack("<Q", len(lengths) + 1),
            struct.pack("<3i", *lengths),
            struct.pack("<3q", *pointers),
            struct.pack("<4q", 0, 1, 2, 3),
        ]
    )


def write(prefix: Path, documents: list[list[int]]) -> None:
    with MegatronWriter(prefix) as writer:
        for document in documents:
            writer.add_document(document)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "corpus.bin").write_bytes(struct.pack(f"<{len(TOKENS)}H", *TOKENS))
    (tmp_path / "corpus.idx").write_bytes(index_bytes())
    return tmp_path / "corpus"


def test_a_pair_written_byte_by_byte_is_read(prefix: Path) -> None:
    tokens = MegatronTokens(prefix, seq_len=3)
    assert (tokens.num_tokens, tokens.num_documents, tokens.num_samples) == (11, 3, 3)
    assert tokens.dtype is np.uint16
    assert tokens.gather(np.array([2, 0, 0])).tolist() == [[11, 12, 13, 14], [5, 6, 7, 8], [5, 6, 7, 8]]
    assert MegatronTokens(f"{prefix}.bin", seq_len=10).gather(np.array([0])).tolist() == [TOKENS]


def test_writer_writes_the_same_bytes(prefix: Path, tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "ours", np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == prefix.with_suffix(suffix).read_bytes()


@pytest.mark.parametrize(("dtype", "code"), [(np.uint8, 1), (np.int32, 4), (np.int64, 5), (np.uint16, 8)])
def test_every_token_type_makes_the_round_trip(dtype: type, code: int, tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "c", dtype) as writer:
        for document in DOCUMENTS:
            writer.add_document(np.array(document))
    assert (tmp_path / "c.idx").read_bytes() == index_bytes(code, np.dtype(dtype).itemsize)
    blocks = MegatronTokens(tmp_path / "c", seq_len=10).gather(np.array([0]))
    assert blocks.dtype == dtype
    assert blocks.tolist() == [TOKENS]


def test_every_token_but_the_first_is_a_target_once(prefix: Path) -> None:
    tokens = MegatronTokens(prefix, seq_len=2)
    assert tokens.gather(np.arange(tokens.num_samples))[:, 1:].ravel().tolist() == TOKENS[1:]


def test_opened_source_is_pickled_without_its_map(prefix: Path) -> None:
    tokens = MegatronTokens(prefix, seq_len=3)
    tokens.gather(np.array([0]))
    data = pickle.dumps(tokens)
    assert len(data) < 1000
    assert pickle.loads(data).gather(np.array([1])).tolist() == [[8, 9, 10, 11]]


def test_fingerprint_follows_the_content_and_not_the_place(prefix: Path, tmp_path: Path) -> None:
    first = MegatronTokens(prefix, seq_len=3).fingerprint()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for suffix in (".bin", ".idx"):
        (moved / f"other{suffix}").write_bytes(prefix.with_suffix(suffix).read_bytes())
    assert MegatronTokens(moved / "other", seq_len=3).fingerprint() == first
    data = bytearray((moved / "other.bin").read_bytes())
    data[4] ^= 1
    (moved / "other.bin").write_bytes(data)
    assert MegatronTokens(moved / "other", seq_len=3).fingerprint() != first


def test_fingerprint_of_a_large_file_is_taken_from_samples(tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "large", np.int32) as writer:
        for number in range(5):
            writer.add_document(np.arange(number, number + 2**20))
    tokens = MegatronTokens(tmp_path / "large", seq_len=128)
    first = tokens.fingerprint()
    with (tmp_path / "large.bin").open("r+b") as stream:
        stream.seek(-4, 2)
        stream.write(b"\x01\x02\x03\x04")
    assert tokens.fingerprint() != first


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        (".bin", lambda data: b"", r"corpus\.bin is empty \(0 bytes\)"),
        (".idx", lambda data: b"", r"corpus\.idx is empty \(0 bytes\)"),
        (".bin", lambda data: data[:-2], "truncated: it has 20 bytes, and corpus.idx describes 22"),
        (".bin", lambda data: data + b"xx", "too long: it has 24 bytes"),
        (".idx", lambda data: data[:20], "header has 20 of 34 bytes"),
        (".idx", lambda data: data[:-1], "truncated: 3 sequences and 4 document marks take 102 bytes"),
        (".idx", lambda data: data + b"x", "damaged"),
        (".idx", lambda data: data + b"xxx", "multimodal"),
        (".idx", lambda data: b"LITPKDS" + data[7:], "no Megatron index"),
        (".idx", lambda data: data[:9] + b"\x02" + data[10:], "format version 2"),
        (".idx", lambda data: data[:17] + b"\x07" + data[18:], "type code 7"),
        (".idx", lambda data: data[:17] + b"\x04" + data[18:], "truncated: it has 22 bytes"),
    ],
)
def test_damaged_pair_is_refused_when_it_is_opened(suffix: str, damage, message: str, prefix: Path) -> None:
    path = prefix.with_suffix(suffix)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        MegatronTokens(prefix, seq_len=3)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_named(suffix: str, prefix: Path) -> None:
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(ValueError, match=f"corpus\\{suffix} is missing"):
        MegatronTokens(prefix, seq_len=3)


def test_file_without_one_whole_sample_is_refused(prefix: Path) -> None:
    with pytest.raises(ValueError, match="holds 11 tokens, and one sample of seq_len 11 takes 12"):
        MegatronTokens(prefix, seq_len=11)


def test_existing_target_is_not_overwritten(prefix: Path) -> None:
    before = prefix.with_suffix(".idx").read_bytes()
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(FileExistsError, match=r"corpus\.idx exists"):
        MegatronWriter(prefix)
    assert prefix.with_suffix(".idx").read_bytes() == before


@pytest.mark.parametrize(("tokens", "wrong"), [([1, 65536], 65536), ([-1, 5], -1)])
def test_token_beyond_the_stored_type_is_refused_and_leaves_nothing(
    tokens: list[int], wrong: int, tmp_path: Path
) -> None:
    message = rf"Document 1 has the token id {wrong}, and uint16 holds 0\.\.65535"
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "c", [[1, 2], tokens])
    assert list(tmp_path.iterdir()) == []


def test_empty_input_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the input is empty"):
        write(tmp_path / "c", [])
    with pytest.raises(ValueError, match="Document 0 is empty"):
        write(tmp_path / "c", [[]])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_visible_before_the_end(tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "c") as writer:
        writer.add_document([1, 2, 3])
        assert not (tmp_path / "c.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(32_000, np.uint16), (65_499, np.uint16), (65_500, np.int32)])
def test_stored_type_follows_megatron(vocab_size: int, dtype: type) -> None:
    assert dtype_for(vocab_size) is dtype


def test_float_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stored as one of"):
        MegatronWriter(tmp_path / "c", np.float32)


def test_empty_documents_at_the_end_are_no_damage(tmp_path: Path) -> None:
    """As Megatron writes them: a sequence of length 0, or a mark and no sequence."""
    tokens, header = np.arange(20, dtype="<i4"), struct.Struct("<9sQBQQ")
    for name, lengths, marks in (("sequence", [12, 8, 0], [0, 1, 2, 3]), ("mark", [12, 8], [0, 1, 2, 2])):
        pointers = np.cumsum([0, *lengths[:-1]]) * 4
        (tmp_path / f"{name}.bin").write_bytes(tokens.tobytes())
        (tmp_path / f"{name}.idx").write_bytes(
            header.pack(b"MMIDIDX\0\0", 1, 4, len(lengths), len(marks))
            + np.array(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes() + np.array(marks, "<i8").tobytes()
        )  # fmt: skip
        source = MegatronTokens(tmp_path / name, 19)
        assert source.num_documents == 3
        assert source.documents(np.array([0])).tolist() == [[0] * 12 + [1] * 7]


READ_WHILE_IT_SHRINKS = """
import os, sys
import numpy as np
from lightning_distplus.data.tokens import MegatronTokens
source = MegatronTokens(sys.argv[1], 8)
source.gather(np.array([0]))
os.truncate(sys.argv[1] + ".bin", 4096)
source.gather(np.array([source.num_samples - 1]))
"""


def test_a_file_that_shrinks_while_it_is_read_is_named_instead_of_a_bus_error(tmp_path: Path) -> None:
    with MegatronWriter(tmp_path / "t", np.int32) as writer:
        writer.add_document(np.arange(100_000))
    arguments = [sys.executable, "-c", READ_WHILE_IT_SHRINKS, str(tmp_path / "t")]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "was cut short while it is read: it has 4096 bytes, and had 400000" in ended.stderr
