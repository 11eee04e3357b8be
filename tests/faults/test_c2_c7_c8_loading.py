"""Rows C2, C7 and C8: what cannot be loaded is refused on all ranks by its name, and one choice is that of all."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import FileSystemReader

from lightning_distplus import _compat, newest_valid, verify
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.catalog import check_unmanifested
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch
from lightning_distplus.events import read_events
from lightning_distplus.report import describe_runs, read_ledgers
from lightning_distplus.strategies.loading import Search
from lightning_distplus.testing import spawn
from tests.distributed import jobs


def save(name: str, paths: list[str], folder: str) -> None:
    for path in paths:
        jobs.fit(name, 2, folder, max_steps=2).save_checkpoint(path)


class Wider(jobs.Model):
    """Another model: one layer more."""

    def grow(self) -> None:
        self.extra = torch.nn.Linear(3, 3)


def load(name: str, path: str, folder: str, wider: bool = False, **more: Any) -> tuple[str, Any]:
    trainer = jobs.trainer(name, 2, folder, **more, max_steps=2)
    try:
        trainer.fit(Wider() if wider else jobs.Model(), jobs.loader(), ckpt_path=path)
    except (CheckpointCorrupt, CheckpointMismatch) as error:
        return type(error).__name__, str(error)
    return "resumed", trainer.global_step


Saved = Callable[[str, Path], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Puts a checkpoint of a strategy, after two steps, into a folder; each strategy trains once."""
    made: dict[str, Path] = {}

    def put(name: str, folder: Path) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            spawn(save, 2, args=(name, [str(made[name] / "two.ckpt")], str(made[name])), deadline="60s").check()
        shutil.copytree(made[name], folder, dirs_exist_ok=True)
        return folder / "two.ckpt"

    return put


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_changed_byte_is_refused_on_all_ranks_by_file(name: str, saved: Saved, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    every_damage_is_found(path)
    payload = path if path.is_file() else max((file for file in path.rglob("*") if file.is_file()), key=size_of)
    data = bytearray(payload.read_bytes())
    data[len(data) // 2] ^= 1
    payload.write_bytes(data)
    run = spawn(load, 2, args=(name, str(path), str(tmp_path))).check()
    for kind, message in run.results.values():
        assert kind == "CheckpointCorrupt"
        assert payload.name in message
    assert payload.read_bytes() == data


def every_damage_is_found(path: Path) -> None:
    """A bit at a random place of every file, a file cut short, missing, or in the place of another one."""
    files = [path] if path.is_file() else [path / entry.path for entry in read_manifest(path).files]
    contents = {file: file.read_bytes() for file in files}
    random = Random(len(contents))
    for file, content in contents.items():
        position = random.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << (position % 8)
        other = next((found for found in contents.values() if found != content), b"")
        for damaged in (bytes(flipped), content[:-1], other, None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            (finding,) = verify(path).findings
            assert path.name in finding.file
            file.write_bytes(content)
    assert verify(path).ok


def size_of(file: Path) -> int:
    return file.stat().st_size


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("ResilientFSDP", "ResilientDeepSpeed"), ("ResilientDeepSpeed", "ResilientModelParallel")],
)
def test_a_checkpoint_of_another_strategy_is_refused_by_name(
    saved_by: str, loaded_by: str, saved: Saved, tmp_path: Path
) -> None:
    path = saved(saved_by, tmp_path)
    run = spawn(load, 2, args=(loaded_by, str(path), str(tmp_path))).check()
    for kind, message in run.results.values():
        assert kind == "CheckpointMismatch"
        assert saved_by in message
        assert loaded_by in message


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(name: str, saved: Saved, tmp_path: Path) -> None:
    path = saved(name, tmp_path)
    run = spawn(load, 2, args=(name, str(path), str(tmp_path), True)).check()
    for kind, message in run.results.values():
        assert kind == "CheckpointMismatch", message
        assert "extra" in message


def test_a_checkpoint_without_a_manifest_loads_and_is_called_unverified(saved: Saved, tmp_path: Path) -> None:
    path = saved("ResilientFSDP", tmp_path)
    shutil.rmtree(path / ".distplus")
    run = spawn(load, 2, args=("ResilientFSDP", str(path), str(tmp_path))).check()
    assert set(run.results.values()) == {("resumed", 2)}
    assert "unverified" in run.logs[0]


def load_verifying(path: str, folder: str) -> list[str]:
    return [load("ResilientDDP", path, folder, verify=mode)[0] for mode in ("size", "off", "full")]


def test_how_much_is_verified_before_a_load_is_an_argument(saved: Saved, tmp_path: Path) -> None:
    path = saved("ResilientDDP", tmp_path)
    flip_in_largest_member(path)
    run = spawn(load_verifying, 2, args=(str(path), str(tmp_path)), deadline="60s").check()
    assert list(run.results.values()) == [["resumed", "resumed", "CheckpointCorrupt"]] * 2


class Notes(jobs.Model):
    """What it was given of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[str] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.used.append("checkpoint")

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        self.used.append("weights")
        return super().load_state_dict(*arguments, **named)


def load_noting(rank: int, paths: list[str], folder: str) -> list[tuple[str, list[str]]]:
    """What comes of each checkpoint, and what the model was given of it."""
    found: list[tuple[str, list[str]]] = []
    for path in paths:
        model, said = Notes(), "resumed"
        try:
            jobs.fit("ResilientDDP", 2, folder, model, ckpt_path=path, max_steps=3)
        except CheckpointCorrupt as error:
            said = str(error)
        found.append((said, model.used))
    return found


def test_what_is_read_while_it_is_verified_is_used_by_nobody_before_it_is_known_to_be_right(
    saved: Saved, tmp_path: Path
) -> None:
    sound, flips, tears = (saved("ResilientDDP", tmp_path / name) for name in ("sound", "flips", "tears"))
    flip_in_largest_member(flips)  # torch loads it
    flipped = flips.read_bytes()
    tears.write_bytes(
        flipped[: flipped.index(b"data.pkl")] + bytes(2000) + flipped[flipped.index(b"data.pkl") + 2000 :]
    )
    for damaged in (flips, tears):
        run = spawn(load_noting, 2, args=([str(sound), str(damaged)], str(tmp_path)), deadline="60s").check()
        for whole, (message, used) in run.results.values():
            assert whole == ("resumed", ["checkpoint", "weights"])
            assert used == []
            assert "XXH3 digest" in message
    with pytest.raises((RuntimeError, pickle.UnpicklingError, EOFError)):
        torch.load(tears, weights_only=False)  # torch does not even read that one


def resume_from_different(
    rank: int, name: str, choices: list[tuple[str | None, str | None]], folder: str
) -> list[tuple[str, int]]:
    runs = [jobs.fit(name, 2, folder, ckpt_path=paths[rank], max_steps=3) for paths in choices]
    return [(str(run.ckpt_path), run.global_step) for run in runs]


@pytest.mark.parametrize("name", ["ResilientDDP", "ResilientFSDP"])
def test_all_ranks_resume_from_what_rank_0_has_found(name: str, saved: Saved, tmp_path: Path) -> None:
    path = str(saved(name, tmp_path))
    choices = [(path, None), (None, path), (path, str(tmp_path / "none.ckpt"))]
    run = spawn(resume_from_different, 2, args=(name, choices, str(tmp_path)), deadline="60s").check()
    assert list(run.results.values()) == [[(str(first), 3) for first, _ in choices]] * 2
    assert run.logs[1].count("it follows rank 0") == len(choices)


def resume_from_nowhere(folder: str) -> str:
    trainer = jobs.trainer("ResilientDDP", 2, folder, max_steps=1)
    with pytest.raises(CheckpointMismatch) as refused:
        trainer.fit(jobs.Model(), jobs.loader(), ckpt_path=f"{folder}/step=7.ckpt")
    return str(refused.value)


def test_a_checkpoint_that_is_not_there_is_refused_with_the_ways_to_find_one(tmp_path: Path) -> None:
    run = spawn(resume_from_nowhere, 2, args=(str(tmp_path),)).check()
    for text in run.results.values():
        assert f"There is no checkpoint at {tmp_path}/step=7.ckpt" in text
        assert f"lightning_distplus.newest_valid('{tmp_path}')" in text
        assert "ckpt_path='auto'" in text


def search(rank: int, name: str, folder: str, allow_fresh: bool) -> tuple[str, int, int]:
    strategy = jobs.strategy(name)
    strategy.search = Search(Path(folder), allow_fresh)
    trainer = jobs.trainer(strategy, 2, folder, max_steps=4)
    given = str(newest_valid(folder, verify="size"))
    reads, read = [], Path.open

    def counted(path: Path, *arguments: Any, **named: Any) -> Any:
        if named.get("buffering") == 0:  # for a digest
            reads.append(path.name)
        return read(path, *arguments, **named)

    Path.open = counted  # type: ignore[method-assign,assignment]
    try:
        trainer.fit(jobs.Model(), jobs.loader(), ckpt_path=given)
    except CheckpointCorrupt as error:
        return str(error), 0, 0
    return str(trainer.ckpt_path), trainer.global_step, sum(name.endswith(".distcp") for name in reads)


def test_the_ranks_share_the_search_for_the_newest_checkpoint_whose_bytes_are_right(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.ckpt") for number in (1, 2, 3)]
    spawn(save, 2, args=("ResilientFSDP", paths, str(tmp_path)), deadline="60s").check()
    for number in (2, 3):
        damaged = max((tmp_path / f"{number}.ckpt").glob("*.distcp"), key=size_of)
        damaged.write_bytes(damaged.read_bytes()[::-1])
    run = spawn(search, 2, args=("ResilientFSDP", str(tmp_path), False)).check()
    assert {step for _, step, _ in run.results.values()} == {4}
    assert sum(num_read for _, _, num_read in run.results.values()) == 6, "each of two files in three checkpoints, once"
    assert all(run.logs[rank].count("is passed over") == 2 for rank in range(2))
    damaged = max((tmp_path / "1.ckpt").glob("*.distcp"), key=size_of)
    damaged.write_bytes(damaged.read_bytes()[::-1])
    run = spawn(search, 2, args=("ResilientFSDP", str(tmp_path), False)).check()
    assert all("none is as it was when it was saved" in message for message, _, _ in run.results.values())
    run = spawn(search, 2, args=("ResilientFSDP", str(tmp_path), True)).check()
    assert all(step == 4 for _, step, _ in run.results.values())


def save_copied(rank: int, folder: str, url: str) -> list[str]:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
    strategy = jobs.strategy("ResilientFSDP", copy_to=url)
    jobs.fit(strategy, 2, folder, max_steps=4, callbacks=[saver])
    return [event["kind"] for event in read_events(Path(folder) / "distplus") if "cop" in event["kind"]]


def resume_from_copy(rank: int, folder: str, url: str) -> tuple[str, int, int]:
    strategy = jobs.strategy("ResilientFSDP", copy_to=url)
    strategy.search = Search(Path(folder))
    trainer = jobs.fit(strategy, 2, folder, (model := jobs.Model()), max_steps=5)
    return str(trainer.ckpt_path), trainer.global_step, len(model.losses)


def test_what_the_fast_folder_has_lost_is_fetched_from_the_durable_one(tmp_path: Path) -> None:
    fast, url = tmp_path / "fast", f"file://{tmp_path}/durable"
    run = spawn(save_copied, 2, args=(str(fast), url)).check()
    assert set(run.results[0]) == {"checkpoint_copied"}
    (told,) = describe_runs(read_ledgers(fast / "distplus"))
    assert [(one["step"], one["state"]) for one in told["checkpoints"]] == [(2, "rotated"), (4, "committed")]
    shutil.rmtree(fast)
    run = spawn(resume_from_copy, 2, args=(str(fast), url)).check()
    for _, step, num_steps in run.results.values():
        assert (step, num_steps) == (5, 1)
    assert newest_valid(fast) == fast / "step=4.ckpt"
    assert "step=4.ckpt is fetched from" in run.logs[0]


def flip_in_largest_member(path: Path) -> None:
    """One bit in the middle of the largest tensor of a file that torch.save has written; torch loads it."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size * (not member.filename.endswith("pkl")))
        offset = path.read_bytes().index(archive.read(largest))
    content = bytearray(path.read_bytes())
    content[offset + largest.file_size // 2] ^= 1
    path.write_bytes(content)


def test_foreign_checkpoints_that_cannot_be_loaded_are_one_clear_error_on_all_ranks(tmp_path: Path) -> None:
    sound = tmp_path / "sound.ckpt"
    torch.save({"weights": torch.arange(4096)}, sound)
    damaged, empty, text, folder = (tmp_path / f"{name}.ckpt" for name in ("damaged", "empty", "text", "folder"))
    shutil.copy(sound, damaged)
    flip_in_largest_member(damaged)
    assert torch.load(damaged)["weights"].sum() != torch.load(sound)["weights"].sum()  # nobody else looks
    empty.write_bytes(b"")
    text.write_text("weights")
    folder.mkdir()
    reasons = {damaged: "CRC", empty: "an empty file", text: "a whole zip file", folder: "none of them"}
    for path, reason in reasons.items():
        run = spawn(load, 2, args=("ResilientDDP", str(path), str(tmp_path))).check()
        for kind, message in run.results.values():
            assert kind == "CheckpointCorrupt"
            assert reason in message
            assert path.name in message
    assert check_unmanifested(sound) == ()
    with _compat.without_crc():
        torch.save(torch.load(sound), tmp_path / "without.ckpt")  # whose CRCs are all 0
    assert check_unmanifested(tmp_path / "without.ckpt") == ()


def archives_in(checkpoint: Path) -> Iterator[zipfile.ZipFile]:
    """What ``torch.save`` has written, on its own or as an item of a shard."""
    if (checkpoint / ".metadata").is_file():
        for item in FileSystemReader(checkpoint).read_metadata().storage_data.values():
            content = (checkpoint / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
            if zipfile.is_zipfile(io.BytesIO(content)):  # what is no tensor is pickled as it is
                yield zipfile.ZipFile(io.BytesIO(content))
    else:
        for path in [checkpoint] if checkpoint.is_file() else sorted(checkpoint.rglob("*.pt")):
            yield zipfile.ZipFile(path)


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_shards_have_no_crc_which_nobody_compares_and_a_single_file_keeps_it(
    name: str, saved: Saved, tmp_path: Path
) -> None:
    members = [member for archive in archives_in(saved(name, tmp_path)) for member in archive.infolist()]
    entries = [member for member in members if "/data/" in member.filename]
    assert len(entries) > 4
    assert [entry.filename for entry in entries if (entry.CRC != 0) is not (name == "ResilientDDP")] == []
