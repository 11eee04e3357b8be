"""The data modules' rules: what is refused, what is saved, what a batch holds, what resuming costs."""

from __future__ import annotations

import io
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_distplus.data import ResumableDataModule, Source, TokenDataModule
from lightning_distplus.data.order import EpochOrder
from lightning_distplus.errors import DatasetMismatch
from tests.distributed.resume_jobs import (
    Augmented,
    Diary,
    SampleDiary,
    WithFingerprint,
    fit,
    map_data,
    quiet_trainer,
    token_data,
    write_tokens,
)

FAR = 10**9


class Endless(Augmented):
    """As long as anyone could wish."""

    def __init__(self) -> None:
        super().__init__(2**40)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    folder = tmp_path_factory.mktemp("corpus")
    return [
        Source(path=write_tokens(folder / "prose", 801), weight=0.7, name="prose"),
        Source(path=write_tokens(folder / "code", 401, start=10_000), weight=0.3, name="code"),
    ]


@pytest.fixture(scope="module")
def map_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_after(3, map_data(), tmp_path_factory.mktemp("map"))


@pytest.fixture(scope="module")
def token_checkpoint(corpus: list[Source], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_after(3, token_data(sources=corpus), tmp_path_factory.mktemp("tokens"))


def saved_after(num_steps: int, data: Any, folder: Path) -> Path:
    trainer = quiet_trainer(max_epochs=-1, max_steps=num_steps)
    trainer.fit(SampleDiary(), data)
    trainer.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def resume(data: Any, path: Path, **arguments: Any) -> SampleDiary:
    model = SampleDiary()
    quiet_trainer(**{"max_epochs": -1, "max_steps": 6, **arguments}).fit(model, data, ckpt_path=path)
    return model


def state_in(path: Path) -> dict[str, Any]:
    checkpoint = torch.load(path, weights_only=True)
    return checkpoint.get("ResumableDataModule") or checkpoint["TokenDataModule"]


def moved_to(path: Path, folder: Path, **changes: Any) -> Path:
    """The checkpoint with another data state."""
    checkpoint = torch.load(path, weights_only=True)
    name = "ResumableDataModule" if "ResumableDataModule" in checkpoint else "TokenDataModule"
    checkpoint[name] = {**checkpoint[name], **changes}
    torch.save(checkpoint, folder / "moved.ckpt")
    return folder / "moved.ckpt"


# What is saved.


def test_state_is_plain_and_smaller_than_1_kb(map_checkpoint: Path, token_checkpoint: Path) -> None:
    for path in (map_checkpoint, token_checkpoint):
        state = state_in(path)
        stream = io.BytesIO()
        torch.save(state, stream)
        assert len(repr(state)) < 1000
        assert state["consumed_samples"] == 6
        assert (state["version"], state["order_version"], state["seed"]) == (2, 2, 3)


def test_resume_says_the_global_batch_where_and_how_long(
    map_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning_distplus"):
        resume(map_data(), map_checkpoint)
    lines = [record.message for record in caplog.records if record.name.startswith("lightning_distplus")]
    assert len(lines) == 2
    cut = "global batch 2 (batch size 2 x 1 data-parallel ranks x accumulation 1)"
    assert lines[0] == f"{cut}; 1 of 17 samples are left out of each epoch"
    assert lines[1].startswith("resumed at sample 6, step 3, epoch 0, in ")


def test_stock_trainer_with_default_flags_goes_on_from_the_checkpoint_that_it_writes(tmp_path: Path) -> None:
    def fit(max_epochs: int, load: str | None = None) -> SampleDiary:
        model = SampleDiary()
        trainer = pl.Trainer(max_epochs=max_epochs, accelerator="cpu", default_root_dir=tmp_path)
        trainer.fit(model, ResumableDataModule(train_dataset=Augmented(17), batch_size=2), ckpt_path=load)
        return model

    undisturbed, first = fit(2), fit(1)
    resumed = fit(2, first.trainer.checkpoint_callback.best_model_path)
    assert {**first.steps, **resumed.steps} == undisturbed.steps
    assert sorted(resumed.steps) == [*range(8, 16)]


# What is refused on resume.


@pytest.mark.parametrize(
    ("make_data", "message"),
    [
        (lambda: map_data(19), "num_samples: 17 in the checkpoint, 19 in this run"),
        (lambda: map_data(seed=4), "seed: 3 in the checkpoint, 4 in this run"),
        (lambda: map_data(shuffle=False), "shuffle: True in the checkpoint, False in this run"),
        (lambda: map_data(batch_size=4), "global batch of 2 samples; this run has 4"),
        (
            lambda: ResumableDataModule(WithFingerprint(17, "b"), batch_size=2, seed=3),
            "fingerprint: None in the checkpoint, 'b' in this run",
        ),
    ],
)
def test_other_map_data_is_refused_with_both_sides(make_data: Any, message: str, map_checkpoint: Path) -> None:
    with pytest.raises(DatasetMismatch, match=message) as error:
        resume(make_data(), map_checkpoint)
    assert "ignore_fingerprint=True" in str(error.value) or "allow_global_batch_change=True" in str(error.value)


def changed(corpus: list[Source], folder: Path, what: str) -> dict[str, Any]:
    prose, code = corpus
    return {
        "weights": {"sources": [Source(path=prose.path, weight=0.6), Source(path=code.path, weight=0.4)]},
        "fewer": {"sources": [prose]},
        "order": {"sources": [code, prose]},
        "content": {"sources": [prose, Source(path=write_tokens(folder / "other", 401, start=20_000), weight=0.3)]},
        "seq_len": {"sources": corpus, "seq_len": 8},
        "seed": {"sources": corpus, "seed": 4},
    }[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", r"source 0 \(.*prose\): weight / 2\*\*32: 3006477107 in the checkpoint, 2576980378 in this run"),
        ("fewer", "number of sources: 2 in the checkpoint, 1 in this run"),
        ("order", r"source 0 \(code\): fingerprint: '"),
        ("content", r"source 1 \(.*other\): fingerprint: '"),
        ("seq_len", "seq_len: 4 in the checkpoint, 8 in this run"),
        ("seed", "seed: 3 in the checkpoint, 4 in this run"),
    ],
)
def test_other_tokens_are_refused_with_both_sides(
    what: str, message: str, corpus: list[Source], token_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(DatasetMismatch, match=message):
        resume(token_data(**changed(corpus, tmp_path, what)), token_checkpoint)


def test_override_goes_on_and_says_what_differs(map_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = resume(map_data(seed=4, ignore_fingerprint=True), map_checkpoint)
    assert min(model.steps) == 3
    assert "seed: 3 in the checkpoint, 4 in this run" in caplog.text


@pytest.mark.parametrize("name", ["version", "order_version"])
def test_state_of_another_version_is_refused(name: str, map_checkpoint: Path, tmp_path: Path) -> None:
    path = moved_to(map_checkpoint, tmp_path, **{name: 3})
    with pytest.raises(DatasetMismatch, match=f"data state has {name} 3; this lightning_distplus reads 1"):
        resume(map_data(ignore_fingerprint=True), path)


def test_a_run_that_began_in_an_older_order_ends_in_it(map_checkpoint: Path, tmp_path: Path) -> None:
    path = moved_to(map_checkpoint, tmp_path, order_version=1)
    data = map_data()
    resume(data, path, max_steps=5)
    assert data.state_dict()["order_version"] == data.identity["order_version"] == 1
    epoch, places = data.position().epoch, np.arange(17)
    before, now = (EpochOrder(num_samples=17, seed=3, epoch=epoch, version=version)(places) for version in (1, 2))
    assert np.array_equal(data._order(data.position())[0](places), before)
    assert not np.array_equal(before, now)


def test_position_past_the_data_is_refused(map_checkpoint: Path, tmp_path: Path) -> None:
    path = moved_to(map_checkpoint, tmp_path, offset=20, batches=10)
    with pytest.raises(DatasetMismatch, match=r"stands at sample 20 of epoch 0, and an epoch of this run has 17"):
        resume(map_data(), path)


def without_position(path: Path, folder: Path) -> Path:
    """As another data module would have written it."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["ResumableDataModule" if "ResumableDataModule" in checkpoint else "TokenDataModule"]
    torch.save(checkpoint, folder / "old.ckpt")
    return folder / "old.ckpt"


def test_checkpoint_without_a_position_is_refused(map_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetMismatch, match="holds no position of a data module ResumableDataModule") as error:
        resume(map_data(), without_position(map_checkpoint, tmp_path))
    assert "pass start_sample=..." in str(error.value)


@pytest.mark.parametrize("kind", ["map", "tokens"])
def test_checkpoint_without_a_position_goes_on_where_start_sample_says(
    kind: str, corpus: list[Source], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def data(**arguments: Any) -> Any:
        return map_data(**arguments) if kind == "map" else token_data(sources=corpus, **arguments)

    settings = {"max_steps": 16, "accumulate_grad_batches": 2}
    undisturbed, model = SampleDiary(), SampleDiary()
    quiet_trainer(max_epochs=-1, **settings).fit(undisturbed, data())
    trainer = quiet_trainer(max_epochs=-1, **{**settings, "max_steps": 6})  # in the second epoch of the map-style data
    trainer.fit(model, data())
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    old = without_position(tmp_path / "saved.ckpt", tmp_path)
    resumed = resume(data(start_sample=24), old, **settings)
    assert resumed.steps == {step: undisturbed.steps[step] for step in range(6, 16)}
    assert "the checkpoint holds no position in the data; going on where start_sample says" in caplog.text
    assert resumed.trainer.global_step == 16
    anew = resume(data(start_sample=0), old, **settings)
    assert anew.steps == {6 + step: undisturbed.steps[step] for step in range(10)}
    assert anew.trainer.datamodule.consumed_samples == 40
    with_position = resume(data(start_sample=0), tmp_path / "saved.ckpt", **settings)
    assert with_position.steps == resumed.steps
    with pytest.raises(
        ValueError, match=r"start_sample=26 is not where an optimizer step begins: .* begins at sample 24"
    ):
        resume(data(start_sample=26), old, **settings)


def test_validation_of_a_checkpoint_does_not_look_at_the_training_data(map_checkpoint: Path) -> None:
    model = SampleDiary()
    quiet_trainer().validate(model, map_data(99, seed=5), ckpt_path=map_checkpoint, verbose=False)
    assert model.validated == [0, 1, 2, 3, 4]


def test_changed_global_batch_is_recorded_and_goes_on_without_a_gap(corpus: list[Source], tmp_path: Path) -> None:
    first = saved_after(3, token_data(sources=corpus), tmp_path)
    data = token_data(sources=corpus, micro_batch_size=4, allow_global_batch_change=True)
    model = resume(data, first, max_steps=5)
    assert data.state_dict()["global_batch_changes"] == [[6, 2, 4]]
    undisturbed = resume_nothing(token_data(sources=corpus), max_steps=7)
    assert flat(model) == flat(undisturbed)[6:14]
    assert data.consumed_samples == 14


def resume_nothing(data: Any, **arguments: Any) -> SampleDiary:
    model = SampleDiary()
    quiet_trainer(max_epochs=-1, **arguments).fit(model, data)
    return model


def flat(model: SampleDiary) -> list[int]:
    return [sample for step in model.steps.values() for part in step for sample in part]


# What resuming costs.


@pytest.mark.parametrize("kind", ["map", "tokens"])
def test_resume_at_a_billion_samples_takes_less_than_a_second(
    kind: str, corpus: list[Source], map_checkpoint: Path, token_checkpoint: Path, tmp_path: Path
) -> None:
    if kind == "map":
        start, data = map_checkpoint, ResumableDataModule(Endless(), batch_size=2, seed=3)
        changes = {"num_samples": 2**40, "offset": FAR, "batches": FAR // 2}
    else:
        start, data = token_checkpoint, token_data(sources=corpus)
        changes = {"epoch": FAR // 298, "offset": 100, "batches": 50}
    path = moved_to(start, tmp_path, consumed_samples=FAR, total_batches=FAR // 2, **changes)
    begin = time.perf_counter()
    model = resume(data, path, max_steps=4, limit_val_batches=0)
    assert time.perf_counter() - begin < 1
    assert list(model.steps) == [3]
    assert data.consumed_samples == FAR + 2
    assert len(repr(data.state_dict())) < 1000


# Batches of tokens.


def test_token_batches_follow_the_weights_and_shift_by_one(corpus: list[Source]) -> None:
    data = token_data(sources=corpus, micro_batch_size=10, vocab_size=10_401)
    batches: list[dict[str, torch.Tensor]] = []

    class Keeping(SampleDiary):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            expected = [index * 4 + 10_000 * source for source, index in data.sample_ids(batch_idx)]
            assert batch["input_ids"][:, 0].tolist() == expected
            batches.append(batch)
            return super().training_step(batch, batch_idx)

    quiet_trainer(max_epochs=1).fit(Keeping(), data)
    assert len(batches) == 30  # 200 + 100 samples
    for batch in batches:
        assert batch["input_ids"].shape == batch["shift_labels"].shape == (10, 4)
        assert torch.equal(batch["shift_labels"], batch["input_ids"] + 1)
    first_tokens = torch.cat([batch["input_ids"][:, 0] for batch in batches])
    assert abs((first_tokens >= 10_000).float().mean().item() - 0.3) < 0.05


def test_huggingface_model_takes_the_batch_as_it_is(corpus: list[Source]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = LlamaForCausalLM(config)
    data = token_data(sources=corpus)
    data.trainer = quiet_trainer()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    loss = model(input_ids=batch["input_ids"], labels=batch["shift_labels"], shift_labels=batch["shift_labels"]).loss
    logits = model(input_ids=batch["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["shift_labels"].flatten())
    assert torch.allclose(loss, expected)


def test_validation_reads_every_source_once_in_order(corpus: list[Source]) -> None:
    model = SampleDiary()
    data = token_data(sources=corpus[0].path, val_sources=corpus, micro_batch_size=8)
    quiet_trainer(max_epochs=1, limit_train_batches=1).fit(model, data)
    assert model.validated == [*range(0, 800, 4), *range(10_000, 10_400, 4)]


def test_accumulation_follows_from_the_global_batch(corpus: list[Source]) -> None:
    trainer = quiet_trainer(max_steps=4)
    trainer.fit(model := SampleDiary(), token_data(sources=corpus, global_batch_size=6))
    assert trainer.accumulate_grad_batches == 3
    assert [len(step) for step in model.steps.values()] == [3, 3, 3, 3]
    assert trainer.datamodule.consumed_samples == 24


@pytest.mark.parametrize(
    ("arguments", "trainer_arguments", "message"),
    [
        ({"global_batch_size": 7}, {}, r"=7 is no multiple of micro_batch_size=2 .* that fits: 1, 7\."),
        ({"global_batch_size": 1}, {}, r"=1 is no multiple .* that fits: 1\."),
        (
            {"global_batch_size": 6},
            {"accumulate_grad_batches": 2},
            r"Trainer\(accumulate_grad_batches=2\) contradicts global_batch_size=6, which takes 3",
        ),
        ({"micro_batch_size": 301}, {}, "has 300 samples, fewer than one global batch of 301"),
        ({"vocab_size": 400}, {}, "Source prose holds the token id 404"),
        ({}, {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}, "GradientAccumulationScheduler changes"),
    ],
)
def test_impossible_token_run_is_refused_before_it_starts(
    arguments: dict[str, Any], trainer_arguments: dict[str, Any], message: str, corpus: list[Source]
) -> None:
    with pytest.raises(ValueError, match=message):
        quiet_trainer(max_steps=1, **trainer_arguments).fit(SampleDiary(), token_data(sources=corpus, **arguments))


# Uneven epochs of map-style data.


def test_padded_epoch_has_every_sample_once_and_repeats_of_weight_0(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[int, float]] = []

    class Weighing(Diary):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            samples, weights = batch
            assert weights.dtype == torch.float32
            seen.extend(zip(samples[:, 0].int().tolist(), weights.tolist(), strict=True))
            return (self.layer(samples).squeeze(1) * weights).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert batch[1].tolist() == [1.0] * len(batch[0])

    with caplog.at_level(logging.INFO, "lightning_distplus"):
        quiet_trainer(max_epochs=1).fit(Weighing(), map_data(17, batch_size=5, uneven="pad"))
    assert "; 3 repeats of weight 0 fill each epoch of 17 samples" in caplog.text
    assert len(seen) == 20
    assert sorted(sample for sample, weight in seen if weight == 1) == list(range(17))
    assert [sample for sample, weight in seen if weight == 0] == [sample for sample, _ in seen[:3]]


@pytest.mark.parametrize(
    ("make_data", "message"),
    [
        (lambda: map_data(17, uneven="error"), r"17 samples are 8 global batches of 2 .* and 1 samples more"),
        (lambda: map_data(1), "has 1 samples, fewer than one global batch of 2"),
        (lambda: map_data(17, batch_size=0), "batch size is 0"),
        (lambda: map_data(17, uneven="repeat"), "uneven is 'repeat'"),
        (lambda: ResumableDataModule(batch_size=2), "There is no training data"),
        (lambda: ResumableDataModule(IterableRange(), batch_size=2), "IterableRange is iterable"),
    ],
)
def test_impossible_map_run_is_refused_before_it_starts(make_data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(make_data(), max_epochs=1)


class IterableRange(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_data_sets_may_be_made_by_overriding_methods() -> None:
    class Own(ResumableDataModule):
        def prepare_data(self) -> None:
            pass

        def setup(self, stage: str) -> None:  # without a call of the parent's
            self.made = Augmented(17)

        def train_dataset(self) -> Augmented:
            return self.made

    assert len(fit(Own(batch_size=2, seed=3), max_epochs=1).events) == 8 + 2


# Validation.


class Trains(SampleDiary):
    """Has no validation_step of its own."""

    validation_step = pl.LightningModule.validation_step


@pytest.mark.parametrize("kind", ["map", "tokens"])
def test_without_validation_data_lightning_does_not_warn(kind: str, corpus: list[Source]) -> None:
    data = ResumableDataModule(Augmented(4), batch_size=2) if kind == "map" else token_data(sources=corpus)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(max_steps=1).fit(Trains(), data)
    assert not [str(one.message) for one in caught if "val_dataloader" in str(one.message)]


def test_validation_data_from_an_override_is_still_read() -> None:
    class OwnSet(ResumableDataModule):
        def val_dataset(self) -> Augmented:
            return Augmented(3)

    class OwnLoader(ResumableDataModule):
        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Augmented(3))

    for data in (OwnSet(Augmented(4), batch_size=2), OwnLoader(Augmented(4), batch_size=2)):
        quiet_trainer(max_epochs=1).fit(model := SampleDiary(), data)
        assert model.validated == [0, 1, 2]


# Configuration.


def test_one_source_may_be_a_path_and_none_is_refused(corpus: list[Source]) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(TokenDataModule, "data")
    one = parser.parse_args([f"--data.sources={corpus[0].path}", "--data.seq_len=4", "--data.micro_batch_size=2"])
    assert parser.instantiate(one).data._sources["train"] == [Source(path=corpus[0].path)]
    with pytest.raises(ValueError, match="sources is empty"):
        TokenDataModule([], seq_len=4, micro_batch_size=2)


def test_public_names_are_imported_on_demand() -> None:
    import lightning_distplus.data as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing
    assert np.array_equal(package.permute(np.arange(1), 1, 0), [0])


def test_batches_without_a_trainer_are_refused_with_the_reason() -> None:
    with pytest.raises(RuntimeError, match="ResumableDataModule has no Trainer yet"):
        map_data().train_dataloader()
