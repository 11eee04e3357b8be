"""The first steps of a configuration on two real CPU processes, in a folder that is gone afterwards."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_distplus.preflight import Finding, Status
from lightning_distplus.timeouts import parse_duration

__all__ = ["run_steps"]

_SHOWN_LINES = 12
_CHECKPOINTS = "checkpoints"


def run_steps(parser: Any, config: Any, steps: int, small: Sequence[str], deadline: str) -> Iterator[Finding]:
    """Trains two ranks.

    Args:
        parser: That of the configuration.
        config: The configuration as it was given.
        steps: Optimizer steps, of one micro-batch each.
        small: ``key=value`` with a path of names, for what is too large for two CPU processes.
        deadline: For all of it.
    """
    limit = parse_duration(deadline, field="deadline")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="distplus-rehearse-") as name:
        folder = Path(name)
        settings = yaml.safe_load(parser.dump(config, skip_none=False))
        _shrink(settings, folder, steps)
        for pair in small:
            key, _, value = pair.partition("=")
            _set(settings, key.split("."), yaml.safe_load(value))
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        try:
            ended = subprocess.run(
                [
                    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                    "-m", "lightning_distplus.cli", "fit", "--config", str(folder / "config.yaml"),
                ],
                capture_output=True, text=True, timeout=limit.total_seconds(), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            subject = f"{steps} steps on two CPU processes had not ended after {deadline}."
            remedy = "Make it smaller: --small model.init_args.KEY=VALUE; or give it longer: --deadline"
            yield Finding(check="steps", status=Status.ERROR, subject=subject, remedy=remedy)
            return
        saved = sum(path.stat().st_size for path in (folder / _CHECKPOINTS).rglob("*") if path.is_file())
    elapsed = f"{time.monotonic() - begin:.0f} s"
    if ended.returncode == 0:
        subject = f"{steps} steps on two CPU processes went well."
        yield Finding(
            check="steps", status=Status.NOTE, subject=subject, detail=f"{elapsed}; checkpoints: {saved} bytes"
        )
        return
    yield Finding(
        check="steps",
        status=Status.ERROR,
        subject=f"Two CPU processes could not train {steps} steps.",
        detail=_reason(ended.stderr),
        remedy="The same error would come after the queue; mend it here",
    )


def _shrink(settings: dict[str, Any], folder: Path, steps: int) -> None:
    trainer = settings["trainer"]
    trainer.update(
        accelerator="cpu", devices=2, num_nodes=1, precision="32-true", max_steps=steps, max_time=None,
        accumulate_grad_batches=1, limit_val_batches=1, num_sanity_val_steps=0, logger=False,
        default_root_dir=str(folder),
    )  # fmt: skip
    for callback in trainer.get("callbacks") or []:
        arguments = callback.setdefault("init_args", {}) or {}
        for key, value in arguments.items():
            if key in ("dirpath", "folder", "save_dir") and value is not None:
                arguments[key] = str(folder / (_CHECKPOINTS if key == "dirpath" else Path(str(value)).name))
        if arguments.get("every_n_train_steps"):
            arguments["every_n_train_steps"] = steps
    for key in ("global_batch_size", "rampup_batch_size"):
        if key in (settings.get("data") or {}).get("init_args", {}):
            settings["data"]["init_args"][key] = None


def _set(settings: Any, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        settings = settings.setdefault(name, {})
    settings[path[-1]] = value


def _reason(log: str) -> str:
    """The first error of a rank, without its traceback."""
    lines = [line for line in log.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if not starts:
        return "\n".join(lines[-_SHOWN_LINES:])
    tail = lines[starts[0] + 1 :]
    for index, line in enumerate(tail):
        text = line.partition("]: ")[2] if line.startswith("[rank") else line
        if text and not text.startswith(" "):
            return "\n".join(tail[index : index + _SHOWN_LINES])
    return "\n".join(tail[-_SHOWN_LINES:])
