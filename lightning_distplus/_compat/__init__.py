"""The one place that touches private names of torch, Lightning and DeepSpeed. Each is probed before it is used.

When an upstream name has vanished, the feature behind it is switched off with one warning and training goes on.
``tests/unit/test_compat.py`` fails loudly for every name, so that we hear of it first.
"""

from lightning_distplus._compat.deepspeed import calls_torch_save, discard_next_deepspeed_step, loading_universal
from lightning_distplus._compat.empty_optimizers import (
    loading_empty_optimizers_of_fsdp,
    loading_empty_optimizers_of_fsdp2,
)
from lightning_distplus._compat.evidence import flight_recorder_dumps, on_terminate
from lightning_distplus._compat.fake import fake_default_group
from lightning_distplus._compat.fsdp import (
    FlatUnit,
    flat_units,
    full_state_dict_without_offload,
    in_shards,
    is_fsdp_shard,
    loading_unsharded_models,
    replacing_sharded_saves,
)
from lightning_distplus._compat.fsdp_state import (
    FlatPlace,
    flat_places,
    state_dict_name,
    state_in_parts,
    why_gathered,
)
from lightning_distplus._compat.groups import (
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    default_group_timeout,
    default_store,
    init_default_group,
    num_collectives,
    process_groups,
    read_group_timeout,
    set_group_timeout,
)
from lightning_distplus._compat.modules import (
    inner_schedulers,
    non_persistent_buffers,
    register_ddp_comm_hook,
    wrapper_tensor,
)
from lightning_distplus._compat.probing import restore_method, warn_once, wrap_method
from lightning_distplus._compat.serialization import without_crc
from lightning_distplus._compat.signals import (
    add_to_worker_signals,
    replace_sigterm_notifier,
    replace_stock_signals,
    restore_sigterm_notifier,
    restore_worker_signals,
)
from lightning_distplus._compat.strategies import HYBRID_GRAD_OP, ddp_arguments, give_mesh, tensor_parallel_size
from lightning_distplus._compat.trainer import (
    accumulates,
    agree_on_resume,
    logged_metric,
    may_stop_early,
    mode_of_combined_loader,
    replace_batch_broadcast,
    replace_checkpoint_link,
    replace_preparation_barrier,
    restore_batch_broadcast,
    restore_checkpoint_link,
    skips_backward,
    synced_metrics,
    validates_now,
)
from lightning_distplus._compat.workers import prepare_workers

__all__ = [
    "HYBRID_GRAD_OP",
    "FlatPlace",
    "FlatUnit",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "accumulates",
    "add_to_worker_signals",
    "agree_on_resume",
    "calls_torch_save",
    "ddp_arguments",
    "default_group_timeout",
    "default_store",
    "discard_next_deepspeed_step",
    "fake_default_group",
    "flat_places",
    "flat_units",
    "flight_recorder_dumps",
    "full_state_dict_without_offload",
    "give_mesh",
    "in_shards",
    "init_default_group",
    "inner_schedulers",
    "is_fsdp_shard",
    "loading_empty_optimizers_of_fsdp",
    "loading_empty_optimizers_of_fsdp2",
    "loading_universal",
    "loading_unsharded_models",
    "logged_metric",
    "may_stop_early",
    "mode_of_combined_loader",
    "non_persistent_buffers",
    "num_collectives",
    "on_terminate",
    "prepare_workers",
    "process_groups",
    "read_group_timeout",
    "register_ddp_comm_hook",
    "replace_batch_broadcast",
    "replace_checkpoint_link",
    "replace_preparation_barrier",
    "replace_sigterm_notifier",
    "replace_stock_signals",
    "replacing_sharded_saves",
    "restore_batch_broadcast",
    "restore_checkpoint_link",
    "restore_method",
    "restore_sigterm_notifier",
    "restore_worker_signals",
    "set_group_timeout",
    "skips_backward",
    "state_dict_name",
    "state_in_parts",
    "synced_metrics",
    "tensor_parallel_size",
    "validates_now",
    "warn_once",
    "why_gathered",
    "without_crc",
    "wrap_method",
    "wrapper_tensor",
]
