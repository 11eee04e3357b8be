from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_distplus.cli.data import run_prepare as main
from lightning_distplus.data.prepare import END_OF_DOCUMENT, Progress, prepare
from lightning_distplus.data.token_files import MegatronTokens

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the cat sat on the mat\nand the dog sat on the log\n" * 40


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("second " + TEXT)
    (folder / "a.txt").write_text("first " + TEXT)
    (folder / "sub" / "c.jsonl").write_text("".join(json.dumps({"text": f"line {n} {TEXT}"}) + "\n" for n in range(3)))
    (folder / ".hidden").write_bytes(b"\xff\xfe")
    return folder


def tokens_of(prefix: Path) -> list[int]:
    source = MegatronTokens(prefix, seq_len=1)
    return np.fromfile(prefix.with_suffix(".bin"), dtype=source.dtype).tolist()


def test_prepared_tokens_decode_to_the_documents_in_sorted_order(corpus: Path, tmp_path: Path) -> None:
    result = prepare([corpus], tmp_path / "out", vocab_size=270, append_eod=True)
    codec = tokenizers.Tokenizer.from_file(str(tmp_path / "out.tokenizer.json"))
    text = codec.decode(tokens_of(result.prefix), skip_special_tokens=False)
    expected = ["first " + TEXT, "second " + TEXT, *(f"line {n} {TEXT}" for n in range(3))]
    assert text == "".join(document + END_OF_DOCUMENT for document in expected)
    assert (result.num_documents, result.dtype, result.vocab_size) == (5, "uint16", 270)
    assert MegatronTokens(result.prefix, seq_len=8).num_documents == 5
    assert MegatronTokens(result.prefix, seq_len=8).num_tokens == result.num_tokens


def test_the_same_files_give_the_same_bytes_in_another_process(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus], tmp_path / "one", vocab_size=300)
    command = [sys.executable, "-m", "lightning_distplus.cli", "prepare", str(corpus), "--vocab_size=300"]
    subprocess.run([*command, "--output", str(tmp_path / "two")], check=True, timeout=50, capture_output=True)
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_a_long_document_is_read_in_pieces_and_stays_one_document(tmp_path: Path) -> None:
    text = "".join(f"row {number} of a long file\n" for number in range(60_000))  # 1.5 MB
    (tmp_path / "long.txt").write_text(text)
    result = prepare([tmp_path / "long.txt"], tmp_path / "out", vocab_size=300)
    codec = tokenizers.Tokenizer.from_file(str(result.tokenizer))
    assert result.num_documents == 1
    assert codec.decode(tokens_of(result.prefix)) == text


def test_a_given_tokenizer_is_used_and_not_copied(corpus: Path, tmp_path: Path) -> None:
    first = prepare([corpus / "a.txt"], tmp_path / "first", vocab_size=300)
    second = prepare([corpus / "a.txt"], tmp_path / "second", tokenizer=first.tokenizer)
    assert tokens_of(second.prefix) == tokens_of(first.prefix)
    assert not (tmp_path / "second.tokenizer.json").exists()


def test_max_bytes_ends_before_the_document_that_would_exceed_it(corpus: Path, tmp_path: Path) -> None:
    size = (corpus / "a.txt").stat().st_size
    result = prepare([corpus], tmp_path / "out", vocab_size=300, max_bytes=size + 10)
    assert (result.num_documents, result.num_bytes) == (1, size)


def test_progress_ends_at_the_total_of_both_stages(corpus: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    prepare([corpus], tmp_path / "out", vocab_size=300, on_progress=seen.append)
    last = {progress.stage: progress for progress in seen}
    assert set(last) == {"tokenizer", "tokens"}
    assert all(progress.done_bytes == progress.total_bytes for progress in last.values())


BAD_INPUT = {
    "bad encoding names file and offset": (b"good\n\xff bad", ".txt", {}, ["bad.txt", "0xff", "offset 5"]),
    "bad encoding in a later line counts from the file": (
        b'{"text": "x"}\n\xff',
        ".jsonl",
        {},
        ["bad.jsonl", "offset 14"],
    ),
    "empty file": (b"", ".txt", {}, ["no text", "bad.txt"]),
    "empty lines only": (b"\n\n", ".jsonl", {}, ["no text"]),
    "missing key names the line": (b'{"text": "x"}\n{"body": "y"}\n', ".jsonl", {}, ["line 2", "'text'", "'body'"]),
    "a line that is no object": (b"[1]\n", ".jsonl", {}, ["line 1", "a list"]),
    "a line that is no JSON": (b"{\n", ".jsonl", {}, ["line 1", "not JSON"]),
    "a text that is no string": (b'{"text": 1}\n', ".jsonl", {}, ["line 1", "int"]),
    "tiny vocabulary": (b"text", ".txt", {"vocab_size": 10}, ["vocab_size is 10", "257"]),
    "two vocabularies": (b"text", ".txt", {"vocab_size": 300, "tokenizer": "t.json"}, ["Drop one"]),
    "max_bytes below the first document": (b"text", ".txt", {"max_bytes": 1}, ["max_bytes=1"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    content, suffix, options, words = BAD_INPUT[case]
    source = tmp_path / f"bad{suffix}"
    source.write_bytes(content)
    with pytest.raises(ValueError, match=r".") as caught:
        prepare([source], tmp_path / "deep" / "out", **{"vocab_size": 300, **options})
    for word in words:
        assert word in str(caught.value)
    assert not list((tmp_path / "deep").glob("*"))


def test_a_vocabulary_that_does_not_fit_the_type_is_refused(tmp_path: Path) -> None:
    vocabulary = {f"t{number}": number for number in range(70_000)}
    codec = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    codec.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("t1 t69999")
    with pytest.raises(ValueError, match=r"largest id is 69999; uint16 holds at most 65535"):
        prepare([tmp_path / "text.txt"], tmp_path / "out", tokenizer=tmp_path, dtype="uint16")
    assert prepare([tmp_path / "text.txt"], tmp_path / "out", tokenizer=tmp_path).dtype == "int32"


def test_an_end_token_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    codec = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    codec.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a a")
    with pytest.raises(ValueError, match="none of the end tokens"):
        prepare([tmp_path / "text.txt"], tmp_path / "out", tokenizer=tmp_path, append_eod=True)


def test_an_existing_target_is_kept_unless_told_otherwise(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out.idx").write_text("precious")
    with pytest.raises(FileExistsError, match=r"out\.idx exists already"):
        prepare([corpus], tmp_path / "out", vocab_size=300)
    assert (tmp_path / "out.idx").read_text() == "precious"
    prepare([corpus], tmp_path / "out", vocab_size=300, overwrite=True)
    assert MegatronTokens(tmp_path / "out", seq_len=8).num_documents == 5


def test_a_failed_overwrite_leaves_the_old_pair(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus], tmp_path / "out", vocab_size=300)
    before = tokens_of(tmp_path / "out")
    (corpus / "z.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        prepare([corpus], tmp_path / "out", vocab_size=300, overwrite=True)
    assert tokens_of(tmp_path / "out") == before


def test_a_missing_input_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        prepare([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no file in .*empty"):
        prepare([tmp_path / "empty"], tmp_path / "out")


def start(source: Path, output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lightning_distplus.cli", "prepare", str(source), "--vocab_size=300"]
    return subprocess.Popen([*command, "--output", str(output)], stderr=subprocess.PIPE, text=True)


def test_a_killed_preparation_shows_no_target_and_a_second_one_beside_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 2_500)  # 5 MB, a second
    process = start(tmp_path / "text.txt", tmp_path / "out")
    assert process.stderr is not None
    with process.stderr:
        assert "training the tokenizer" in process.stderr.readline()
        with pytest.raises(BlockingIOError, match="Another preparation writes to the same target"):
            prepare([tmp_path / "text.txt"], tmp_path / "out", vocab_size=300)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["text.txt"]
    (tmp_path / "text.txt").write_text(TEXT)
    prepare([tmp_path / "text.txt"], tmp_path / "out", vocab_size=300)
    assert not (tmp_path / ".out.prepare").exists(), "the next one cleans up"


def test_control_c_ends_a_preparation_with_one_line_and_no_rest(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 2_500)
    process = start(tmp_path / "text.txt", tmp_path / "out")
    assert process.stderr is not None
    with process.stderr:
        assert "training the tokenizer" in process.stderr.readline()
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert time.monotonic() - began < 20
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_removed_options_are_refused_with_what_to_do_instead(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--num_workers", "2"], ["--shard_bytes=9"]):
        with pytest.raises(SystemExit, match="2"):
            main(["corpus", "--output", "x", *words])
        assert "any more: one process prepares all; a larger corpus: datatrove" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["corpus", "--output", "x", "--fromat", "text"])
    assert "did you mean 'format'?" in capsys.readouterr().err


# Parquet.


def write_parquet(path: Path, texts: list[str | None], rows: int = 200, column: str = "text") -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, path, row_group_size=rows)


def test_parquet_gives_the_tokens_of_the_same_jsonl(tmp_path: Path) -> None:
    texts = [f"{number} {TEXT[: number % 300]}" for number in range(2_000)]
    write_parquet(tmp_path / "a.parquet", [*texts[:900], ""], rows=150)
    write_parquet(tmp_path / "b.parquet", texts[900:], rows=1_000)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = prepare([tmp_path / "a.jsonl"], tmp_path / "jsonl", vocab_size=300).tokenizer
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    assert prepare(files, tmp_path / "parquet", tokenizer=tokenizer).num_documents == 2_000
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"parquet{suffix}").read_bytes() == (tmp_path / f"jsonl{suffix}").read_bytes()
    limited = prepare(files, tmp_path / "limited", tokenizer=tokenizer, max_bytes=20_000)
    assert limited.num_bytes <= 20_000


@pytest.mark.parametrize(
    ("deed", "words"),
    [("column", r"no column 'text'; found id, body"), ("null", r"bad\.parquet, row 3: column 'text' holds null"),
     ("cut", r"bad\.parquet is no Parquet file"), ("type", "column 'id' holds int64, not strings")],
)  # fmt: skip
def test_bad_parquet_is_named(deed: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    write_parquet(path, ["a", "b", None if deed == "null" else "c"], column="body" if deed == "column" else "text")
    if deed == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=words):
        prepare([path], tmp_path / "out", vocab_size=300, text_key="id" if deed == "type" else "text")
    assert not list(tmp_path.glob("*out*"))


# As published.

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        return bytes(pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True))
    options = {"mtime": 0} if suffix == ".gz" else {}  # the name of a test that is given this is always the same
    return importlib.import_module(COMPRESSIONS[suffix]).compress(data, **options)


def slimpajama(number: int) -> bytes:
    """Some lines of SlimPajama-627B: train/chunk1/example_train_0.jsonl.zst."""
    meta = {"redpajama_set_name": "RedPajamaC4"}
    return b"".join(
        json.dumps({"text": f"{number}-{line} {TEXT[: line % 90]}", "meta": meta}).encode() + b"\n"
        for line in range(300)
    )


@pytest.mark.parametrize("suffix", [".zst", ".gz", ".bz2", ".xz"])
def test_compressed_files_give_the_tokens_of_plain_ones(suffix: str, tmp_path: Path) -> None:
    for chunk in (1, 2):
        for folder, data, ending in (("plain", slimpajama(chunk), ""), ("packed", slimpajama(chunk), suffix)):
            place = tmp_path / folder / "train" / f"chunk{chunk}"
            place.mkdir(parents=True)
            (place / f"example_train_0.jsonl{ending}").write_bytes(compress(data, ending) if ending else data)
    # Two frames, one behind the other, are one file.
    (tmp_path / "plain" / "z.txt").write_bytes(b"one\ntwo\n")
    (tmp_path / "packed" / f"z.txt{suffix}").write_bytes(compress(b"one\n", suffix) + compress(b"two\n", suffix))
    tokenizer = prepare([tmp_path / "plain"], tmp_path / "a", vocab_size=300).tokenizer
    seen: list[Progress] = []
    prepare([tmp_path / "packed"], tmp_path / "b", tokenizer=tokenizer, on_progress=seen.append)
    for part in (".bin", ".idx"):
        assert (tmp_path / f"a{part}").read_bytes() == (tmp_path / f"b{part}").read_bytes()
    size = sum(path.stat().st_size for path in (tmp_path / "packed").rglob("*") if path.is_file())
    assert seen[0].total_bytes == seen[-1].total_bytes == seen[-1].done_bytes == size


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.zst", compress(b'{"text": "x"}\n', ".gz"), "its content is gzip, and its name says zstd"),
        ("a.jsonl", compress(b'{"text": "x"}\n', ".gz"), "its content is gzip, and its name does not say so"),
        ("a.jsonl.gz", b'{"text": "x"}\n', "its content is not compressed, and its name says gzip"),
        ("a.txt.gz", compress(b"text\n" * 999, ".gz")[:-9], "damaged or cut off"),
        ("a.txt.xz", compress(b"text\n" * 999, ".xz")[:-9], "damaged or cut off"),
        ("a.txt.bz2", compress(b"text\n" * 999, ".bz2")[:-9], "damaged or cut off"),
        ("a.jsonl.zst", compress(slimpajama(1), ".zst")[:-9], "damaged or cut off"),
        ("a.jsonl.gz", compress(b'{"text": "x"}\n{"body": "y"}\n', ".gz"), "line 2 has no field 'text'; found 'body'"),
        ("a.jsonl", b'{"text": "x", "content": "y"}\n', "has both text and content"),
    ],
    ids=range(9),  # the contents hold the time at which they were packed
)
def test_a_mislabelled_or_damaged_file_is_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        prepare([tmp_path / name], tmp_path / "out", vocab_size=300)


def test_a_compressed_file_without_a_suffix_is_read_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "part-00000").write_bytes(compress(b"text\n" * 9, ".gz"))
    assert prepare([tmp_path / "part-00000"], tmp_path / "out", vocab_size=300).num_bytes == 45


def test_the_column_of_starcoder_is_found(tmp_path: Path) -> None:
    """Starcoderdata: python/train-00000-of-00059.parquet, the text in `content`."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "max_stars_repo_path": ["a.py", "b.py"],
        "max_stars_repo_name": ["x/y", "x/y"],
        "max_stars_count": [1, 2],
        "id": ["0", "1"],
        "content": [TEXT, "second " + TEXT],
    }
    (tmp_path / "python").mkdir()
    parquet.write_table(arrow.table(columns), tmp_path / "python" / "train-00000-of-00059.parquet")
    result = prepare([tmp_path], tmp_path / "out", vocab_size=300)
    assert (result.num_documents, result.num_bytes) == (2, 2 * len(TEXT) + 7)


def test_a_shuffle_keeps_every_document_and_depends_on_its_seed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_distplus.data.prepare._PART_BYTES", 1_000)  # several parts
    (tmp_path / "a.jsonl").write_bytes(slimpajama(1))
    tokenizer = prepare([tmp_path / "a.jsonl"], tmp_path / "plain", vocab_size=300, append_eod=True).tokenizer

    def documents(name: str, **options: int) -> list[str]:
        result = prepare([tmp_path / "a.jsonl"], tmp_path / name, tokenizer=tokenizer, append_eod=True, **options)
        text = tokenizers.Tokenizer.from_file(str(tokenizer)).decode(
            tokens_of(result.prefix), skip_special_tokens=False
        )
        return text.split(END_OF_DOCUMENT)[:-1]

    plain, one, again = documents("0"), documents("1", shuffle_seed=7), documents("2", shuffle_seed=7)
    other = documents("3", shuffle_seed=8)
    assert sorted(one) == sorted(plain)
    assert one == again
    assert len({tuple(plain), tuple(one), tuple(other)}) == 3
    assert not list(tmp_path.glob(".*"))


def test_every_order_is_equally_likely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_distplus.data.prepare import _Shuffle

    monkeypatch.setattr("lightning_distplus.data.prepare._PART_BYTES", 1)

    class Kept(list[int]):
        def add_document(self, tokens: np.ndarray) -> None:
            self.append(int(tokens[0]))

    counts: dict[tuple[int, ...], int] = {}
    for seed in range(1200):
        shuffle, kept = _Shuffle(tmp_path, seed, np.uint16, 2), Kept()
        for number in range(3):
            shuffle.add_document([number])
        shuffle.write(kept, lambda _: None)  # type: ignore[arg-type]
        counts[tuple(kept)] = counts.get(tuple(kept), 0) + 1
    assert len(counts) == 6
    # chi-squared with 5 degrees of freedom: beyond 20.5 in one of 1,000 tries; the seeds are fixed
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 20.5
