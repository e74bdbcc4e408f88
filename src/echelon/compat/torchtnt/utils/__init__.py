"""torchtnt.utils: what it publishes, loaded when it is first used."""

from __future__ import annotations

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
        "early_stop_checker": "EarlyStopChecker",
        "env": "init_from_env seed",
        "flops": "FlopTensorDispatchMode",
        "lr_scheduler": "TLRScheduler",
        "module_summary": "ModuleSummary get_module_summary get_summary_table prune_module_summary",
        "oom": "attach_oom_observer log_memory_snapshot",
        "optimizer": "extract_lr_from_optimizer",
        "precision": "convert_precision_str_to_dtype",
        "prepare_module": "DDPStrategy FSDPStrategy NOOPStrategy prepare_ddp prepare_fsdp",
        "progress": "Progress",
        "rank_zero_log": """rank_zero_critical rank_zero_debug rank_zero_error rank_zero_info rank_zero_print
            rank_zero_warn""",
        "stateful": "Stateful",
        "swa": "AveragedModel",
        "timer": "Timer get_timer_summary",
        "tqdm": "close_progress_bar create_progress_bar update_progress_bar",
        "version": "is_torch_version_geq",
    }.items()
    for name in names.split()
}

__all__ = list(_HOMES)

__getattr__ = absent("utils", _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
