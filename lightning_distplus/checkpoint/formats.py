"""Checkpoints in other forms: shards as one file, safetensors, DeepSpeed's universal layout, and those of strangers.

Checkpoints of other programs are read key by key as those of ``recipes.model.TinyLlama``, and written for them. No
pickle of theirs runs code: everything is read with ``weights_only``. Weights and moments come in 32 bits.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal
from zipfile import is_zipfile

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_distplus import _compat
from lightning_distplus.checkpoint.catalog import FileFinding, verify
from lightning_distplus.checkpoint.commit import commit, info_like
from lightning_distplus.checkpoint.files import beside, leftovers_of
from lightning_distplus.checkpoint.tensors import Piece, Sums, differing, named_tensors, sums_of_pieces
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch

# -- shards, and safetensors -------------------------------------------------------------------------------------------

META = "meta.pt"
"""Where Lightning puts everything but weights and moments."""
_WEIGHTS = ("model", "state_dict")  # what FSDPStrategy and ModelParallelStrategy call them
CONFIG = "llama_config"
"""Where a checkpoint of ``recipes.model.TinyLlama`` says how that is configured."""
_BATCH_BYTES = 256 << 20
_ALIGNMENT_BYTES = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def is_sharded(path: Path) -> bool:
    """Whether FSDP or FSDP2 has saved this folder."""
    return (path / META).is_file() and (path / ".metadata").is_file()


def _read_alone(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant
        load(state, storage_reader=FileSystemReader(path), no_dist=True)


def read_sharded(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """A folder of Lightning's FSDP or FSDP2, all of it in memory, as the dictionary that a file of it would hold.

    The shards have no such argument as ``weights_only`` (`_compat.refusing_code`).
    """
    metadata = FileSystemReader(path).read_metadata()
    flat: dict[str, Any] = {
        name: _empty(entry) if isinstance(entry, TensorStorageMetadata) else None
        for name, entry in metadata.state_dict_metadata.items()
    }
    _read_alone(flat, path)
    tree: dict[Any, Any] = {}
    for name, value in flat.items():
        *folders, last = metadata.planner_data[name]
        place = tree
        for key in folders:
            place = place.setdefault(key, {})
        place[last] = value
    checkpoint: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    checkpoint["state_dict"] = next((tree[name] for name in _WEIGHTS if name in tree), {})
    numbers = sorted(int(name.removeprefix("optimizer_")) for name in tree if str(name).startswith("optimizer_"))
    checkpoint["optimizer_states"] = [_by_index(tree[f"optimizer_{number}"]) for number in numbers]
    return checkpoint


def _empty(entry: Any, device: str = "cpu") -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def _by_index(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer keyed by the parameter's index, as torch does it, instead of its name."""
    by_number = optimizer["param_groups"]
    groups = [dict(by_number[number]) for number in sorted(by_number)]
    index = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    for group in groups:
        group["params"] = [index[name] for name in group["params"]]
    return {"state": {index[name]: state for name, state in optimizer.get("state", {}).items()}, "param_groups": groups}


def weights_of(path: Path, *, weights_only: bool = True) -> _Parts:
    """The weights of a checkpoint: names and shapes, and the same with content, some at a time.

    Of shards of FSDP at most 256 MB, or the largest tensor, are in memory at once; a file is mapped into it.
    """
    if is_sharded(path):
        return _in_parts(path, lambda first, *inner: ".".join(map(str, inner)) if first in _WEIGHTS else None)
    if path.is_dir():
        converter = import_module("deepspeed.utils.zero_to_fp32")
        with redirect_stdout(io.StringIO()):
            weights: dict[str, Tensor] = converter.get_fp32_state_dict_from_zero_checkpoint(path, _TAG)
    else:
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)["state_dict"]
    return weights, ({name: tensor} for name, tensor in weights.items())


_Parts = tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]


def _in_parts(path: Path, name_of: Callable[..., str | None]) -> _Parts:
    """The tensors in a folder of shards that get a name from their places: without content, and then with it."""
    metadata = FileSystemReader(path).read_metadata()
    entries, places = metadata.state_dict_metadata, metadata.planner_data
    tensors = [key for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]
    names = {key: name for key in tensors if (name := name_of(*places[key])) is not None}

    def parts() -> Iterator[dict[str, Tensor]]:
        batch: dict[str, Any] = {}
        for number, key in enumerate(names, start=1):
            batch[key] = _empty(entries[key])
            if number == len(names) or sum(tensor.nbytes for tensor in batch.values()) >= _BATCH_BYTES:
                _read_alone(batch, path)
                yield {names[key]: tensor for key, tensor in batch.items()}
                batch = {}

    return {name: _empty(entries[key], "meta") for key, name in names.items()}, parts()


def config_in(path: Path, *, weights_only: bool = True) -> dict[str, Any]:
    """How the model of a recipe is configured, as its checkpoint says; empty where it does not."""
    states = sorted((path / _TAG).glob("*model_states.pt"))
    file = path if not path.is_dir() else path / META if is_sharded(path) else next(iter(states), None)
    if file is None:
        return {}
    config: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only).get(CONFIG, {})
    return config


def write_safetensors(target: Path, weights: Mapping[str, Tensor], parts: Iterator[dict[str, Tensor]]) -> None:
    """Writes a safetensors file, whole or not at all, of weights without content and then with it, in one order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"safetensors has no {tensor.dtype}, the dtype of {name}. Export to a .ckpt file instead.")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in parts:
                for tensor in part.values():
                    # numpy knows no bfloat16: the bytes go as they are
                    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


# -- tensors beside those of a manifest --------------------------------------------------------------------------------


def tensor_findings(path: Path, expected: Mapping[str, str], *, weights_only: bool = True) -> list[FileFinding]:
    """Tensors that are not what they should be; DeepSpeed's folders hold none by name, and are not read.

    At most 256 MB, or the largest tensor, are in memory at once.
    """
    if not (path.is_file() or is_sharded(path)):
        return []
    total: Sums = {}
    for name, tensor in _named(path, weights_only):
        total.update(sums_of_pieces([Piece.whole(name, tensor)]))
    odd = differing(expected, total)
    missing = [name for name in expected if name not in total]
    return [
        *(FileFinding(f"{path}: {name}", f"fingerprint {want}", found) for name, (want, found) in odd.items()),
        *(FileFinding(f"{path}: {name}", expected[name], "no such tensor") for name in missing),
    ]


def _named(path: Path, weights_only: bool) -> Iterator[tuple[str, Tensor]]:
    """As `tensors.named_tensors` has it."""
    if path.is_file():
        yield from named_tensors(torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only))
        return

    def name_of(first: str, *inner: str) -> str | None:
        number = str(first).removeprefix("optimizer_")
        if number == first:
            return f"weights/{'.'.join(map(str, inner))}"
        return f"optimizer {number}/{'/'.join(map(str, inner[1:]))}" if inner[0] == "state" else None

    for part in _in_parts(path, name_of)[1]:
        yield from part.items()


# -- DeepSpeed's universal checkpoints ---------------------------------------------------------------------------------

_TAG = "checkpoint"  # the name of Lightning's only tag


def is_universal(path: Path) -> bool:
    """Whether a folder is a universal checkpoint."""
    return (path / "latest_universal").is_file()


def num_shards(path: Path) -> int:
    """For how many ranks a folder holds optimizer states; 0 where it holds none."""
    return len(list((path / _TAG).glob("*_optim_states.pt")))


def convert(source: Path, target: Path) -> None:
    """Makes a committed universal checkpoint of what ZeRO 1, 2 or 3 has saved. One process calls it.

    DeepSpeed's converters run what a pickle names, but within `_compat.refusing_code`.

    Raises:
        SaveFailed: It cannot be converted, or not be written; the cause says why.
    """

    def write(stage: Path) -> None:
        stage.mkdir()
        to_universal(source / _TAG, stage / _TAG)
        (stage / "latest").write_text(_TAG)  # Lightning's sign of a DeepSpeed folder

    info = replace(info_like(source, is_successor=True), strategy="ResilientDeepSpeed")
    commit(target, write, info)


def converted_beside(source: Path) -> Path:
    """The universal form of a checkpoint, made where it is not there yet; it goes when the checkpoint is removed."""
    for folder in leftovers_of(source, "universal"):
        if verify(folder / source.name).ok:
            return folder / source.name
    target = beside(source, "universal") / source.name
    with _compat.refusing_code(
        source, f"If you trust whoever wrote it: distplus export --universal --trust {source} OUT"
    ):
        convert(source, target)
    return target


def write_whole(source: Path, file: Path) -> None:
    """Writes what ZeRO has sharded as a single-file checkpoint of Lightning, weights in 32 bits, without moments."""
    converter = import_module("lightning.pytorch.utilities.deepspeed")
    with redirect_stdout(io.StringIO()):
        converter.convert_zero_checkpoint_to_fp32_state_dict(source, file, tag=_TAG)


def to_universal(shards: Path, target: Path) -> None:
    """Has DeepSpeed put its shards together: a folder for each parameter, with weight and moments."""
    converter = import_module("deepspeed.checkpoint.ds_to_universal")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it prints its progress
        converter.main(
            Namespace(
                input_folder=str(shards),
                output_folder=str(target),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )


# -- what other programs save ------------------------------------------------------------------------------------------

Origin = Literal["hf", "litgpt", "lightning", "deepspeed"]
PREFIX = "model."  # TinyLlama holds transformers' model in its attribute of this name
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens", "model.norm", "lm_head"
_LAYER_PARTS = (  # in the order in which transformers registers them
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BUFFER = "rotary_emb.inv_freq"  # of early versions of transformers; computed from the configuration


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What a checkpoint of another program holds, by the names that ``TinyLlama`` gives its parameters."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    """Arguments of ``LlamaConfig``, as far as the source says."""
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """AdamW's ``step``, ``exp_avg`` and ``exp_avg_sq`` by parameter."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The optimizer's: lr, betas, eps, weight_decay, weight_decay_of_norms."""
    step: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    """What the source holds and cannot be carried over, and why."""


# -- whose checkpoint it is --------------------------------------------------------------------------------------------


def origin_of(path: Path) -> Origin | None:
    """Which program has written a checkpoint; None where that cannot be told."""
    if path.suffix == ".safetensors" and not path.is_dir():
        return "hf"
    if not path.is_dir():
        keys = set(_keys_of(path))
        if _VERSION in keys:
            return "lightning"
        if ("model" in keys and _COUNTS & keys) or any(key.startswith(_LITGPT) for key in keys):
            return "litgpt"
        return "hf" if any(map(_LAYER.match, keys)) else None
    if is_sharded(path):
        keys = set(_keys_of(path / META))  # of Fabric: what the script has named
        return None if keys and _VERSION not in keys else "lightning"
    if _hf_files(path):
        return "hf"
    if (path / "lit_model.pth").exists():
        return "litgpt"
    return "deepspeed" if (path / "latest").is_file() else None


def refuse_foreign(path: Path) -> None:
    """Refuses, with the command to run, what Lightning would end on with a bare KeyError."""
    is_of_lightning = path.is_dir() and (path / "checkpoint").is_dir()  # DeepSpeed's, by the name of its only tag
    origin = None if is_of_lightning else origin_of(path)
    file = path / META if is_sharded(path) else path
    keys = [] if file.is_dir() or file.suffix == ".safetensors" else _keys_of(file)
    if origin == "lightning" or (origin is None and (not keys or "state_dict" in keys)):
        return
    if origin is None:
        found = ", ".join(map(repr, keys[:5]))
        raise CheckpointMismatch(f"{path} is no checkpoint of Lightning: it holds {found}. Give another ckpt_path.")
    target = path.with_name(f"{path.stem or path.name}-imported.ckpt")
    raise CheckpointMismatch(
        f"{path} is a checkpoint of {_NAMES[origin]}, which Lightning cannot resume from. Make one of it that it can: "
        f"distplus import --from {origin} {path} --to {target}"
    )


_LITGPT = "transformer."
_VERSION = "pytorch-lightning_version"
_COUNTS = {"iter_num", "step_count"}
_NAMES = {"hf": "Hugging Face", "litgpt": "lit-gpt", "lightning": "Lightning", "deepspeed": "DeepSpeed"}


def _keys_of(path: Path) -> list[str]:
    """The first level of a file of torch, without reading a tensor; nothing where it is none, or may run code."""
    with suppress(Exception):  # whatever is wrong with it, the load says so
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        model = loaded.get("model")
        inner = [key for key in model if key.startswith(_LITGPT)] if isinstance(model, dict) else []  # without counts
        return [str(key) for key in (*loaded, *inner)]
    return []


def read_foreign(source: Path, origin: Origin, *, config: Mapping[str, Any], remedy: str) -> Foreign:
    """Reads the checkpoint of another program, not Lightning's, all of it that this one can use.

    ``config`` holds arguments of ``LlamaConfig``, for what the source does not say; ``remedy`` how to go past a pickle
    that is refused.

    Raises:
        CheckpointCorrupt: A file is missing or damaged.
        CheckpointMismatch: It is no Llama, or a key is missing or not known.
        CheckpointUnsafe: A pickle names something that may run code.
    """
    readers = {"hf": _read_hf, "litgpt": _read_litgpt, "deepspeed": _read_deepspeed}
    with _compat.refusing_code(source, remedy):
        found = readers[origin](source, config)
    _require_llama(found.weights, source)
    return found


def _load(file: Path) -> Any:
    if not file.is_file():
        what = "is a folder of shards, and one file is read" if file.is_dir() else "is not there"
        raise CheckpointCorrupt(f"{file} {what}. Give a whole checkpoint.")
    try:
        return torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)  # torch 1.5 wrote no zip
    except (RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointCorrupt(f"{file} cannot be read: {reason}. Give another checkpoint.") from error


def _require_llama(weights: Mapping[str, Tensor], source: Path) -> None:
    """Refuses weights that lack a part of a Llama, or have one that a Llama has not."""
    layers = {int(found[1]) for name in weights if (found := _LAYER.match(name.removeprefix(PREFIX)))}
    expected = set(parameter_order(max(layers, default=0) + 1))
    missing = sorted(expected - weights.keys())
    strange = sorted(name for name in weights.keys() - expected if not name.endswith("_proj.bias"))
    if missing or strange:
        what = f"lacks {missing[0]}" if missing else f"holds {strange[0]}, which a Llama has not"
        raise CheckpointMismatch(
            f"{source} {what} (and {len(missing) + len(strange) - 1} more). Llama's layout is read: merge adapters "
            "such as LoRA first, and give all files of a checkpoint in parts."
        )


def parameter_order(num_layers: int, names: Mapping[str, Any] | None = None) -> list[str]:
    """The parameters of ``TinyLlama`` in the order of its ``named_parameters``, which optimizers number.

    Given the names that it has, biases are among them; else they are the weights.
    """
    layers = [f"model.layers.{number}.{part}" for number in range(num_layers) for part in _LAYER_PARTS]
    modules = [_EMBEDDING, *layers, _NORM, _HEAD]
    order = [f"{PREFIX}{module}.{kind}" for module in modules for kind in ("weight", "bias")]
    return [name for name in order if (name.endswith(".weight") if names is None else name in names)]


# -- Hugging Face ------------------------------------------------------------------------------------------------------

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_KEPT_OF_CONFIG = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
)


def weights_for(model: Any, source: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a folder of Hugging Face, or of what ``distplus import`` wrote, for transformers' Llama."""
    with _compat.refusing_code(source, "Give another init_from."):
        is_hf = origin_of(source) == "hf"
        found = _read_hf(source, {}).weights if is_hf else _load(source).get("state_dict", {})
    shapes = {name: getattr(one, "ds_shape", one.shape) for name, one in model.named_parameters()}
    for name, shape in shapes.items():
        weight = found.get(f"{PREFIX}{name}")
        if weight is None or tuple(weight.shape) != tuple(shape):
            has = "no such weight" if weight is None else f"the shape {tuple(weight.shape)}"
            raise CheckpointMismatch(
                f"init_from: the model has {name} of shape {tuple(shape)}, and {source} {has}. Set model.config as "
                "the source has it, or give another one: a folder of Hugging Face, or what distplus import wrote."
            )
    return ((name, found[f"{PREFIX}{name}"]) for name in shapes)


def _hf_files(source: Path) -> list[Path]:
    """The files of the weights; those of an index whether they are there or not."""
    if not source.is_dir():
        return [source]
    for name in _INDEXES:
        if (source / name).is_file():
            parts = json.loads((source / name).read_text())["weight_map"].values()
            return [source / part for part in sorted(set(parts))]
    return [source / name for name in _WHOLE if (source / name).is_file()][:1]


def _tensors_in(file: Path) -> dict[str, Tensor]:
    if file.suffix != ".safetensors" or not file.is_file():
        return dict(_load(file))
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointCorrupt(f"{file} cannot be read: {error}. Fetch it again.") from error


def _read_hf(source: Path, config: Mapping[str, Any]) -> Foreign:
    files = _hf_files(source)
    if not files:
        wanted = " or ".join((*_WHOLE, *_INDEXES))
        raise CheckpointMismatch(f"{source} holds no weights of Hugging Face. Give a folder with {wanted}.")
    described = (source if source.is_dir() else source.parent) / "config.json"
    said = _llama_config(json.loads(described.read_text()), described) if described.is_file() else {}
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= _tensors_in(file)
    left_out = {}
    if buffers := [name for name in weights if name.endswith(_BUFFER)]:
        left_out[f"{len(buffers)} buffers {_BUFFER}"] = "computed from the configuration"
    head, embedding = f"{_HEAD}.weight", f"{_EMBEDDING}.weight"
    if head not in weights and embedding in weights and said.get("tie_word_embeddings", True):
        weights[head] = weights[embedding]
        said["tie_word_embeddings"] = True
    named = {f"{PREFIX}{name}": one.float() for name, one in weights.items() if name not in buffers}
    return Foreign(weights=named, config=said, left_out=left_out)


def _llama_config(document: dict[str, Any], file: Path) -> dict[str, Any]:
    kind = document.get("model_type", "llama")
    if kind != "llama":
        raise CheckpointMismatch(f"{file} describes a model of type {kind!r}, and the recipes train a Llama.")
    config = {name: document[name] for name in _KEPT_OF_CONFIG if document.get(name) is not None}
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type", "default") == "default":  # transformers 5 writes it so; the flat form is read by 4 as well
        config.pop("rope_parameters", None)
        config |= {name: value for name, value in rope.items() if name == "rope_theta"}
    return config


def hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says beside the weights."""
    kept = {name: value for name, value in config.items() if name in _KEPT_OF_CONFIG}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", **kept}


# -- lit-gpt -----------------------------------------------------------------------------------------------------------

_OF_LITGPT = {"transformer.wte": _EMBEDDING, "transformer.ln_f": _NORM, "lm_head": _HEAD}
_OF_LITGPT_LAYER = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.proj": "self_attn.o_proj",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}
_OF_TINYLLAMA_LAYER = {  # xformers' SwiGLU
    "mlp.swiglu.w1": "mlp.gate_proj",
    "mlp.swiglu.w2": "mlp.up_proj",
    "mlp.swiglu.w3": "mlp.down_proj",
}
_LITGPT_LAYER = re.compile(r"transformer\.h\.(\d+)\.(.+)\.weight")
_TINYLLAMAS = {"tiny_LLaMA_1b": (32, 4), "tiny_LLaMA_120M": (12, 1)}  # heads and groups of queries
_ADDED_BY_WRAPPERS = re.compile(r"_orig_mod\.|^_forward_module\.")


@dataclass(frozen=True)
class _Heads:
    """How the rows of the attention's matrices are cut."""

    num: int
    groups: int
    size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Heads:
        num = int(config["num_attention_heads"])
        size = int(config.get("head_dim") or config["hidden_size"] // num)
        return cls(num, int(config.get("num_key_value_heads") or num), size)

    def split(self, rows: Tensor, *, is_interleaved: bool) -> tuple[Tensor, ...]:
        """Cuts one matrix into those of queries, keys and values.

        Interleaved are each group's queries, key and value, as in lit-gpt before 0.5; litgpt puts all queries first.
        """
        if rows.shape[0] != (self.num + 2 * self.groups) * self.size:
            raise CheckpointMismatch(
                f"The attention has {rows.shape[0]} rows, which are not {self.num} heads and 2 x {self.groups} groups "
                f"of {self.size}. Name the configuration of that model with --config."
            )
        if not is_interleaved:
            return torch.split(rows, [self.num * self.size, self.groups * self.size, self.groups * self.size])
        grouped = rows.reshape(self.groups, self.num // self.groups + 2, self.size, -1)
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return tuple(part.reshape(-1, rows.shape[1]).contiguous() for part in parts)


def _from_litgpt(name: str, value: Tensor, heads: _Heads) -> dict[str, Tensor]:
    """One tensor of lit-gpt as those that it stands for."""
    module = _OF_LITGPT.get(name.removesuffix(".weight"))
    found = _LITGPT_LAYER.fullmatch(name)
    if module is not None:
        return {f"{PREFIX}{module}.weight": value}
    if found is not None:
        layer, part = f"{PREFIX}model.layers.{found[1]}.", found[2]
        if part in ("attn.attn", "attn.qkv"):
            parts = heads.split(value, is_interleaved=part == "attn.attn")
            return {f"{layer}self_attn.{kind}_proj.weight": one for kind, one in zip("qkv", parts, strict=True)}
        if (own := (_OF_LITGPT_LAYER | _OF_TINYLLAMA_LAYER).get(part)) is not None:
            return {f"{layer}{own}.weight": value}
    return {f"{PREFIX}{name}": value}  # not known: refused by this name


def _read_litgpt(source: Path, config: Mapping[str, Any]) -> Foreign:
    file = source / "lit_model.pth" if source.is_dir() else source
    state = _load(file)
    weights = {_ADDED_BY_WRAPPERS.sub("", name): value for name, value in state.get("model", state).items()}
    said = _config_of_litgpt(weights, state, file) or dict(config)
    if "num_attention_heads" not in said:
        raise CheckpointMismatch(
            f"{file} does not say how many heads its attention has, nor does a model_config.yaml beside it. Name the "
            "configuration of a run with such a model: --config recipe:tinyllama_1.1b, or a YAML file of yours."
        )
    heads = _Heads.of({**said, **_shapes(weights)})
    named = {
        own: one.float() for name, value in weights.items() for own, one in _from_litgpt(name, value, heads).items()
    }
    moments, settings, why = _moments_of_litgpt(state.get("optimizer") or {}, weights, heads)
    left_out = {"moments": why} if why else {}
    if "iter_num" in state:
        left_out["position in the data"] = (
            f"iter_num {state['iter_num']} counts micro-batches of a rank in lit-gpt's order; this package has its own"
        )
    known = {"model", "optimizer", "iter_num", "step_count"}
    left_out |= dict.fromkeys(sorted(set(map(str, state)) - known if "model" in state else ()), "lit-gpt's own")
    return Foreign(
        weights=named,
        config={**said, **_shapes(weights)},
        moments=moments,
        settings=settings,
        step=int(state.get("step_count", 0)) if "model" in state else 0,
        left_out=left_out,
    )


def _config_of_litgpt(weights: Mapping[str, Tensor], state: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """What lit-gpt's file beside the weights says, or the name of one of TinyLlama's own models in them."""
    said: dict[str, Any] = {}
    hparams = state.get("hparams")
    if isinstance(hparams, dict) and (known := _TINYLLAMAS.get(str(hparams.get("model_name")))):
        said = {"n_head": known[0], "n_query_groups": known[1], "block_size": 2048, "norm_eps": 1e-5}
    if (described := file.with_name("lit_config.json")).is_file():
        said = json.loads(described.read_text())
    if (described := file.with_name("model_config.yaml")).is_file():
        said = import_module("yaml").safe_load(described.read_text())
    if "n_head" not in said:
        return {}
    size, width = said.get("head_size"), weights["lm_head.weight"].shape[1]
    return {
        "num_attention_heads": said["n_head"],
        "num_key_value_heads": said.get("n_query_groups") or said["n_head"],
        "rms_norm_eps": said.get("norm_eps", 1e-5),
        **({"head_dim": size} if size and size != width // said["n_head"] else {}),
        **({"max_position_embeddings": said["block_size"]} if "block_size" in said else {}),
        **({"rope_theta": float(said["rope_base"])} if "rope_base" in said else {}),
    }


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the tensors themselves say of the model."""
    layers = {int(found[1]) for name in weights if (found := _LITGPT_LAYER.fullmatch(name))}
    gates = ("transformer.h.0.mlp.fc_1.weight", "transformer.h.0.mlp.swiglu.w1.weight")
    gate = next((weights[name] for name in gates if name in weights), None)
    embedding = weights.get("transformer.wte.weight")
    if gate is None or embedding is None:
        raise CheckpointMismatch(f"The checkpoint is of no Llama of lit-gpt: it has none of {', '.join(gates)}.")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": embedding.shape[1],
        "intermediate_size": gate.shape[0],
        "num_hidden_layers": max(layers) + 1,
    }


def _moments_of_litgpt(
    optimizer: Mapping[str, Any], weights: Mapping[str, Tensor], heads: _Heads
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], str]:
    """The moments by parameter, the settings of the optimizer, and why there are no moments.

    FSDP writes the parameter's name. Other strategies write its number in the one group that lit-gpt makes.
    """
    groups, state = optimizer.get("param_groups") or [{}], optimizer.get("state") or {}
    if not state:
        return {}, {}, "the source has none"
    numbers: dict[Any, str] = dict(enumerate(weights))
    named = {_ADDED_BY_WRAPPERS.sub("", str(numbers.get(key, key))): values for key, values in state.items()}
    fits = all(
        name in weights
        and {"exp_avg", "exp_avg_sq"} <= values.keys()
        and values["exp_avg"].shape == weights[name].shape
        for name, values in named.items()
    )
    if not fits or (len(groups) > 1 and any(isinstance(key, int) for key in state)):
        return {}, {}, "they are not those of AdamW over the parameters in the order of the weights"
    moments: dict[str, dict[str, Tensor]] = {}
    for name, values in named.items():
        parts = [_from_litgpt(name, values[kind], heads) for kind in ("exp_avg", "exp_avg_sq")]
        step = torch.as_tensor(values["step"], dtype=torch.float32)
        for own, first in parts[0].items():
            moments[own] = {"step": step.clone(), "exp_avg": first.float(), "exp_avg_sq": parts[1][own].float()}
    return moments, _settings(groups), ""


def _settings(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of the first group; where another one decays less, it is that of the norms."""
    found: dict[str, Any] = {
        name: groups[0][name] for name in ("lr", "betas", "eps", "weight_decay") if name in groups[0]
    }
    if "weight_decay" in found:
        found["weight_decay_of_norms"] = min(group.get("weight_decay", 0.0) for group in groups)
    return found


def to_litgpt(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the names that litgpt has for them today."""
    own = {f"{PREFIX}{module}.weight": f"{name}.weight" for name, module in _OF_LITGPT.items()}
    parts = {part: name for name, part in _OF_LITGPT_LAYER.items()}
    named: dict[str, Tensor] = {}
    for name, value in weights.items():
        found = re.fullmatch(r"model\.model\.layers\.(\d+)\.(.+)\.weight", name)
        if name in own:
            named[own[name]] = value
        elif found is not None and found[2] in parts:
            named[f"transformer.h.{found[1]}.{parts[found[2]]}.weight"] = value
        elif found is not None and found[2] == "self_attn.q_proj":
            matrices = [weights[name.replace("q_proj", f"{kind}_proj")] for kind in "qkv"]
            named[f"transformer.h.{found[1]}.attn.qkv.weight"] = torch.cat(matrices)
        elif found is None or found[2] not in ("self_attn.k_proj", "self_attn.v_proj"):
            raise CheckpointMismatch(f"litgpt's Llama has no {name}. Export to hf instead.")
    return named


def litgpt_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What model_config.yaml says beside the weights."""
    heads = _Heads.of(config)
    return {
        "name": name,
        "block_size": config.get("max_position_embeddings", 2048),
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": config["vocab_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": heads.num,
        "n_embd": config["hidden_size"],
        "head_size": heads.size,
        "n_query_groups": heads.groups,
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": config["intermediate_size"],
        "rope_base": int(config.get("rope_theta", 10000)),
    }


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def _read_deepspeed(source: Path, config: Mapping[str, Any]) -> Foreign:
    """What ZeRO has sharded, put together by DeepSpeed's converter in a folder for the time being."""
    latest = source / "latest"
    tag = source / (latest.read_text().strip() if latest.is_file() else "checkpoint")
    states = sorted(tag.glob("*model_states.pt"))
    shards = sorted(tag.glob("*optim_states.pt"))
    if not states or not shards:
        raise CheckpointMismatch(
            f"{tag} holds no shards of DeepSpeed's ZeRO. Give the folder that has the file latest."
        )
    # Before anything is read: DeepSpeed's own classes are let through where it is imported.
    import_module("deepspeed")
    model, shard = _load(states[0]), _load(shards[0])["optimizer_state_dict"]
    values: dict[str, dict[str, Tensor]] = {}
    shapes = {name: shape for group in model.get("param_shapes") or [] for name, shape in group.items()}
    with tempfile.TemporaryDirectory(dir=source.parent, prefix=".distplus-import-") as folder:
        to_universal(tag, Path(folder))
        for file in sorted(Path(folder, "zero").rglob("*.pt")):
            if file.stem in ("fp32", "exp_avg", "exp_avg_sq"):
                content = torch.load(file, map_location="cpu", weights_only=True)
                name = file.parent.name
                # Of stage 3 the converter leaves the numbers of a parameter in a row.
                value = content["param"] if isinstance(content, dict) else content.view(shapes[name])
                values.setdefault(name, {})[file.stem] = value.float().contiguous()
    # transformers' Trainer saves the model itself; Lightning a module that holds it.
    prefix = "" if any(name.startswith("model.model.") for name in values) else PREFIX
    step = int(model.get("global_step", model.get("global_steps", 0)))
    base = shard.get("base_optimizer_state") or shard.get("optimizer_state_dict") or {}
    groups = base.get("param_groups") or [{}] if isinstance(base, dict) else [{}]
    count = torch.tensor(float(step))
    return Foreign(
        weights={prefix + name: one["fp32"] for name, one in values.items()},
        config=dict(model.get(CONFIG) or config),
        moments={
            prefix + name: {"step": count.clone(), "exp_avg": one["exp_avg"], "exp_avg_sq": one["exp_avg_sq"]}
            for name, one in values.items()
        },
        settings=_settings(groups),
        step=step,
        left_out={"position in the data, callbacks, schedulers": "DeepSpeed's shards alone are read"},
    )
