"""The audit tells what went through ``training_step``: planted repeats and gaps are named, honest runs pass."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_distplus import ResilientDDP, samplers
from lightning_distplus.cli.__main__ import main
from lightning_distplus.data import ResumableDataModule, SampleAudit
from lightning_distplus.data.audit import AuditWriter, audit_folder, read_audit, sum_of_samples
from lightning_distplus.data.iterable import pack, unpack
from lightning_distplus.testing import spawn
from tests.distributed.resume_jobs import (
    Augmented,
    Diary,
    SaveAt,
    fit,
    ids_by_step,
    map_data,
    quiet_trainer,
    token_data,
    write_tokens,
)
from tests.distributed.test_elastic import SaveAfter
from tests.faults.test_r11_manual_windows import Accumulates, TwoOptimizers


class Tampered(ResumableDataModule):
    """Delivers the fourth micro-batch twice, or a batch other than the fifth, or leaves it out."""

    deed = ""

    def _requests(self, plan: Any, epoch: int) -> Iterator[Any]:
        for number, request in enumerate(super()._requests(plan, epoch)):
            if self.deed == "gap" and number == 4:
                continue
            if self.deed == "swap" and number == 4:
                yield request._replace(ids=request.ids + 1)
                continue
            yield request
            if self.deed == "repeat" and number == 3:
                yield request


class UncheckedDiary(Diary):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.note("train", batch_idx, 0, tuple(batch[:, 0].int().tolist()), ())
        return self.layer(batch).pow(2).mean()


def tampered(deed: str, folder: Path, **arguments: Any) -> Diary:
    data = Tampered(Augmented(40), batch_size=2, seed=3)
    data.deed = deed
    settings = {"max_steps": 12, "default_root_dir": folder, "callbacks": [SampleAudit()], **arguments}
    return fit(data, diary=UncheckedDiary, **settings)


def test_records_are_what_the_model_saw(tmp_path: Path) -> None:
    run = fit(map_data(17), max_epochs=2, accumulate_grad_batches=3, callbacks=[SampleAudit(str(tmp_path))])
    (path,) = tmp_path.glob("*.audit")
    file = read_audit(path)
    written: dict[int, list[int]] = {}
    for batch in file.batches:
        written.setdefault(batch.step, []).extend(batch.ids[:, 0].tolist())
    assert written == ids_by_step(run)
    assert file.has_ended


@pytest.mark.parametrize(
    ("kind", "every", "workers"),
    [
        (Diary, 1, {}),
        (Diary, 6, {"num_workers": 2, "persistent_workers": True}),
        (Accumulates, 3, {}),
        (TwoOptimizers, 3, {}),
    ],
)
def test_resume_from_every_save_audits_clean_and_continues_the_sum(
    kind: type[Diary], every: int, workers: dict[str, Any], tmp_path: Path, reset_sigchld: None
) -> None:
    arguments: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 3, "diary": kind}
    if kind is Diary:  # the others decide by themselves when to step
        arguments["accumulate_grad_batches"] = 3
    saver = SaveAt("on_train_batch_end", tmp_path)
    fit(map_data(26), callbacks=[SampleAudit(str(tmp_path / "first")), saver], **arguments)
    assert audit_folder(tmp_path / "first").ok
    (first,) = (tmp_path / "first").glob("*.audit")
    for path, _ in saver.saves[::every]:
        folder = tmp_path / path.stem
        folder.mkdir()
        (folder / first.name).write_bytes(first.read_bytes())
        fit(map_data(26, **workers), callbacks=[SampleAudit(str(folder))], ckpt_path=path, **arguments)
        report = audit_folder(folder)
        assert report.ok, (path, report)
        expected = {Diary: (48, 8), Accumulates: (52, 9), TwoOptimizers: (52, 26)}[kind]
        assert (report.num_samples, report.num_steps, report.num_runs) == (*expected, 2)


def test_a_planted_repeat_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tampered("repeat", tmp_path)
    assert main(["audit", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "repeated 2, missed 0"
    batches = list(ids_by_step(model).values())
    assert batches[3] == batches[4]
    named = [
        re.match(r"repeated: sample (\d+) .*: step 3 on rank 0 in run 0 at .* UTC; step 4 ", line) for line in lines
    ]
    assert {int(one[1]) for one in named if one} == set(batches[3])


def test_a_planted_gap_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    honest = tampered("", tmp_path / "honest")
    assert main(["audit", str(tmp_path / "honest")]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "repeated 0, missed 0"
    tampered("gap", tmp_path / "gap")
    assert main(["audit", str(tmp_path / "gap")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "repeated 0, missed 2"
    named = [int(line.split()[2]) for line in lines if line.startswith("missed: ")]
    assert named == ids_by_step(honest)[4]
    assert lines[-1].endswith("(position 9 of epoch 0)")
    assert main(["audit", str(tmp_path / "gap"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["repeated"], [one[2] for one in told["missed"]]) == (False, [], [[one] for one in named])


def test_overfitting_and_foreign_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="overfit_batches repeats samples on purpose"):
        fit(map_data(26), callbacks=[SampleAudit(str(tmp_path))], max_epochs=1, overfit_batches=2)
    trainer = quiet_trainer(max_steps=1, callbacks=[SampleAudit(str(tmp_path))])
    with pytest.raises(ValueError, match="not of NoneType"):
        trainer.fit(UncheckedDiary(), torch.utils.data.DataLoader(Augmented(8), batch_size=2))


def test_another_sample_than_the_order_says_is_named(tmp_path: Path) -> None:
    tampered("swap", tmp_path)
    report = audit_folder(tmp_path / "distplus" / "audit")
    assert len(report.problems) == 2
    assert report.problems[0].startswith("run 0, rank 0, step 4: position 8 of epoch 0 held sample ")


class Wrong(Augmented):
    """Returns the sample before one of those it is asked for, and says so by its id."""

    def __init__(self, num_samples: int, wrong: int) -> None:
        super().__init__(num_samples)
        self.wrong = wrong

    def __getitem__(self, index: int) -> dict[str, Any]:
        index -= index == self.wrong
        return {"x": super().__getitem__(index), "id": index}


class ByName(Diary):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["x"] if isinstance(batch, dict) else batch[0]["x"]).pow(2).mean()


@pytest.mark.parametrize("uneven", ["drop", "pad"])
@pytest.mark.parametrize("order", ["order", "weights"])
def test_another_sample_than_was_asked_for_is_named_where_the_batch_carries_ids(
    order: str, uneven: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments: dict[str, Any] = {"batch_size": 2, "uneven": uneven}
    if order == "weights":
        arguments |= {"sampler": samplers.weighted(np.ones(16), replacement=False)}
    for wrong in (-1, 5):
        folder = tmp_path / str(wrong)
        saver = SaveAt("on_train_batch_end", folder)
        run = partial(fit, diary=ByName, max_epochs=1, default_root_dir=folder)
        data = [ResumableDataModule(Wrong(16, wrong), **arguments) for _ in range(2)]
        run(data[0], max_steps=5, callbacks=[SampleAudit(ids="id"), saver])
        run(data[1], callbacks=[SampleAudit(ids="id")], ckpt_path=saver.saves[-1][0])
        assert main(["audit", str(folder)]) == (wrong == 5)
        lines = capsys.readouterr().out.splitlines()
        assert lines[1:3] == ["repeated 0, missed 0", "ids: as the batches carried them into training_step"]
        if wrong == 5:
            assert len(lines) == 4
            assert lines[3].endswith("the data was asked for sample (5,), and (4,) reached training_step")


def test_a_batch_without_the_ids_that_were_named_is_refused(tmp_path: Path) -> None:
    settings = {"max_epochs": 1, "default_root_dir": tmp_path, "callbacks": [SampleAudit(ids="number")]}
    with pytest.raises(ValueError, match=r"ids='number'\): the batch carries no ids there, it is the keys"):
        fit(ResumableDataModule(Wrong(16, -1), batch_size=2), diary=ByName, **settings)


def test_checkpoint_of_steps_that_are_not_in_the_records_is_named(tmp_path: Path) -> None:
    saver = SaveAt("on_train_batch_end", tmp_path)
    fit(map_data(26), callbacks=[SampleAudit(str(tmp_path / "lost")), saver], max_epochs=1)
    folder = tmp_path / "kept"
    fit(map_data(26), callbacks=[SampleAudit(str(folder))], max_epochs=1, ckpt_path=saver.saves[4][0])
    report = audit_folder(folder)
    assert not report.missed, "the records begin where the run resumed"
    assert "from a checkpoint of 10 samples" in report.problems[0]


def test_torn_record_is_an_unfinished_step_and_a_damaged_header_is_refused(tmp_path: Path) -> None:
    tampered("", tmp_path)
    (path,) = tmp_path.glob("distplus/audit/*.audit")
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    assert not read_audit(path).has_ended
    report = audit_folder(path.parent)
    assert report.ok, "what a kill cut off is an unfinished step"
    assert report.num_undone > 0
    path.write_bytes(whole.replace(b'"world_size": 1', b'"world_size": 2'))
    with pytest.raises(ValueError, match="does not begin with the header"):
        audit_folder(path.parent)
    assert main(["audit", str(path.parent)]) == 1


def test_folder_without_records_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 1
    assert "there are no records" in capsys.readouterr().err


class DieAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batch:
            trainer.strategy.barrier()
            os._exit(9)


def audited_leg(rank: int, prefix: str, world_size: int, micro_batch: int, die_at: int, folder: str) -> None:
    data = token_data(sources=prefix, micro_batch_size=micro_batch)
    fit_leg(UncheckedTokens, data, world_size, 7, die_at, folder, max_steps=9, accumulate_grad_batches=2)


def fit_leg(kind: Any, data: Any, world_size: int, save_at: int, die_at: int, folder: str, **arguments: Any) -> None:
    """Goes on from what the leg before it has saved."""
    path = Path(folder) / "saved.ckpt"
    callbacks = [SampleAudit(), SaveAfter(save_at, str(path)), DieAt(die_at)]
    settings = {"devices": world_size, "default_root_dir": folder, "callbacks": callbacks, **arguments}
    strategy = ResilientDDP(timeout="40s")
    fit(data, diary=kind, ckpt_path=path if path.exists() else None, strategy=strategy, **settings)


class UncheckedTokens(Diary):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch["input_ids"][:, :2].float()).mean()


def test_killed_run_that_goes_on_on_another_number_of_ranks_audits_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_tokens(tmp_path / "tokens", 401)
    killed = spawn(audited_leg, 2, args=(prefix, 2, 3, 12, str(tmp_path)), deadline="40s")
    assert set(killed.exit_codes.values()) == {9}, killed.logs
    spawn(audited_leg, 3, args=(prefix, 3, 2, 0, str(tmp_path)), deadline="40s").check()
    assert main(["audit", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("108 samples in 9 steps of 2 runs; 36 samples of steps that were done again")
    assert lines[1] == "repeated 0, missed 0"
    assert lines[2].startswith("ids: as the data set was asked for them, of 108 samples")
    assert len(lines) == 3
    (tmp_path / "distplus" / "audit").glob("*-rank00001.audit").__next__().unlink()
    assert main(["audit", str(tmp_path)]) == 1
    assert "the records of rank(s) 1 are not in" in capsys.readouterr().out


def plain_leg(rank: int, world_size: int, micro_batch: int, die_at: int, folder: str) -> None:
    loader = torch.utils.data.DataLoader(Augmented(50), batch_size=micro_batch, shuffle=True, num_workers=2)
    fit_leg(UncheckedDiary, loader, world_size, 4, die_at, folder, max_epochs=2)


def test_a_plain_loader_that_goes_on_on_another_number_of_ranks_audits_clean_and_one_that_begins_anew_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = spawn(plain_leg, 2, args=(2, 3, 7, str(tmp_path)), deadline="60s")
    assert set(killed.exit_codes.values()) == {9}, killed.logs
    anew = tmp_path / "anew"
    shutil.copytree(tmp_path, anew)
    spawn(plain_leg, 3, args=(3, 2, 0, str(tmp_path)), deadline="60s").check()
    assert main(["audit", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("102 samples in 18 steps of 2 runs; ")  # of 50 in an epoch, and one that pads 3 ranks
    assert lines[1] == "repeated 0, missed 0"

    other = tmp_path / "other"
    shutil.copytree(anew, other)

    def audited_after(folder: Path, change: Callable[[dict[str, Any]], None]) -> list[str]:
        """What the audit says of a run that goes on from the checkpoint as somebody has changed it."""
        checkpoint = torch.load(folder / "saved.ckpt", weights_only=True)
        change(checkpoint)
        shutil.rmtree(folder / ".distplus")
        torch.save(checkpoint, folder / "saved.ckpt")
        spawn(plain_leg, 2, args=(2, 3, 0, str(folder)), deadline="60s").check()
        assert main(["audit", str(folder)]) == 1
        return capsys.readouterr().out.splitlines()

    def reshuffle(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["lightning_distplus_dataloaders"]
        state["ranks"] = [
            pack([{**loader, "seed": loader["seed"] + 1} for loader in unpack(rank)], owner="")
            for rank in state["ranks"]
        ]

    lines = audited_after(
        anew, lambda checkpoint: checkpoint.pop("lightning_distplus_dataloaders")
    )  # as Lightning saves it
    assert any(line.startswith("repeated: sample ") for line in lines)
    # At the place, in the order of another seed: each place of the epoch is seen once, and samples are seen twice.
    lines = audited_after(other, reshuffle)
    repeated, missed = map(int, re.findall(r"\d+", lines[1]))
    assert 0 < repeated == missed < 24  # of the 24 that epoch 0 had seen before
    assert all(" at " in line and "; step " in line for line in lines if line.startswith("repeated: sample "))


def test_one_record_costs_far_less_than_a_millisecond(tmp_path: Path) -> None:
    writer = AuditWriter(tmp_path, "run", 0, {})
    positions, ids = np.arange(8), np.arange(16).reshape(8, 2)
    times = []
    for step in range(2000):
        begin = time.perf_counter()
        sum_of_samples(0, positions, ids)
        writer.write(0, step, positions, ids)
        times.append(time.perf_counter() - begin)
    writer.close()
    assert sorted(times)[len(times) // 2] < 500e-6  # some 20 us; an fsync alone costs more
