"""Preparation in several processes and after a kill: byte for byte what one undisturbed process writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_distplus.cli.__main__ import main
from lightning_distplus.data.documents import Corpus
from lightning_distplus.data.prepare import prepare

tokenizers = pytest.importorskip("tokenizers")

OPTIONS = {"vocab_size": 270, "append_eod": True, "shard_bytes": 40_000}
SUFFIXES = (".bin", ".idx", ".tokenizer.json")


def lines(count: int, seed: int = 0) -> str:
    words = ["cat", "dog", "mat", "log", "sat", "on", "the", "and\nnext", "\u00e9t\u00e9"]
    texts = (" ".join(words[(seed + n * k) % 9] for k in range(5 + n % 60)) for n in range(count))
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(4_000))
    for number in range(9):
        (folder / f"b{number}.txt").write_text(lines(100, number))
    (folder / "c.txt").write_text(lines(700, 5))  # larger than a shard, and one document
    (folder / "d.jsonl").write_text(lines(50).rstrip("\n"))
    return folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    prepare([write_corpus(folder / "corpus")], folder / "whole", **{**OPTIONS, "shard_bytes": 10**9})
    return contents(folder / "whole")


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_name(prefix.name + suffix).read_bytes() for suffix in SUFFIXES]


@contextmanager
def running(corpus: Path, output: Path, num_workers: int) -> Iterator[subprocess.Popen[bytes]]:
    options = [f"--{name}={value}" for name, value in OPTIONS.items() if name != "append_eod"]
    command = [sys.executable, "-m", "lightning_distplus.cli", "prepare", str(corpus), *options, "--append_eod"]
    process = subprocess.Popen(
        [*command, "--output", str(output), f"--num_workers={num_workers}"], stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)


def wait_for_shards(stage: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    due = time.monotonic() + 60
    while len(list(stage.glob("*.done"))) < count:
        assert time.monotonic() < due
        assert process.poll() is None, "it ended before it could be struck"
        time.sleep(0.005)


def workers_of(stage: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"lightning_distplus.data.prepare_workers" in words and str(stage).encode() in words:
            found.append(int(path.parent.name))
    return found


def test_any_number_of_processes_and_any_shards_write_the_same_bytes(
    corpus: Path, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    assert len(Corpus([corpus], shard_bytes=40_000).shards()) > 10
    for num_workers, shard_bytes in ((0, 30_000), (3, 40_000)):
        seen = []
        options = {**OPTIONS, "shard_bytes": shard_bytes, "on_progress": seen.append}
        result = prepare([corpus], tmp_path / f"out{num_workers}", num_workers=num_workers, **options)
        assert contents(result.prefix) == undisturbed
        assert seen[-1].done_bytes == seen[-1].total_bytes
        assert result.num_bytes == sum(path.stat().st_size for path in corpus.iterdir())
    limit = 300_000
    one = prepare([corpus], tmp_path / "one", max_bytes=limit, **{**OPTIONS, "shard_bytes": 10**9})
    two = prepare([corpus], tmp_path / "two", max_bytes=limit, num_workers=2, **OPTIONS)
    assert contents(one.prefix) == contents(two.prefix)
    assert one.num_bytes == two.num_bytes <= limit


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_preparation_goes_on_from_its_complete_shards_to_the_same_bytes(
    num_workers: int, corpus: Path, tmp_path: Path, undisturbed: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    output, stage = tmp_path / "out", tmp_path / ".out.prepare"
    with running(corpus, output, num_workers) as process:
        wait_for_shards(stage, 4, process)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert not list(tmp_path.glob("out.*")), "nothing is published"
    while workers_of(stage):  # they notice that their parent is gone, and hold the lock until then
        time.sleep(0.01)
    complete = sorted(stage.glob("*.done"))
    torn, forged, lost = complete[0].with_suffix(".tokens"), complete[1], complete[2].with_suffix(".lengths")
    torn.write_bytes(torn.read_bytes()[:-2])
    forged.write_text(forged.read_text().replace('"digest": "', '"digest": "0'))
    lost.unlink()
    assert prepare_again(corpus, output, num_workers) == 0
    assert f"; {len(complete) - 3} of " in capsys.readouterr().out, "nothing damaged is trusted"
    assert contents(output) == undisturbed
    assert not stage.exists()
    assert not workers_of(stage)


def prepare_again(corpus: Path, output: Path, num_workers: int) -> int:
    options = [f"--{name}={value}" for name, value in OPTIONS.items() if name != "append_eod"]
    words = ["prepare", str(corpus), *options, "--append_eod", f"--num_workers={num_workers}", "--output", str(output)]
    return main(words)


def test_killed_worker_is_named_and_the_same_call_goes_on(
    corpus: Path, tmp_path: Path, undisturbed: list[bytes]
) -> None:
    stage, struck = tmp_path / ".out.prepare", []

    def strike(progress: object) -> None:
        if not struck and len(list(stage.glob("*.done"))) >= 2:
            struck.append(workers_of(stage)[0])
            os.kill(struck[0], signal.SIGKILL)

    with pytest.raises(ChildProcessError, match=r"ended with signal 9 while it read .*same command goes on") as caught:
        prepare([corpus], tmp_path / "out", num_workers=2, on_progress=strike, **OPTIONS)
    assert f"Worker process {struck[0]} " in str(caught.value)
    assert not workers_of(stage), "the others are gone"
    result = prepare([corpus], tmp_path / "out", num_workers=2, **OPTIONS)
    assert 2 <= result.num_reused < result.num_shards
    assert contents(result.prefix) == undisturbed


def test_other_inputs_or_settings_begin_anew_and_a_second_preparation_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, stage = tmp_path / "out", tmp_path / ".out.prepare"
    with running(corpus, output, 2) as process:
        wait_for_shards(stage, 2, process)
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr("lightning_distplus.data.prepare_stage._LOCK_WAIT_S", 0.2)
        with pytest.raises(BlockingIOError, match=rf"Another preparation \(process {process.pid}\)"):
            prepare([corpus], output, **OPTIONS)
        monkeypatch.undo()
    changed = corpus / "d.jsonl"
    changed.write_text(lines(51))
    result = prepare([corpus], output, **OPTIONS)
    assert result.num_reused == 0
    prepare([corpus], tmp_path / "whole", **OPTIONS)
    assert contents(output) == contents(tmp_path / "whole")


def test_error_in_a_worker_is_the_error_of_the_preparation(corpus: Path, tmp_path: Path) -> None:
    first = prepare([corpus], tmp_path / "first", **OPTIONS)
    (corpus / "z.jsonl").write_bytes(b'{"text": "x"}\n\n{"body": "y"}\n')
    options = {"tokenizer": first.tokenizer, "shard_bytes": 40_000}
    with pytest.raises(ValueError, match=r"z\.jsonl, line 3 has no field 'text'; found 'body'"):
        prepare([corpus], tmp_path / "out", num_workers=2, **options)
    assert not list(tmp_path.glob("out*"))


# Parquet.


def write_parquet(path: Path, texts: list[str | None], rows: int = 200, column: str = "text") -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'lightning-distplus[formats]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, path, row_group_size=rows)


def test_parquet_gives_the_tokens_of_the_same_jsonl(tmp_path: Path) -> None:
    texts = [json.loads(line)["text"] for line in lines(2_000).splitlines()]
    write_parquet(tmp_path / "a.parquet", [*texts[:900], ""], rows=150)
    write_parquet(tmp_path / "b.parquet", texts[900:], rows=1_000)
    (tmp_path / "a.jsonl").write_text(lines(2_000))
    tokenizer = prepare([tmp_path / "a.jsonl"], tmp_path / "jsonl", vocab_size=300).tokenizer
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for num_workers in (0, 2):
        prefix = tmp_path / f"parquet{num_workers}"
        result = prepare(files, prefix, tokenizer=tokenizer, num_workers=num_workers, shard_bytes=20_000)
        assert (result.num_documents, result.num_shards > 3) == (2_000, True)
        assert contents(tmp_path / "jsonl")[:2] == [Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES[:2]]
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
