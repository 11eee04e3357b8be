"""Checkpoints of Hugging Face, lit-gpt and Lightning, in and out, against transformers and a lit-gpt written here."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_distplus import ResilientDeepSpeed
from lightning_distplus.checkpoint import newest_valid, read_manifest
from lightning_distplus.checkpoint.formats import origin_of, parameter_order, refuse_foreign
from lightning_distplus.cli.__main__ import main
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch

transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
TOKENS = torch.arange(24).reshape(2, 12) * 7 % CONFIG["vocab_size"]


def llama(**changed: Any) -> Any:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**CONFIG, **changed}))


def tiny_llama(checkpoint: Path | dict[str, Any], **options: Any) -> Any:
    from lightning_distplus.recipes.model import TinyLlama

    state = checkpoint if isinstance(checkpoint, dict) else torch.load(checkpoint, weights_only=True)
    module = TinyLlama(state["llama_config"], **options)
    module.configure_model()
    module.load_state_dict(state["state_dict"])
    return module


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def configuration(folder: Path, **options: Any) -> str:
    path = folder / "run.yaml"
    path.write_text(json.dumps({"model": {"init_args": {"config": CONFIG, **options}}}))
    return str(path)


class LitGPT(torch.nn.Module):
    """The layout of lit-gpt, and its arithmetic written a second time.

    TinyLlama's fork has one interleaved matrix of queries, keys and values, and xformers' SwiGLU; litgpt has the three
    one behind the other, and three linear layers.
    """

    def __init__(self, *, is_fork: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        width, inner, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], 8
        self.is_fork = is_fork
        self.qkv = "attn" if is_fork else "qkv"
        self.mlp = ("swiglu.w1", "swiglu.w2", "swiglu.w3") if is_fork else ("fc_1", "fc_2", "proj")
        self.lm_head = torch.nn.Linear(width, CONFIG["vocab_size"], bias=False)
        layers = []
        for _ in range(CONFIG["num_hidden_layers"]):
            layer = torch.nn.Module()
            layer.norm_1, layer.norm_2 = (torch.nn.RMSNorm(width, eps=1e-5) for _ in range(2))
            layer.attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
            setattr(layer.attn, self.qkv, torch.nn.Linear(width, heads * 8, bias=False))
            layer.attn.proj = torch.nn.Linear(width, width, bias=False)
            place = layer.mlp
            if is_fork:
                place = layer.mlp.swiglu = torch.nn.Module()
            for name, (ins, outs) in zip(self.mlp, [(width, inner)] * 2 + [(inner, width)], strict=True):
                setattr(place, name.rpartition(".")[2], torch.nn.Linear(ins, outs, bias=False))
            layers.append(layer)
        parts = {
            "wte": torch.nn.Embedding(CONFIG["vocab_size"], width),
            "h": torch.nn.ModuleList(layers),
            "ln_f": torch.nn.RMSNorm(width, eps=1e-5),
        }
        self.transformer = torch.nn.ModuleDict(parts)
        for name, parameter in self.named_parameters():
            if "norm" in name or "ln_f" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](tokens)
        for layer in self.transformer["h"]:
            x = x + layer.attn.proj(self.attention(getattr(layer.attn, self.qkv)(layer.norm_1(x))))
            gate, up, down = (layer.mlp.get_submodule(name) for name in self.mlp)
            y = layer.norm_2(x)
            x = x + down(torch.nn.functional.silu(gate(y)) * up(y))
        return self.lm_head(self.transformer["ln_f"](x))

    def attention(self, rows: torch.Tensor) -> torch.Tensor:
        batch, length, _ = rows.shape
        if self.is_fork:  # groups of 2 queries, 1 key, 1 value
            grouped = rows.view(batch, length, 2, 4, 8)
            q, k, v = grouped[:, :, :, :2].reshape(batch, length, 4, 8), grouped[:, :, :, 2], grouped[:, :, :, 3]
        else:
            q, k, v = (part.view(batch, length, -1, 8) for part in rows.split([32, 16, 16], dim=-1))
        angles = torch.outer(torch.arange(length), 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8)).repeat(1, 2)[:, None]
        q, k = (one * angles.cos() + torch.cat((-one[..., 4:], one[..., :4]), -1) * angles.sin() for one in (q, k))
        k, v = (one.repeat_interleave(2, dim=2) for one in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
        mask = torch.full((length, length), -torch.inf).triu(1)
        return torch.einsum("bhqk,bkhd->bqhd", (scores + mask).softmax(-1), v).flatten(2)

    def loss(self) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def trained(*, is_fork: bool, names: bool = False) -> tuple[LitGPT, torch.optim.AdamW, dict[str, Any]]:
    """A lit-gpt after three steps, and the file that it saves: with numbers as one device writes it, names as FSDP."""
    model = LitGPT(is_fork=is_fork)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(3):
        step(model, optimizer)
    saved = optimizer.state_dict()
    if names:
        known = [name for name, _ in model.named_parameters()]
        saved = {
            "state": {known[number]: value for number, value in saved["state"].items()},
            "param_groups": [{**saved["param_groups"][0], "params": known}],
        }
    state = {"model": model.state_dict(), "optimizer": saved, "iter_num": 24, "step_count": 3}
    return model, optimizer, state


def step(model: LitGPT, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.loss().backward()
    optimizer.step()


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def test_the_order_of_the_parameters_is_that_of_transformers() -> None:
    assert parameter_order(2) == [f"model.{name}" for name, _ in llama().named_parameters()]


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_a_folder_of_transformers_comes_in_and_goes_out_with_its_logits(shards: str, tmp_path: Path) -> None:
    source, target, back = tmp_path / "hf", tmp_path / "run" / "in.ckpt", tmp_path / "back"
    model = llama()
    model.save_pretrained(source, max_shard_size=shards)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shards == "20KB")
    assert main(["import", "--from", "hf", str(source), "--to", str(target)]) == 0
    assert newest_valid(target.parent) == target
    assert torch.equal(logits_of(tiny_llama(target).model), logits_of(model))
    assert main(["export", "--to", "hf", str(target), str(back)]) == 0
    exported = transformers.LlamaForCausalLM.from_pretrained(back)
    assert torch.equal(logits_of(exported), logits_of(model))
    kept = {name: getattr(exported.config, name) for name in CONFIG if name != "rope_theta"}
    assert kept == {name: value for name, value in CONFIG.items() if name != "rope_theta"}


def test_pickled_weights_in_half_precision_and_tied_ones_come_in(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    model.config.save_pretrained(tmp_path)
    weights = {name: one.bfloat16() for name, one in model.state_dict().items() if name != "lm_head.weight"}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)  # as old ones are
    assert main(["import", str(tmp_path), "--to", str(tmp_path / "in.ckpt")]) == 0
    assert torch.equal(logits_of(tiny_llama(tmp_path / "in.ckpt").model), logits_of(model))


def test_a_run_starts_from_a_folder_or_an_import_and_not_where_it_resumes(tmp_path: Path) -> None:
    from lightning_distplus.recipes.model import TinyLlama

    llama().save_pretrained(tmp_path / "hf")
    main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "in.ckpt")])
    for source in ("hf", "in.ckpt"):
        module = TinyLlama(CONFIG, init_from=str(tmp_path / source))
        module.trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
        module.configure_model()
        assert torch.equal(logits_of(module.model), logits_of(llama()))
    resumed = TinyLlama(CONFIG, init_from=str(tmp_path / "gone"))
    resumed.trainer = module.trainer
    resumed.trainer.ckpt_path = "some.ckpt"
    resumed.configure_model()
    other = TinyLlama({**CONFIG, "hidden_size": 16}, init_from=str(tmp_path / "hf"))
    other.trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    with pytest.raises(CheckpointMismatch, match=r"embed_tokens\.weight of shape \(64, 16\).*the shape \(64, 32\)"):
        other.configure_model()


# -- lit-gpt -----------------------------------------------------------------------------------------------------------


class Same(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": TOKENS[index, :-1], "shift_labels": TOKENS[index, 1:]}


@pytest.mark.parametrize("is_fork", [True, False])
def test_a_run_of_lit_gpt_goes_on_as_it_would_have_there(is_fork: bool, tmp_path: Path) -> None:
    model, optimizer, state = trained(is_fork=is_fork, names=is_fork)
    saved, target = tmp_path / "iter-000024-ckpt.pth", tmp_path / "in.ckpt"
    torch.save(state, saved)
    assert origin_of(saved) == "litgpt"
    command = ["import", "--from", "litgpt", str(saved), "--to", str(target)]
    assert main([*command, "--config", configuration(tmp_path)]) == 0
    assert read_manifest(target).global_step == 3
    # A schedule that stands still: the source's learning rate holds.
    module = tiny_llama(target, lr=1e-3, min_lr=1e-3, warmup_steps=1)
    torch.testing.assert_close(logits_of(module.model), model(TOKENS), atol=1e-5, rtol=1e-4)
    fresh = tiny_llama(target, lr=1e-3, min_lr=1e-3, warmup_steps=1)
    torch.nn.init.zeros_(fresh.model.lm_head.weight)  # what is trained comes from the checkpoint
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(fresh, DataLoader(Same(), batch_size=2), ckpt_path=str(target), weights_only=True)
    assert trainer.global_step == 4
    step(model, optimizer)
    torch.testing.assert_close(logits_of(fresh.model), model(TOKENS), atol=1e-5, rtol=1e-4)


def test_weights_go_out_to_litgpt(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "in.ckpt")])
    assert main(["export", "--to", "litgpt", str(tmp_path / "in.ckpt"), str(tmp_path / "lit")]) == 0
    theirs = LitGPT(is_fork=False)
    theirs.load_state_dict(torch.load(tmp_path / "lit" / "lit_model.pth", weights_only=True)["model"])
    torch.testing.assert_close(theirs(TOKENS), logits_of(model), atol=1e-5, rtol=1e-4)
    assert origin_of(tmp_path / "lit" / "lit_model.pth") == "litgpt"
    # And back: model_config.yaml beside it says what the tensors do not.
    assert main(["import", str(tmp_path / "lit"), "--to", str(tmp_path / "again.ckpt")]) == 0
    assert torch.equal(logits_of(tiny_llama(tmp_path / "again.ckpt").model), logits_of(model))


# -- Lightning ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_stock_lightning_is_committed_as_it_is(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(3)}, "global_step": 7, "epoch": 1, "pytorch-lightning_version": "2.6.6"}
    torch.save({**state, "optimizer_states": [], "lr_schedulers": []}, tmp_path / "last.ckpt")
    assert main(["import", "--from", "lightning", str(tmp_path / "last.ckpt"), "--to", str(tmp_path / "new.ckpt")]) == 0
    manifest = read_manifest(tmp_path / "new.ckpt")
    assert (manifest.global_step, manifest.epoch) == (7, 1)
    assert main(["import", str(tmp_path / "new.ckpt"), "--to", str(tmp_path / "again.ckpt")]) == 1  # it is one of ours
    assert not (tmp_path / "again.ckpt").exists()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_is_not_kept_is_said_and_a_dry_run_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(trained(is_fork=True)[2] | {"hparams": {"lr": 1}}, tmp_path / "a.pth")
    command = ["import", str(tmp_path / "a.pth"), "--to", str(tmp_path / "in.ckpt"), "--dry_run"]
    assert main([*command, "--config", configuration(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "  moments of AdamW: of 21 tensors: kept, float32\n" in told
    assert "  position in the data: iter_num 24 counts micro-batches" in told
    assert "  hparams: lit-gpt's own: left out\n" in told
    assert not (tmp_path / "in.ckpt").exists()


def test_an_existing_target_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path / "hf")
    (tmp_path / "in.ckpt").write_text("mine")
    assert main(["import", str(tmp_path / "hf"), "--to", str(tmp_path / "in.ckpt")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "in.ckpt").read_text() == "mine"


DEEDS = {
    "shard": (CheckpointCorrupt, "is not there"),
    "truncated": (CheckpointCorrupt, "cannot be read"),
    "key": (CheckpointMismatch, r"lacks model\.model\.norm\.weight"),
    "adapter": (CheckpointMismatch, r"holds model\.model\.layers\.0\.lora_A\.weight, which a Llama has not"),
    "family": (CheckpointMismatch, "model of type 'gpt2'"),
    "config": (CheckpointMismatch, "hidden_size: 32 there, 16 in the source"),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_a_source_that_does_not_fit_is_named_and_nothing_is_written(
    deed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "hf"
    model = llama(**({"hidden_size": 16} if deed == "config" else {}))
    model.save_pretrained(source, max_shard_size="20KB" if deed == "shard" else "1GB")
    file = sorted(source.glob("*.safetensors"))[-1]
    if deed == "shard":
        file.unlink()
    elif deed == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif deed == "family":
        (source / "config.json").write_text('{"model_type": "gpt2"}')
    elif deed in ("key", "adapter"):
        from safetensors.torch import load_file, save_file

        weights = load_file(file)
        weights |= {"model.layers.0.lora_A.weight": torch.ones(2)}
        if deed == "key":
            del weights["model.norm.weight"]
        save_file(weights, file)
    options = ["--config", configuration(tmp_path)] if deed == "config" else []
    error, words = DEEDS[deed]
    assert main(["import", str(source), "--to", str(tmp_path / "in.ckpt"), *options]) == error.exit_code
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distplus")]
    assert re.search(words, told), told
    assert not (tmp_path / "in.ckpt").exists()


def test_a_pickle_that_runs_code_is_refused_and_has_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"model": {"x": Evil()}, "iter_num": 1}, tmp_path / "a.pth")
    assert main(["import", "--from", "litgpt", str(tmp_path / "a.pth"), "--to", str(tmp_path / "in.ckpt")]) != 0
    assert "nothing of it was run" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_lightning_is_spared_what_it_cannot_resume_from(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "hf")
    torch.save(trained(is_fork=True)[2], tmp_path / "iter.pth")
    torch.save({"model": 1, "other": 2}, tmp_path / "odd.pt")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "fine.ckpt")
    assert [origin_of(tmp_path / name) for name in ("hf", "iter.pth", "odd.pt")] == ["hf", "litgpt", None]
    refuse_foreign(tmp_path / "fine.ckpt")
    refuse_foreign(tmp_path / "nothing.ckpt")
    for name, command in (("hf", "--from hf"), ("iter.pth", "--from litgpt")):
        with pytest.raises(CheckpointMismatch, match=f"distplus import {command} .*-imported.ckpt"):
            refuse_foreign(tmp_path / name)
    with pytest.raises(CheckpointMismatch, match="it holds 'model', 'other'"):
        refuse_foreign(tmp_path / "odd.pt")


def test_one_file_is_refused_to_deepspeed_before_it_begins_with_what_takes_it(tmp_path: Path) -> None:
    file = tmp_path / "imported.ckpt"
    file.touch()
    for stage in (2, 3):
        with pytest.raises(CheckpointMismatch, match=f"under ResilientDDP.*--model.init_from {re.escape(str(file))}"):
            ResilientDeepSpeed(stage=stage).fitting_checkpoint(file)
    assert ResilientDeepSpeed(stage=3, load_full_weights=True).fitting_checkpoint(file) == file


@pytest.mark.parametrize("content", [b"no checkpoint", b"PK\x03\x04 torn"])
def test_what_is_no_whole_file_of_torch_is_refused_in_a_sentence(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    assert main(["import", "--from", "lightning", str(tmp_path / "last.ckpt"), "--to", str(tmp_path / "in.ckpt")]) == 1
    assert "last.ckpt cannot be imported: " in capsys.readouterr().err
    assert main(["export", str(tmp_path / "gone.ckpt"), str(tmp_path / "out.ckpt")]) == 1
    assert capsys.readouterr().err.endswith("gone.ckpt does not exist.\n")
