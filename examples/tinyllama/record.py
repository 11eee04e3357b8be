"""What really happened in a run: one JSON line per micro-batch and rank, written as it happens."""

import json
import os
import time
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class StepRecord(Callback):
    """Writes ``rank<r>-start<n>.jsonl`` in a folder, a new file for each start of the process.

    ```text
    {"pid": 4711, "step": 60, "time": 1767225600.1}                                  at the start: where it resumes
    {"step": 60, "samples": [[0, 1734, "9f2c..."], ...], "loss": "0x1.2p+2", ...}    each micro-batch
    ```

    A sample is source, index and a digest of the tokens that reached ``training_step``.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._file: IO[str] | None = None
        self._line: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.global_rank
        number = sum(1 for _ in self.folder.glob(f"rank{rank}-start*.jsonl"))
        self._file = (self.folder / f"rank{rank}-start{number}.jsonl").open("x", encoding="utf-8")
        self._write({"pid": os.getpid(), "step": trainer.global_step, "time": time.time()})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes the step and its samples."""
        digests = digest_samples(batch["input_ids"], batch["shift_labels"])
        ids = trainer.datamodule.sample_ids(batch_idx)
        samples = [[*place, digest] for place, digest in zip(ids, digests, strict=True)]
        self._line = {"step": trainer.global_step, "samples": samples}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes the line."""
        self._write({**self._line, "loss": float(outputs["loss"]).hex(), "time": time.time()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()  # what SIGKILL must not take away


def digest_samples(input_ids: torch.Tensor, shift_labels: torch.Tensor) -> list[str]:
    """16 hex digits for each sample: over all its tokens, the last target included."""
    blocks = torch.cat([input_ids, shift_labels[:, -1:]], dim=1).cpu().numpy()
    return [xxhash.xxh3_64_hexdigest(block.tobytes()) for block in blocks]
