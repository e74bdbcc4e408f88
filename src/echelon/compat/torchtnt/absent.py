"""Names of TorchTNT that compat lacks, since no public program was found to use them: using one says what to use instead."""

from __future__ import annotations

from echelon.compat.names import refusing

__all__ = ["ALIASES", "ARGUMENTS", "MODULES", "NAMES", "absent", "instead"]

_NUMBERS = "a comparison where the number is logged; a loss that is nan or grows is looked at by echelon itself."
_OWN = "a Callback of your own, of a few lines; or keep TorchTNT's file."
_LOADERS = "echelon.Mixture, which mixes datasets by weight; itertools.chain or zip, for loaders one after another or together."
_GRID = "echelon.Layout(dp_replicate=..., dp_shard=..., tp=..., plan=...)."
_STATE = "torch.distributed.checkpoint.state_dict, which gives states by name; echelon's checkpoints name them by themselves."
_COMPILED = "`torch._dynamo.config.compiled_autograd = True` before training."
_MEMORY = "`echelon plan`, which foretells memory, and torch.cuda.memory._record_memory_history, which torch documents."
_TIMES = "`echelon report`, which shows durations, waits and throughput of every run; state.train_state.iteration_timer has them."

# A module of compat -> the modules of TorchTNT that it stands for.
_SAME = {
    "framework.base_checkpointer": "framework.callbacks.base_checkpointer framework.callbacks.checkpointer_types",
    "framework.callbacks": "framework.callback framework.callbacks.early_stopping framework.callbacks.garbage_collector "
    "framework.callbacks.lambda_callback framework.callbacks.learning_rate_monitor framework.callbacks.module_summary "
    "framework.callbacks.pytorch_profiler framework.callbacks.tqdm_progress_bar",
    "framework.loops": "framework.evaluate framework.fit framework.predict framework.train",
    "framework.savers": "framework.callbacks.dcp_saver framework.callbacks.torchsnapshot_saver",
    "utils.data": "utils.data.data_prefetcher",
    "utils.helpers": "utils.early_stop_checker utils.lr_scheduler utils.optimizer utils.precision utils.progress "
    "utils.rank_zero_log utils.stateful utils.version",
    "utils.module_summary": "utils.flops",
    "utils.loggers": "utils.loggers.csv utils.loggers.in_memory utils.loggers.logger utils.loggers.stdout "
    "utils.loggers.tensorboard utils.loggers.utils",
}
ALIASES = {name: same for same, names in _SAME.items() for name in names.split()}
# Absent modules: their public names, and what to use instead.
MODULES = {
    "framework.callbacks.base_csv_writer": (
        "BaseCSVWriter",
        "csv.writer in the unit's on_predict_step_end, a file a rank.",
    ),
    "framework.callbacks.empty_cuda_cache": ("EmptyCudaCache", "torch.cuda.empty_cache() in a Callback's on_train_step_end."),
    "framework.callbacks.empty_dataloader_detector": ("EmptyDataloaderDetectorCallback", _OWN),
    "framework.callbacks.iteration_time_logger": ("IterationTimeLogger", _TIMES),
    "framework.callbacks.memory_snapshot": ("MemorySnapshot", _MEMORY),
    "framework.callbacks.periodic_distributed_sync": ("PeriodicDistributedSync", "torch.distributed.barrier() in a Callback."),
    "framework.callbacks.progress_reporter": ("ProgressReporter", "`echelon explain RUN`, which says where each rank is."),
    "framework.callbacks.slow_rank_detector": ("SlowRankDetector", "`echelon report`, which names slow ranks."),
    "framework.callbacks.system_resources_monitor": ("SystemResourcesMonitor", "`echelon report`, which has memory and GPUs."),
    "framework.callbacks.tensorboard_parameter_monitor": ("TensorBoardParameterMonitor", _OWN),
    "framework.callbacks.tensorfloat32": ("EnableTensorFloat32", "torch.set_float32_matmul_precision('high') before training."),
    "framework.callbacks.throughput_logger": ("ThroughputLogger", _TIMES),
    "framework.callbacks.time_limit_interrupter": ("TimeLimitInterrupter", "`echelon run --stop-after DURATION`."),
    "framework.callbacks.time_wait_for_batch_logger": ("TimeWaitForBatchLogger", _TIMES),
    "framework.callbacks.torch_compile": ("TorchCompile", _OWN),
    "framework.callbacks.train_progress_monitor": ("TrainProgressMonitor", "state.log in a hook of the unit."),
    "framework.test": ("test", "echelon.units.test."),
    "framework.utils": ("get_timing_context", "torch.profiler.record_function."),
    "utils.anomaly_evaluation": ("", _NUMBERS),
    "utils.loggers.file": ("FileLogger", "CSVLogger; or a MetricLogger of your own."),
    "utils.loggers.json": ("JSONLogger", "CSVLogger; metrics.jsonl in the run's folder has what the run logs."),
    "utils.loggers.anomaly_logger": ("AnomalyLogger TrackedMetric", _NUMBERS),
    "utils.data.iterators": (
        "AllDatasetBatches AllDatasetBatchesIterator DataIterationStrategy DataIterationStrategyRegistry InOrder InOrderIterator "
        "MultiIterator RandomizedBatchSampler RandomizedBatchSamplerIterator RoundRobin RoundRobinIterator StoppingMechanism",
        _LOADERS,
    ),
    "utils.data.multi_dataloader": ("MultiDataLoader", _LOADERS),
    "utils.data.profile_dataloader": ("profile_dataloader", "`echelon report`, which has the waits for data; torch.profiler."),
    "utils.data.synthetic_data": ("AbstractRandomDataset", "a Dataset of your own that draws from torch.Generator."),
    "utils.device_mesh": ("GlobalMeshCoordinator create_device_mesh get_dp_local_rank get_dp_mesh get_dp_mesh_size", _GRID),
    "utils.event": ("", "Python's logging."),
    "utils.event_handlers": ("", "Python's logging."),
    "utils.fsspec": ("get_filesystem", "fsspec.core.url_to_fs(path)[0]."),
    "utils.memory": ("RSSProfiler get_tensor_size_bytes_map measure_rss_deltas", _MEMORY),
    "utils.memory_snapshot_profiler": ("MemorySnapshotParams MemorySnapshotProfiler", _MEMORY),
    "utils.misc": ("days_to_secs transfer_batch_norm_stats transfer_weights", "load_state_dict, and datetime.timedelta."),
    "utils.nan": ("", "torch.autograd.detect_anomaly, or AutoUnit(detect_anomaly=True)."),
    "utils.tqdm": ("close_progress_bar create_progress_bar update_progress_bar", "tqdm.auto.tqdm(loader, desc=...)."),
    "utils.test_utils": (
        "captured_output get_pet_launch_config is_asan is_asan_or_tsan is_tsan skip_if_asan skip_if_not_distributed "
        "skip_if_not_gpu",
        "echelon.launch(fn, ranks=2), which gives each rank's value; unittest.skipUnless(torch.cuda.is_available(), ...).",
    ),
}

# Absent arguments, and what to use instead.
ARGUMENTS = {
    "enable_compiled_autograd": _COMPILED,
    "enable_loss_parallel": "torch.distributed.tensor.parallel.loss_parallel() around the loss, in compute_loss.",
    "global_mesh": _GRID,
    "grad_scaler_params": "precision='fp16', whose scale finds its height by itself; or precision='bf16', which needs none.",
    "save_every_n_predict_steps": "nothing: a prediction changes no weights; write what it gives in on_predict_step_end.",
    "gradient_accumulation_sync": "nothing: gradients travel once in a window.",
}

# Names that are absent from modules that exist here.
NAMES = {
    "framework.unit": {"TTestUnit TestUnit": "echelon.units.TestUnit."},
    "utils.checkpoint": {"load_from_full_model_state_dict": _STATE},
    "utils.device": {
        "CPUStats GPUStats collect_system_stats get_nvidia_smi_gpu_stats get_psutil_cpu_stats": "`echelon report`; psutil.",
    },
    "utils.distributed": {
        "PGWrapper": "torch.distributed's collectives of objects, such as all_gather_object.",
        "ProcessGroupSetupParams": "echelon.launch(fn, ranks=2), which gives each rank's value.",
        "all_gather_str broadcast_str": "echelon.gather for numbers, torch.distributed.all_gather_object for strings.",
        "destroy_process_group": "torch.distributed.destroy_process_group().",
        "get_or_create_gloo_pg": "torch.distributed.new_group(backend='gloo').",
        "local_rank_zero_fn rank_zero_fn": "`if get_global_rank() == 0`.",
        "rank_zero_read_and_broadcast": "torch.distributed.broadcast_object_list, after rank 0 has read.",
        "sync_bool": "torch.distributed.all_reduce of 0 or 1, with ReduceOp.MAX for any rank, MIN for all.",
        "revert_sync_batchnorm": "a copy of the module from before torch.nn.SyncBatchNorm.convert_sync_batchnorm.",
    },
    "utils.oom": {
        "is_out_of_cpu_memory is_out_of_cuda_memory is_out_of_memory_error": "`except (torch.OutOfMemoryError, MemoryError)`.",
    },
    "utils.optimizer": {"init_optim_state": _STATE},
    "utils.precision": {"get_grad_scaler_from_precision": "torch.amp.GradScaler, or ech.AutoUnit(precision='fp16')."},
    "utils.prepare_module": {
        "FSDP2OptimizerWrapper FSDPOptimizerWrapper get_module_state_dict": _STATE,
        "TPStrategy": _GRID,
    },
    "utils.progress": {
        "estimated_steps_in_epoch estimated_steps_in_fit estimated_steps_in_loop": "the progress that `echelon run` shows.",
    },
    "utils.stateful": {
        "DictStateful MetricStateful": "a class of your own with state_dict and load_state_dict.",
    },
    "utils.timer": {
        "AggregatedTimer BoundedTimer TimedActionStats TimerProtocol TimerReport": "Timer, or `echelon report`.",
        "FullSyncPeriodicTimer": "a count of steps, which all ranks have alike.",
        "get_durations_histogram get_recorded_durations_table get_synced_durations_histogram get_synced_timer_histogram": _TIMES,
        "log_elapsed_time": "Timer(verbose=True).",
    },
    "utils.version": {"get_python_version get_torch_version is_windows": "torch.__version__, sys.version_info, sys.platform."},
}


_LOST = {
    name: (f"torchtnt.{where}.{name}", text)
    for where, rows in [*((where, {names: text}) for where, (names, text) in MODULES.items()), *NAMES.items()]
    for names, text in rows.items()
    for name in names.split()
}

absent = refusing(_LOST)


def instead(module: str, name: str = "") -> str | None:
    """What to use instead of a name in any module below `torchtnt`, or instead of a module; None if it is in no table."""
    if not name:
        return MODULES.get(module, (None, None))[1]
    return _LOST[name][1] if name in _LOST else None
