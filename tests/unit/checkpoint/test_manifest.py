from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from lightning_distplus.checkpoint.manifest import FileEntry, Manifest, installed_packages
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch

LARGE = (64 << 20) + 1

MANIFEST = Manifest(
    global_step=12,
    epoch=1,
    world_size=2,
    strategy="resilient_fsdp",
    files=(
        FileEntry("optimizer/state.bin", 7, "0" * 32),
        FileEntry("model.bin", LARGE, "a" * 32, ("d" * 32,) * 2),
    ),
    committed_at=1767225600.25,
    packages={"torch": "2.13.0"},
    data={"consumed_samples": 96},
    layout={"data_parallel": 2, "sharding": "FULL_SHARD"},
    configuration="0123456789abcdef" * 2,
    deadlines_s={"step": 60.0, "checkpoint": 180.5},
    parent={"path": "/runs/a/step=8.ckpt", "manifest_xxh3_128": "b" * 32},
    tensors={"weights/net.0.weight": f"float32 12 {'c' * 32}"},
)


def changed(path: str, value: Any) -> str:
    document = copy.deepcopy(json.loads(MANIFEST.to_json()))
    *folders, name = path.split(".")
    place: Any = document
    for folder in folders:
        place = place[int(folder)] if folder.isdigit() else place[folder]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return json.dumps(document)


def test_a_manifest_of_a_release_that_took_sha256_digests_is_read() -> None:
    assert Manifest.from_json(changed("files.1.sha256", "e" * 64)) == MANIFEST


def test_manifest_survives_a_round_trip() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert MANIFEST.size_bytes == 7 + LARGE


def test_what_json_cannot_express_is_refused_and_what_is_empty_is_left_out() -> None:
    with pytest.raises(ValueError, match="JSON"):
        replace(MANIFEST, data={"loss": float("nan")}).to_json()
    first, second = json.loads(MANIFEST.to_json())["files"]
    assert set(second) - set(first) == {"blocks_64_mib"}


def test_manifest_is_readable_text_with_the_version_first() -> None:
    lines = MANIFEST.to_json().splitlines()
    assert lines[:3] == ["{", '  "version": 1,', '  "global_step": 12,']
    assert all(len(line) < 100 for line in lines)


def test_unknown_field_is_ignored() -> None:
    assert Manifest.from_json(changed("from_the_future", [1])) == MANIFEST


def test_a_manifest_of_before_fields_were_added_is_read() -> None:
    document = json.loads(MANIFEST.to_json())
    for name in ("layout", "configuration", "deadlines_s", "parent", "tensors"):
        del document[name]
    del document["files"][1]["blocks_64_mib"]

    manifest = Manifest.from_json(json.dumps(document))

    assert (manifest.layout, manifest.configuration, manifest.parent) == ({}, None, None)
    assert manifest.deadlines_s == {}
    assert (manifest.tensors, manifest.files[1].blocks_64_mib) == (None, ())


def test_unknown_version_is_refused_naming_both_sides() -> None:
    with pytest.raises(CheckpointMismatch, match="has manifest version 2; this release reads version 1"):
        Manifest.from_json(changed("version", 2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", ...),
        ("version", "1"),
        ("global_step", -1),
        ("global_step", True),
        ("global_step", 1.0),
        ("epoch", None),
        ("world_size", 0),
        ("strategy", 3),
        ("committed_at", "now"),
        ("committed_at", float("nan")),
        ("packages", {"torch": 2}),
        ("packages", ...),
        ("data", [1]),
        ("layout", None),
        ("configuration", 7),
        ("deadlines_s", {"step": 0}),
        ("deadlines_s", {"step": "1m"}),
        ("parent", "step=8.ckpt"),
        ("parent", {"path": "/runs/a/step=8.ckpt"}),
        ("parent", {"path": "/runs/a/step=8.ckpt", "manifest_xxh3_128": "B" * 32}),
        ("tensors", ["weights"]),
        ("tensors", {"weights/net.0.weight": "float32 12"}),
        ("files", []),
        ("files", {}),
    ],
)
def test_malformed_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(CheckpointCorrupt, match=f"checkpoint.json: field '{field}': expected .*, found"):
        Manifest.from_json(changed(field, value), "checkpoint.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", "../other"),
        ("path", "/etc/passwd"),
        ("path", "a//b"),
        ("path", "."),
        ("path", ""),
        ("path", "optimizer/state.bin"),
        ("size_bytes", -1),
        ("xxh3_128", "A" * 32),
        ("xxh3_128", "a" * 31),
        ("xxh3_128", ...),
        ("blocks_64_mib", ["d" * 32]),
        ("blocks_64_mib", ["d" * 32, "d"]),
    ],
)
def test_malformed_file_is_named_by_its_index(field: str, value: Any) -> None:
    with pytest.raises(CheckpointCorrupt, match=rf"files\[1\]: field '{field}': expected"):
        Manifest.from_json(changed(f"files.1.{field}", value))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", b"\xff\xfe\x00"])
def test_text_that_is_no_object_is_corrupt(text: str | bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="expected a JSON"):
        Manifest.from_json(text)


def test_recorded_packages_have_versions() -> None:
    assert installed_packages()["torch"].split(".")[0].isdigit()


def test_importing_the_package_loads_neither_torch_nor_xxhash() -> None:
    code = (
        "import sys, lightning_distplus.checkpoint as c\n"
        "assert not {'torch', 'lightning', 'xxhash'} & sys.modules.keys()\n"
        "assert all(getattr(c, name) is not None for name in c.__all__)\n"
        "assert not {'torch', 'lightning'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
