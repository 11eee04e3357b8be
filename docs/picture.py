"""Draws assets/verdict.svg, the picture of the README: what a terminal shows when a rank hangs. See ``make readme``.

The run is real: the script that ``distplus init`` writes, with a rank that sleeps for ever in its fifth batch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

import lightning_distplus.recipes

HANG = """        if batch_idx == 5 and self.global_rank == 1:
            time.sleep(10**6)
        inputs, targets = batch
"""
WIDTH = 110


def script() -> str:
    """The script of ``distplus init``, that hangs."""
    stock = (Path(lightning_distplus.recipes.__file__).parent / "train.py").read_text()
    hanging = stock.replace("        inputs, targets = batch\n", HANG)
    hanging = hanging.replace("import torch\n", "import time\n\nimport torch\n", 1)
    return hanging.replace('timeout="5m"', 'timeout={"step": "5s"}')


def shown_at_the_end(folder: Path) -> str:
    """Runs it, and returns the verdict with the colours of a terminal."""
    (folder / "train.py").write_text(script())
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "DISTPLUS_TRACEBACK": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    begin = done.stdout.rindex("\n", 0, done.stdout.index("RANK 1 HANGS"))  # before the colour of the line
    return done.stdout[begin + 1 :]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        text = shown_at_the_end(Path(folder)).replace(folder, "/runs/x")
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    picture = console.export_svg(title="python train.py")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # they would be asked for from another host
    (Path(__file__).parent / "assets" / "verdict.svg").write_text(picture)
