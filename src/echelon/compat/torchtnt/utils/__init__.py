"""torchtnt.utils: what it publishes."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler as TLRScheduler

from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.utils import data, loggers
from echelon.compat.torchtnt.utils.checkpoint import (
    BestCheckpointConfig,
    CheckpointManager,
    CheckpointPath,
    MetricData,
    get_best_checkpoint_path,
    get_checkpoint_dirpaths,
    get_latest_checkpoint_path,
)
from echelon.compat.torchtnt.utils.distributed import (
    all_gather_tensors,
    barrier,
    copy_data_to_device,
    get_device_from_env,
    get_global_rank,
    get_local_rank,
    get_process_group_backend_from_device,
    get_world_size,
    init_from_env,
    rank_zero_critical,
    rank_zero_debug,
    rank_zero_error,
    rank_zero_info,
    rank_zero_print,
    rank_zero_warn,
    record_data_in_stream,
    seed,
    set_float32_precision,
    spawn_multi_process,
)
from echelon.compat.torchtnt.utils.flops import FlopTensorDispatchMode
from echelon.compat.torchtnt.utils.module_summary import (
    ModuleSummary,
    get_module_summary,
    get_summary_table,
    prune_module_summary,
)
from echelon.compat.torchtnt.utils.oom import attach_oom_observer, log_memory_snapshot
from echelon.compat.torchtnt.utils.prepare_module import (
    DDPStrategy,
    FSDPStrategy,
    NOOPStrategy,
    convert_precision_str_to_dtype,
    prepare_ddp,
    prepare_fsdp,
)
from echelon.compat.torchtnt.utils.timer import Timer, get_timer_summary
from echelon.compat.torchtnt.utils.tqdm import close_progress_bar, create_progress_bar, update_progress_bar
from echelon.loop.callbacks.early_stopping import EarlyStopChecker
from echelon.loop.callbacks.monitors import learning_rates as extract_lr_from_optimizer
from echelon.loop.progress import Progress
from echelon.loop.unit import Stateful

__all__ = [
    "BestCheckpointConfig",
    "CheckpointManager",
    "CheckpointPath",
    "DDPStrategy",
    "EarlyStopChecker",
    "FSDPStrategy",
    "FlopTensorDispatchMode",
    "MetricData",
    "ModuleSummary",
    "NOOPStrategy",
    "Progress",
    "Stateful",
    "TLRScheduler",
    "Timer",
    "all_gather_tensors",
    "attach_oom_observer",
    "barrier",
    "close_progress_bar",
    "convert_precision_str_to_dtype",
    "copy_data_to_device",
    "create_progress_bar",
    "data",
    "extract_lr_from_optimizer",
    "get_best_checkpoint_path",
    "get_checkpoint_dirpaths",
    "get_device_from_env",
    "get_global_rank",
    "get_latest_checkpoint_path",
    "get_local_rank",
    "get_module_summary",
    "get_process_group_backend_from_device",
    "get_summary_table",
    "get_timer_summary",
    "get_world_size",
    "init_from_env",
    "is_torch_version_geq",
    "log_memory_snapshot",
    "loggers",
    "prepare_ddp",
    "prepare_fsdp",
    "prune_module_summary",
    "rank_zero_critical",
    "rank_zero_debug",
    "rank_zero_error",
    "rank_zero_info",
    "rank_zero_print",
    "rank_zero_warn",
    "record_data_in_stream",
    "seed",
    "set_float32_precision",
    "spawn_multi_process",
    "update_progress_bar",
]


def is_torch_version_geq(version: str) -> bool:
    """Whether torch is at least this version."""
    found: Any = torch.__version__  # compares as a version, not as text
    return bool(found >= version)


__getattr__ = absent(__name__)
