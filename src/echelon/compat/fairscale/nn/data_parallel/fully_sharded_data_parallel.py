"""`FullyShardedDataParallel` with FairScale's options, on torch's class of that name.

For new programs `echelon`'s strategy "fsdp" is the better choice: it builds on `fully_shard`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.compat.fairscale.clip import clip_owned_
from echelon.compat.fairscale.names import later
from echelon.compat.fairscale.nn.data_parallel.fsdp_optim_utils import gathered, sharded
from echelon.contracts.errors import UsageError
from echelon.world.init import World, ensure_group

if TYPE_CHECKING:
    pass

__all__ = ["FullyShardedDataParallel", "get_fsdp_instances"]

__getattr__ = later("nn.data_parallel.fully_sharded_data_parallel", {"auto_wrap_bn": "nn.wrap.batch_norm"}, {})

logger = logging.getLogger(__name__)

_CHECKPOINTS = "echelon.DistributedCheckpointSaver, which saves shards and reads them at any number of ranks"
_DIVIDING = "torch's fully_shard(...) and set_gradient_divide_factor()"

# Options without a counterpart: the value that asks for nothing, and what to do instead.
_UNSUPPORTED = {
    "no_broadcast_optim_state": (False, f"{_CHECKPOINTS}."),
    "force_input_to_fp32": (False, "mixed_precision=True, which casts inputs, or cast them in forward()."),
    "gradient_predivide_factor": (None, f"{_DIVIDING}."),
    "allow_reset_parameters": (False, "reset them before wrapping, or on the meta device: `with echelon.on_meta():`."),
    "process_group_reduce_scatter": (None, "one process_group for everything; torch overlaps its messages by itself."),
}
_HELD_ANYWAY = {"disable_reshard_on_root": True, "flatten_parameters": True, "bucket_cap_mb": 25, "clear_autocast_cache": False}


class FullyShardedDataParallel(TorchFSDP):
    """Parameters, gradients and optimizer state in shards, one flat parameter per wrapped module.

    Parameters keep their names (`use_orig_params`), and start from rank 0's values. Collective.

    Args:
        reshard_after_forward: free whole parameters between forward and backward.
        mixed_precision: compute and reduce in `compute_dtype` (by default half precision), with float32 shards.
        fp32_reduce_scatter: reduce gradients in float32 nevertheless.
        buffer_dtype: of buffers; by default `compute_dtype`.
        move_params_to_cpu, cpu_offload: shards live in host memory; `move_grads_to_cpu` goes with them.
        compute_device: by default the GPU, or the CPU where there is none.
        state_dict_device, state_dict_on_rank_0_only: where `state_dict()` puts the whole parameters: on their device, or
            torch.device("cpu"); on all ranks, or on rank 0.
        disable_reshard_on_root, flatten_parameters, bucket_cap_mb, clear_autocast_cache, verbose: accepted; torch decides.
    Raises:
        UsageError: an option that torch's class has no counterpart for, with what takes its place.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        process_group_reduce_scatter: Any = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool | None = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        _check(locals())
        device = compute_device or World.current().device
        ensure_group(device)
        offload = move_params_to_cpu or cpu_offload
        if move_grads_to_cpu not in (None, offload):
            raise UsageError(f"move_grads_to_cpu={move_grads_to_cpu}: gradients lie where the shards do. Leave it out.")
        low = (compute_dtype or torch.float16) if mixed_precision else None
        if device.type == "cpu":  # where torch's `sync_module_states` refuses to work
            _send_from_rank0(module, process_group)
        super().__init__(
            module,
            process_group,
            sharding_strategy=ShardingStrategy.FULL_SHARD if reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP,
            cpu_offload=CPUOffload(offload_params=offload and device.type != "cpu"),
            mixed_precision=MixedPrecision(
                param_dtype=low,
                reduce_dtype=torch.float32 if low and fp32_reduce_scatter else low,
                buffer_dtype=buffer_dtype or low,
            ),
            device_id=device,
            sync_module_states=device.type != "cpu",
            use_orig_params=True,
        )
        if state_dict_device is not None or state_dict_on_rank_0_only:
            # On a CPU torch 2.13 crashes if it is told to offload, and there is nothing to offload.
            on_cpu = device.type != "cpu" and state_dict_device is not None and torch.device(state_dict_device).type == "cpu"
            config = FullStateDictConfig(offload_to_cpu=on_cpu, rank0_only=state_dict_on_rank_0_only)
            TorchFSDP.set_state_dict_type(self, StateDictType.FULL_STATE_DICT, config)

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:  # type: ignore[override]
        """Inside, parameters are whole; what is written to them is kept, unless `volatile`. Collective."""
        with TorchFSDP.summon_full_params(self, recurse=recurse, writeback=not volatile):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over all shards. Collective."""
        if any(each.process_group is not self.process_group for each in get_fsdp_instances(self)):
            return super().clip_grad_norm_(max_norm, norm_type)
        # torch's own fails on float64: it takes norms in float32.
        shards = [p for p in self.parameters() if p.numel()]
        return clip_owned_(self.parameters(), shards, max_norm, norm_type, self.process_group)

    def gather_full_optim_state_dict(self, optim: torch.optim.Optimizer, **ignored: Any) -> dict[str, Any] | None:
        """The whole optimizer state, by parameter name, on rank 0; None elsewhere. Collective."""
        return gathered(self, optim)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of what `gather_full_optim_state_dict` gave, for the optimizer's `load_state_dict`. Collective."""
        return sharded(self, full_optim_state_dict)

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise UsageError(f"FullyShardedDataParallel.local_state_dict: instead {_CHECKPOINTS}.")

    def load_local_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(f"FullyShardedDataParallel.load_local_state_dict: instead {_CHECKPOINTS}.")

    def local_metadata_dict(self) -> dict[str, Any]:
        raise UsageError(f"FullyShardedDataParallel.local_metadata_dict: instead {_CHECKPOINTS}.")

    @staticmethod
    def consolidate_shard_weights(*args: Any, **kwargs: Any) -> dict[str, Any]:
        raise UsageError("FullyShardedDataParallel.consolidate_shard_weights: instead `echelon ckpt export`.")

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        raise UsageError(f"FullyShardedDataParallel.set_gradient_divide_factors: instead {_DIVIDING}.")


def _check(given: dict[str, Any]) -> None:
    for name, (nothing, instead) in _UNSUPPORTED.items():
        if given[name] not in (nothing, None):
            raise UsageError(f"FullyShardedDataParallel({name}={given[name]!r}) has no counterpart. Instead: {instead}")
    changed = [name for name, usual in _HELD_ANYWAY.items() if given[name] != usual]
    if changed and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.info("FullyShardedDataParallel(%s=...) has no effect: torch decides", "=..., ".join(changed))


@torch.no_grad()
def _send_from_rank0(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    done = {id(p) for each in get_fsdp_instances(module) for p in (*each.parameters(), *each.buffers())}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in done:
            dist.broadcast(tensor.detach(), group_src=0, group=group)


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[TorchFSDP]:
    """The FullyShardedDataParallel modules within a module; `skip_empty` leaves out those without parameters."""
    found = [m for m in mod.modules() if isinstance(m, TorchFSDP)]
    return [m for m in found if not skip_empty or any(True for _ in m.parameters())]
