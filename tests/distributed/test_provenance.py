"""What a manifest tells of the run: layout, configuration and the checkpoint before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_distplus.checkpoint import Manifest, read_manifest
from lightning_distplus.checkpoint.files import MARKER, meta_folder
from lightning_distplus.testing import spawn
from tests.distributed import jobs

LAYOUTS: dict[str, dict[str, Any]] = {
    "ResilientDDP": {"data_parallel": 2},
    "ResilientFSDP": {"data_parallel": 2, "sharding": "FULL_SHARD"},
    "ResilientModelParallel": {"data_parallel": 2, "tensor_parallel": 1},
    "ResilientDeepSpeed": {"data_parallel": 2, "zero_stage": 2},
}


def save_twice_and_resume(name: str, folder: str) -> None:
    for start, saves, clip in ((None, ("a", "b"), 1.0), ("b", ("c",), 1.0), ("b", ("d",), 0.5)):
        arguments = {"stage": 2} if name == "ResilientDeepSpeed" else {}
        clips = {} if name == "ResilientFSDP" else {"gradient_clip_val": clip}
        accumulates = 2 if name == "ResilientFSDP" and clip == 0.5 else 1
        trainer = jobs.trainer(
            jobs.strategy(name, **arguments), 2, folder, max_steps=4, accumulate_grad_batches=accumulates, **clips
        )
        trainer.fit(jobs.Model(), jobs.loader(), ckpt_path=None if start is None else f"{folder}/{start}.ckpt")
        for save in saves:
            trainer.save_checkpoint(f"{folder}/{save}.ckpt")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_manifest_names_layout_configuration_and_parent(name: str, tmp_path: Path) -> None:
    spawn(save_twice_and_resume, 2, args=(name, str(tmp_path)), deadline="2m").check()
    manifests: dict[str, Manifest] = {save: read_manifest(tmp_path / f"{save}.ckpt") for save in "abcd"}

    assert all(manifest.layout == LAYOUTS[name] for manifest in manifests.values())
    parents = {save: manifest.parent for save, manifest in manifests.items()}
    assert parents.pop("a") is None
    for parent, children in (("a", "b"), ("b", "cd")):
        marker = json.loads((meta_folder(tmp_path / f"{parent}.ckpt") / MARKER).read_text())
        expected = {"path": str(tmp_path / f"{parent}.ckpt"), "manifest_xxh3_128": marker["manifest_xxh3_128"]}
        assert [parents[child] for child in children] == [expected] * len(children)
    of = {save: manifest.configuration for save, manifest in manifests.items()}
    assert len(of["a"] or "") == 32
    assert of["a"] == of["b"] == of["c"] != of["d"]
