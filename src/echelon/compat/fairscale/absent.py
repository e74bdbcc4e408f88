"""Names of FairScale that compat lacks: they can be imported, and using one is an error that says what to use instead."""

from __future__ import annotations

from echelon.compat.names import Missing, nearest, refusing

__all__ = ["ALIASES", "INSTEAD", "METHODS", "NAMES", "absent", "instead"]

_ADASCALE = "keep FairScale's file, which needs torch and NumPy alone; or a warm-up to the larger batch's learning rate."
_BUCKETS = "nothing: what travels in one message is decided inside."
_FLAT = "strategy 'fsdp', which divides parameters as they are."
_EXPERTS = "echelon.nn.MoE, a layer of experts, which strategy 'ep=2' divides over ranks."
_HELPERS = "a helper inside of FairScale: keep its file, it needs nothing but torch."
_PIPELINE = "strategy 'pp=2', which cuts a model into stages over ranks; or torch.distributed.pipelining."
_MODEL_PARALLEL = (
    "FairScale's own, whose import lines may stay beside these; or strategy 'tp', or torch.distributed.tensor.parallel."
)
_SLOWMO = "DiLoCoStrategy(every=..., outer_optimizer=...), whose outer optimizer has the slow momentum."

# A module of compat -> the modules of FairScale that it stands for.
_SAME = {
    "fsdp": "nn.data_parallel.fully_sharded_data_parallel",
    "grad_scaler": "optim.grad_scaler",
    "nn": "nn.checkpoint nn.checkpoint.checkpoint_activations nn.data_parallel nn.misc",
    "oss": "optim.oss",
    "sharded_ddp": "nn.data_parallel.sharded_ddp",
    "wrap": "nn.wrap nn.wrap.auto_wrap",
}
ALIASES = {name: same for same, names in _SAME.items() for name in names.split()}
# A module of FairScale -> its names that are absent here.
NAMES: dict[str, dict[str, str]] = {
    "nn": {
        "FlattenParamsWrapper": _FLAT,
        "MOELayer": _EXPERTS,
        "Pipe": _PIPELINE,
        "PipeRPCWrapper": _PIPELINE,
        "Top2Gate": _EXPERTS,
        "model_parallel": _MODEL_PARALLEL,
    },
    "nn.checkpoint": {
        "FlattenParamsWrapper": _FLAT,
        "GradBucket": _BUCKETS,
        "ParamBucket": _BUCKETS,
        **dict.fromkeys(
            ("disable_checkpointing", "is_checkpointing", "is_recomputing"),
            "nothing: a batch norm's statistics and random draws are those of one pass; else FairScale's file.",
        ),
    },
    "nn.data_parallel": {
        "TrainingState": "nothing: a method that must not be called at a moment says so.",
        "get_fsdp_instances": "[m for m in module.modules() if isinstance(m, FullyShardedDataParallel)].",
        "no_pre_load_state_dict_hook": "nothing: load_state_dict takes whole parameters by the unwrapped module's names.",
    },
    "optim": {
        "AdaScale": _ADASCALE,
        "AdaScaleWrapper": _ADASCALE,
        "Adam": "torch.optim.Adam(fused=True) on a GPU.",
        "GradScaler": "torch.amp.GradScaler.",
        "Precision": "echelon.AutoUnit(precision='fp16'), or torch.autocast.",
    },
}
METHODS = {
    name: Missing(f"{name} is not part of echelon.compat. Instead: {instead}")
    for name, instead in {
        "FullyShardedDataParallel.append_shared_param": "wrap the module around all that use it.",
        "FullyShardedDataParallel.reset_parameters": "call it before the module is wrapped.",
        "FullyShardedDataParallel.set_gradient_divide_factors": "nothing: half of the division comes first.",
        "OSS.partition_parameters": "OSS.partition.owns(parameter), whether this rank has its state.",
    }.items()
}

INSTEAD = {
    "experimental": "keep FairScale's file.",
    "experimental.nn": "strategy 'fsdp' with cpu_offload=True for OffloadModel, torch.nn.SyncBatchNorm; else FairScale's file.",
    "experimental.nn.ampnet_pipe": _PIPELINE,
    "experimental.nn.auto_shard": _PIPELINE,
    "experimental.nn.data_parallel": _SLOWMO,
    "experimental.nn.distributed_pipeline": _PIPELINE,
    "experimental.nn.mevo": "echelon's linear_cross_entropy, which takes a vocabulary's loss in chunks.",
    "experimental.nn.offload": "strategy 'fsdp' with cpu_offload=True.",
    "experimental.nn.sync_batchnorm": "torch.nn.SyncBatchNorm.",
    "experimental.optim": "torch.amp.GradScaler.",
    "experimental.tooling": "torch.profiler and torch.cuda.memory._record_memory_history.",
    "experimental.wgit": "keep FairScale's files.",
    "fair_dev": "pytest, and torch.multiprocessing.spawn.",
    "internal": _HELPERS,
    "internal.object": "torch.distributed.broadcast_object_list.",
    "internal.reduce_scatter_bucketer": "nothing: what travels in one message is decided inside.",
    "internal.version": "torch.__version__, which compares with tuples and strings.",
    "nn.model_parallel": _MODEL_PARALLEL,
    "nn.moe": _EXPERTS,
    "nn.pipe": _PIPELINE,
    "optim.adascale": _ADASCALE,
    "optim.adam": "torch.optim.Adam(fused=True) on a GPU, echelon.AutoUnit(precision='fp16').",
    "optim.layerwise_gradient_scaler": "ShardedGradScaler: one scale for all layers; AutoUnit(precision='bf16') needs none.",
    "nn.checkpoint.checkpoint_utils": "nothing: statistics are counted once by themselves.",
    "nn.misc.flatten_params_wrapper": _FLAT,
    "nn.misc.param_bucket": _BUCKETS,
    "utils": _HELPERS,
    "version": "fairscale.__version__.",
}


_LOST = {name: (f"fairscale.{module}.{name}", text) for module, lost in reversed(NAMES.items()) for name, text in lost.items()}

absent = refusing(_LOST)


def instead(module: str, name: str = "") -> str | None:
    """What to use instead of a name in any module below `fairscale`, or instead of a module; None if it is in no table."""
    if not name:
        return nearest(INSTEAD, module)
    return _LOST[name][1] if name in _LOST else None
