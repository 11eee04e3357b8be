"""Copies at a URL: committed there last, verified when they are fetched, and never half a one."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_distplus import newest_valid, verify
from lightning_distplus.checkpoint import remove
from lightning_distplus.checkpoint.catalog import look
from lightning_distplus.checkpoint.copies import Copier, Copies
from lightning_distplus.checkpoint.files import bytes_digest

KINDS = ["file", "directory"]


@pytest.fixture(scope="module", autouse=True)
def bucket() -> Iterator[str | None]:
    """A bucket of an S3 server of our own, which lives from before the first test until after the last one."""
    try:
        import s3fs
        from moto.server import ThreadedMotoServer
    except ImportError:
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        s3fs.S3FileSystem().mkdir("runs")
        yield "s3://runs"
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, bucket: str | None) -> str:
    if request.param == "s3":
        if bucket is None:
            pytest.skip("copies to S3 need the package s3fs, and a server to test with moto[s3], flask and flask-cors")
        return f"{bucket}/{uuid.uuid4()}"
    return f"memory://{uuid.uuid4()}" if request.param == "memory" else f"file://{tmp_path}/durable"


@pytest.mark.parametrize("kind", KINDS)
def test_the_newest_copy_comes_back_as_it_was_and_the_oldest_go(
    save: Callable[..., Any], content_of: Callable[[Path], bytes], tmp_path: Path, url: str, kind: str
) -> None:
    copies, fast = Copies(url, kept=2), tmp_path / "fast"
    assert copies.fetch_newest(tmp_path / "other") is None
    for step in (1, 2, 3):
        save(fast / f"{step}.ckpt", step, b"weights %d" % step, kind)
        copies.put(fast / f"{step}.ckpt")
    for step in (1, 2, 3):
        remove(fast / f"{step}.ckpt")
    found = copies.fetch_newest(fast)
    assert found == fast / "3.ckpt"
    assert content_of(found) == b"weights 3"
    assert verify(found).ok
    assert [copy.name for copy, *_ in copies._committed()] == ["3.ckpt", "2.ckpt"]


def test_a_run_that_went_back_keeps_the_copies_of_its_own_line(
    save: Callable[..., Any], tmp_path: Path, url: str
) -> None:
    copies, parent = Copies(url, kept=2), None
    for name, step in (("8", 8), ("20", 20), ("22", 22), ("10", 10), ("12", 12)):
        if name == "10":
            parent = look(tmp_path / "8").reference
        save(tmp_path / name, step, parent=parent)
        parent = look(tmp_path / name).reference
        copies.put(tmp_path / name)
    assert [copy.name for copy, *_ in copies._committed()] == ["12", "10"]
    assert copies.fetch_newest(tmp_path / "other") == tmp_path / "other" / "12"


def test_what_a_later_release_has_written_is_fetched_as_it_is(save: Callable[..., Any], tmp_path: Path) -> None:
    copies, path = Copies(f"file://{tmp_path}/durable"), tmp_path / "fast" / "1.ckpt"
    save(path, 1)
    meta = path.parent / ".distplus" / path.name
    manifest = json.dumps({**json.loads((meta / "manifest.json").read_bytes()), "from_the_future": 1}).encode()
    (meta / "manifest.json").write_bytes(manifest)
    (meta / "commit").write_text(json.dumps({"version": 1, "manifest_xxh3_128": bytes_digest(manifest)}))
    copies.put(path)
    found = copies.fetch_newest(tmp_path / "other")
    assert found is not None
    assert look(found).manifest_xxh3_128 == look(path).manifest_xxh3_128


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_copy_is_passed_over_and_one_that_was_cut_off_does_not_exist(
    save: Callable[..., Any], content_of: Callable[[Path], bytes], tmp_path: Path, url: str, kind: str
) -> None:
    class Breaks(Copies):
        """Ends at its n-th write."""

        writes_left = 99

        def __init__(self, url: str) -> None:
            super().__init__(url)
            inner = self._fs

            class Counted:
                def __getattr__(_, name: str) -> Any:  # noqa: N805
                    if name in ("put_file", "pipe_file", "makedirs"):
                        self.writes_left -= 1
                        if self.writes_left < 0:
                            raise OSError(5, "Input/output error")
                    return getattr(inner, name)

            self._fs = Counted()

    copies, fast = Breaks(url), tmp_path / "fast"
    for step in (1, 2):
        save(fast / f"{step}.ckpt", step, b"weights %d" % step, kind)
        copies.put(fast / f"{step}.ckpt")
    save(fast / "3.ckpt", 3, b"weights 3", kind)
    num_writes = {"file": 5, "directory": 7}[kind]
    for is_again in (False, True):
        for writes_left in range(num_writes):
            copies.writes_left = writes_left
            with pytest.raises(OSError, match="Input/output error"):
                copies.put(fast / "3.ckpt")
            assert [copy.name for copy, _ in Copies(url)._committed()] == ["2.ckpt", "1.ckpt"], is_again
        copies.writes_left = num_writes
        copies.put(fast / "3.ckpt")
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/3.ckpt" + ("/model.bin" if kind == "directory" else ""), b"weights 4")
    found = copies.fetch_newest(tmp_path / "other")
    assert found == tmp_path / "other" / "2.ckpt"
    assert content_of(found) == b"weights 2"
    assert newest_valid(tmp_path / "other") == found


def test_the_thread_copies_the_newest_tells_of_errors_and_ends(save: Callable[..., Any], tmp_path: Path) -> None:
    copies = Copies(f"file://{tmp_path}/durable")
    told: list[tuple[str, str | None]] = []
    begun, go_on = threading.Event(), threading.Event()
    put = copies.put

    def held(path: Path) -> None:
        begun.set()
        assert go_on.wait(30)
        put(path)

    copies.put = held  # type: ignore[method-assign]
    copier = Copier(copies, lambda path, error: told.append((path.name, error)))
    for step in (1, 2, 3):
        save(tmp_path / f"{step}.ckpt", step)
    copier.submit(tmp_path / "none.ckpt")
    assert begun.wait(30)
    copier.submit(tmp_path / "2.ckpt")
    copier.submit(tmp_path / "3.ckpt")
    go_on.set()
    assert copier.close(timedelta(seconds=30))
    assert [name for name, _ in told] == ["none.ckpt", "3.ckpt"]
    assert "CheckpointCorrupt" in str(told[0][1])
    assert told[1][1] is None
