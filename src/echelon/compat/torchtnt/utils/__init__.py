"""torchtnt.utils: its public names, loaded at first use."""

from __future__ import annotations

import importlib
from typing import Any

from echelon.compat.torchtnt.absent import absent

# The module that has each name.
_HOMES = {
    name: f"utils.{module}"
    for module, names in {
        "checkpoint": """BestCheckpointConfig CheckpointManager CheckpointPath MetricData get_best_checkpoint_path
            get_checkpoint_dirpaths get_latest_checkpoint_path""",
        "device": "copy_data_to_device get_device_from_env record_data_in_stream set_float32_precision",
        "distributed": """all_gather_tensors barrier get_global_rank get_local_rank
            get_process_group_backend_from_device get_world_size spawn_multi_process""",
        "env": "init_from_env seed",
        "helpers": """EarlyStopChecker Progress Stateful TLRScheduler convert_precision_str_to_dtype extract_lr_from_optimizer
            is_torch_version_geq rank_zero_critical rank_zero_debug rank_zero_error rank_zero_info rank_zero_print
            rank_zero_warn""",
        "module_summary": "FlopTensorDispatchMode ModuleSummary get_module_summary get_summary_table prune_module_summary",
        "oom": "attach_oom_observer log_memory_snapshot",
        "prepare_module": "DDPStrategy FSDPStrategy NOOPStrategy prepare_ddp prepare_fsdp",
        "swa": "AveragedModel",
        "timer": "Timer get_timer_summary",
    }.items()
    for name in names.split()
}

__all__ = list(_HOMES)

_absent = absent(__name__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        return _absent(name)
    return getattr(importlib.import_module(f"echelon.compat.torchtnt.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
