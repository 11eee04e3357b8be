"""Checkpoints of a stranger whose pickles run code: nothing of them runs, and the refusal names what they name.

Row C11.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_distplus.checkpoint import read_manifest, verify
from lightning_distplus.checkpoint.files import MANIFEST, MARKER, bytes_digest, digest_file, meta_folder
from lightning_distplus.cli.__main__ import main
from lightning_distplus.errors import CheckpointUnsafe
from lightning_distplus.testing import spawn
from tests.distributed import jobs
from tests.pairs import kept

Poison = Callable[[Path, Any], None]


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = str(ran)

    def __reduce__(self) -> Any:
        return os.makedirs, (self.ran, 0o777, True)


def ran(checkpoint: Path) -> Path:
    """The folder that is there if a checkpoint's pickle has run."""
    return checkpoint.with_suffix(".ran")


def in_torch_file(*patterns: str) -> Poison:
    """Adds to what ``torch.save`` has written, so that whoever expects it finds all that it looks for."""

    def poison(checkpoint: Path, hostile: Hostile) -> None:
        files = [file for pattern in patterns for file in checkpoint.parent.glob(f"{checkpoint.name}{pattern}")]
        assert files
        for file in files:
            content = torch.load(file, weights_only=False)
            if isinstance(content, torch.Tensor):
                content.hostile = hostile
            else:
                content["hostile"] = hostile
            torch.save(content, file)

    return poison


def in_metadata(checkpoint: Path, hostile: Hostile) -> None:
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.hostile = hostile
    file.write_bytes(pickle.dumps(metadata))


def in_shard(checkpoint: Path, hostile: Hostile) -> None:
    """In the place of a learning rate, which DCP unpickles out of the middle of a shard."""
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn.endswith("param_groups.0.lr"))
    place = metadata.storage_data[index]
    stream = io.BytesIO()
    torch.save([0.01, hostile], stream)
    shard = checkpoint / place.relative_path
    place.offset, place.length = shard.stat().st_size, len(stream.getvalue())
    with shard.open("ab") as appended:
        appended.write(stream.getvalue())
    file.write_bytes(pickle.dumps(metadata))


def forge_manifest(checkpoint: Path) -> None:
    """Makes manifest and marker match what lies there now, as anybody can who may write there."""
    manifest = read_manifest(checkpoint)
    entries = []
    for entry in manifest.files:
        found = digest_file(checkpoint / entry.path if checkpoint.is_dir() else checkpoint, with_blocks=True)
        entries.append(
            replace(entry, size_bytes=found.size_bytes, xxh3_128=found.xxh3_128, blocks_64_mib=tuple(found.blocks))
        )
    content = replace(manifest, files=tuple(entries)).to_json().encode()
    meta = meta_folder(checkpoint)
    (meta / MANIFEST).write_bytes(content)
    (meta / MARKER).write_text(json.dumps({"version": 1, "manifest_xxh3_128": bytes_digest(content)}))
    assert verify(checkpoint).ok


def copy_of(sound: Path, kind: str) -> Path:
    copy = sound.with_name(f"{kind}.ckpt")
    if sound.is_dir():
        shutil.copytree(sound, copy)
    else:
        shutil.copy(sound, copy)
        shutil.copytree(meta_folder(sound), meta_folder(copy))
    return copy


def whole(sound: Path) -> Path:
    """A checkpoint of shards as one file, which FSDP and FSDP2 read by another way."""
    assert main(["export", str(sound), str(sound.with_name("whole.ckpt"))]) == 0
    return sound.with_name("whole.ckpt")


def universal(sound: Path) -> Path:
    assert main(["export", "--universal", str(sound), str(sound.with_name("universal.ckpt"))]) == 0
    return sound.with_name("universal.ckpt")


def same(sound: Path) -> Path:
    return sound


SHARDS: dict[str, tuple[Callable[[Path], Path], Poison]] = {
    "metadata": (same, in_metadata),
    "shard": (same, in_shard),
    "meta": (same, in_torch_file("/meta.pt")),
    "file": (whole, in_torch_file("")),
}
KINDS: dict[str, dict[str, tuple[Callable[[Path], Path], Poison]]] = {
    "ResilientDDP": {"file": (same, in_torch_file(""))},
    "ResilientFSDP": SHARDS,
    "ResilientModelParallel": SHARDS,
    "ResilientDeepSpeed": {
        "model": (same, in_torch_file("/checkpoint/*model_states.pt")),
        "optimizer": (same, in_torch_file("/checkpoint/*optim_states.pt")),
        "universal-model": (universal, in_torch_file("/checkpoint/*model_states.pt")),
        "universal-optimizer": (universal, in_torch_file("/checkpoint/zero/optimizer_state.pt")),
        "universal-weights": (universal, in_torch_file("/checkpoint/zero/*/fp32.pt")),
        "universal-moments": (universal, in_torch_file("/checkpoint/zero/*/exp_avg.pt")),
        "universal-step": (universal, in_torch_file("/checkpoint/zero/*/step.pt")),
    },
}
READ_BY_DEEP = {("ResilientDDP", "file"), ("ResilientFSDP", "metadata"), ("ResilientModelParallel", "metadata")}
"""In others there are no tensors that have fingerprints."""


class LoadsEach(Callback):
    """Saves a sound checkpoint, poisons a copy of it in each way, and loads all of these copies."""

    def __init__(self, folder: str, kinds: list[str], trusts: bool) -> None:
        self.folder, self.kinds, self.trusts = Path(folder), kinds, trusts
        self.refusals: dict[str, str] = {}

    def on_train_end(self, trainer: Any, module: Any) -> None:
        sound = self.folder / "sound.ckpt"
        trainer.save_checkpoint(sound)
        if trainer.is_global_zero:
            kinds = KINDS[type(trainer.strategy).__name__]
            made = {make: make(sound) for make in {make for make, _ in kinds.values()}}
            for kind, (make, poison) in kinds.items():
                copy = copy_of(made[make], f"hostile-{kind}")
                poison(copy, Hostile(ran(copy)))
                forge_manifest(copy)
        trainer.strategy.barrier()
        for kind in self.kinds:
            try:
                trainer.strategy.load_checkpoint(
                    self.folder / f"hostile-{kind}.ckpt", weights_only=False if self.trusts else None
                )
            except CheckpointUnsafe as error:
                self.refusals[kind] = str(error)
            trainer.strategy.barrier()


def load_each(name: str, folder: str, kinds: list[str], trusts: bool) -> dict[str, str]:
    loads = LoadsEach(folder, kinds, trusts)
    jobs.fit(name, 2, folder, max_steps=1, callbacks=[loads])
    return loads.refusals


@pytest.mark.parametrize("name", kept(jobs.STRATEGIES, [name for name in jobs.STRATEGIES if "Parallel" not in name]))
def test_no_pickle_of_a_stranger_runs_in_fit_verify_or_export(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = list(KINDS[name])
    result = spawn(load_each, 2, args=(name, str(tmp_path), kinds, False), deadline="150s").check()
    assert not list(tmp_path.glob("*.ran"))
    for refusals in result.results.values():
        assert list(refusals) == kinds
        for refusal in refusals.values():
            assert "os.makedirs" in refusal
            assert "weights_only=False" in refusal

    for kind in kinds:
        hostile, out = tmp_path / f"hostile-{kind}.ckpt", tmp_path / f"{kind}-out"
        assert main(["verify", str(hostile)]) == 0, "the manifest is forged well"
        deep = main(["verify", "--deep", str(hostile)])
        said = capsys.readouterr().out
        assert deep == (1 if (name, kind) in READ_BY_DEEP else 0)
        assert deep == 0 or ("refused" in said and "os.makedirs" in said and "--trust" in said)
        whole = [str(hostile), f"{out}.ckpt" if hostile.is_dir() else f"{out}.safetensors"]
        for command in [whole, ["--universal", *whole]] if "universal" not in kind and "Deep" in name else [whole]:
            assert main(["export", *command]) == 1
            said = capsys.readouterr().err
            assert "universal" in kind or ("os.makedirs" in said and "--trust" in said)
            assert not Path(command[-1]).exists()
        assert not list(tmp_path.glob("*.ran")), kind


@pytest.mark.parametrize(("name", "kind"), [("ResilientFSDP", "metadata"), ("ResilientDeepSpeed", "optimizer")])
def test_who_trusts_a_checkpoint_runs_what_is_in_it(name: str, kind: str, tmp_path: Path) -> None:
    # Without this, the test above could plant what nobody would have run.
    hostile = tmp_path / f"hostile-{kind}.ckpt"
    spawn(load_each, 2, args=(name, str(tmp_path), [kind], True), deadline="100s").check()
    assert ran(hostile).exists()
    ran(hostile).rmdir()
    assert main(["export", "--trust", str(hostile), str(tmp_path / "out.ckpt")]) == 0
    assert ran(hostile).exists()


def resume(name: str, hostile: str) -> None:
    jobs.fit(name, 2, str(Path(hostile).parent), ckpt_path=hostile, max_steps=2)


def test_a_pickle_that_only_one_rank_reads_ends_all_of_them(tmp_path: Path) -> None:
    spawn(load_each, 2, args=("ResilientDeepSpeed", str(tmp_path), [], False), deadline="150s").check()
    hostile = copy_of(tmp_path / "sound.ckpt", "one")
    in_torch_file("/checkpoint/*rank_1_mp*optim_states.pt")(hostile, Hostile(ran(hostile)))
    forge_manifest(hostile)
    result = spawn(resume, 2, args=("ResilientDeepSpeed", str(hostile)), deadline="100s")
    assert result.alive == {}
    assert not ran(hostile).exists()
    assert all(result.exit_codes.values())
    for log in result.logs.values():
        assert "CheckpointUnsafe" in log
        assert "os.makedirs" in log
