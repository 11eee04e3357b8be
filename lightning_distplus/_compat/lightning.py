"""What Lightning and torch's data loader keep to themselves: loops of the Trainer, its signals, worker processes.

A function that takes the place of something returns whether it was there.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_distplus._compat import (
    probed,
    replace_method,
    replaced,
    restore_method,
    warn_once,
    wrap_class,
    wrap_method,
)

__all__ = [
    "WorkerInit",
    "accumulates",
    "add_to_worker_signals",
    "agree_on_resume",
    "before_scripts_of_ranks",
    "choose_checkpoints",
    "find_more_last_checkpoints",
    "give_mesh",
    "handle_errors_of_forks",
    "logged_metric",
    "logger_connector",
    "may_stop_early",
    "prepare_workers",
    "replace_batch_broadcast",
    "replace_checkpoint_link",
    "replace_preparation_barrier",
    "replace_sigterm_notifier",
    "replace_stock_signals",
    "restart_steps_for_loggers",
    "restore_batch_broadcast",
    "restore_checkpoint_link",
    "restore_sigterm_notifier",
    "restore_step_hooks",
    "restore_worker_signals",
    "skip_step_hooks",
    "skips_backward",
    "steps_for_loggers",
    "stop_child_observer",
    "synced_metrics",
    "tensor_parallel_size",
    "validates_now",
    "validation_interval",
]

_CONNECTORS = "lightning.pytorch.trainer.connectors"
_FRAMES_TO_METRIC = 3  # between strategy.reduce and the metric that is logged stands at most a partial's own frame


def stop_child_observer() -> None:
    """Leaves the end of this process to the watchdog.

    Lightning's launcher looks every five seconds for ranks that have ended badly, and kills this process, which started
    them, before it could say what happened.
    """
    for thread in threading.enumerate():
        if type(thread).__name__ == "_ChildProcessObserver":
            consequence = "a run may be killed before it has said which rank has failed"
            replace_method(thread, "_run", lambda: True, consequence)


# -- loops -------------------------------------------------------------------------------------------------------------


def replace_batch_broadcast(trainer: Any, gate: Callable[[], None]) -> bool:
    """Puts ``gate`` in the place of the broadcast that Lightning issues on the default group before every batch.

    That broadcast carries one bit (SIGTERM on rank 0) and swallows its own errors (lightning 2.6.6,
    ``training_epoch_loop.py`` 259-272); it runs only when a process group exists.
    """
    consequence = "ranks are not compared before each step"
    return replace_method(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", gate, consequence)


def restore_batch_broadcast(trainer: Any) -> None:
    """Puts the stock broadcast back."""
    restore_method(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor")


def logged_metric(frame: FrameType | None) -> tuple[str, str] | None:
    """What Lightning is about to reduce for ``self.log(..., sync_dist=True)``, read off the frames of its callers.

    Args:
        frame: The caller of ``strategy.reduce``.

    Returns:
        The hook and the key, as in ``"training_step.loss"``, and ``"step"`` or ``"epoch"``; None for any other call.
    """
    module = importlib.import_module(f"{_CONNECTORS}.logger_connector.result")
    metric = probed(module, "_ResultMetric", "a reduction of a logged value is not named after its key")
    if metric is None:
        return None
    moments = {metric.update.__code__: "step", metric.compute.__code__: "epoch"}
    for _ in range(_FRAMES_TO_METRIC):
        if frame is None:
            return None
        if moment := moments.get(frame.f_code):
            meta = getattr(frame.f_locals["self"], "meta", None)
            return f"{getattr(meta, 'fx', '')}.{getattr(meta, 'name', '')}", moment
        frame = frame.f_back
    return None


def synced_metrics(trainer: Any) -> list[str]:
    """The logged metrics, in order, that Lightning will reduce over all ranks at the end of this epoch."""
    found, consequence = [], "the names of logged metrics are not compared"
    if not hasattr(trainer, "_results"):
        warn_once("Trainer._results", consequence)
    for key, metric in (getattr(trainer, "_results", None) or {}).items():
        meta = getattr(metric, "meta", None)
        if meta is None or not hasattr(meta, "sync"):
            warn_once("_ResultMetric.meta.sync", consequence)
            return []
        if meta.on_epoch and (meta.sync.should or not metric.is_tensor):
            found.append(str(key))
    return found


def logger_connector(trainer: Any) -> Any:
    """What reduces the metrics of a validation; None where it is not there."""
    return probed(trainer, "_logger_connector", "the names of metrics in validation are not compared")


def validation_interval(trainer: Any) -> float | None:
    """Seconds between two validations, where they come by the clock: at different steps on different ranks."""
    name = "_val_check_time_interval"
    if not hasattr(trainer, name):
        warn_once(f"Trainer.{name}", "validations by the clock are not agreed upon")
    return getattr(trainer, name, None)


def accumulates(trainer: Any) -> bool:
    """Whether the batch that has just run was inside an accumulation window, so that no optimizer step followed it."""
    consequence = "a wish to stop is agreed upon after every micro-batch"
    asked = probed(trainer.fit_loop.epoch_loop, "_should_accumulate", consequence)
    return asked is not None and bool(asked())


def validates_now(trainer: Any, *arguments: Any) -> bool:
    """Whether this rank's loop, asked with Lightning's own arguments, wants to validate after the batch."""
    consequence = "a validation by the clock is not agreed upon"
    asked = probed(trainer.fit_loop.epoch_loop, "_should_check_val_fx", consequence)
    return asked is not None and bool(asked(*arguments))


def skips_backward(trainer: Any) -> bool:
    """Whether steps go without gradients now: ``StochasticWeightAveraging`` renews the statistics of batch norm."""
    consequence = "the monitor takes the last epoch of weight averaging for wrong"
    return bool(probed(trainer.fit_loop, "_skip_backward", consequence))


def may_stop_early(trainer: Any) -> bool:
    """Whether the fewest steps and epochs that the user asked for are done."""
    consequence = "a run that stops early may leave its last validation out"
    return bool(probed(trainer.fit_loop, "_can_stop_early", consequence))


_LOGGED_STEPS = "_batches_that_stepped"  # in the saved state of Lightning's loop


def steps_for_loggers(trainer: Any) -> int | None:
    """How many steps the loggers have seen."""
    state = trainer.fit_loop.epoch_loop.on_save_checkpoint()
    if _LOGGED_STEPS not in state:
        warn_once(f"_TrainingEpochLoop.{_LOGGED_STEPS}", "loggers may count a step twice after a preemption")
    return state.get(_LOGGED_STEPS)  # type: ignore[no-any-return]


def restart_steps_for_loggers(trainer: Any, number: int) -> None:
    """Has the loggers count from here on."""
    trainer.fit_loop.epoch_loop.on_load_checkpoint({_LOGGED_STEPS: number})


_STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


def skip_step_hooks(callback: Callback, *done: str) -> None:
    """Keeps Lightning from calling the hooks of a step that a callback does not have: each call takes microseconds.
    Those that are ``done`` it has, and needs no more in this run.
    """
    if _skips_what_is_not_callable():
        own = vars(callback)
        for name in _STEP_HOOKS:
            if name in done or (name not in own and getattr(type(callback), name) is getattr(Callback, name)):
                own[name] = None


def restore_step_hooks(callback: Callback) -> None:
    """Undoes ``skip_step_hooks``."""
    for name in _STEP_HOOKS:
        if vars(callback).get(name, name) is None:
            del vars(callback)[name]


@functools.cache
def _skips_what_is_not_callable() -> bool:
    """Whether Lightning asks before it calls a hook (lightning 2.6.6, ``trainer/call.py`` 226)."""
    call = getattr(importlib.import_module("lightning.pytorch.trainer.call"), "_call_callback_hooks", None)
    trainer = SimpleNamespace(
        lightning_module=None,
        callbacks=[SimpleNamespace(on_train_batch_start=None, state_key="")],
        profiler=PassThroughProfiler(),
    )
    try:
        call(trainer, "on_train_batch_start")  # type: ignore[misc]
    except Exception:
        warn_once("trainer.call._call_callback_hooks", "a step takes some microseconds more")
        return False
    return True


# -- the start of a run, and its checkpoints ---------------------------------------------------------------------------


def replace_preparation_barrier(trainer: Any, barrier: Callable[[], Any]) -> bool:
    """Puts the context manager that ``barrier`` makes in the place of the one around the next ``prepare_data``.

    Lightning's waits 10,000 days, and waits so too where ``prepare_data`` has raised on one rank (lightning 2.6.6,
    ``data_connector.py`` 93 and 100).
    """
    connector = getattr(trainer, "_data_connector", None)
    module = importlib.import_module(f"{_CONNECTORS}.data_connector")
    consequence = "ranks wait for prepare_data without a deadline"

    def prepare_once(prepare: Callable[[], None]) -> None:
        restore_method(connector, "prepare_data")
        with replaced((module,), "_InfiniteBarrier", barrier, consequence):
            prepare()

    is_there = probed(module, "_InfiniteBarrier", consequence) is not None
    return is_there and wrap_method(connector, "prepare_data", prepare_once, consequence)


def agree_on_resume(trainer: Any, agree: Callable[[Any], Any]) -> bool:
    """Has the next run of ``trainer`` resume from what ``agree`` makes of this rank's ``ckpt_path``.

    Lightning resolves ``"last"`` and ``"hpc"`` on each rank by itself (lightning 2.6.6, ``checkpoint_connector.py``
    158-230), so that some may resume while others start anew.
    """
    connector = getattr(trainer, "_checkpoint_connector", None)

    def resume_once(resume: Callable[..., None], path: Any = None, *arguments: Any, **named: Any) -> None:
        restore_method(connector, "resume_start")
        resume(agree(path), *arguments, **named)

    return wrap_method(connector, "resume_start", resume_once, "each rank resumes from what it has found itself")


def choose_checkpoints(choose: Callable[[Any, Any], Any]) -> bool:
    """Has each run, in this process, begin from what ``choose`` makes of the ``ckpt_path`` that it was called with.

    Lightning settles the path before its strategy hears of the run (2.6.6, ``trainer.py`` 630), so that the class is
    changed, once. A path that was set as ``trainer.ckpt_path`` is the user's choice as well.
    ``choose`` is given the Trainer and the path, or None.
    """
    module = importlib.import_module(f"{_CONNECTORS}.checkpoint_connector")

    def selected(select: Any, connector: Any, state_fn: Any, ckpt_path: Any, *arguments: Any, **named: Any) -> Any:
        if ckpt_path is not None or not getattr(connector, "_user_managed", False):
            ckpt_path = choose(connector.trainer, ckpt_path)
        return select(connector, state_fn, ckpt_path, *arguments, **named)

    consequence = 'ckpt_path="auto" and restarted scripts find no checkpoint'
    return wrap_class(getattr(module, "_CheckpointConnector", None), "_select_ckpt_path", selected, consequence)


def find_more_last_checkpoints(find: Callable[[Any, Any, str], set[str]]) -> bool:
    """Has ``ckpt_path="last"`` look, in every run of this process, at what ``find`` names as well.

    Lightning looks at the folder before its strategy hears of the run (2.6.6, ``model_checkpoint.py`` 867), so that the
    class is changed, once.
    ``find`` is given a ModelCheckpoint, the Trainer and the folder.
    """
    owner = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint
    consequence = 'ckpt_path="last" does not see what a killed save left aside'
    folder_of = probed(owner, "_ModelCheckpoint__resolve_ckpt_dir", consequence)

    def search_more(search: Any, callback: Any, trainer: Any) -> set[str]:
        return set(search(callback, trainer)) | find(callback, trainer, str(folder_of(callback, trainer)))

    return folder_of is not None and wrap_class(owner, "_find_last_checkpoints", search_more, consequence)


def before_scripts_of_ranks(launcher: Any, call: Callable[[], None]) -> None:
    """Calls ``call`` in rank 0 just before it starts the script once more for each other rank of its host.
    Only a launcher of scripts does so (lightning 2.6.6, ``strategies/launchers/subprocess_script.py``). ``call`` sets
    in the environment what they are to find there.
    """

    def start(inner: Callable[[], None]) -> None:
        call()
        inner()

    if hasattr(launcher, "_call_children_scripts"):
        wrap_method(launcher, "_call_children_scripts", start, "a rank whose rank 0 was killed waits for the deadline")


def handle_errors_of_forks(launcher: Any, before: Callable[[Any], object]) -> None:
    """Handles an error in a rank that is forked from a notebook as Lightning does in any other: there it asks no hook.
    Only a launcher that forks is compatible with a notebook (lightning 2.6.6,
    ``strategies/launchers/multiprocessing.py``, ``_wrapping_function``). ``before`` is told the Trainer before.
    """
    consequence = "a notebook shows no verdict on an error"

    def launch(inner: Any, function: Any, *arguments: Any, trainer: Any = None, **named: Any) -> Any:
        if trainer is not None:
            before(trainer)
        return inner(functools.partial(run, trainer, function), *arguments, trainer=trainer, **named)

    def run(trainer: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except BaseException as error:
            interrupt = probed(importlib.import_module("lightning.pytorch.trainer.call"), "_interrupt", consequence)
            if interrupt is not None and trainer is not None:
                interrupt(trainer, error)
            raise

    if launcher is not None and launcher.is_interactive_compatible:
        wrap_method(launcher, "launch", launch, consequence)


def replace_checkpoint_link(callback: Any, link: Callable[[Any, str, str], None]) -> bool:
    """Puts ``link`` in the place of a ModelCheckpoint's for ``save_last="link"``, which removes the old link first."""
    consequence = 'with save_last="link" there are moments without a link'
    return hasattr(callback, "save_last") and replace_method(callback, "_link_checkpoint", link, consequence)


def restore_checkpoint_link(callback: Any) -> None:
    """Puts a ModelCheckpoint's own method back."""
    restore_method(callback, "_link_checkpoint")


# -- signal handlers ---------------------------------------------------------------------------------------------------

_WORKER_SIGNALS = "torch.utils.data._utils.signal_handling"


def replace_sigterm_notifier(trainer: Any, handler: Callable[[int, Any], None]) -> bool:
    """Puts ``handler`` in the place of Lightning's SIGTERM handler, which broadcasts inside the signal.

    Takes effect when the Trainer registers its handlers, after the strategy's set-up.
    """
    connector = getattr(trainer, "_signal_connector", None)
    return replace_method(connector, "_sigterm_notifier_fn", handler, "a SIGTERM may block this rank in a broadcast")


def restore_sigterm_notifier(trainer: Any) -> None:
    """Puts Lightning's SIGTERM handler back."""
    if (connector := getattr(trainer, "_signal_connector", None)) is not None:
        restore_method(connector, "_sigterm_notifier_fn")


def replace_stock_signals(trainer: Any, restore: Callable[[], None]) -> bool:
    """Keeps Lightning from registering signal handlers in the next run of this Trainer.

    Its SIGTERM handler broadcasts, and its Slurm handler saves, inside the signal (lightning 2.6.6,
    ``signal_connector.py`` 58-118).
    The Trainer does so after the strategy's set-up. ``restore`` is called once, when it would put back the handlers
    that it found; Lightning's are back then.
    """
    connector: Any = getattr(trainer, "_signal_connector", None)
    name, consequence = "register_signal_handlers", "Lightning's own signal handlers stand before ours"
    if not replace_method(connector, name, lambda: None, consequence):
        return False

    def teardown() -> None:
        restore_method(connector, name)
        restore_method(connector, "teardown")
        restore()

    connector.received_sigterm = False
    connector.teardown = teardown
    return True


def add_to_worker_signals(also: Callable[[], None]) -> bool:
    """Calls ``also`` in each data worker that is forked from now on, once torch has set its signal handlers there.

    Torch's own handler ends a worker on SIGTERM, whoever sends it, and the step that needs its batch fails (torch
    2.13, ``signal_handling.py``).
    """
    module = importlib.import_module(_WORKER_SIGNALS)
    consequence = "a SIGTERM to all processes ends data workers"
    original = probed(module, "_set_worker_signal_handlers", consequence)
    if original is None:
        return False

    def set_handlers() -> None:
        original()
        also()

    vars(module).setdefault("_distplus_original", original)
    setattr(module, "_set_worker_signal_handlers", set_handlers)  # noqa: B010  # mypy refuses the attribute
    return True


def restore_worker_signals() -> None:
    """Undoes ``add_to_worker_signals``."""
    module = importlib.import_module(_WORKER_SIGNALS)
    if original := vars(module).pop("_distplus_original", None):
        setattr(module, "_set_worker_signal_handlers", original)  # noqa: B010


# -- data workers ------------------------------------------------------------------------------------------------------

WorkerInit = Callable[[int], None]


def prepare_workers(prepare: Callable[[Any], WorkerInit | None]) -> Callable[[], None]:
    """Starts all data workers of this process with ``prepare(loader)`` as their ``worker_init_fn``.

    The loader gets its own one back at once: Lightning, which seeds workers, looks whether there is one.

    Returns:
        What undoes it.
    """
    consequence = "data workers that are not forked do not show their stacks when they hang"
    module = importlib.import_module("torch.utils.data.dataloader")
    iterator = probed(module, "_MultiProcessingDataLoaderIter", consequence)
    if iterator is None:
        return lambda: None
    original = iterator.__init__

    def start_workers(self: Any, loader: Any) -> None:
        own = loader.worker_init_fn
        loader.worker_init_fn = prepare(loader)
        try:
            original(self, loader)
        finally:
            loader.worker_init_fn = own

    def undo() -> None:
        iterator.__init__ = original

    iterator.__init__ = start_workers
    return undo


# -- how strategies hold a model ---------------------------------------------------------------------------------------


def tensor_parallel_size(strategy: ModelParallelStrategy) -> int | None:
    """None where it is as large as a node ("auto")."""
    size = probed(strategy, "_tensor_parallel_size", "a rehearsal takes a host for the size of tensor parallelism")
    return size if isinstance(size, int) else None


def give_mesh(strategy: Any, model: Any, mesh: Any) -> None:
    """Puts a device mesh where ``configure_model`` looks for it, without setting up the strategy."""
    for owner in (strategy, model):
        if not hasattr(type(owner), "device_mesh"):
            warn_once(f"{type(owner).__name__}.device_mesh", "a model that asks for its mesh is not rehearsed")
            return
        owner._device_mesh = mesh
