"""Token files: byte for byte the format, read as their own tools read them, refused by name when damaged."""

from __future__ import annotations

import contextlib
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser

from lightning_distplus.data import Source, TokenDataModule
from lightning_distplus.data.batches import Request
from lightning_distplus.data.token_datamodule import TokenFetcher
from lightning_distplus.data.token_files import (
    MegatronTokens,
    MegatronWriter,
    TokenSource,
    detect,
    dtype_for,
    open_source,
)
from tests.distributed.resume_jobs import SampleDiary, quiet_trainer

# -- Megatron-LM -------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("dtype", "code"), [(np.uint8, 1), (np.int32, 4), (np.int64, 5), (np.uint16, 8)])
def test_every_token_type_makes_the_round_trip(dtype: type, code: int, tmp_path: Path) -> None:
    write_pair(tmp_path / "c", DOCUMENTS, dtype)
    assert (tmp_path / "c.bin").read_bytes() == np.array(TOKENS, dtype).tobytes()
    assert (tmp_path / "c.idx").read_bytes() == index_bytes(code, np.dtype(dtype).itemsize)
    blocks = MegatronTokens(tmp_path / "c", seq_len=10).gather(np.array([0]))
    assert blocks.dtype == dtype
    assert blocks.tolist() == [TOKENS]


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
        write_pair(tmp_path / "c", [[1, 2], tokens], np.uint16)
    assert list(tmp_path.iterdir()) == []


def test_empty_input_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the input is empty"):
        write_pair(tmp_path / "c", [])
    with pytest.raises(ValueError, match="Document 0 is empty"):
        write_pair(tmp_path / "c", [[]])
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
from lightning_distplus.data.token_files import MegatronTokens
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


# -- files of other tools ----------------------------------------------------------------------------------------------

CHUNK = 10  # tokens of a packed file
SEQ_LEN = 3


def packed_bytes(tokens: list[int], *, magic: bytes = b"LITPKDS", version: int = 1, code: int = 8) -> bytes:
    """A file as lit-gpt's PackedDatasetBuilder writes it, field by field."""
    kind = {1: "B", 4: "i", 6: "f", 8: "H"}[code]
    head = magic + struct.pack("<Q", version) + struct.pack("<B", code) + struct.pack("<Q", len(tokens))
    return head + struct.pack(f"<{len(tokens)}{kind}", *tokens)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    folder = tmp_path / "slim"
    folder.mkdir()
    for number in (2, 0, 3, 1):  # the order is that of the names
        tokens = list(range(CHUNK * number, CHUNK * (number + 1)))
        (folder / f"train_slim_{number:010d}.bin").write_bytes(packed_bytes(tokens))
    return folder


def opened(path: Path, seq_len: int = SEQ_LEN, **arguments: Any) -> TokenSource:
    return open_source(Source(path=str(path), **arguments), seq_len)


def rows(source: TokenSource) -> list[list[int]]:
    return source.gather(np.arange(source.num_samples)).tolist()


def write_pair(prefix: Path, documents: list[list[int]], dtype: type = np.int32) -> Path:
    with MegatronWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


# Packed files.


def test_packed_folder_is_read_block_by_block_as_lit_gpt_does(packed: Path) -> None:
    source = opened(packed)
    expected = [
        [start, start + 1, start + 2, start + 3] for file in range(4) for start in (CHUNK * file, CHUNK * file + 4)
    ]
    assert (source.format, source.dtype, source.num_samples) == ("litpkds", np.uint16, 8)
    assert rows(source) == expected
    assert source.gather(np.array([7, 0, 7]))[:, 0].tolist() == [34, 0, 34]


def test_packed_files_are_chosen_by_the_beginning_of_their_names(packed: Path) -> None:
    (packed / "train_star_0000000000.bin").write_bytes(packed_bytes([7] * 8))
    assert opened(packed / "train_slim").num_samples == 8
    assert rows(opened(packed / "train_star")) == [[7] * 4] * 2
    assert opened(packed / "train_slim_0000000001.bin").num_samples == 2
    with pytest.raises(ValueError, match=r"train_star_0000000000\.bin \(file 5 of 5\) does not belong to the others"):
        opened(packed)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", r"is empty \(0 bytes\)"),
        (lambda data: data[:11], "truncated in its header: 11 of 24 bytes"),
        (lambda data: data[:-2], "is truncated: it has 42 bytes, and its header describes 44"),
        (lambda data: data + b"x", "is too long: it has 45 bytes"),
        (lambda data: b"LITPKDX" + data[7:], "begins with b'LITPKDX', expected b'LITPKDS'"),
        (lambda data: packed_bytes([0] * CHUNK, version=2), "has format version 2, expected 1"),
        (lambda data: packed_bytes([0] * CHUNK, code=6), r"token type code 6 \(float32\), expected one of 1 = uint8"),
        (lambda data: data[:15] + b"\x63" + data[16:], "token type code 99"),
    ],
)
@pytest.mark.parametrize("number", [0, 3])
def test_damaged_packed_file_is_refused_at_setup_with_its_number(
    number: int, damage: Callable[[bytes], bytes], message: str, packed: Path
) -> None:
    path = packed / f"train_slim_{number:010d}.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        set_up(packed)
    assert path.name in str(error.value)
    assert f"file {number + 1} of 4" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed_bytes([0] * CHUNK, code=4), "10 tokens of int32, expected 10 tokens of uint16"),
        (packed_bytes([0] * 11), "11 tokens of uint16, expected 10 tokens of uint16"),
    ],
)
def test_packed_file_of_another_kind_is_refused_before_training(content: bytes, message: str, packed: Path) -> None:
    (packed / "train_slim_0000000003.bin").write_bytes(content)
    data = TokenDataModule(str(packed), seq_len=SEQ_LEN, micro_batch_size=1)
    model = SampleDiary()
    with pytest.raises(ValueError, match=rf"train_slim_0000000003\.bin \(file 4 of 4\) .*{message}"):
        quiet_trainer(max_steps=1).fit(model, data)
    assert not model.steps


def set_up(path: Path, **arguments: Any) -> None:
    TokenDataModule([Source(path=str(path), **arguments)], seq_len=SEQ_LEN, micro_batch_size=1).setup("fit")


# Raw and .npy.


def test_raw_files_are_one_stream(tmp_path: Path) -> None:
    for number in range(3):
        np.arange(5 * number, 5 * number + 5, dtype="<u4").tofile(tmp_path / f"{number}.bin")
    source = opened(tmp_path, dtype="uint32")
    assert (source.format, source.num_tokens) == ("raw", 15)
    assert rows(source) == [[start, start + 1, start + 2, start + 3] for start in (0, 3, 6, 9)]
    assert rows(opened(tmp_path / "1.bin", dtype="uint32")) == [[5, 6, 7, 8]]


def test_npy_says_its_own_type(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(7, dtype=np.int64))
    np.save(tmp_path / "b.npy", np.arange(7, 10, dtype=np.int64))
    source = opened(tmp_path)
    assert (source.format, source.dtype, source.num_tokens) == ("npy", np.int64, 10)
    assert rows(source) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("name", "content", "dtype", "message"),
    [
        ("a.bin", b"", "uint16", r"a\.bin is empty \(0 bytes\)"),
        ("a.bin", b"x" * 15, "uint16", "it has 15 bytes, no multiple of 2"),
        ("a.bin", b"x" * 4, "uint16", "holds 2 tokens, and one sample of seq_len 3 takes 4"),
        ("a.bin", b"x" * 16, None, r"\(raw\) does not say its token type; name it, as in dtype=\"uint16\""),
        ("a.npy", b"", None, "is empty"),
        ("a.npy", b"x" * 80, None, r"a\.npy \(file 1 of 1\) is no \.npy file"),
    ],
)
def test_damaged_flat_file_is_refused_at_setup(
    name: str, content: bytes, dtype: str | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        set_up(tmp_path / name, dtype=dtype)


@pytest.mark.parametrize(
    ("array", "cut", "message"),
    [
        (
            np.arange(9, dtype=np.int32),
            4,
            r"b\.npy \(file 2 of 2\) is truncated: it has 160 bytes, and its header describes 164",
        ),
        (np.arange(9, dtype=np.int64), 0, r"b\.npy \(file 2 of 2\) .* it holds int64, expected int32 as in a\.npy"),
        (np.arange(9, dtype=">i4"), 0, r"b\.npy \(file 2 of 2\) .* it holds >i4, expected int32 as in a\.npy"),
        (np.ones(9), 0, r"holds float64 of shape \(9,\), expected one row of"),
        (np.ones((3, 3), dtype=np.int32), 0, r"holds int32 of shape \(3, 3\)"),
    ],
)
def test_damaged_second_npy_file_is_refused(array: np.ndarray, cut: int, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(9, dtype=np.int32))
    np.save(tmp_path / "b.npy", array)
    path = tmp_path / "b.npy"
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    with pytest.raises(ValueError, match=message):
        opened(tmp_path)


# What is at a path.


def test_what_is_at_a_path_is_found_out(packed: Path, tmp_path: Path) -> None:
    write_pair(tmp_path / "pair", [[1, 2, 3, 4, 5]])
    np.save(tmp_path / "one.npy", np.arange(9))
    (tmp_path / "raw.bin").write_bytes(b"x" * 16)
    for name in ("pair", "pair.bin", "pair.idx"):
        assert detect(str(tmp_path / name)) == "megatron"
    for name, expected in {
        "slim": "litpkds",
        "one.npy": "npy",
        "raw.bin": "raw",
    }.items():
        assert detect(str(tmp_path / name)) == expected
    assert rows(opened(tmp_path / "pair")) == [[1, 2, 3, 4]]


def test_ambiguous_or_unknown_path_is_refused(packed: Path, tmp_path: Path) -> None:
    write_pair(tmp_path / "slim", [[1, 2, 3, 4, 5]])
    with pytest.raises(ValueError, match=r"slim is ambiguous: it could be litpkds or megatron\. Say format=\.\.\."):
        opened(packed)
    assert opened(packed, format="litpkds").num_samples == 8
    assert opened(packed, format="megatron").num_samples == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"other \(it holds notes\.txt\) is in no format that is known"):
        opened(tmp_path / "other")
    (tmp_path / "optimized").mkdir()
    (tmp_path / "optimized" / "index.json").write_text('{"chunks": []}')
    (tmp_path / "optimized" / "chunk-0-0.bin").write_bytes(b"x" * 16)
    with pytest.raises(ValueError, match=r"is in no format that is known .* read it by its own library"):
        opened(tmp_path / "optimized")
    with pytest.raises(ValueError, match=r"nothing\.idx is missing"):
        opened(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is no file, and no folder with files"):
        opened(tmp_path / "nothing", format="npy")
    with pytest.raises(ValueError, match="holds no LITPKDS file"):
        opened(tmp_path / "nothing", format="litpkds")


def test_source_that_contradicts_its_files_is_refused(packed: Path) -> None:
    assert opened(packed, dtype="uint16").num_samples == 8
    with pytest.raises(ValueError, match=r"\(litpkds\) holds uint16, and the source says dtype='int32'"):
        opened(packed, dtype="int32")
    with pytest.raises(ValueError, match="dtype of source x is 'float32'; it is one of uint8"):
        Source(path="x", dtype="float32")
    for removed in ("ds", "litdata", "arrow", "parquet"):
        with pytest.raises(ValueError, match=f"{removed}', which is not read in place: read it by its own library"):
            Source(path="x", format=removed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="format of source x is 'zip'; it is auto, megatron"):
        Source(path="x", format="zip")  # type: ignore[arg-type]


def test_yaml_and_python_mix_formats_with_weights_and_read_what_the_files_hold(packed: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "code.npy", np.arange(1000, 1400, dtype=np.int32))
    np.arange(2000, 2400, dtype="<i4").tofile(tmp_path / "prose.bin")
    write_pair(tmp_path / "pair", [list(range(3000, 3400))])
    listed = [
        {"path": str(packed), "weight": 0.1},
        {"path": str(tmp_path / "code.npy"), "weight": 0.3, "split": [0.0, 0.9]},
        {"path": str(tmp_path / "prose.bin"), "weight": 0.3, "format": "raw", "dtype": "int32"},
        {"path": str(tmp_path / "pair"), "weight": 0.3},
    ]
    parser = ArgumentParser()
    parser.add_class_arguments(TokenDataModule, "data")
    config = {"data": {"sources": listed, "seq_len": SEQ_LEN, "micro_batch_size": 4, "vocab_size": 3400}}
    parsed = parser.parse_string(yaml.safe_dump(config))
    data = parser.instantiate(parsed).data
    assert data._sources["train"] == [Source(**one) for one in listed]
    assert parser.parse_string(parser.dump(parsed)) == parsed
    data.trainer = quiet_trainer(max_steps=1)
    data.setup("fit")
    sources = data._open("train")
    batches = list(data.train_dataloader())
    ids = [data.sample_ids(number) for number in range(len(batches))]
    assert {source for batch in ids for source, _ in batch} == {0, 1, 2, 3}
    for batch, samples in zip(batches, ids, strict=True):
        expected = [sources[source].gather(np.array([index]))[0, :-1].tolist() for source, index in samples]
        assert batch["input_ids"].tolist() == expected
        assert batch["shift_labels"].tolist() == (batch["input_ids"] + 1).tolist()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_weight_is_refused_when_the_module_is_made(weight: float, packed: Path) -> None:
    sources = [Source(path=str(packed)), Source(path=str(packed), weight=weight)]
    with pytest.raises(ValueError, match=r"The weight of source 1 is .*; it is a finite number above 0"):
        TokenDataModule(sources, seq_len=SEQ_LEN, micro_batch_size=1)


@pytest.mark.parametrize("sample", [0, 57, 3000])
def test_token_beyond_the_vocabulary_is_found_at_setup_where_it_is_common(sample: int, tmp_path: Path) -> None:
    tokens = np.zeros(SEQ_LEN * 4000 + 1, dtype=np.int32)
    tokens[sample * SEQ_LEN :: SEQ_LEN * 50] = 500
    np.save(tmp_path / "a.npy", tokens)
    data = TokenDataModule(str(tmp_path / "a.npy"), seq_len=SEQ_LEN, micro_batch_size=1, vocab_size=500)
    with pytest.raises(ValueError, match=r"a\.npy holds the token id 500 \(sample \d+\), and vocab_size is 500"):
        data.setup("fit")


# Documents.


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=12), seq_len=st.integers(1, 8), begin=st.floats(0, 0.6))
def test_document_and_position_ids_are_those_of_a_plain_count(
    lengths: list[int], seq_len: int, begin: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = write_pair(tmp_path_factory.mktemp("c") / "c", [[number] * size for number, size in enumerate(lengths)])
    with contextlib.suppress(ValueError):  # a share that is too small for one sample
        source = opened(prefix, seq_len, split=(begin, 1.0))
        fetcher = TokenFetcher(
            sources=[source], names=["c"], seq_len=seq_len, vocab_size=None, position_ids=True, document_ids=True
        )
        indices = np.arange(source.num_samples)
        ids = np.stack([np.zeros_like(indices), indices], axis=1)
        batch = fetcher.finish(fetcher.__getitems__(Request(ids, indices, 0)), pin_memory=False)
        for tokens, documents, positions in zip(
            batch["input_ids"].tolist(), batch["document_ids"].tolist(), batch["position_ids"].tolist(), strict=True
        ):
            assert documents == [token - tokens[0] for token in tokens]
            assert positions == [tokens[:place].count(token) for place, token in enumerate(tokens)]


def test_documents_of_sequences_that_megatron_split_are_whole(tmp_path: Path) -> None:
    np.arange(9, dtype="<i4").tofile(tmp_path / "c.bin")
    lengths, pointers, marks = [2, 3, 1, 3], [0, 8, 20, 24], [0, 2, 4]  # documents: sequences 0..1 and 2..3
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 4, 3)
    (tmp_path / "c.idx").write_bytes(head + struct.pack("<4i4q3q", *lengths, *pointers, *marks))
    assert opened(tmp_path / "c", seq_len=8).documents(np.array([0])).tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    (tmp_path / "c.idx").write_bytes(head + struct.pack("<4i4q3q", *lengths, *pointers, 0, 9, 4))
    with pytest.raises(ValueError, match=r"c\.idx is damaged: a document begins past its 4 sequences"):
        opened(tmp_path / "c", seq_len=8, split=(0.0, 0.5))


def test_batches_have_document_ids_only_where_asked_and_known(packed: Path, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "c", [[1, 2], [3, 4, 5], [6, 7, 8, 9]])
    for wanted in ({"position_ids"}, {"document_ids"}, {"position_ids", "document_ids"}, set()):
        extras = dict.fromkeys(wanted, True)
        data = TokenDataModule(str(prefix), seq_len=4, micro_batch_size=1, **extras)
        data.trainer = quiet_trainer(max_steps=1)
        data.setup("fit")
        batch = next(iter(data.train_dataloader()))
        assert set(batch) == {"input_ids", "shift_labels"} | wanted
        assert all(value.shape == (1, 4) for value in batch.values())
    data = TokenDataModule(str(packed), seq_len=SEQ_LEN, micro_batch_size=1, position_ids=True)
    with pytest.raises(ValueError, match=r"slim \(litpkds\) does not say where documents begin"):
        data.setup("fit")


# Shares.


def test_share_begins_and_ends_with_a_document(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "c", [[10 * d + t for t in range(5)] for d in range(10)])
    train, rest = opened(prefix, seq_len=2, split=(0.0, 0.7)), opened(prefix, seq_len=2, split=(0.7, 1.0))
    assert rows(rest)[0] == [70, 71, 72]
    assert not set(np.ravel(rows(train))) & set(np.ravel(rows(rest)))
    whole = opened(prefix, seq_len=2)
    assert len({source.fingerprint() for source in (whole, train, rest)}) == 3
    assert whole.fingerprint() == MegatronTokens(prefix, 7).fingerprint()


@pytest.mark.parametrize("split", [(0.5, 0.5), (-0.1, 1.0), (0.0, 1.5), (float("nan"), 1.0)])
def test_senseless_share_is_refused(split: tuple[float, float], packed: Path) -> None:
    with pytest.raises(ValueError, match=r"split of .*slim is \[.*\]; it is \[from, to\]"):
        opened(packed, split=split)


def test_share_without_a_sample_is_refused(packed: Path) -> None:
    with pytest.raises(ValueError, match=r"slim holds .* in the share \[0\.0, 0\.01\], and one sample of seq_len 3"):
        opened(packed, split=(0.0, 0.01))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=9),
    seq_len=st.integers(1, 6),
    cut=st.floats(0.05, 0.95),
    kind=st.sampled_from(["megatron", "npy"]),
)
def test_shares_partition_and_blocks_are_slices_of_the_stream(
    lengths: list[int], seq_len: int, cut: float, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c")
    tokens = np.arange(sum(lengths), dtype=np.int32)
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    if kind == "megatron":
        write_pair(folder / "c", [part.tolist() for part in parts])
    else:
        for number, part in enumerate(parts):
            np.save(folder / f"{number:02d}.npy", part)
    path = folder / "c" if kind == "megatron" else folder
    shares = []
    for split in ((0.0, cut), (cut, 1.0)):
        with contextlib.suppress(ValueError):  # a share that is too small for one sample
            source = pickle.loads(pickle.dumps(opened(path, seq_len, split=split)))
            blocks = source.gather(np.arange(source.num_samples))
            begins = blocks[0, 0] + np.arange(len(blocks)) * seq_len
            assert (blocks == begins[:, None] + np.arange(seq_len + 1)).all()
            shares.append(set(blocks.ravel().tolist()))
    assert not shares[1:] or not shares[0] & shares[1]


# Fingerprints.


def test_fingerprint_of_a_megatron_pair_is_what_it_has_always_been(tmp_path: Path) -> None:
    write_pair(tmp_path / "c", [[1, 2, 3], [4, 5]])
    assert MegatronTokens(tmp_path / "c", 2).fingerprint() == "dd4d94ac691ab343"


def test_fingerprints_of_few_files_and_of_samples_of_many_are_what_they_have_always_been(tmp_path: Path) -> None:
    for folder in ("few", "many"):
        (tmp_path / folder).mkdir()
    for number in range(3):
        np.save(tmp_path / "few" / f"{number}.npy", np.arange(number, number + 9, dtype=np.uint16))
    for number in range(70):
        (tmp_path / "many" / f"{number:02d}.bin").write_bytes(bytes([number]) * 300_000)
    assert opened(tmp_path / "few", seq_len=4, split=(0.0, 0.9)).fingerprint() == "04834b2956c01634"
    assert opened(tmp_path / "many", seq_len=4, dtype="uint16").fingerprint() == "e142f81ed29dce3d"


def test_fingerprint_follows_the_content_of_any_file_and_not_its_place(packed: Path, tmp_path: Path) -> None:
    first = opened(packed).fingerprint()
    moved = packed.rename(tmp_path / "moved")
    assert opened(moved).fingerprint() == first
    path = moved / "train_slim_0000000002.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\x01\x02")
    assert opened(moved).fingerprint() != first
