"""A folder on each node: what a node lacks, or has damaged, is fetched from the durable copy before it is loaded.

Row C2.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_distplus import newest_valid
from lightning_distplus.testing import spawn, weights_digest
from tests.distributed import jobs

_CLONE_NEWNS = 0x20000


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("a folder of its own for a rank needs the right to make mount namespaces")


def on_another_node(folder: str) -> None:
    """From here this process sees an empty disk of its own in the place of ``folder``."""
    assert ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)


def save(rank: int, folder: str, url: str) -> str:
    if rank == 1:
        on_another_node(folder)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1)
    strategy = jobs.strategy("ResilientDDP", copy_to=url)
    jobs.fit(strategy, 2, folder, (model := jobs.Model()), max_steps=4, callbacks=[saver])
    return weights_digest(model)


def load(rank: int, folder: str, url: str) -> tuple[str, str, list[str]]:
    if rank == 1:
        on_another_node(folder)
    trainer = jobs.trainer("ResilientDDP", 2, folder, copy_to=url, max_steps=4)
    try:
        trainer.fit(model := jobs.Model(), jobs.loader(), ckpt_path=f"{folder}/step=4.ckpt")
    except Exception as error:
        return type(error).__name__, str(error), []
    return weights_digest(model), str(newest_valid(folder)), [path.name for path in Path(folder).glob("*.ckpt")]


def test_a_node_without_the_checkpoint_or_with_a_damaged_one_fetches_the_copy(tmp_path: Path) -> None:
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    fast.mkdir()
    arguments: Any = (str(fast), f"file://{durable}")
    saved = spawn(save, 2, args=arguments).check().results
    newest = fast / "step=4.ckpt"
    assert (durable / newest.name).exists()
    expected = (saved[0], str(newest), [newest.name])

    shutil.rmtree(durable)  # then rank 0 copies it for the other node
    run = spawn(load, 2, args=arguments).check()
    assert run.results == {0: expected, 1: expected}
    assert "is fetched from" in run.logs[1]
    assert "is fetched from" not in run.logs[0]

    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    run = spawn(load, 2, args=arguments).check()
    assert run.results == {0: expected, 1: expected}
    assert all("is fetched from" in run.logs[rank] for rank in range(2))

    newest.write_bytes(content)
    shutil.rmtree(durable)  # nothing sound is left anywhere
    run = spawn(load, 2, args=arguments).check()
    for kind, message, _ in run.results.values():
        assert kind == "CheckpointCorrupt"
        assert "has no copy of step=4.ckpt" in message
