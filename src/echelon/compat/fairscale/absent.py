"""Modules of FairScale of which nothing is here: import lines that name them work, and a use says what to take instead."""

from __future__ import annotations

from echelon.compat.names import Missing, leave_out

__all__ = ["BELOW", "INSTEAD", "METHODS", "NAMES", "instead", "register"]

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

_CHECKPOINT = dict.fromkeys(
    ("disable_checkpointing", "is_checkpointing", "is_recomputing"),
    "nothing: a batch norm's statistics and random draws are those of one pass; else FairScale's file.",
)
_FSDP = {
    "TrainingState": "nothing: a method that must not be called at a moment says so.",
    "get_fsdp_instances": "[m for m in module.modules() if isinstance(m, FullyShardedDataParallel)].",
    "no_pre_load_state_dict_hook": "nothing: load_state_dict takes whole parameters by the unwrapped module's names.",
}
# By module that is here, names that are not.
NAMES: dict[str, dict[str, str]] = {
    "nn": {
        "FlattenParamsWrapper": _FLAT,
        "MOELayer": _EXPERTS,
        "Pipe": _PIPELINE,
        "PipeRPCWrapper": _PIPELINE,
        "Top2Gate": _EXPERTS,
        "model_parallel": _MODEL_PARALLEL,
    },
    "nn.checkpoint": _CHECKPOINT,
    "nn.checkpoint.checkpoint_activations": _CHECKPOINT,
    "nn.data_parallel": _FSDP,
    "nn.data_parallel.fully_sharded_data_parallel": _FSDP,
    "nn.misc": {"FlattenParamsWrapper": _FLAT, "GradBucket": _BUCKETS, "ParamBucket": _BUCKETS},
    "optim": {
        "AdaScale": _ADASCALE,
        "AdaScaleWrapper": _ADASCALE,
        "Adam": "torch.optim.Adam(fused=True) on a GPU.",
        "Precision": "echelon.AutoUnit(precision='fp16'), or torch.autocast.",
    },
}
METHODS = {
    name: Missing(f"FullyShardedDataParallel.{name} is not part of echelon.compat. Instead: {instead}")
    for name, instead in {
        "append_shared_param": "wrap the module that has all that use the parameter, and none of these by itself.",
        "reset_parameters": "call it before the module is wrapped.",
        "set_gradient_divide_factors": "FullyShardedDataParallel(gradient_predivide_factor=...).",
    }.items()
}

INSTEAD = {
    "experimental": "keep FairScale's file.",
    "experimental.nn": "strategy 'fsdp' with cpu_offload=True for OffloadModel, torch.nn.SyncBatchNorm; else FairScale's file.",
    "experimental.nn.ampnet_pipe": _PIPELINE,
    "experimental.nn.auto_shard": _PIPELINE,
    "experimental.nn.data_parallel": _SLOWMO,
    "experimental.nn.data_parallel.gossip": _SLOWMO,
    "experimental.nn.data_parallel.gossip.distributed": _SLOWMO,
    "experimental.nn.distributed_pipeline": _PIPELINE,
    "experimental.nn.mevo": "echelon's linear_cross_entropy, which takes a vocabulary's loss in chunks.",
    "experimental.nn.offload": "strategy 'fsdp' with cpu_offload=True.",
    "experimental.nn.sync_batchnorm": "torch.nn.SyncBatchNorm.",
    "experimental.optim": "torch.amp.GradScaler.",
    "experimental.optim.dynamic_loss_scaler": "torch.amp.GradScaler.",
    "experimental.tooling": "torch.profiler and torch.cuda.memory._record_memory_history.",
    "experimental.tooling.layer_memory_tracker": "torch.profiler and torch.cuda.memory._record_memory_history.",
    "experimental.wgit": "keep FairScale's files.",
    "fair_dev": "pytest, and torch.multiprocessing.spawn.",
    "fair_dev.testing": "pytest, and torch.multiprocessing.spawn.",
    "fair_dev.testing.testing": "pytest, and torch.multiprocessing.spawn.",
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
}

# Modules below these, of which the same is to be said.
BELOW = {
    "experimental.nn.ampnet_pipe": "ampnet pipe",
    "experimental.nn.data_parallel.gossip": "gossiper graph_manager mixing_manager utils utils.cuda_metering utils.helpers",
    "experimental.nn.distributed_pipeline": "data graph loss partition_handler pipeline trace",
    "experimental.wgit": "cli pygit repo sha1_store signal_sparsity signal_sparsity_profiling utils version",
    "internal": "containers parallel params state_dict",
    "nn.model_parallel": "cross_entropy initialize layers mappings random utils",
    "nn.moe": "moe_layer top2gate",
    "nn.pipe": "async_pipe async_pipeline async_schedule balance balance.blockpartition balance.profile batchnorm checkpoint "
    "copy dependency messages microbatch phony pipe pipeline rpc skip skip.layout skip.namespace skip.portal skip.skippable "
    "skip.tracker stream types worker",
    "utils": "containers parallel params state_dict testing",
}


def _modules() -> dict[str, str]:
    return INSTEAD | {f"{name}.{each}": INSTEAD[name] for name, modules in BELOW.items() for each in modules.split()}


def instead(module: str, name: str = "") -> str | None:
    """What to take in place of a name of a module, or of a module, below `fairscale`; None: it is in no table."""
    return NAMES.get(module, {}).get(name) if name else _modules().get(module)


def register(package: str) -> None:
    """Let the modules of the tables be imported below `package`."""
    leave_out("fairscale", package, _modules())
