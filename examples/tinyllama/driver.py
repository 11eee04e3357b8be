"""Pretrains a small Llama on two ranks, kills one of them, and proves that the weights do not show it."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.tinyllama import receipt
from examples.tinyllama.job import ROOT, Job
from lightning_distplus import recipes
from lightning_distplus.recipes.corpus import build_corpus

SOURCES = {"code": 0.7, "prose": 0.3}
RECIPES = {"deepspeed": "deepspeed_stage2"}
NUM_RANKS = 2

console = Console()


@dataclass(frozen=True)
class Kill:
    """The end of one rank."""

    rank: int
    step: int
    time: float


def main(options: argparse.Namespace, overrides: list[str]) -> int:
    """Returns 0 where everything is identical, 1 where it is not, 130 after Ctrl-C.

    Args:
        options: As ``pretrain.py`` parses them.
        overrides: Further options of ``distplus fit``.
    """
    try:
        return _pretrain(options, overrides)
    except KeyboardInterrupt:
        console.print("interrupted; all processes are ended")
        return 130
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        console.print(f"pretrain: {error}", markup=False, highlight=False)
        return 1


def _pretrain(options: argparse.Namespace, overrides: list[str]) -> int:
    runs = ROOT / "runs" / "pretrain"
    prefixes = prepare_data(options.data or runs / "data", options.corpus_mb)
    out = options.out or runs / f"{options.strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    every = next(size for size in range(max(options.steps // 10, 1), 0, -1) if options.steps % size == 0)
    trainer = Runner(options.strategy, options.steps, every, out.resolve(), prefixes, overrides)
    if options.no_kill:
        job, _ = trainer.run("plain run", "plain")
        console.print(
            _receipt({"steps": options.steps, "tokens/s": f"{trainer.tokens_per_s(job):,.0f}", "folder": out})
        )
        return 0
    disturbed, kill = trainer.run(f"one rank is killed (seed {seed})", "killed", random.Random(seed))
    undisturbed, _ = trainer.run("nobody disturbs", "undisturbed")
    return trainer.compare(disturbed, kill, undisturbed)


def prepare_data(folder: Path, corpus_mb: float) -> list[Path]:
    """Builds the corpus and its token files, where they are not there yet; returns their prefixes."""
    prefixes = [(folder / name).resolve() for name in SOURCES]
    if all(prefix.with_suffix(".idx").exists() for prefix in prefixes):
        console.print(f"tokens are in {folder} already")
        return prefixes
    paths = build_corpus(folder, corpus_mb)
    vocabulary = ["--vocab_size", "4096"]
    for prefix in prefixes:
        command = [sys.executable, "-m", "lightning_distplus.cli", "prepare", str(paths[prefix.name]), "--append_eod"]
        subprocess.run([*command, "--overwrite", "--output", str(prefix), *vocabulary], check=True, cwd=ROOT)
        vocabulary = ["--tokenizer", str(prefixes[0].with_suffix(".tokenizer.json"))]
    return prefixes


class Runner:
    """Runs the same training several times.

    Args:
        strategy: Which ``recipe:tiny_cpu_<strategy>``.
        steps: Optimizer steps.
        every: Optimizer steps between two checkpoints.
        out: Where the runs go.
        prefixes: The token files.
        overrides: Further options of ``distplus fit``.
    """

    def __init__(
        self, strategy: str, steps: int, every: int, out: Path, prefixes: list[Path], overrides: list[str]
    ) -> None:
        self.recipe = f"tiny_cpu_{RECIPES.get(strategy, strategy)}"
        self.strategy, self.steps, self.every, self.out, self.prefixes = strategy, steps, every, out, prefixes
        self.overrides = overrides

    def run(self, title: str, name: str, chance: random.Random | None = None) -> tuple[Job, Kill | None]:
        """Trains once; with ``chance``, kills a random rank at a random step between two checkpoints."""
        kill = None
        victim, target = self._choose(chance) if chance else (0, self.steps)
        with Job(self.out / name, self._arguments(self.out / name), NUM_RANKS) as job, _bars() as bars:
            task = bars.add_task(title, total=self.steps, status="starting")
            for _ in job.watch():
                start = job.newest(rank=victim)
                if start is None or not start.batches:
                    continue
                last = start.batches[-1]
                if chance and kill is None and last["step"] >= target:
                    time.sleep(chance.uniform(0, 0.2))  # anywhere within a step
                    os.kill(start.pid, signal.SIGKILL)
                    kill = Kill(victim, last["step"], time.time())
                state = "training" if start.number == 0 else f"resumed at step {start.first_step}"
                if kill and start.number == 0:
                    state = f"rank {victim} killed in step {kill.step + 1}"
                loss = float.fromhex(last["loss"])
                bars.update(task, completed=last["step"] + 1, status=f"loss {loss:.3f}, {state}")
        return job, kill

    def tokens_per_s(self, job: Job) -> float:
        """Speed of all ranks together, start-up and saves included after the first step."""
        batches = job.newest(rank=0).batches
        samples = NUM_RANKS * sum(len(batch["samples"]) for batch in batches[1:])
        return samples * self._seq_len() / (batches[-1]["time"] - batches[0]["time"])

    def compare(self, disturbed: Job, kill: Kill | None, undisturbed: Job) -> int:
        """Prints the receipt; 0 where nothing differs."""
        if kill is None:
            raise RuntimeError("No rank was killed: the run was over before its random step came. Use more --steps.")
        ours, theirs = (receipt.committed_steps(job.starts.values()) for job in (disturbed, undisturbed))
        samples, expected = receipt.samples_of(ours), receipt.samples_of(theirs)
        repeated, missed = receipt.count_differences(samples, expected)
        misread = receipt.misread_samples(samples, self.prefixes, self._seq_len())
        last = f"checkpoints/step={self.steps}.ckpt"
        differences, num_tensors = receipt.state_differences(disturbed.folder / last, undisturbed.folder / last)
        restarted = disturbed.newest(kill.rank)
        regained = next((batch["time"] for batch in restarted.batches if batch["step"] >= kill.step), None)
        lines = {
            "strategy": self.strategy,
            "steps": len(samples),
            "tokens/s": f"{self.tokens_per_s(undisturbed):,.0f}",
            "killed": f"rank {kill.rank} by SIGKILL in step {kill.step + 1}, resumed at step {restarted.first_step}",
            "samples": f"{sum(map(len, samples.values())):,}",
            "samples repeated": repeated,
            "samples missed": missed,
            "weights identical": f"no: {len(differences)} differ" if differences else f"yes ({num_tensors} tensors)",
            "seconds lost": "-" if regained is None else f"{regained - kill.time:.1f}",
            "loss plot": _plot(self.out / "loss.png", receipt.losses_of(theirs), disturbed, kill),
            "report": disturbed.folder / "distplus" / "report.html",
        }
        faults = {
            "the killed rank did not start again": restarted.number == 0 or regained is None,
            f"there are {len(samples)} steps, not {self.steps}": sorted(samples) != list(range(self.steps)),
            f"{repeated} samples were repeated and {missed} missed": repeated + missed > 0,
            f"{misread} samples are not what the token files hold": misread > 0,
            "samples came in another order": samples != expected,
            f"the last checkpoints differ in {', '.join(differences[:5])}": bool(differences),
            "the last checkpoints hold no tensors": num_tensors == 0,
        }
        console.print(_receipt(lines))
        found = [text for text, is_true in faults.items() if is_true]
        for text in found:
            console.print(f"NOT IDENTICAL: {text}", markup=False)
        return 1 if found else 0

    def _choose(self, chance: random.Random) -> tuple[int, int]:
        """A rank, and a step in the middle of the run with which no checkpoint ends: the kill costs some steps."""
        steps = range(max(self.every, self.steps * 3 // 10), self.steps * 8 // 10)
        between = [step for step in steps if (step + 1) % self.every or self.every == 1]
        return chance.randrange(NUM_RANKS), chance.choice(between)

    def _arguments(self, folder: Path) -> list[str]:
        sources = [{"path": str(path), "weight": SOURCES[path.name]} for path in self.prefixes]
        return [
            *("--config", f"{recipes.PREFIX}{self.recipe}", "--ckpt_path", "auto"),
            f"--trainer.max_steps={self.steps}",
            f"--trainer.default_root_dir={folder}",
            f"--trainer.callbacks.init_args.every_n_train_steps={self.every}",
            *("--config", str(Path(__file__).with_name("record.yaml"))),
            f"--data.init_args.sources={json.dumps(sources)}",
            "--data.init_args.val_sources=null",  # what is compared is training
            *self.overrides,
        ]

    def _seq_len(self) -> int:
        return int(OmegaConf.load(recipes.files(self.recipe)[0]).data.init_args.seq_len)


def _bars() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[status]}"), console=console)


def _receipt(lines: dict[str, object]) -> Table:
    table = Table("receipt", "", show_header=False, title="receipt")
    for name, value in lines.items():
        table.add_row(name, str(value))
    return table


def _plot(path: Path, undisturbed: dict[int, float], disturbed: Job, kill: Kill) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(
        list(undisturbed), list(undisturbed.values()), color="tab:gray", linewidth=4, alpha=0.5, label="undisturbed"
    )
    for number in sorted({start.number for start in disturbed.starts.values()}):
        starts = [start for start in disturbed.starts.values() if start.number == number]
        losses = receipt.losses_of(receipt.committed_steps(starts))
        label = "until the kill" if number == 0 else "after the restart"
        axes.plot(list(losses), list(losses.values()), linewidth=1, label=label)
    axes.axvline(kill.step, color="tab:red", linestyle="--", linewidth=1, label=f"rank {kill.rank} killed")
    axes.set(xlabel="optimizer step", ylabel="loss", title="Training loss with and without a killed rank")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return path
