"""Row R15: a subclass with a name of its own loads its parent class's shards, and the parent those of the subclass."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_distplus import ResilientFSDP
from lightning_distplus.checkpoint import read_manifest
from lightning_distplus.checkpoint.files import bytes_digest
from lightning_distplus.testing import spawn
from tests.distributed import jobs


class MyFSDP(ResilientFSDP):
    """What a user adds to a strategy."""


def save_and_load(rank: int, folder: str) -> list[int]:
    """The parent saves, the subclass goes on and saves, and the parent goes on; what it reads names the subclass."""
    path, found = None, []
    for step, strategy in enumerate((ResilientFSDP(), MyFSDP(), ResilientFSDP()), start=1):
        trainer = jobs.fit(strategy, 2, folder, (model := jobs.Model()), ckpt_path=path, max_steps=step)
        found.append(trainer.global_step - len(model.losses))
        path = f"{folder}/{step}.ckpt"
        trainer.save_checkpoint(path)
        if step == 2 and rank == 0:
            name_in_manifest(Path(path), "MyFSDP")
    return found


def name_in_manifest(path: Path, strategy: str) -> None:
    """Changes a manifest to what an early release wrote."""
    assert read_manifest(path).strategy == "ResilientFSDP"
    meta = path / ".distplus"
    document = json.loads((meta / "manifest.json").read_bytes()) | {"strategy": strategy}
    (meta / "manifest.json").write_text(json.dumps(document))
    marker = {"version": 1, "manifest_xxh3_128": bytes_digest((meta / "manifest.json").read_bytes())}
    (meta / "commit").write_text(json.dumps(marker))


def test_subclass_and_its_parent_load_the_shards_of_each_other(tmp_path: Path) -> None:
    run = spawn(save_and_load, 2, args=(str(tmp_path),), deadline="60s").check()
    assert set(map(tuple, run.results.values())) == {(0, 1, 2)}
