"""One step of training that notes who started it and what the checks of the launch say: ``distplus fit`` runs it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from lightning_distplus.preflight.host import HOST_CHECKS
from lightning_distplus.strategies.start import facts_of
from tests.distributed import jobs


class _Findings(logging.Handler):
    """What the checks log, but for those of the host: a busy machine writes slowly."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "preflight (" in text and not any(f"preflight ({name})" in text for name in HOST_CHECKS):
            self.told.append(text)


class Healthy(jobs.Model):
    """Brings its data; leaves a file for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.findings = _Findings()
        logging.getLogger("lightning_distplus").addHandler(self.findings)

    def train_dataloader(self) -> DataLoader[Any]:
        return jobs.loader()

    def on_train_end(self) -> None:
        launcher = facts_of(self.trainer.strategy).launcher.name
        told = {"launcher": launcher, "world_size": self.trainer.world_size, "findings": self.findings.told}
        Path(self.trainer.default_root_dir, f"rank{self.trainer.global_rank}.json").write_text(json.dumps(told))
