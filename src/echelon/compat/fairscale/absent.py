"""Modules of FairScale of which nothing is here: import lines that name them work, and a use says what to take instead."""

from __future__ import annotations

from echelon.compat.names import leave_out

__all__ = ["BELOW", "EXPERTS", "INSTEAD", "MODEL_PARALLEL", "PIPELINE", "register"]

EXPERTS = "echelon.nn.MoE, a layer of experts, which strategy 'ep=2' divides over ranks."
_HELPERS = "a helper inside of FairScale: keep its file, it needs nothing but torch."
PIPELINE = "strategy 'pp=2', which cuts a model into stages over ranks; or torch.distributed.pipelining."
MODEL_PARALLEL = (
    "FairScale's own, whose import lines may stay beside these; or strategy 'tp', or torch.distributed.tensor.parallel."
)
_SLOWMO = "DiLoCoStrategy(every=..., outer_optimizer=...), whose outer optimizer has the slow momentum."

INSTEAD = {
    "experimental": "keep FairScale's file.",
    "experimental.nn": "strategy 'fsdp' with cpu_offload=True for OffloadModel, torch.nn.SyncBatchNorm; else FairScale's file.",
    "experimental.nn.ampnet_pipe": PIPELINE,
    "experimental.nn.auto_shard": PIPELINE,
    "experimental.nn.data_parallel": _SLOWMO,
    "experimental.nn.data_parallel.gossip": _SLOWMO,
    "experimental.nn.data_parallel.gossip.distributed": _SLOWMO,
    "experimental.nn.distributed_pipeline": PIPELINE,
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
    "nn.model_parallel": MODEL_PARALLEL,
    "nn.moe": EXPERTS,
    "nn.pipe": PIPELINE,
    "optim.adam": "torch.optim.Adam(fused=True) on a GPU, echelon.AutoUnit(precision='fp16').",
    "optim.layerwise_gradient_scaler": "ShardedGradScaler: one scale for all layers; AutoUnit(precision='bf16') needs none.",
    "nn.checkpoint.checkpoint_utils": "nothing: statistics are counted once by themselves.",
    "nn.misc.param_bucket": "nothing: what travels in one message is decided inside.",
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


def register(package: str) -> None:
    """Let the modules of the tables be imported below `package`."""
    below = {f"{name}.{each}": INSTEAD[name] for name, modules in BELOW.items() for each in modules.split()}
    leave_out("fairscale", package, INSTEAD | below)
