"""Row C2: a bit that flips on the way to the disk is named by its tensor; a damaged file is fetched from its copy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_distplus
from lightning_distplus import newest_valid, verify
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.formats import tensor_findings
from lightning_distplus.cli.checkpoints import run_verify as distplus_verify
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch
from lightning_distplus.strategies import loading
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs
from tests.pairs import in_turn

BY_NAME = jobs.STRATEGIES[:3]  # DeepSpeed writes flat buffers
WEIGHT = "weights/net.0.weight"


class FlippingWrites:
    """In the place of `DigestedWrites`: flips a bit of what a weight is written as, before it has a digest."""

    def __init__(self, inner: Any, needle: bytes) -> None:
        self.inner, self.needle = inner, needle
        self.num_flipped = 0

    @contextmanager
    def open(self, path: Path) -> Iterator[Any]:
        with self.inner.open(path) as stream:
            write = stream.write

            def flip(data: Any) -> int:
                content = bytearray(data)
                if not self.num_flipped and (place := content.find(self.needle)) >= 0:
                    content[place] ^= 1
                    self.num_flipped += 1
                return write(content)

            stream.write = flip
            yield stream


def flipping(name: str, *, on_disk: bool, **arguments: Any) -> Any:
    """A strategy whose bytes change between memory and disk, or as soon as they are there."""

    class Flips(getattr(lightning_distplus, name)):
        num_flipped = 0

        def write_checkpoint(self, checkpoint: Any, stage: Path, storage_options: Any, writes: Any) -> None:
            if on_disk or self.global_rank:
                super().write_checkpoint(checkpoint, stage, storage_options, writes)
            else:
                writes.digested = FlippingWrites(writes.digested, self.needle())
                super().write_checkpoint(checkpoint, stage, storage_options, writes)
                self.num_flipped += writes.digested.num_flipped
            self.barrier("written")
            if on_disk and self.global_rank == 0:
                files = sorted(file for file in stage.rglob("*") if file.is_file() and file.name != ".metadata")
                for file in [stage] if stage.is_file() else files:
                    content = bytearray(file.read_bytes())
                    if (place := content.find(self.needle())) >= 0:
                        content[place] ^= 1
                        file.write_bytes(content)
                        self.num_flipped += 1
                        break

        def needle(self) -> bytes:
            weights = dict(self.lightning_module.named_parameters())
            weight = next(weight for name, weight in weights.items() if name.endswith("0.weight"))
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            return local.detach().reshape(-1)[:4].numpy().tobytes()

    Flips.__name__ = name
    return Flips(monitor=False, **arguments)  # all ranks have the same samples


def save_and_load(rank: int, name: str, on_disk: bool, folder: str) -> dict[str, Any]:
    strategy = flipping(name, on_disk=on_disk)
    trainer = jobs.fit(strategy, 2, folder, max_steps=2)
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    found: dict[str, Any] = {"flipped": strategy.num_flipped}
    trainer = jobs.trainer(name, 2, folder, max_steps=3)
    try:
        trainer.fit(jobs.Model(), jobs.loader(), ckpt_path=f"{folder}/two.ckpt")
    except CheckpointCorrupt as error:
        found["loaded"] = str(error)
    return found


@pytest.mark.parametrize(("name", "where"), in_turn(BY_NAME, ["on the way", "on the disk"]))
def test_a_bit_that_flips_between_memory_and_disk_is_refused_by_the_tensors_name(
    name: str, where: str, tmp_path: Path
) -> None:
    on_disk = where == "on the disk"
    run = spawn(save_and_load, 2, args=(name, on_disk, str(tmp_path)), deadline="60s").check()
    for rank, found in run.results.items():
        assert found["flipped"] == (rank == 0)
        assert ("XXH3" if on_disk else WEIGHT) in found["loaded"]
    # On the way: the digests are those of the changed bytes.
    assert verify(tmp_path / "two.ckpt").ok is not on_disk
    assert distplus_verify([str(tmp_path)]) == on_disk
    assert distplus_verify([str(tmp_path), "--deep"]) == 1
    (finding,) = tensor_findings(tmp_path / "two.ckpt", read_manifest(tmp_path / "two.ckpt").tensors or {})
    assert finding.file.endswith(WEIGHT)


class Rounding(jobs.Model):
    """A model that changes its weights while it loads them."""

    def grow(self) -> None:
        def round_weights(net: Any, keys: Any) -> None:
            net[0].weight.data.round_(decimals=2)

        self.net.register_load_state_dict_post_hook(round_weights)


def load_rounding(rank: int, folder: str) -> tuple[int, str]:
    """The step to which a run comes that compares sizes only, and the refusal of one that compares tensors."""
    path, told = f"{folder}/two.ckpt", ""
    jobs.fit("ResilientDDP", 2, folder, max_steps=2).save_checkpoint(path)
    by_size = jobs.fit("ResilientDDP", 2, folder, Rounding(), ckpt_path=path, verify="size", max_steps=3)
    try:
        jobs.fit("ResilientDDP", 2, folder, Rounding(), ckpt_path=path, max_steps=3)
    except CheckpointCorrupt as error:
        told = str(error)
    return by_size.global_step, told


def test_a_model_that_changes_its_weights_while_it_loads_them_is_told_what_to_say(tmp_path: Path) -> None:
    for steps, told in spawn(load_rounding, 2, args=(str(tmp_path),)).check().results.values():
        assert WEIGHT in told
        assert 'needs verify="size"' in told
        assert steps == 3


# -- a folder on each node: what a node lacks, or has damaged, is fetched from the durable copy before it is loaded ----

CLONE_NEWNS = 0x20000


def on_another_node(folder: str) -> None:
    """From here this process sees an empty disk of its own in the place of ``folder``."""
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)


def save_copied(rank: int, folder: str, url: str) -> str:
    if rank == 1:
        on_another_node(folder)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
    strategy = jobs.strategy("ResilientDDP", copy_to=url)
    jobs.fit(strategy, 2, folder, (model := jobs.Model()), max_steps=4, callbacks=[saver])
    return weights_digest(model)


def load_copied(rank: int, folder: str, url: str | None) -> tuple[str, str, list[str]]:
    loading._NUM_LOOKS = 2  # type: ignore[attr-defined]
    if rank == 1:
        on_another_node(folder)
    trainer = jobs.trainer("ResilientDDP", 2, folder, copy_to=url, max_steps=4)
    try:
        trainer.fit(model := jobs.Model(), jobs.loader(), ckpt_path=f"{folder}/step=4.ckpt")
    except (CheckpointCorrupt, CheckpointMismatch) as error:
        return type(error).__name__, str(error), []
    return weights_digest(model), str(newest_valid(folder)), [path.name for path in Path(folder).glob("*.ckpt")]


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="a folder of its own for a rank needs the right to make mount namespaces",
)
def test_a_node_without_the_checkpoint_or_with_a_damaged_one_fetches_the_copy(tmp_path: Path) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    fast.mkdir()
    arguments: Any = (str(fast), f"file://{durable}")
    saved = spawn(save_copied, 2, args=arguments).check().results
    newest = fast / "step=4.ckpt"
    assert (durable / newest.name).exists()
    expected = (saved[0], str(newest), [newest.name])

    run = spawn(load_copied, 2, args=(str(fast), None)).check()
    for kind, message, _ in run.results.values():
        assert kind == "CheckpointMismatch"
        assert "is not there for rank 1" in message

    shutil.rmtree(durable)  # then rank 0 copies it for the other node
    run = spawn(load_copied, 2, args=arguments).check()
    assert run.results == {0: expected, 1: expected}
    assert "is fetched from" in run.logs[1]
    assert "is fetched from" not in run.logs[0]

    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    run = spawn(load_copied, 2, args=arguments).check()
    assert run.results == {0: expected, 1: expected}
    assert all("is fetched from" in run.logs[rank] for rank in range(2))

    newest.write_bytes(content)
    shutil.rmtree(durable)  # nothing sound is left anywhere
    run = spawn(load_copied, 2, args=arguments).check()
    for kind, message, _ in run.results.values():
        assert kind == "CheckpointCorrupt"
        assert "has no copy of step=4.ckpt" in message
