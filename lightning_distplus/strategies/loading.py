"""From which checkpoint a run begins; its loads, verified and agreed by all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_distplus import _compat, env
from lightning_distplus.checkpoint import catalog
from lightning_distplus.checkpoint.copies import Copies
from lightning_distplus.checkpoint.formats import origin_of, refuse_foreign
from lightning_distplus.checkpoint.tensors import (
    Sums,
    differing,
    is_current,
    named_tensors,
    pieces_of_live,
    sums_of_pieces,
)
from lightning_distplus.control import ControlPlane
from lightning_distplus.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointUnsafe, DistplusError
from lightning_distplus.events import folder_of_run
from lightning_distplus.preemption import checkpoint_folder
from lightning_distplus.run_access import Phases, set_rng_state
from lightning_distplus.strategies.start import engine_in, engine_of
from lightning_distplus.timeouts import Phase
from lightning_distplus.world import name_ranks

if TYPE_CHECKING:
    from lightning_distplus.strategies.base import ResilientStrategy

log = logging.getLogger(__name__)

# -- which checkpoint --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Search:
    """Where a run looks for the newest valid checkpoint when it starts."""

    folder: Path
    allow_fresh: bool = False
    """Whether it starts anew where none can be trusted."""
    but: tuple[Path, ...] = ()
    """Those that are passed over, because they are of another job."""


def choose_checkpoint(trainer: Any, ckpt_path: Any) -> Any:
    """What a run of a Resilient strategy begins from, in the place of the ``ckpt_path`` that it was called with.

    Raises:
        CheckpointCorrupt: There are checkpoints to choose from, and none is valid.
        ValueError: There is none, and the run is no fit.
    """
    function = trainer.state.fn
    if not _is_ours(trainer) or (ckpt_path != catalog.AUTO and not (ckpt_path is None and function == "fit")):
        return ckpt_path
    found = newest_checkpoint(trainer, function.value) if ckpt_path == catalog.AUTO else _newest_of_job(trainer)
    return None if found is None else str(found)


def newest_checkpoint(trainer: Any, function: str = "fit", *, allow_fresh: bool = False) -> Path | None:
    """The newest valid checkpoint of a run's folder; None where there is none yet to fit from.

    For a Resilient strategy its sizes are right; its bytes are read by all ranks together when they start.
    """
    folder, is_ours = settle_checkpoint_folder(trainer), _is_ours(trainer)
    if is_ours:
        trainer.strategy.search = Search(folder, allow_fresh)
    may_be_copied = is_ours and function == "fit" and trainer.strategy.copy_to is not None  # all ranks look for it
    verify: catalog.Mode = "size" if is_ours else "full"
    found = catalog.newest_in(folder, verify=verify, allow_fresh=allow_fresh or may_be_copied)
    if found is None and function != "fit":
        raise ValueError(f"ckpt_path auto found no checkpoint to {function}. Name one by its path.")
    return found


def settle_checkpoint_folder(trainer: Any) -> Path:
    """The folder that ``auto`` looks in, which the first ModelCheckpoint takes where it has none.

    It would save below the logger's next version, where no later start looks.
    """
    folder = checkpoint_folder(trainer)
    for saver in savers_of(trainer)[:1]:
        saver.dirpath = saver.dirpath or str(folder)
    return folder


def last_ones_aside(callback: Any, trainer: Any, folder: str) -> set[str]:
    """What is called like the last checkpoint of a run of ours, and was left aside with nothing in its place."""
    found = [] if not _is_ours(trainer) or "://" in folder else catalog.asides_without_target(Path(folder))
    name, suffix = callback.CHECKPOINT_NAME_LAST, callback.FILE_EXTENSION
    return {str(path) for path in found if path.name.startswith(name) and path.suffix == suffix}


def savers_of(trainer: Any) -> list[ModelCheckpoint]:
    """The ModelCheckpoints of a Trainer; other classes may save as well."""
    return [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]


def local_path(path: str | Path) -> Path | None:
    """The path, or None for a URL of a remote file system."""
    return None if "://" in str(path) else Path(path)


def _is_ours(trainer: Any) -> bool:
    """Whether the strategy's ranks read what was found together, and look further where it is damaged."""
    return hasattr(trainer.strategy, "search")


def _newest_of_job(trainer: Any) -> Path | None:
    """Where ``distplus launch`` has restarted a script, the newest valid checkpoint that this fit of it has saved."""
    attempt, run_id = env.DISTPLUS_ATTEMPT.integer() or 0, env.DISTPLUS_RUN_ID.get()
    if attempt == 0 or run_id is None or env.DISTPLUS_RESUME.get() != "1":
        return None
    home = folder_of_run(trainer.default_root_dir)
    saves = catalog.JobSaves.of_fit(home, run_id, 1 + catalog.num_fits(home, run_id, attempt, trainer.global_rank))
    found = saves.newest_valid()
    if found is not None:
        _save_on(trainer, saves)
        trainer.strategy.search = Search(found.parent, but=tuple(saves.passed_over(found.parent)))
    if trainer.global_rank == 0:
        what = "starts anew: this job has no checkpoint yet" if found is None else f"goes on from {found}"
        log.warning(
            "attempt %d: fit names no checkpoint, and %s (distplus launch --no-resume leaves it to the script)",
            attempt + 1,
            what,
        )
    return found


def _save_on(trainer: Any, saves: catalog.JobSaves) -> None:
    """Has a ModelCheckpoint without a folder go on in the one that it had, and not below the logger's next version."""
    named = {Path(saver.dirpath).absolute() for saver in savers_of(trainer) if saver.dirpath}
    chosen = [folder for folder in saves.folders if folder.absolute() not in named]
    if len(chosen) == 1:
        for saver in savers_of(trainer):
            saver.dirpath = saver.dirpath or str(chosen[0])


# -- what all ranks hear of a checkpoint -------------------------------------------------------------------------------

_OTHER_COPY = "Resume from another checkpoint, or restore the file from a copy."
_SHOWN_FINDINGS = 3
_NUM_LOOKS, _LOOK_S = 62, 1.0  # a client of NFS may see a folder as it was 60 s ago
_REFUSALS: dict[str, type[DistplusError]] = {
    error.__name__: error for error in (CheckpointCorrupt, CheckpointMismatch, CheckpointUnsafe)
}


class SharedVerdicts:
    """Decisions and findings about checkpoints that the ranks make and hear together, over the control plane."""

    def __init__(self, plane: ControlPlane, phases: Phases) -> None:
        self._plane = plane
        self._phases = phases
        self._rank = plane.world.rank

    def gather(self, name: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks, by rank."""
        return self._plane.gather_json(name, mine, self._phases.patience_in(Phase.RESUME))

    def agree(self, name: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0 decides; its answer, or its error, is that of all ranks."""
        mine: dict[str, Any] = {}
        error: DistplusError | None = None
        if self._rank == 0:
            try:
                mine = decide()
            except tuple(_REFUSALS.values()) as caught:
                error = caught
                mine = {"error": str(caught), "type": type(caught).__name__}
        answer = self.gather(name, mine)[0]
        if error is not None:
            raise error
        if "error" in answer:
            raise _REFUSALS[answer["type"]](f"Rank 0 refuses the checkpoint: {answer['error']}")
        return answer

    def agree_on_path(self, name: str, decide: Callable[[], Path | None]) -> Path | None:
        """`agree` on a path, or on nothing."""
        found = self.agree(name, lambda: {"path": (path := decide()) and str(path)})["path"]
        return found and Path(found)

    def hear(self, name: str, path: str | Path, findings: list[str], remedy: str = _OTHER_COPY) -> None:
        """Tells the other ranks what this one has found wrong with a checkpoint, and hears what they have."""
        if found := self.all_findings(name, findings):
            raise CheckpointCorrupt(
                f"The checkpoint {path} is committed and cannot be trusted: {found[0]} (and {len(found) - 1} more). "
                f"{remedy}"
            )

    def all_findings(self, name: str, mine: list[str]) -> list[str]:
        """What all ranks have found, the first few of each in words."""
        heard = self.gather(name, {"findings": mine[:_SHOWN_FINDINGS], "count": len(mine)})
        shown = [f"rank {rank}: {finding}" for rank, one in enumerate(heard) for finding in one["findings"]]
        return shown + ["and others"] * (sum(one["count"] for one in heard) - len(shown))

    def look_for(self, path: Path, copies: Copies | None) -> Callable[[], list[str]]:
        """What reads this rank's share of a checkpoint's bytes, and says what is wrong with it, in any thread.

        Where nodes have folders of their own, their ranks share those. With ``copies`` a node may lack what rank 0 sees
        and fetch it later: it has nothing to read.

        Raises:
            CheckpointMismatch: A node lacks it, on all ranks, and there is nowhere to fetch it from.
        """
        for number in range(_NUM_LOOKS):
            places = [one["place"] for one in self.gather("checkpoint-places", {"place": catalog.place_of(path)})]
            mine, first = places[self._rank], places[0]
            lacking = [rank for rank, place in enumerate(places) if first and (not place or place[0] != first[0])]
            if not lacking or copies is not None:
                break
            if number == 0 and self._rank == 0:
                log.warning(
                    "%s is not there for %s; they look for %d s", path, name_ranks(lacking), _NUM_LOOKS * _LOOK_S
                )
            time.sleep(_LOOK_S)
        if lacking and copies is None:
            raise CheckpointMismatch(
                f"The checkpoint {path} that rank 0 sees is not there for {name_ranks(lacking)}, or another one is, or "
                "its files have other sizes ('distplus verify' there says which). "
                "Save to a folder that all hosts share, or name a place to fetch it from: copy_to=URL of the strategy."
            )
        if mine is None or self._rank in lacking:
            return list
        sharers = [rank for rank, place in enumerate(places) if place == mine]
        manifest, rank, num_ranks = catalog.read_manifest(path), sharers.index(self._rank), len(sharers)
        look = partial(catalog.findings_in_share, path, manifest, rank=rank, num_ranks=num_ranks)
        return lambda: [str(found) for found in look()]

    def fetch_where_it_lacks(self, path: Path, findings: list[str], copies: Copies) -> list[str]:
        """Has the lowest rank of each folder that has not what rank 0 has chosen, or has it damaged, fetch a copy.

        Returns:
            What is wrong then: why this rank could not fetch it.
        """
        folder = [self._plane.world.host, *_identity_of(path.parent)]
        message = {"place": catalog.place_of(path), "folder": folder, "is_damaged": bool(findings)}
        heard = self.gather("checkpoint-nodes", message)
        places, chosen = [one["place"] for one in heard], heard[0]["place"]
        if chosen is None:
            return [] if self._rank else [f"{path} is gone, or its files have not the sizes of the manifest"]
        damaged = [one["place"] for one in heard if one["is_damaged"]]
        lacking = [rank for rank, place in enumerate(places) if (place or [""])[0] != chosen[0] or place in damaged]
        if lacking and chosen not in damaged:
            self.agree_on_path("checkpoint-upload", partial(copies.ensure, path, chosen[0]))
        fetchers = {str(places[rank] or heard[rank]["folder"]): rank for rank in reversed(lacking)}
        if self._rank not in fetchers.values():
            return []
        log.warning("rank %d: %s is not here, or not as it was; it is fetched from %s", self._rank, path, copies.url)
        return copies.fetch(path, chosen[0])


def _identity_of(folder: Path) -> tuple[int, ...]:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return folder.stat().st_dev, folder.stat().st_ino
    return ()


# -- loads -------------------------------------------------------------------------------------------------------------

Verification = Literal["full", "size", "off"]
"""Of a load: every byte is read and every tensor compared, sizes are compared, or only manifest and marker are."""

KEY = "lightning_distplus"
"""Where a checkpoint holds what this package adds."""
VERSION = 1
_SIGNS_OF_ANOTHER_MODEL = ("missing key", "unexpected key", "size mismatch", "does not exist in the loaded")
_DIFFERENCES_CHARACTERS = 1000
_WEIGHTS, _MOMENTS = "weights/", "optimizer "
_TRUE = ("1", "y", "yes", "true")  # to torch
_TRUST = (
    "If you know that class, declare it with torch.serialization.add_safe_globals; if you trust whoever wrote the "
    "checkpoint, resume with Trainer.fit(weights_only=False), or --weights_only=false on the command line."
)


class LoadHooks:
    """Loads the checkpoints of a strategy: verified before, agreed by all ranks, and compared in memory after."""

    verdicts: SharedVerdicts  # from `begin` on

    def __init__(self, strategy: ResilientStrategy) -> None:
        self._strategy = strategy
        self._as_read: dict[str, tuple[ReferenceType[Tensor], int]] = {}
        self._group: dist.ProcessGroup | None = None

    def begin(self, plane: ControlPlane, copies: Copies | None) -> None:
        """A run begins, whose ranks have met; where the folder has no checkpoint, rank 0 fetches one of the copies."""
        strategy = self._strategy
        self.verdicts, self._world, self._copies = SharedVerdicts(plane, strategy.phases), plane.world, copies
        self._search, strategy.search = strategy.search, None  # for this run only
        self._has_read: Path | None = None
        self._rng: dict[str, bytes] | None = None
        self._loaded: str | Path = ""
        self._expected: dict[str, str] = {}  # fingerprints of its tensors; empty where none are to be compared
        self.parent: dict[str, str] | None = None
        """The checkpoint before the next one; known to rank 0, which writes the manifest."""
        self.parent_committed_at = 0.0

    # -- before the run ----------------------------------------------------------------------------------------------

    def agree_on_resume(self, path: str | Path | None) -> str | None:
        """What rank 0 resumes from, or that it starts anew; each rank may have looked for itself, and seen another.

        Its calibrated deadlines hold from here on, as the load itself has one.
        """
        mine, search = None if path is None else str(path), self._search
        told = None if search is None else {"folder": str(search.folder), "allow_fresh": search.allow_fresh}
        first = self.verdicts.gather("checkpoint-choice", {"path": mine, "search": told})[0]
        chosen: str | None = first["path"]
        if chosen != mine:
            log.warning("rank %d would resume from %s; it follows rank 0: %s", self._world.rank, mine, chosen)
        if first["search"] is not None:  # also on a rank whose host has no such folder: all ranks search, or none
            search = search or Search(Path(first["search"]["folder"]), first["search"]["allow_fresh"])
            found = self._search_on(None if chosen is None else Path(chosen), search)
            chosen = None if found is None else str(found)
        local = None if chosen is None else local_path(chosen)
        if local is not None and self._strategy.measured.calibration is not None:
            self._strategy.measured.adopt(self.verdicts.agree("deadlines", partial(_deadlines_in, local)))
        return chosen

    def _search_on(self, first: Path | None, search: Search) -> Path | None:
        """The newest checkpoint in which no rank finds anything wrong, from one on whose sizes are right.

        Where the folder has none, the newest copy is fetched.
        """
        passed_over: list[Path] = []
        found = first
        while found is not None:
            damage = self.verdicts.all_findings("checkpoint-search", self.verdicts.look_for(found, self._copies)())
            if not damage:
                self._has_read = found
                return found
            log.warning("Checkpoint %s is passed over: %s", found, damage[0])
            passed_over.append(found)
            look = partial(catalog.newest_valid, search.folder, verify="size", but=[*passed_over, *search.but])
            found = self.verdicts.agree_on_path("checkpoint-older", look)
        if self._copies is not None:
            found = self.verdicts.agree_on_path("checkpoint-copy", partial(_fetched, self._copies, search))
        if found is not None or search.allow_fresh or not passed_over:
            return found
        raise CheckpointCorrupt(
            f"{search.folder} holds {len(passed_over)} committed checkpoint(s), and none is as it was when it was "
            "saved. Name another one by its path, or start anew: with --allow_fresh, or in a script without ckpt_path."
        )

    # -- the load ----------------------------------------------------------------------------------------------------

    def load(
        self, path: str | Path, weights_only: bool | None, parent: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        """Loads what rank 0 has chosen, by the parent's load, after verifying it; raises what the strategy says."""
        strategy = self._strategy
        strategy.marks.set(f"load {path}")
        strategy.phases.enter(Phase.RESUME)
        self._loaded, self._expected = path, {}
        read, local = partial(_read, weights_only=weights_only, parent=parent), local_path(path)
        with strategy.transfer.of("load"):
            checkpoint = read(path) if local is None else self._load(local, read)
        self._take_generators(checkpoint)
        fits = strategy.lightning_module is not None and strategy.lightning_module.trainer.state.fn == "fit"
        if strategy.lightning_restore_optimizer and fits and "optimizer_states" not in checkpoint:
            raise CheckpointMismatch(
                f"The checkpoint {path} holds weights and no state of an optimizer: a fit cannot go on from it. "
                "Start from its weights: model.init_from in a recipe, or load_state_dict in a script; or add an empty "
                f"state: distplus import --from lightning {path} --to CKPT"
            )
        if strategy.lightning_restore_optimizer:
            self._as_read = _versions(checkpoint)  # what hooks change before it is restored is theirs
        else:
            self.compare((_WEIGHTS, _MOMENTS), are_shards=True)
        strategy.note("loaded", path=str(path), global_step=checkpoint.get("global_step"))
        return checkpoint

    def _load(self, local: Path, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Verifies and reads what rank 0 has chosen: where a killed save has left a whole one aside, that one."""
        verdicts, strategy, copies = self.verdicts, self._strategy, self._copies
        found = verdicts.agree("checkpoint-verdict", lambda: self._verify(catalog.whole_one_of(local)))
        chosen = Path(found["path"])
        is_unread = found["has_files"] and chosen != self._has_read
        look = verdicts.look_for(chosen, copies) if is_unread else list
        # The parent reads such a file and restores nothing, nor meets another rank, so that it can be verified at the
        # same time. Nobody gets what was read before all ranks have heard that it is right.
        overlaps = found["is_file"] and is_unread and copies is None and strategy.lightning_restore_optimizer
        if found["has_manifest"] and not overlaps:
            findings = look()
            if copies is not None:
                findings = verdicts.fetch_where_it_lacks(chosen, findings, copies)
            verdicts.hear("checkpoint-bytes", chosen, findings)
        if found["has_files"]:
            tensors = catalog.read_manifest(chosen).tensors or {}
            self._expected = _comparable(chosen, tensors, is_heard=self._world.rank == 0)
        fitting = verdicts.agree_on_path("checkpoint-form", lambda: strategy.fitting_checkpoint(chosen)) or chosen
        self.follow(chosen)
        with self._refusing_another_model(chosen):
            return self._read_and_verify(chosen, read, look) if overlaps else read(fitting)

    def _verify(self, path: Path) -> dict[str, Any]:
        """What rank 0 alone looks at: manifest, marker, sizes, and who has saved it; whether there is more to read."""
        if not path.exists():
            raise CheckpointMismatch(
                f"There is no checkpoint at {path}. Give a path that exists, such as "
                f"lightning_distplus.newest_valid({str(path.parent)!r}), or ckpt_path='auto': the newest valid one of "
                "this run's folder, or a fresh start."
            )
        found, verification = catalog.state(path), self._strategy.verify
        if found is catalog.CheckpointState.UNMANIFESTED:
            _check_unmanifested(path, verification)
            return {"path": str(path), "has_manifest": False, "has_files": False, "is_file": path.is_file()}
        if found is not catalog.CheckpointState.COMMITTED or verification != "off":
            catalog.verify_or_raise(path, "size")
        saved_by, engine = engine_in(catalog.read_manifest(path)), engine_of(type(self._strategy))
        if path.is_dir() and saved_by != engine:
            raise CheckpointMismatch(
                f"The checkpoint {path} was saved by {saved_by}; this run uses {engine}, which cannot read its "
                f"shards. Resume with {saved_by}, or make one file of it: distplus export {path} "
                f"{path.with_name(f'{path.stem}-whole{path.suffix}')}"
            )
        has_files, is_file = verification == "full", path.is_file()
        return {"path": str(path), "has_manifest": True, "has_files": has_files, "is_file": is_file}

    def _read_and_verify(
        self, path: Path, read: Callable[[Path], dict[str, Any]], look: Callable[[], list[str]]
    ) -> dict[str, Any]:
        """Reads a file while another thread compares its bytes; what is wrong with those comes before other errors."""
        checkpoint: dict[str, Any] = {}
        error: Exception | None = None
        with ThreadPoolExecutor(1, "distplus-verifier") as verifier:
            findings = verifier.submit(look)
            try:
                checkpoint = read(path)
            except Exception as caught:  # a torn file is hard to read; all ranks hear first that it is torn
                error = caught
        self.verdicts.hear("checkpoint-bytes", path, findings.result())
        if error is not None:
            raise error
        return checkpoint

    def _take_generators(self, checkpoint: dict[str, Any]) -> None:
        """Keeps the states of this rank's generators for the start of the training."""
        ours = checkpoint.get(KEY)
        if ours is None:
            return
        if ours["version"] != VERSION:
            raise CheckpointMismatch(
                f"The checkpoint holds version {ours['version']} of lightning_distplus' state; this version reads "
                f"{VERSION}. Install the version that wrote it."
            )
        if len(ours["rng"]) == self._world.size:
            self._rng = ours["rng"][self._world.rank]
        elif self._world.rank == 0:
            message = "the checkpoint holds the random states of %d ranks, this run has %d: they start afresh"
            log.warning(message, len(ours["rng"]), self._world.size)

    def restore_rng(self) -> None:
        """Puts this rank's generators back to where the checkpoint left them."""
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None

    def follow(self, path: Path) -> None:
        """What is saved from now on has this checkpoint before it."""
        if self._world.rank == 0:
            report = catalog.look(path)
            self.parent = report.reference
            self.parent_committed_at = report.manifest.committed_at if report.ok and report.manifest else 0.0

    @contextmanager
    def _refusing_another_model(self, path: Path | None = None) -> Iterator[None]:
        """Turns what torch, DCP and DeepSpeed say of weights that do not fit into one error."""
        try:
            yield
        except (RuntimeError, KeyError, ValueError, CheckpointException) as error:
            # The lines that name tensors, without the frames of the ranks on which they were found.
            lines = [line.strip() for line in str(error).splitlines()]
            named = [line for line in lines if any(sign in line.lower() for sign in _SIGNS_OF_ANOTHER_MODEL)]
            if isinstance(error, DistplusError) or not named:
                raise
            differences = "; ".join(dict.fromkeys(named))[:_DIFFERENCES_CHARACTERS]
            raise CheckpointMismatch(
                f"The checkpoint {path or self._loaded} is of another model than this run's: {differences}. Build the "
                "model that was saved, or start without ckpt_path."
            ) from error

    # -- what is in memory then --------------------------------------------------------------------------------------

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool, parent: Callable[..., None]) -> None:
        """The parent's part, whose result is compared with what was saved."""
        changed = self._changed_since_read(checkpoint)
        with self._refusing_another_model():
            parent(checkpoint, strict)
        if self._strategy.lightning_restore_optimizer:
            self.compare((_WEIGHTS,), changed)

    def load_optimizers(self, checkpoint: Mapping[str, Any], parent: Callable[..., None]) -> None:
        """The parent's part, whose result is compared with what was saved."""
        changed = self._changed_since_read(checkpoint)
        parent(checkpoint)
        if self._strategy.lightning_restore_optimizer:
            self.compare((_MOMENTS,), changed)

    def _changed_since_read(self, checkpoint: Mapping[str, Any]) -> set[str]:
        """The tensors that hooks have put in the place of what was read, or written to."""
        now = _versions(checkpoint)
        return {
            name
            for name, (tensor, version) in self._as_read.items()
            if name not in now or now[name][0]() is not tensor() or now[name][1] != version
        }

    def compare(self, kinds: tuple[str, ...], changed: Collection[str] = (), *, are_shards: bool = False) -> None:
        """Compares tensors of these kinds in memory with the manifest's fingerprints. All ranks call it together.

        What hooks have changed on purpose before it was restored is left out. Shards of the ranks are added up.
        """
        strategy, module = self._strategy, self._strategy.lightning_module
        assert module is not None
        if module.trainer.state.fn != "fit":
            kinds = (_WEIGHTS,)
        expected = {name: text for name, text in self._expected.items() if name.startswith(kinds)}
        if not expected:
            return
        strategy.marks.set("compare what is loaded with what was saved")
        expected = {name: text for name, text in expected.items() if name not in changed}
        total = sums_of_pieces(piece for piece in pieces_of_live(strategy) if piece.name in expected)
        if are_shards and strategy.world_size > 1:
            total = self._added_up(expected, total)
        odd = differing(expected, total).items() if strategy.is_global_zero or not are_shards else ()
        self.verdicts.hear(
            "checkpoint-tensors",
            self._loaded,
            [f"{name}: expected fingerprint {want}, found {found} in memory" for name, (want, found) in odd],
            'Resume from another checkpoint. A model that changes its weights while it loads them needs verify="size".',
        )

    def _added_up(self, expected: Mapping[str, str], mine: Sums) -> Sums:
        """What all ranks hold together of the tensors that are expected."""
        facts = {name: (text.split()[0], int(text.split()[1])) for name, text in expected.items()}
        counts = torch.zeros(len(facts), 3, dtype=torch.int64)
        for row, (name, fact) in zip(counts, facts.items(), strict=True):
            if name in mine and mine[name][:2] == fact:
                row[:] = torch.tensor([number - (number >> 63 << 64) for number in mine[name][2:]])
        dist.all_reduce(counts, group=self.group())
        return {
            name: (*fact, counted, first % (1 << 64), second % (1 << 64))
            for (name, fact), (counted, first, second) in zip(facts.items(), counts.tolist(), strict=True)
        }

    def group(self) -> dist.ProcessGroup | None:
        """A group whose time-out is always that of a checkpoint; its first use forms it, on all ranks."""
        strategy = self._strategy
        if strategy.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=strategy.phases.patience_in(Phase.CHECKPOINT))
            strategy.phases.spare(self._group)
        return self._group

    def end(self) -> None:
        """The run ends, and its process groups with it."""
        self._group = None


def _deadlines_in(path: Path) -> dict[str, Any]:
    # Nobody trusts this checkpoint yet: whatever is wrong with it, the load says so.
    with suppress(CheckpointCorrupt, CheckpointMismatch, OSError):
        return catalog.read_manifest(path).deadlines_s
    return {}


def _fetched(copies: Copies, search: Search) -> Path | None:
    found = copies.fetch_newest(search.folder)
    if found is not None:
        log.warning("%s holds no valid checkpoint; %s is fetched from %s", search.folder, found.name, copies.url)
    else:
        catalog.newest_in(search.folder, verify="size", allow_fresh=search.allow_fresh)  # refuses what is not sound
    return found


def _read(path: Any, *, weights_only: bool | None, parent: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The parent's part, which runs no code of the checkpoint unless the caller, or torch's variable, trusts it."""
    if weights_only is False or env.TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD.get() in _TRUE:
        return parent(path, weights_only)
    with _compat.refusing_code(path, _TRUST):
        return parent(path, weights_only)


def _versions(checkpoint: Mapping[str, Any]) -> dict[str, tuple[ReferenceType[Tensor], int]]:
    """Each tensor, without keeping it in memory, and how often it was written to."""
    return {name: (ref(tensor), tensor._version) for name, tensor in named_tensors(checkpoint)}


def _check_unmanifested(path: Path, verification: Verification) -> None:
    findings = () if verification == "off" else catalog.check_unmanifested(path)
    if not findings or origin_of(path) is not None:  # a folder of another program looks damaged here
        refuse_foreign(path)
    if findings:
        raise CheckpointCorrupt(
            f"The checkpoint {path} was not committed by lightning_distplus and cannot be loaded: {findings[0]}. "
            "Give another checkpoint, or restore the file from a copy."
        )
    log.warning("%s was not committed by lightning_distplus; it is loaded unverified", path)


def _comparable(path: Path, tensors: Mapping[str, str], *, is_heard: bool) -> dict[str, str]:
    """The fingerprints of a manifest that can be compared with what is in memory."""
    found = {name: text for name, text in tensors.items() if is_current(text)}
    if is_heard and len(found) < len(tensors):
        log.warning(
            "%s was saved by an older lightning_distplus, whose fingerprints of tensors are not compared any more: "
            "its files are verified, its tensors in memory are not. The next save has the new ones.",
            path,
        )
    return found
