"""The environment of the rivals, beside ours and with ours underneath: all run on the same torch and numpy."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

__all__ = ["call", "interpreter"]

_ROOT = Path(__file__).parents[1]
_RIVALS = ("litdata==0.2.76", "mosaicml-streaming==0.13.0")  # torchdata is a dependency of ours
# What they import for local files. Without --no-deps they would replace torch, numpy and transformers.
_THEIR_IMPORTS = (
    "boto3", "filelock", "obstore", "tifffile", "requests", "brotli", "zstd", "python-snappy", "paramiko",
    "google-cloud-storage", "catalogue", "lightning-utilities", "tqdm",
)  # fmt: skip
# They import it for pictures, of which there are none here; a wheel of it would bring another torch. Lightning's
# torchmetrics would take it for a whole one.
_PICTURES = "pictures"
_TORCHVISION = {
    "__init__.py": "",
    "datasets.py": "class VisionDataset:\n    pass\n\n\nclass CIFAR10:\n    pass\n",
    "transforms/__init__.py": "",
    "transforms/functional.py": "to_tensor = None\n",
}


def interpreter() -> Path:
    """The interpreter with the rivals, one for each environment of ours; the first call installs them."""
    folder = Path(tempfile.gettempdir()) / f"distplus-rivals-{zlib.crc32(sys.prefix.encode()):08x}"
    python = folder / "bin" / "python"
    mark = folder / "complete"
    if not mark.exists():
        _quietly(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
        packages = Path(_quietly(str(python), "-c", "import site; print(site.getsitepackages()[0])").strip())
        (packages / "ours.pth").write_text("\n".join(site.getsitepackages()))
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
        _quietly(*pip, "--no-deps", *_RIVALS)
        _quietly(*pip, *_THEIR_IMPORTS)
        for name, text in _TORCHVISION.items():
            (folder / _PICTURES / "torchvision" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / _PICTURES / "torchvision" / name).write_text(text)
        mark.touch()
    return python


def call(job: str, *arguments: Any) -> Any:
    """Runs a job of ``rival_jobs`` in a process of its own and returns its result."""
    words = [json.dumps(argument) for argument in arguments]
    python = interpreter()
    paths = [_ROOT] if "lightning_distplus" in arguments else [_ROOT, python.parents[1] / _PICTURES]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": "ignore"}
    text = _quietly(str(python), "-m", "benchmarks.rival_jobs", job, *words, env=environment)
    return json.loads(text.splitlines()[-1])


def _quietly(*command: str, **options: Any) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, **options)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    return ended.stdout
