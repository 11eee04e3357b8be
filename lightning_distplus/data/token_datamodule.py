"""The data module for pretraining: weighted mixtures of token files, made into batches for a language model.

A source is identified by the fingerprint of its content. Beside the position a checkpoint holds one record of the files
of all sources. It decides nothing: where fingerprints differ it tells in which file, and where they agree it tells of a
large file, of which only samples are compared, that somebody has written to it. In plain values, format version 2:

    {"version": 2, "sources": [{
        "facts": {"format": "npy", "dtype": "uint16", ...},    what else the fingerprint depends on
        "num_files": 2,
        "files": [[name, bytes, digest, modified], ...]        digest: 16 hex digits, "" where only the size is compared
    }]}                                                        modified: st_mtime_ns, 0 where all bytes are compared

Version 1 had no ``modified``. Of more than 4,096 files there are no rows.
"""

# No `from __future__ import annotations`: jsonargparse reads these signatures at run time.
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_distplus.data.batches import Geometry, Order, Request, SequentialPlan, num_global_batches
from lightning_distplus.data.datamodule import ExactDataModule
from lightning_distplus.data.order import (
    Mixture,
    MixturePhase,
    change_of_mixture,
    derive_key,
    order_of,
    past_mixture,
    permute,
)
from lightning_distplus.data.progress import Position, differences
from lightning_distplus.data.token_files import Source, TokenSource, open_source
from lightning_distplus.errors import refuse_unknown_arguments, require_type
from lightning_distplus.world import DataParallel

__all__ = ["Source", "TokenDataModule", "TokenFetcher", "document_mask"]


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens each token attends to: those before it in its own document, and itself.

    Make it on the device, in ``training_step``: it is seq_len times as large as the batch. For ``attn_mask`` of
    ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        document_ids: Integers of shape (num_samples, seq_len), as ``TokenDataModule(document_ids=True)`` adds them.

    Returns:
        bool of shape (num_samples, 1, seq_len, seq_len): [sample, head, token, attended token].
    """
    is_same: torch.Tensor = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return is_same.tril()


# -- token batches -----------------------------------------------------------------------------------------------------

_CHECK = -4  # separates the key of the check from those of order and augmentation
_NUM_CHECKED = 64  # blocks of each source whose token ids are checked at setup


class TokenBlocks(NamedTuple):
    """The samples of one batch as they are stored."""

    tokens: NDArray[np.integer[Any]]  # of shape (num_samples, seq_len + 1)
    documents: NDArray[np.int32] | None  # (num_samples, seq_len): each token's, counted from 0 in each sample


@dataclass(kw_only=True)
class TokenFetcher:
    """Fetches one batch of token blocks."""

    sources: Sequence[TokenSource]
    names: Sequence[str]  # of the sources, for messages
    seq_len: int
    vocab_size: int | None  # token ids below this are legal; None means unchecked
    position_ids: bool = False  # add the place of each token in its document
    document_ids: bool = False  # add the number of each token's document

    def __post_init__(self) -> None:
        types = {np.dtype(source.dtype) for source in self.sources}
        self._dtype = types.pop() if len(types) == 1 else np.dtype(np.int64)

    def __getitems__(self, request: Request) -> TokenBlocks:
        """The samples as they are stored.

        request.ids: (num_samples, 2), source and index.
        """
        ids = request.ids
        sources = sorted(set(ids[:, 0].tolist()))
        if len(sources) == 1:
            return TokenBlocks(self._gather(sources[0], ids[:, 1]), self._documents(ids))
        blocks = np.empty((len(ids), self.seq_len + 1), dtype=self._dtype)
        for source in sources:
            rows = np.flatnonzero(ids[:, 0] == source)
            blocks[rows] = self._gather(source, ids[rows, 1])
        return TokenBlocks(blocks, self._documents(ids))

    def finish(self, taken: TokenBlocks, *, pin_memory: bool) -> dict[str, torch.Tensor]:
        """The batch, in the training process: tensors, all int64 of shape (num_samples, seq_len)."""
        tokens, documents = taken
        inputs_and_labels = _as_int64((tokens[:, :-1], tokens[:, 1:]), pin_memory)
        batch = dict(zip(("input_ids", "shift_labels"), inputs_and_labels, strict=True))
        if self.document_ids and documents is not None:
            batch["document_ids"] = _as_int64((documents,), pin_memory)[0]
        if self.position_ids and documents is not None:
            batch["position_ids"] = _as_int64((_positions(documents),), pin_memory)[0]
        return batch

    def check_documents(self) -> None:
        """Reads where documents begin, if the batches need it; a ValueError where a source does not say it."""
        if self.position_ids or self.document_ids:
            for source in self.sources:
                source.documents(np.zeros(1, dtype=np.int64))

    def check_vocabulary(self) -> None:
        """Looks for illegal token ids in 64 blocks of each source that are evenly spread, and 64 that a key chooses."""
        if self.vocab_size is None:
            return
        for place, source in enumerate(self.sources):
            size = source.num_samples
            count = min(_NUM_CHECKED, size)
            self._gather(place, np.linspace(0, size - 1, count).astype(np.int64))
            self._gather(place, np.sort(permute(np.arange(count), size, derive_key(_CHECK, place))))

    def _documents(self, ids: NDArray[np.int64]) -> NDArray[np.int32] | None:
        if not (self.position_ids or self.document_ids):
            return None
        documents = np.empty((len(ids), self.seq_len), dtype=np.int32)
        for source in np.unique(ids[:, 0]).tolist():
            rows = ids[:, 0] == source
            documents[rows] = self.sources[source].documents(ids[rows, 1])
        return documents

    def _gather(self, source: int, indices: NDArray[np.int64]) -> NDArray[np.integer]:
        blocks = self.sources[source].gather(indices)
        if self.vocab_size is not None and (blocks.max() >= self.vocab_size or blocks.min() < 0):
            row, column = np.argwhere((blocks >= self.vocab_size) | (blocks < 0))[0].tolist()
            raise ValueError(
                f"Source {self.names[source]} holds the token id {blocks[row, column]} (sample {indices[row]}), and "
                f"vocab_size is {self.vocab_size}. Prepare the source with the model's tokenizer."
            )
        return blocks


def _as_int64(arrays: Sequence[NDArray[np.integer[Any]]], pin_memory: bool) -> torch.Tensor:
    """Arrays of one shape as one tensor: an allocation costs 5 microseconds."""
    result = torch.empty((len(arrays), *arrays[0].shape), dtype=torch.int64, pin_memory=pin_memory)
    for target, values in zip(result.numpy(), arrays, strict=True):
        np.copyto(target, values)  # torch converts uint16 in half the speed
    return result


def _positions(documents: NDArray[np.int32]) -> NDArray[np.int32]:
    """Places counted from the beginning of the document, or of the sample where that comes later."""
    places = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int32), documents.shape)
    begins = np.zeros_like(documents)
    np.copyto(begins[:, 1:], places[:, 1:], where=documents[:, 1:] != documents[:, :-1])
    result: NDArray[np.int32] = places - np.maximum.accumulate(begins, axis=1)
    return result


# -- the record of the files -------------------------------------------------------------------------------------------

_VERSION = 2
_READABLE = (1, _VERSION)


def inventory(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of a checkpoint, from the ``contents`` of each source."""
    return {"version": _VERSION, "sources": [dict(source) for source in sources]}


def first_difference(record: Any, place: int, now: Mapping[str, Any]) -> str:
    """The first thing in which a source's ``contents`` differ from those of a checkpoint, with both sides."""
    if not (before := _source_of(record, place)):
        return ""
    old, new = before["facts"], now["facts"]
    pairs = [(name, old.get(name), new.get(name)) for name in dict.fromkeys((*new, *old))]
    pairs.append(("number of files", before["num_files"], now["num_files"]))
    for number, (was, here) in enumerate(zip(before["files"], now["files"], strict=False), start=1):
        pairs += [
            (f"file {number}, {here[0]}: {what}", was[at], here[at]) for at, what in ((1, "bytes"), (2, "content"))
        ]
    sides = (f"{what}: {was!r} in the checkpoint, {here!r} in this run" for what, was, here in pairs if was != here)
    return next(sides, "")


def rewritten(record: Any, place: int, now: Mapping[str, Any]) -> str:
    """The first file that was written to since a checkpoint, and in which nothing that is compared has changed."""
    rows = zip(_source_of(record, place).get("files", []), now["files"], strict=False)
    for number, (was, (name, size, digest, modified)) in enumerate(rows, start=1):
        if was[3:] and was[3] != modified:
            compared = "and the samples of its content have" if digest else "has"
            return (
                f"file {number}, {name} was modified at {_time(modified)}, and at {_time(was[3])} when the checkpoint "
                f"was written: its size ({size} bytes) {compared} not changed; the rest was not compared"
            )
    return ""


def _time(modified_ns: int) -> str:
    return f"{datetime.fromtimestamp(modified_ns / 1e9, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _source_of(record: Any, place: int) -> Mapping[str, Any]:
    """One source of a record; empty where there is none, or the record is not there or newer."""
    if not isinstance(record, Mapping) or record.get("version") not in _READABLE:
        return {}
    sources: Sequence[Mapping[str, Any]] = record["sources"]
    return sources[place] if place < len(sources) else {}


# -- the data module ---------------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)
_FILES = "lightning_distplus_files"  # in a checkpoint: what the sources are made of
_ROW = ("fingerprint", "weight / 2**32", "num_samples")  # of a source, in the identity
_MAX_PAST = 4  # earlier mixtures in the state, which stays below 1 KB


class TokenDataModule(ExactDataModule):
    """Exact, position-independent resume for pretraining on packed tokens.

    The training data is one endless stream. Global sample g comes from the source and the draw that the weights
    assign to g; draw k of a source with n samples is sample k mod n of its epoch k // n, each epoch in an order of its
    own. Global batch s is the samples from s x global_batch on, cut into micro-batches and these into one contiguous
    slice per data-parallel rank. So the tokens of a step depend on seed, sources and global batch alone, and not on
    the number of ranks, the micro-batch or the workers. An epoch of the Trainer is (samples of all sources) //
    (global batch) optimizer steps of that stream; use ``max_steps`` for a run of a given length.

    A batch is ``{"input_ids": x, "shift_labels": y}``, both int64 of shape (micro_batch_size, seq_len), and y[:, t] is
    the token after x[:, t]. The name is that of Hugging Face: ``labels`` would be shifted a second time by its models,
    so it is not used. ``model(input_ids=x, labels=y, shift_labels=y).loss`` or
    ``cross_entropy(logits.flatten(0, 1), y.flatten())``.

    Args:
        sources: The path of one source, or a list of ``Source`` (or of their dicts).
        seq_len: Tokens per sample.
        micro_batch_size: Samples per data-parallel rank and micro-batch.
        global_batch_size: Samples per optimizer step. The Trainer's accumulation then follows from it. None means
            micro_batch_size x ranks x the Trainer's ``accumulate_grad_batches``.
        val_sources: Validation data, read in order, each source once; weights do not count.
        shuffle: False reads each source from its beginning to its end.
        vocab_size: Where given, token ids are checked against it, at setup by samples and in each batch.
        position_ids: Adds ``position_ids`` to the batch, int64 of the same shape: the place of each token in its
            document, counted from the beginning of the sample where the document began before it.
        document_ids: Adds ``document_ids``: which document of the sample a token belongs to, 0, 1, 2, ... Tokens may
            attend to each other where theirs are equal.
        allow_mixture_change: Resume with other weights, or with sources added or taken away. The new mixture holds
            from the position of the checkpoint on; a source that stays goes on with its next sample. Recorded in the
            state, so that later resumes need not allow it again.
        common: Seed, workers (0 is enough for files on a local disk) and what a resume allows: see
            ``ExactDataModule``.
    """

    def __init__(
        self,
        sources: str | list[Source],
        *,
        seq_len: int,
        micro_batch_size: int,
        global_batch_size: int | None = None,
        val_sources: str | list[Source] | None = None,
        shuffle: bool = True,
        vocab_size: int | None = None,
        position_ids: bool = False,
        document_ids: bool = False,
        allow_mixture_change: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(micro_batch=micro_batch_size, **common)
        self._sources = {"train": _as_sources(sources), "val": _as_sources(val_sources or [])}
        if not self._sources["train"]:
            raise ValueError("sources is empty; name at least one source.")
        self._mixture = Mixture([source.weight for source in self._sources["train"]], self._seed)
        self.seq_len = seq_len
        """Tokens of a sample, without the one that is only a target."""
        require_type("global_batch_size", global_batch_size, int, or_none=True)
        self._global_batch_size = global_batch_size
        self._shuffle = shuffle
        self._allow_mixture_change = allow_mixture_change
        self._phase: MixturePhase | None = None  # None is the first one
        self._past_mixtures: list[list[Any]] = []
        self._vocab_size = vocab_size
        self._extras = {"position_ids": position_ids, "document_ids": document_ids}
        self._files: dict[str, list[TokenSource]] = {}
        self._fingerprints: list[str] = []
        self._contents: dict[int, dict[str, Any]] = {}  # of the training sources, once they are asked for
        self._files_before: Any = None  # the record of the checkpoint
        if not self._sources["val"]:
            self._hide_validation()

    def setup(self, stage: str) -> None:
        """Opens and checks all sources."""
        for kind in ("train", "val"):
            fetcher = self._fetcher(kind)
            fetcher.check_documents()
            fetcher.check_vocabulary()
        super().setup(stage)

    def _open(self, stage: str) -> list[TokenSource]:
        if stage not in self._files:
            self._files[stage] = [open_source(source, self.seq_len) for source in self._sources[stage]]
        return self._files[stage]

    def _num_samples(self, stage: str) -> list[int]:
        return [tokens.num_samples for tokens in self._open(stage)]

    def _identity(self) -> dict[str, Any]:
        if not self._fingerprints:
            self._fingerprints = [tokens.fingerprint() for tokens in self._open("train")]
        rows = zip(self._fingerprints, self._mixture.numerators, self._num_samples("train"), strict=True)
        return {
            "sources": [list(row) for row in rows],
            "seq_len": self.seq_len,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **(self._phase.as_state() if self._phase is not None else {}),
        }

    def _begin_anew(self) -> None:
        self._phase, self._past_mixtures = None, []

    def _adopt(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The phase of the state, or a new one where the mixture has changed and may."""
        before, was = self._phase, [tuple(row) for row in state["sources"]]
        self._phase, self._past_mixtures = MixturePhase.in_state(state), list(state.get("past_mixtures", []))
        now = [tuple(row) for row in self._identity()["sources"]]
        if now != was and self._allow_mixture_change:
            sample = state["consumed_samples"]
            self._past_mixtures = [*self._past_mixtures, past_mixture(self._phase, was)][-_MAX_PAST:]
            self._phase = self._phase.followed_by(was, now, sample=sample, seed=self._seed)
            state = {**state, "sources": [list(row) for row in now], **self._phase.as_state()}
            if self._phase != before and self.trainer is not None and self.trainer.is_global_zero:
                _log.warning("%s", change_of_mixture(self._phase, was, now, self._source_names()))
        elif len(now) != len(was):
            self._phase = None  # refused next, or, with ignore_fingerprint, another order altogether
        self._known_identity = self._identity()
        return state

    def state_dict(self) -> dict[str, Any]:
        """The position, what it refers to, and the mixtures of the past."""
        state = super().state_dict()
        if self._past_mixtures and self._loaded is None:
            state["past_mixtures"] = self._past_mixtures
        return state

    def extend_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the record of the files."""
        checkpoint[_FILES] = inventory([self._contents_of(place) for place in range(len(self._open("train")))])

    def read_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the record of the files, which decides nothing."""
        self._files_before = checkpoint.get(_FILES)

    def _differences(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Of each source too what differs, and of its content the first thing."""
        ours, old, new = self._known_identity, state["sources"], self._known_identity["sources"]
        yield from differences(state, {name: value for name, value in ours.items() if name != "sources"})
        yield from differences({"number of sources": len(old)}, {"number of sources": len(new)})
        for place, name in enumerate(self._source_names() if len(old) == len(new) else ()):
            before, now = (dict(zip(_ROW, rows[place], strict=True)) for rows in (old, new))
            lines = list(differences(before, now))
            if before["fingerprint"] != now["fingerprint"]:
                lines.append(first_difference(self._files_before, place, self._contents_of(place)))
            yield from (f"source {place} ({name}): {line}" for line in lines if line)

    def _warnings_of_resume(self) -> Iterator[str]:
        for place, name in enumerate(self._source_names()):
            if text := rewritten(self._files_before, place, self._contents_of(place)):
                yield f"source {place} ({name}): {text}"

    def _contents_of(self, place: int) -> dict[str, Any]:
        if place not in self._contents:
            self._contents[place] = self._open("train")[place].contents()
        return self._contents[place]

    def accumulation(self, trainer: Any, ranks: DataParallel) -> int:
        """Micro-batches of an optimizer step, from ``global_batch_size`` where it is given.

        Raises:
            ValueError: It does not divide by micro-batch and ranks, or contradicts the Trainer's accumulation.
        """
        wanted, present = self._global_batch_size, int(trainer.accumulate_grad_batches)
        if wanted is None:
            return present
        accumulation, rest = divmod(wanted, self.micro_batch * ranks.size)
        if rest or not accumulation:
            raise ValueError(_no_fit(wanted, self.micro_batch, ranks))
        if present not in (1, accumulation):
            raise ValueError(
                f"Trainer(accumulate_grad_batches={present}) contradicts global_batch_size={wanted}, which takes "
                f"{accumulation} ({self.micro_batch} samples on {ranks.size} ranks). Leave one of the two out."
            )
        if accumulation > 1 and not trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"global_batch_size={wanted} takes an accumulation of {accumulation}, and with manual optimization the "
                "Trainer does not accumulate. Leave global_batch_size out."
            )
        trainer.accumulate_grad_batches = accumulation
        return accumulation

    def _num_global_batches(self, geometry: Geometry) -> int:
        return num_global_batches(sum(self._num_samples("train")), geometry, "drop")

    def _source_names(self) -> list[str]:
        return [source.label for source in self._sources["train"]]

    def _order(self, position: Position) -> tuple[Order, int]:
        return order_of(self._known_identity), position.consumed_samples

    def _fetcher(self, stage: str) -> TokenFetcher:
        names = [source.label for source in self._sources[stage]]
        sources, size = self._open(stage), self._vocab_size
        return TokenFetcher(sources=sources, names=names, seq_len=self.seq_len, vocab_size=size, **self._extras)

    def _validation_plan(self, ranks: DataParallel, stage: str) -> SequentialPlan | None:
        sizes = self._num_samples("val")
        if not sizes:
            return None
        return SequentialPlan(num_samples=sum(sizes), micro_batch=self.micro_batch, ranks=ranks, uneven="drop")

    def _validation_request(self, plan: SequentialPlan, positions: Any) -> Request:
        ends = np.cumsum(self._num_samples("val"))
        sources = np.searchsorted(ends, positions, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        return Request(np.stack([sources, positions - starts[sources]], axis=1), positions, 0)


def _as_sources(sources: str | Sequence[Source | dict[str, Any]]) -> list[Source]:
    if isinstance(sources, str):
        return [Source(path=sources)]
    for source in sources:
        if not isinstance(source, Source):
            refuse_unknown_arguments("Source", source, Source.__dataclass_fields__)
    return [source if isinstance(source, Source) else Source(**source) for source in sources]


def _no_fit(wanted: int, micro_batch: int, ranks: DataParallel) -> str:
    fitting = [size for size in range(1, wanted // ranks.size + 1) if wanted % (size * ranks.size) == 0]
    remedy = f"micro_batch_size that fits: {', '.join(map(str, fitting))}" if fitting else "no micro_batch_size fits"
    return (
        f"global_batch_size={wanted} is no multiple of micro_batch_size={micro_batch} x {ranks.size} data-parallel "
        f"ranks = {micro_batch * ranks.size}; {remedy}."
    )
