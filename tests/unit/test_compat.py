"""Every private upstream name on which we rely is there; without it, its feature goes off with one warning."""

from __future__ import annotations

import importlib
import inspect
import logging
import signal
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.call import _call_callback_hooks
from torch.distributed import distributed_c10d as c10d

from lightning_distplus import _compat
from lightning_distplus.testing import spawn

NAMES = [  # beside those that the tests below take away, or look at
    # torch: process groups and stores
    "torch._C._distributed_c10d:HashStore.clone",
    "torch._C._distributed_c10d:PrefixStore.clone",
    "torch._C._distributed_c10d:TCPStore.clone",
    "torch.distributed.distributed_c10d:_world.pg_map",
    "torch.distributed.distributed_c10d:_get_default_store",
    "torch.distributed:ProcessGroup._get_backend",
    "torch._C._distributed_c10d:ProcessGroupGloo._set_default_timeout",
    "torch._C._distributed_c10d:ProcessGroupGloo.options",
    "torch._C._distributed_c10d:ProcessGroupGloo._Options._timeout",
    # torch and DeepSpeed: gradients and state inside the engines
    "torch.distributed.fsdp._flat_param:FlatParameter._init_metadata",
    "torch.distributed.fsdp._common_utils:FSDP_FLATTENED",
    "torch.distributed.fsdp._state_dict_utils:FSDP_PREFIX",
    "torch.distributed._checkpointable:_Checkpointable.__create_chunk_list__",
    # what unpickles a checkpoint
    "torch.distributed.checkpoint.filesystem:pickle.load",
    "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    "lightning.pytorch.strategies.fsdp:_lazy_load",
    "deepspeed.checkpoint.universal_checkpoint:SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
    "deepspeed.runtime.engine:DeepSpeedEngine._optimizer_has_ckpt_event_epilogue",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._update_scale",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._update_scale",
    "torch.distributed.fsdp:ShardingStrategy._HYBRID_SHARD_ZERO2",
    # Lightning: the broadcast of each batch, signals, checkpoints
    "lightning.pytorch.loops.fit_loop:_FitLoop._skip_backward",
    "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector.teardown",
    "lightning.pytorch.trainer.connectors.data_connector:_DataConnector.prepare_data",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric.update",
    "lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric.compute",
    "lightning.pytorch.trainer.call:_interrupt",
    "lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher._call_children_scripts",
    "lightning.fabric.utilities.distributed:_destroy_dist_connection",
    "lightning.fabric.strategies.model_parallel:_has_dtensor_modules",
    "lightning.fabric.strategies.model_parallel:_rekey_optimizer_state_if_needed",
    "lightning.pytorch.strategies.fsdp:_materialize_tensors",
    # Lightning: the methods and attributes of the parents that the strategies override or use
    "lightning.pytorch.strategies:DDPStrategy._register_ddp_hooks",
    "lightning.pytorch.strategies:DDPStrategy._get_process_group_backend",
    "lightning.pytorch.strategies:Strategy._configure_launcher",
    "lightning.pytorch.strategies:FSDPStrategy._setup_model",
    "lightning.pytorch.strategies:FSDPStrategy._get_process_group_backend",
    "lightning.pytorch.strategies:ModelParallelStrategy._get_process_group_backend",
    "lightning.pytorch.strategies:DeepSpeedStrategy._init_deepspeed_distributed",
    "lightning.pytorch.strategies:DeepSpeedStrategy._get_process_group_backend",
]
ATTRIBUTES = {
    "DDPStrategy": ["_ddp_comm_state", "_ddp_comm_hook", "_ddp_comm_wrapper"],
    "ModelParallelStrategy": ["_data_parallel_size", "_tensor_parallel_size", "_device_mesh"],
}


def _is_there(name: str) -> bool:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def test_every_private_name_is_there() -> None:
    vanished = [name for name in NAMES if not _is_there(name)]
    assert not vanished, f"{vanished}: give _compat another way, or switch the feature off there"


def test_every_private_attribute_of_a_parent_is_there() -> None:
    for strategy, names in ATTRIBUTES.items():
        made = getattr(importlib.import_module("lightning.pytorch.strategies"), strategy)()
        vanished = [f"{strategy}.{name}" for name in names if not hasattr(made, name)]
        assert not vanished


def test_full_state_dict_context_has_the_signature_that_we_replace() -> None:
    for module in ("lightning.pytorch.strategies.fsdp", "lightning.fabric.strategies.model_parallel"):
        original = importlib.import_module(module)._get_full_state_dict_context
        assert list(inspect.signature(original).parameters) == list(
            inspect.signature(_compat.engines._full_state_dict_on_cpu).parameters
        )


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default group; it is not handed over, because a reference to it would keep its socket open."""
    monkeypatch.setattr(_compat, "_warned", set())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(_compat, "_warned", set())
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def _entered(block: Any) -> Any:
    with block as made:
        return made


CONNECTORS = "lightning.pytorch.trainer.connectors"
SAVER = "lightning.pytorch.callbacks.ModelCheckpoint"
LOOPS = "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop"


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("torch.distributed.distributed_c10d._get_default_timeout",
         lambda trainer: _entered(_compat.default_group_timeout(timedelta(seconds=5)))),
        ("torch._C._distributed_c10d._dump_fr_trace_json",
         lambda trainer: _compat.flight_recorder_dumps(with_collectives=True)),
        ("torch.utils.data._utils.signal_handling._set_worker_signal_handlers",
         lambda trainer: _compat.add_to_worker_signals(print)),
        ("torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
         lambda trainer: _compat.prepare_workers(lambda loader: None)()),
        ("torch.testing._internal.distributed.fake_pg.FakeStore",
         lambda trainer: _entered(_compat.fake_default_group(2))),
        ("lightning.pytorch.overrides.distributed._register_ddp_comm_hook",
         lambda trainer: _compat.register_ddp_comm_hook(None, None, None, None)),
        ("lightning.pytorch.strategies.fsdp._distributed_checkpoint_save",
         lambda trainer: _entered(_compat.replacing_sharded_saves(print))),
        (f"{LOOPS}._broadcast_sigterm_tensor", lambda trainer: _compat.replace_batch_broadcast(trainer, print)),
        (f"{CONNECTORS}.signal_connector._SignalConnector._sigterm_notifier_fn",
         lambda trainer: _compat.replace_sigterm_notifier(trainer, print)),
        (f"{CONNECTORS}.signal_connector._SignalConnector.register_signal_handlers",
         lambda trainer: _compat.replace_stock_signals(trainer, print)),
        (f"{CONNECTORS}.data_connector._InfiniteBarrier",
         lambda trainer: _compat.replace_preparation_barrier(trainer, object)),
        (f"{CONNECTORS}.checkpoint_connector._CheckpointConnector.resume_start",
         lambda trainer: _compat.agree_on_resume(trainer, str)),
        (f"{CONNECTORS}.checkpoint_connector._CheckpointConnector._select_ckpt_path",
         lambda trainer: _compat.choose_checkpoints(print)),
        (f"{CONNECTORS}.logger_connector.result._ResultMetric",
         lambda trainer: _compat.logged_metric(inspect.currentframe())),
        (f"{SAVER}._find_last_checkpoints", lambda trainer: _compat.find_more_last_checkpoints(print)),
        (f"{SAVER}._link_checkpoint", lambda trainer: _compat.replace_checkpoint_link(ModelCheckpoint(), print)),
    ],
)  # fmt: skip
def test_without_a_name_its_feature_is_off_with_one_warning(
    name: str, use: Callable[[Trainer], Any], trainer: Trainer, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.delattr(name)
    assert [bool(use(trainer)) for _ in range(2)] == [False, False]
    (warning,) = _warnings(caplog)
    assert f"{name.rpartition('.')[2]} is not in this version of its library" in warning


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (_compat.logger_connector, "_logger_connector"),
        (_compat.synced_metrics, "_results"),
        (_compat.validation_interval, "_val_check_time_interval"),
        (_compat.non_persistent_buffers, "_non_persistent_buffers_set"),
        (_compat.tensor_parallel_size, "_tensor_parallel_size"),
        (lambda stub: _compat.steps_for_loggers(SimpleNamespace(fit_loop=stub)), "_batches_that_stepped"),
    ],
)
def test_without_an_attribute_of_an_object_its_feature_is_off_with_one_warning(
    use: Callable[[Any], Any], name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_compat, "_warned", set())
    stub = SimpleNamespace(epoch_loop=SimpleNamespace(on_save_checkpoint=dict))
    assert not any(use(stub) for _ in range(2))
    (warning,) = _warnings(caplog)
    assert f"{name} is not in this version of its library" in warning


def test_a_trainer_has_what_is_asked_of_it(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    by_the_clock = Trainer(accelerator="cpu", logger=False, val_check_interval="00:00:01:30")
    assert (_compat.validation_interval(trainer), _compat.validation_interval(by_the_clock)) == (None, 90)
    assert _compat.logger_connector(trainer) is trainer._logger_connector
    assert _compat.synced_metrics(trainer) == []
    _compat.restart_steps_for_loggers(trainer, 7)
    assert _compat.steps_for_loggers(trainer) == 7
    assert not _warnings(caplog)


def test_time_outs_of_a_live_group_can_be_read_and_set(group: None) -> None:
    assert _compat.process_groups() == [dist.group.WORLD]
    assert _compat.read_group_timeout(dist.group.WORLD) == timedelta(seconds=77)
    _compat.set_group_timeout(dist.group.WORLD, timedelta(seconds=5))
    assert _compat.read_group_timeout(dist.group.WORLD) == timedelta(seconds=5)


def test_groups_that_a_library_makes_inside_the_block_get_its_time_out(group: None) -> None:
    original = c10d._get_default_timeout
    with _compat.default_group_timeout(timedelta(seconds=9)):
        inside = dist.new_group([0])
    assert _compat.read_group_timeout(inside) == timedelta(seconds=9)
    assert c10d._get_default_timeout is original


def test_without_the_list_of_groups_the_default_group_is_left(group, monkeypatch, caplog) -> None:
    dist.new_group([0])
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(default_pg=dist.group.WORLD))
    for _ in range(2):
        assert _compat.process_groups() == [dist.group.WORLD]
    monkeypatch.undo()
    assert len(_warnings(caplog)) == 1
    assert "_world.pg_map is not in this version" in _warnings(caplog)[0]


def test_a_backend_without_a_setter_keeps_its_time_out(group, monkeypatch, caplog) -> None:
    class Backend:
        options = None

    monkeypatch.setattr(_compat.torch, "_backends", lambda _group: [Backend()])
    for _ in range(2):
        _compat.set_group_timeout(dist.group.WORLD, timedelta(seconds=5))
    assert _compat.read_group_timeout(dist.group.WORLD) is None
    assert len(_warnings(caplog)) == 1
    assert "Backend._set_default_timeout" in _warnings(caplog)[0]


def test_a_group_that_does_not_tell_its_backends_keeps_its_time_out(group, caplog) -> None:
    for _ in range(2):
        _compat.set_group_timeout(object(), timedelta(seconds=5))
    assert _compat.read_group_timeout(object()) is None
    assert len(_warnings(caplog)) == 1
    assert "ProcessGroup._get_backend" in _warnings(caplog)[0]


def test_the_gate_takes_the_place_of_the_broadcast_and_gives_it_back(trainer: Trainer) -> None:
    loop = trainer.fit_loop.epoch_loop
    assert _compat.replace_batch_broadcast(trainer, gate := lambda: None)
    assert loop._broadcast_sigterm_tensor is gate
    _compat.restore_batch_broadcast(trainer)
    _compat.restore_batch_broadcast(trainer)
    assert loop._broadcast_sigterm_tensor.__func__ is type(loop)._broadcast_sigterm_tensor


def test_the_signal_handler_is_replaced_and_given_back(trainer: Trainer) -> None:
    connector = trainer._signal_connector
    assert _compat.replace_sigterm_notifier(trainer, handler := lambda *_: None)
    assert connector._sigterm_notifier_fn is handler
    _compat.restore_sigterm_notifier(trainer)
    assert connector._sigterm_notifier_fn.__func__ is type(connector)._sigterm_notifier_fn


def test_what_workers_do_with_signals_is_added_to_and_given_back(monkeypatch) -> None:
    module = importlib.import_module("torch.utils.data._utils.signal_handling")
    called: list[str] = []
    monkeypatch.setattr(module, "_set_worker_signal_handlers", torchs := lambda: called.append("torch"))
    assert _compat.add_to_worker_signals(lambda: called.append("ours"))
    module._set_worker_signal_handlers()
    assert called == ["torch", "ours"]
    for _ in range(2):
        _compat.restore_worker_signals()
    assert module._set_worker_signal_handlers is torchs


def test_without_the_full_state_dict_context_there_is_one_warning_per_module(monkeypatch, caplog) -> None:
    monkeypatch.setattr(_compat, "_warned", set())
    module = importlib.import_module("lightning.pytorch.strategies.fsdp")
    original = importlib.import_module("lightning.fabric.strategies.model_parallel")._get_full_state_dict_context
    monkeypatch.delattr(module, "_get_full_state_dict_context")
    for _ in range(2):
        with _compat.full_state_dict_without_offload():
            pass
    assert len(_warnings(caplog)) == 1
    fabric = importlib.import_module("lightning.fabric.strategies.model_parallel")
    assert fabric._get_full_state_dict_context is original
    assert not hasattr(module, "_get_full_state_dict_context")


def test_preparation_barrier_is_ours_for_one_preparation(trainer: Trainer) -> None:
    module = importlib.import_module("lightning.pytorch.trainer.connectors.data_connector")
    original, seen = module._InfiniteBarrier, []
    prepare = trainer._data_connector.prepare_data
    trainer._data_connector.prepare_data = lambda: seen.append(module._InfiniteBarrier)
    barrier = object
    assert _compat.replace_preparation_barrier(trainer, barrier)
    trainer._data_connector.prepare_data()
    assert seen == [barrier]
    assert module._InfiniteBarrier is original
    assert trainer._data_connector.prepare_data == prepare


def test_a_run_resumes_once_from_what_is_agreed(trainer: Trainer, monkeypatch) -> None:
    connector = trainer._checkpoint_connector
    resumed = []
    monkeypatch.setattr(type(connector), "resume_start", lambda self, path, **named: resumed.append((path, named)))
    assert _compat.agree_on_resume(trainer, lambda path: f"agreed {path}")
    connector.resume_start("mine", weights_only=None)
    connector.resume_start("mine")
    assert resumed == [("agreed mine", {"weights_only": None}), ("mine", {})]


def test_a_checkpoint_callback_links_through_us_until_it_is_put_back() -> None:
    saver = ModelCheckpoint(save_last="link")
    links = []
    assert _compat.replace_checkpoint_link(saver, lambda *arguments: links.append(arguments))
    saver._link_checkpoint("trainer", "from", "to")
    assert links == [("trainer", "from", "to")]
    _compat.restore_checkpoint_link(saver)
    assert saver._link_checkpoint is ModelCheckpoint._link_checkpoint
    assert not _compat.replace_checkpoint_link(object(), print)


def test_the_last_checkpoints_are_searched_for_in_more_places(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(ModelCheckpoint, "_find_last_checkpoints", lambda self, trainer: {"stock"})
    saver = ModelCheckpoint(tmp_path)
    for name in ("ours", "twice"):  # the first one stays
        assert _compat.find_more_last_checkpoints(lambda callback, trainer, folder, name=name: {f"{folder}/{name}"})
    assert saver._find_last_checkpoints("trainer") == {"stock", f"{tmp_path}/ours"}


def test_what_a_run_begins_from_can_be_chosen(monkeypatch) -> None:
    owner = type(Trainer(accelerator="cpu", logger=False)._checkpoint_connector)
    monkeypatch.setattr(owner, "_select_ckpt_path", lambda self, fn, path, **named: path)
    for name in ("ours", "twice"):  # the first one stays
        assert _compat.choose_checkpoints(lambda trainer, path, name=name: f"{path} {name}")
    connector = Trainer(accelerator="cpu", logger=False)._checkpoint_connector
    assert connector._select_ckpt_path("fit", None, model_provided=True) == "None ours"
    connector.trainer.ckpt_path = "of the user"
    assert connector._select_ckpt_path("fit", None) is None  # Lightning takes the user's
    assert connector._select_ckpt_path("fit", "auto") == "auto ours"


def throws_in_cpp(words: str) -> None:
    import ctypes

    assert _compat.on_terminate(lambda exception: Path(words).write_text(f"ended by {exception!r}")) is not None
    _compat.on_terminate(lambda exception: None)()  # type: ignore[misc]  # chained and taken out again
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()  # std::terminate


def test_the_end_that_cpp_decides_is_heard_and_stays_what_it_was(tmp_path: Path) -> None:
    run = spawn(throws_in_cpp, 1, args=(str(tmp_path / "words"),))
    assert run.exit_codes == {0: -signal.SIGABRT}
    assert (tmp_path / "words").read_text() == "ended by ''"
    assert "terminate called" in run.logs[0]


def test_the_flight_recorder_is_there() -> None:
    assert _compat.flight_recorder_dumps(with_collectives=False)[0]["version"].startswith("2.")


def test_a_reduction_of_a_logged_value_is_named_and_every_other_one_is_not() -> None:
    result = importlib.import_module("lightning.pytorch.trainer.connectors.logger_connector.result")
    found = []

    def reduce(value: torch.Tensor, **_: object) -> torch.Tensor:
        found.append(_compat.logged_metric(inspect.currentframe().f_back))
        return value

    logged = result._ResultCollection(training=True)
    named = {"on_step": True, "on_epoch": True, "sync_dist": True, "sync_dist_fn": reduce}
    logged.log("training_step", "loss", torch.tensor(1.0), batch_size=1, **named)
    logged.metrics(on_step=False)
    reduce(torch.tensor(1.0))
    key = "training_step.loss"
    assert found == [(key, "step"), (key, "epoch"), (key, "epoch"), None]  # a mean reduces the sum and the count


def test_the_unit_of_an_fsdp_model_tells_its_parameters_in_order(group: None) -> None:
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    model = FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)
    (unit,) = _compat.flat_units(model)
    named = [section for section in unit.sections if section[0] != "padding"]
    assert named == [("0.weight", 12), ("0.bias", 4), ("1.weight", 8)]
    assert unit.local.numel() == unit.parameter.numel() == sum(numel for _, numel in unit.sections)
    assert unit.shard == "", "one rank shards nothing"
    assert _compat.flat_units(inner) == []
    assert all(map(_compat.is_fsdp_shard, inner.parameters()))
    assert not any(map(_compat.is_fsdp_shard, nn.Linear(2, 2).parameters()))


def test_buffers_that_are_not_saved_are_known() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("cache", torch.ones(1), persistent=False)
    assert _compat.non_persistent_buffers(module) == {"cache"}


def test_without_the_scale_of_zero_a_step_is_not_left_out(monkeypatch, caplog) -> None:
    monkeypatch.setattr(_compat, "_warned", set())
    engine = SimpleNamespace(optimizer=SimpleNamespace(step=lambda: None))
    for _ in range(2):
        assert not _compat.discard_next_deepspeed_step(engine)
    assert len(_warnings(caplog)) == 1


def test_an_engine_reads_universal_checkpoints_in_a_block_only() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine = SimpleNamespace(_config=SimpleNamespace(load_universal_checkpoint=False))
    with _compat.loading_universal(engine):
        assert DeepSpeedEngine.load_universal_checkpoint(engine)
    assert not DeepSpeedEngine.load_universal_checkpoint(engine)
    with pytest.raises(RuntimeError, match="load_universal"), _compat.loading_universal(SimpleNamespace()):
        pass


def test_a_file_has_no_crc_in_a_block_and_in_its_thread_only(tmp_path: Path, monkeypatch, caplog) -> None:
    def has_crc(name: str) -> bool:
        torch.save({"weight": torch.ones(3)}, tmp_path / name)
        return any(member.CRC for member in zipfile.ZipFile(tmp_path / name).infolist())

    with _compat.without_crc(), ThreadPoolExecutor(1) as other:
        assert not has_crc("without")
        assert other.submit(has_crc, "other").result()
    assert has_crc("after")
    assert torch.equal(torch.load(tmp_path / "without")["weight"], torch.ones(3))
    serialization = importlib.import_module("lightning_distplus._compat.torch")
    serialization._is_of_one_thread.cache_clear()
    monkeypatch.setattr(serialization, "config", SimpleNamespace())
    with _compat.without_crc():
        assert has_crc("as it is")
    serialization._is_of_one_thread.cache_clear()
    assert len(_warnings(caplog)) == 1


def test_deepspeeds_own_checkpoint_engine_is_known() -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    class Other(TorchCheckpointEngine):
        pass

    assert _compat.calls_torch_save(TorchCheckpointEngine())
    assert not _compat.calls_torch_save(Other())


def test_shards_are_handed_over_in_a_block_instead_of_being_written() -> None:
    modules = [importlib.import_module(f"lightning.pytorch.strategies.{part}") for part in ("fsdp", "model_parallel")]
    stock = [module._distributed_checkpoint_save for module in modules]
    with _compat.replacing_sharded_saves(print):
        assert [module._distributed_checkpoint_save for module in modules] == [print, print]
    assert [module._distributed_checkpoint_save for module in modules] == stock


def test_data_workers_are_prepared_until_that_is_undone() -> None:
    module = importlib.import_module("torch.utils.data.dataloader")
    torchs = module._MultiProcessingDataLoaderIter.__init__
    undo = _compat.prepare_workers(lambda loader: None)
    assert module._MultiProcessingDataLoaderIter.__init__ is not torchs
    undo()
    assert module._MultiProcessingDataLoaderIter.__init__ is torchs


@pytest.mark.parametrize(
    ("ask", "owner", "name"),
    [
        (_compat.accumulates, "epoch_loop", "_should_accumulate"),
        (lambda trainer: _compat.validates_now(trainer, None), "epoch_loop", "_should_check_val_fx"),
        (_compat.may_stop_early, "", "_can_stop_early"),
    ],
)
def test_what_a_loop_decides_is_asked_or_taken_as_no(trainer: Trainer, caplog, ask, owner: str, name: str) -> None:
    loop = getattr(trainer.fit_loop, owner) if owner else trainer.fit_loop
    stub = SimpleNamespace(**{name: (lambda *_: True) if owner else True})
    fit_loop = SimpleNamespace(epoch_loop=stub) if owner else stub
    assert hasattr(loop, name)
    assert ask(SimpleNamespace(fit_loop=fit_loop))
    delattr(stub, name)
    for _ in range(2):
        assert not ask(SimpleNamespace(fit_loop=fit_loop))
    assert len(_warnings(caplog)) == 1


def test_a_strategy_tells_its_layout_or_has_none(trainer: Trainer, caplog) -> None:
    strategy = ModelParallelStrategy(tensor_parallel_size=2)
    model = LightningModule()
    assert _compat.tensor_parallel_size(strategy) == 2
    assert _compat.tensor_parallel_size(ModelParallelStrategy()) is None
    _compat.give_mesh(strategy, model, "a mesh")
    assert (strategy.device_mesh, model.device_mesh) == ("a mesh", "a mesh")
    for _ in range(2):
        _compat.give_mesh(SimpleNamespace(), model, None)
    assert len(_warnings(caplog)) == 1


class _WithOneHook(Callback):
    def on_after_backward(self, *_: Any) -> None:
        self.called = True


def test_lightning_calls_no_hook_of_a_step_that_a_callback_does_not_have() -> None:
    callback = _WithOneHook()
    trainer = SimpleNamespace(lightning_module=None, callbacks=[callback], profiler=PassThroughProfiler())
    _compat.skip_step_hooks(callback)
    for hook in ("on_train_batch_start", "on_before_zero_grad", "on_after_backward"):
        _call_callback_hooks(trainer, hook)
    assert callback.called
    assert callback.on_before_zero_grad is None
    _compat.skip_step_hooks(callback, "on_after_backward")
    assert callback.on_after_backward is None
    _compat.restore_step_hooks(callback)
    assert vars(callback) == {"called": True}
