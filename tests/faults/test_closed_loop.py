"""The live state, the manifest and the loaded state have one fingerprint: what differs is named by its tensor."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lightning_distplus
from lightning_distplus import newest_valid, verify
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.reading_back import tensor_findings
from lightning_distplus.cli.verify import main as distplus_verify
from lightning_distplus.errors import CheckpointCorrupt, SaveFailed
from lightning_distplus.events import read_events
from lightning_distplus.testing import spawn
from tests.distributed import jobs

BY_NAME = jobs.STRATEGIES[:3]  # DeepSpeed writes flat buffers
WEIGHT = "weights/net.0.weight"


def arguments_of(name: str) -> dict[str, Any]:
    return {"stage": 2} if "DeepSpeed" in name else {}


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

        def _write(self, checkpoint: Any, stage: Path, storage_options: Any, writes: Any) -> None:
            if on_disk or self.global_rank:
                super()._write(checkpoint, stage, storage_options, writes)
            else:
                writes.digested = FlippingWrites(writes.digested, self.needle())
                super()._write(checkpoint, stage, storage_options, writes)
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
    return Flips(**arguments)


def save_and_load(rank: int, name: str, on_disk: bool, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for reads_back in (True, False):
        strategy = flipping(name, on_disk=on_disk, read_back_saves=reads_back)
        trainer = jobs.trainer(strategy, 2, folder, max_steps=2)
        trainer.fit(jobs.Model(), jobs.loader())
        try:
            trainer.save_checkpoint(f"{folder}/{reads_back}.ckpt")
        except SaveFailed as error:
            found["refused"] = str(error)
        found[f"flipped {reads_back}"] = strategy.num_flipped
    trainer = jobs.trainer(jobs.strategy(name), 2, folder, max_steps=3)
    try:
        trainer.fit(jobs.Model(), jobs.loader(), ckpt_path=f"{folder}/False.ckpt")
    except CheckpointCorrupt as error:
        found["loaded"] = str(error)
    return found


@pytest.mark.parametrize("on_disk", [False, True], ids=["on the way", "on the disk"])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_bit_that_flips_between_memory_and_disk_is_refused_by_the_tensors_name(
    name: str, on_disk: bool, tmp_path: Path
) -> None:
    run = spawn(save_and_load, 2, args=(name, on_disk, str(tmp_path)), deadline="60s")
    for rank, found in run.results.items():
        assert found["flipped True"] == found["flipped False"] == (rank == 0)
        assert WEIGHT in found["refused"]
        assert "is not what was in memory" in found["refused"]
        assert ("XXH3" if on_disk else WEIGHT) in found["loaded"]
    assert len(run.results) == 2
    assert not (tmp_path / "True.ckpt").exists()
    # On the way: the digests are those of the changed bytes.
    assert verify(tmp_path / "False.ckpt").ok is not on_disk
    assert distplus_verify([str(tmp_path)]) == on_disk
    assert distplus_verify([str(tmp_path), "--deep"]) == 1
    (finding,) = tensor_findings(tmp_path / "False.ckpt", read_manifest(tmp_path / "False.ckpt").tensors or {})
    assert finding.file.endswith(WEIGHT)


def save_with_deepspeed(rank: int, folder: str) -> str:
    strategy = flipping("ResilientDeepSpeed", on_disk=True, read_back_saves=True, stage=2)
    trainer = jobs.trainer(strategy, 2, folder, max_steps=2)
    trainer.fit(jobs.Model(), jobs.loader())
    try:
        trainer.save_checkpoint(f"{folder}/two.ckpt")
    except SaveFailed as error:
        return str(error)
    return f"saved, {strategy.num_flipped} flipped"


def test_a_bit_that_flips_in_what_deepspeed_wrote_is_found_when_it_is_read_back(tmp_path: Path) -> None:
    for told in spawn(save_with_deepspeed, 2, args=(str(tmp_path),), deadline="120s").check().results.values():
        assert re.search(r"is not what was in memory: \S+model_states\.pt: expected XXH3 digest \w+ of what was", told)
    assert not (tmp_path / "two.ckpt").exists()


class Rounding(jobs.Model):
    """A model that changes its weights while it loads them."""

    def configure_model(self) -> None:
        super().configure_model()

        def round_weights(net: Any, keys: Any) -> None:
            net[0].weight.data.round_(decimals=2)

        self.net.register_load_state_dict_post_hook(round_weights)


def load_rounding(rank: int, folder: str) -> str:
    trainer = jobs.trainer(jobs.strategy("ResilientDDP"), 2, folder, max_steps=2)
    trainer.fit(jobs.Model(), jobs.loader())
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    trainer = jobs.trainer(jobs.strategy("ResilientDDP"), 2, folder, max_steps=3)
    try:
        trainer.fit(Rounding(), jobs.loader(), ckpt_path=f"{folder}/two.ckpt")
    except CheckpointCorrupt as error:
        return str(error)
    return ""


def load_rounding_by_size(rank: int, folder: str) -> int:
    trainer = jobs.trainer(jobs.strategy("ResilientDDP", verify="size"), 2, folder, max_steps=3)
    trainer.fit(Rounding(), jobs.loader(), ckpt_path=f"{folder}/two.ckpt")
    return trainer.global_step


def test_a_model_that_changes_its_weights_while_it_loads_them_is_told_what_to_say(tmp_path: Path) -> None:
    for told in spawn(load_rounding, 2, args=(str(tmp_path),)).check().results.values():
        assert WEIGHT in told
        assert 'needs verify="size"' in told
    assert set(spawn(load_rounding_by_size, 2, args=(str(tmp_path),)).check().results.values()) == {3}


class RotsBehind(Callback):
    """Damages what step 2 has saved, and waits until somebody has noticed."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 3:
            return
        folder = Path(trainer.default_root_dir)
        if trainer.global_rank == 0:
            path = folder / "step=2.ckpt"
            path.write_bytes(path.read_bytes()[::-1])
        deadline_s = time.monotonic() + 40
        while not list(folder.glob(".distplus/step=2.ckpt.torn-*/step=2.ckpt")):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def save_and_rot(rank: int, folder: str) -> list[dict[str, Any]]:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = jobs.strategy("ResilientDDP", scrub_every="10ms")
    trainer = jobs.trainer(strategy, 2, folder, max_steps=4, callbacks=[RotsBehind(), saver], enable_checkpointing=True)
    trainer.fit(jobs.Model(), jobs.loader())
    assert not any(thread.name == "distplus-scrubber" for thread in threading.enumerate())
    return [event for event in read_events(Path(folder) / "distplus") if event["kind"] == "checkpoint_damaged"]


def test_scrubbing_finds_a_checkpoint_that_rots_while_training_goes_on(tmp_path: Path) -> None:
    run = spawn(save_and_rot, 2, args=(str(tmp_path),), deadline="60s").check()
    for events in run.results.values():
        assert [Path(event["path"]).name for event in events] == ["step=2.ckpt"]
        assert "XXH3 digest" in events[0]["damage"]
    assert newest_valid(tmp_path) == tmp_path / "step=4.ckpt"
    assert not (tmp_path / "step=2.ckpt").exists()


class LosesABit(jobs.Model):
    """On rank 1 one bit of one moment changes while the optimizer is restored."""

    num_fired = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()

        def flip(restored: torch.optim.Optimizer) -> None:
            moments = [state["exp_avg"] for state in restored.state.values() if "exp_avg" in state]
            local = [moment.to_local() if hasattr(moment, "to_local") else moment for moment in moments]
            held = next((moment for moment in local if moment.numel()), None)
            if self.trainer.global_rank == 1 and held is not None and not self.num_fired:
                held.view(-1).view(torch.int32)[0] ^= 1
                self.num_fired += 1

        optimizer.register_load_state_dict_post_hook(flip)
        return optimizer


def load_and_lose(rank: int, name: str, folder: str) -> tuple[int, str]:
    trainer = jobs.trainer(jobs.strategy(name, **arguments_of(name)), 2, folder, max_steps=2)
    trainer.fit(jobs.Model(), jobs.loader())
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    model = LosesABit()
    trainer = jobs.trainer(jobs.strategy(name, **arguments_of(name)), 2, folder, max_steps=3)
    try:
        trainer.fit(model, jobs.loader(), ckpt_path=f"{folder}/two.ckpt")
    except CheckpointCorrupt as error:
        return model.num_fired, str(error)
    return model.num_fired, "resumed"


@pytest.mark.parametrize("name", jobs.STRATEGIES)
def test_a_moment_that_changes_while_it_is_restored_is_named_on_all_ranks(name: str, tmp_path: Path) -> None:
    run = spawn(load_and_lose, 2, args=(name, str(tmp_path)), deadline="60s")
    for rank, (num_fired, message) in run.results.items():
        assert num_fired == (rank == 1)
        assert "/exp_avg" in message
        assert "found" in message
        assert "in memory (and 0 more)" in message
    assert len(run.results) == 2


class Changes(jobs.Model):
    """A hook that changes weights on purpose while they are loaded, as fine-tuning does."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        weights["net.0.weight"] = torch.zeros_like(weights["net.0.weight"])
        weights["net.0.bias"].zero_()


def load_and_change(rank: int, folder: str) -> tuple[int, float]:
    trainer = jobs.trainer(jobs.strategy("ResilientDDP"), 2, folder, max_steps=2)
    trainer.fit(jobs.Model(), jobs.loader())
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    trainer = jobs.trainer(jobs.strategy("ResilientDDP"), 2, folder, max_steps=3)
    trainer.fit(model := Changes(), jobs.loader(), ckpt_path=f"{folder}/two.ckpt")
    assert model.net is not None
    trainer.validate(jobs.Model(), jobs.loader(), ckpt_path=f"{folder}/two.ckpt", verbose=False)
    return trainer.global_step, float(model.net[0].weight.abs().max())


def test_what_a_hook_changes_on_purpose_is_no_damage(tmp_path: Path) -> None:
    run = spawn(load_and_change, 2, args=(str(tmp_path),), deadline="60s").check()
    assert all(step >= 2 and largest < 0.1 for step, largest in run.results.values())
