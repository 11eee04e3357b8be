"""The command of ``make pretrain``: pretrains a small Llama twice, kills a rank, and compares. See ``driver.py``.

```text
python examples/tinyllama/pretrain.py [--strategy fsdp|ddp|model_parallel|deepspeed] [--no-kill] [--steps 300]
```
"""

import argparse
import signal
import sys
from pathlib import Path


def parse_options() -> tuple[argparse.Namespace, list[str]]:
    """The options of the driver, and those that are passed on to ``distplus fit``."""
    parser = argparse.ArgumentParser(
        description="Pretrains a small Llama on two ranks, kills one, and proves that the weights do not show it.",
        epilog="Other options are passed on to `distplus fit`.",
    )
    parser.add_argument("--strategy", choices=("fsdp", "ddp", "model_parallel", "deepspeed"), default="fsdp")
    parser.add_argument("--no-kill", action="store_true", help="train plainly, once")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps; default: 300")
    parser.add_argument("--seed", type=int, help="of the kill; default: another one each time")
    parser.add_argument("--out", type=Path, help="a new folder; default: runs/pretrain/<strategy>-<time>")
    parser.add_argument("--data", type=Path, help="where the token files are or go; default: runs/pretrain/data")
    parser.add_argument("--corpus-mb", type=float, default=22.0, help="megabytes of text; default: 22")
    options, overrides = parser.parse_known_args()
    if options.steps < 6:
        parser.error("--steps must be at least 6: a kill needs steps before and after it")
    if options.out is not None and options.out.exists():
        parser.error(f"--out {options.out} exists; name a new folder")
    return options, overrides


if __name__ == "__main__":
    options, overrides = parse_options()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this file is run by its path
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the children, as Ctrl-C does
    try:
        from examples.tinyllama.driver import main

        sys.exit(main(options, overrides))
    except KeyboardInterrupt:
        sys.exit(130)
