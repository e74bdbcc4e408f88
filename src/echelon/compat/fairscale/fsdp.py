"""`FullyShardedDataParallel` with FairScale's options, on torch's class of that name.

For new programs, `echelon`'s strategy "fsdp" is the better choice: it builds on `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.common.errors import LayoutError, NotHereError
from echelon.compat.fairscale import fsdp_states
from echelon.compat.fairscale.absent import METHODS
from echelon.compat.fairscale.groups import clip_owned_, outlive
from echelon.compat.fairscale.torch_fsdp import (
    claim,
    claimed,
    is_summoned,
    plain,
    wrappers,
)
from echelon.world.init import World, ensure_group

__all__ = ["FullyShardedDataParallel", "Options"]


@dataclass
class Options:
    """FullyShardedDataParallel's arguments after the module and its group, in their order.

    Args:
        process_group_reduce_scatter: accepted; torch overlaps its messages in one group.
        reshard_after_forward: free the gathered parameters between forward and backward.
        mixed_precision: compute and reduce in `compute_dtype` (by default half precision), with float32 shards.
        fp32_reduce_scatter: reduce gradients in float32 nevertheless.
        buffer_dtype: of buffers; by default `compute_dtype`.
        move_params_to_cpu, cpu_offload: shards live in host memory; `move_grads_to_cpu` goes with them.
        compute_device: by default the GPU, or the CPU where there is none.
        no_broadcast_optim_state: tells `consolidate_shard_weights` that the wrapper is in a group of one rank.
        state_dict_device, state_dict_on_rank_0_only: where `state_dict()` puts the whole parameters: on their device or
            torch.device("cpu"), on all ranks or on rank 0.
        force_input_to_fp32: half-precision inputs are cast, unless `mixed_precision`.
        disable_reshard_on_root, bucket_cap_mb, flatten_parameters, verbose: accepted; parameters keep their names, torch decides
            the rest.
        gradient_predivide_factor: refused; torch divides gradients both before and after ranks add them.
    """

    process_group_reduce_scatter: Any = None
    reshard_after_forward: bool = True
    disable_reshard_on_root: bool = True
    mixed_precision: bool = False
    fp32_reduce_scatter: bool = False
    flatten_parameters: bool = True
    move_params_to_cpu: bool = False
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    move_grads_to_cpu: bool | None = None
    bucket_cap_mb: int = 25
    compute_device: torch.device | None = None
    no_broadcast_optim_state: bool | None = False
    state_dict_device: torch.device | None = None
    clear_autocast_cache: bool = False
    force_input_to_fp32: bool = False
    verbose: bool = False
    cpu_offload: bool = False
    state_dict_on_rank_0_only: bool = False
    gradient_predivide_factor: float | None = None

    def __post_init__(self) -> None:
        """Merge options that have several names, and set defaults for None."""
        self.compute_device = self.compute_device or World.current().device
        self.cpu_offload = self.move_params_to_cpu = self.move_params_to_cpu or self.cpu_offload
        if self.move_grads_to_cpu is None:
            self.move_grads_to_cpu = self.cpu_offload
        self.low = (self.compute_dtype or torch.float16) if self.mixed_precision else None
        self.compute_dtype = self.compute_dtype or self.low or torch.float32
        self.torch_buffer_dtype = self.buffer_dtype or self.low
        self.buffer_dtype = self.buffer_dtype or self.compute_dtype

    def check(self, module: nn.Module, on_cpu: bool) -> None:
        """
        Raises:
            LayoutError, NotHereError, ValueError: the module does not fit the options, or torch's class does not support them.
        """
        if self.gradient_predivide_factor is not None:
            raise NotHereError(
                f"FullyShardedDataParallel(gradient_predivide_factor={self.gradient_predivide_factor}) is not part of "
                "echelon.compat. Instead: leave it out. Half of the division is before ranks add the gradients."
            )
        if self.fp32_reduce_scatter and not self.mixed_precision:
            raise ValueError("fp32_reduce_scatter requires mixed_precision=True")
        if self.move_grads_to_cpu != self.cpu_offload and not on_cpu:
            raise LayoutError(f"move_grads_to_cpu={self.move_grads_to_cpu}: gradients lie where the shards do. Leave it out.")
        own = dict(_own_parameters(module))
        half = self.compute_dtype is torch.float16 and not self.mixed_precision
        if half and any(p.dtype is not torch.float16 for p in own.values()):
            raise ValueError("Expecting FP16 param type in pure FP16 mode.")
        if not half and any(p.dtype is torch.float16 for p in own.values()):
            raise ValueError("Expecting FP16 param type in FP32 & MP modes.")
        if twice := claimed(own):
            raise LayoutError(f"{', '.join(twice)}: another wrapper has the same parameters. Wrap what has all that use them.")


class FullyShardedDataParallel(TorchFSDP):
    """Parameters, gradients and optimizer state in shards, one flat parameter per wrapped module.

    Parameters keep their names (`use_orig_params`), and start from rank 0's values. Collective. Arguments are attributes.

    Args:
        args, options: the fields of `Options`.
    Raises:
        LayoutError: `move_grads_to_cpu` without `cpu_offload`, or a parameter that another wrapper has already.
    """

    append_shared_param: Any = METHODS["FullyShardedDataParallel.append_shared_param"]
    reset_parameters: Any = METHODS["FullyShardedDataParallel.reset_parameters"]
    set_gradient_divide_factors: Any = METHODS["FullyShardedDataParallel.set_gradient_divide_factors"]

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None, *args: Any, **options: Any) -> None:
        given = Options(*args, **options)
        device = given.compute_device
        assert device is not None
        ensure_group(device)
        outlive(process_group)
        given.check(module, device.type == "cpu")
        self._build(module, process_group, given, device)
        both = ("mixed_precision", "cpu_offload", "compute_device")  # torch's class has these as well, with more in them
        vars(self).update({name: value for name, value in vars(given).items() if name not in both})
        self.state_dict_device = given.state_dict_device or device
        for each in wrappers(self)[1:]:  # its optimizer state differs on every rank, as that of experts
            if each.world_size == 1 < self.world_size:
                each.no_broadcast_optim_state = True  # type: ignore[assignment]
        claim(self)
        if given.state_dict_device is not None or given.state_dict_on_rank_0_only:
            # On a CPU torch 2.13 crashes if it is told to offload, and there is nothing to offload.
            on_cpu = device.type != "cpu" and torch.device(given.state_dict_device or device).type == "cpu"
            config = FullStateDictConfig(offload_to_cpu=on_cpu, rank0_only=given.state_dict_on_rank_0_only)
            TorchFSDP.set_state_dict_type(self, StateDictType.FULL_STATE_DICT, config)

    def _build(self, module: nn.Module, group: Any, given: Options, device: torch.device) -> None:
        """Build torch's class with these options."""
        on_cpu = device.type == "cpu"
        if on_cpu:  # torch's `sync_module_states` does not work there
            _send_from_rank0(module, group)
        super().__init__(
            module,
            group,
            sharding_strategy=ShardingStrategy.FULL_SHARD if given.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP,
            cpu_offload=CPUOffload(offload_params=given.cpu_offload and not on_cpu),
            mixed_precision=MixedPrecision(
                param_dtype=given.low,
                reduce_dtype=torch.float32 if given.low and given.fp32_reduce_scatter else given.low,
                buffer_dtype=given.torch_buffer_dtype,
            ),
            device_id=device,
            sync_module_states=not on_cpu,
            use_orig_params=True,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_summoned(self):
            raise LayoutError("FullyShardedDataParallel must run outside of summon_full_params, got a forward within it.")
        if self.force_input_to_fp32 and self.low is None:
            args, kwargs = _in_float32(args), _in_float32(kwargs)
        outputs = super().forward(*args, **kwargs)
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotHereError("FullyShardedDataParallel cannot be pickled or copied: a process group cannot. Save state_dict().")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by the unwrapped module's names."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield plain(name), parameter

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:  # type: ignore[override]
        """Context in which parameters are whole. What is written to them is kept, unless `volatile`. Collective.

        Raises:
            AssertionError: within a forward or backward pass, or within another such context.
        """
        with TorchFSDP.summon_full_params(self, recurse=recurse, writeback=not volatile):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over all shards. Collective.

        Raises:
            NotImplementedError: wrappers with several process groups.
            LayoutError: this wrapper is within another one.
        """
        if self._is_root is False:
            raise LayoutError("clip_grad_norm_ must be called on the outermost FullyShardedDataParallel, got one within another.")
        if any(each.process_group is not self.process_group for each in wrappers(self)):
            raise NotImplementedError(
                "clip_grad_norm requires that all params share one process group. clip_grad_by_value_ should work"
            )
        # torch's own fails on float64: it takes norms in float32.
        shards = [p for p in self.parameters() if p.numel()]
        return clip_owned_(self.parameters(), shards, max_norm, norm_type, self.process_group)

    def gather_full_optim_state_dict(self, optim: torch.optim.Optimizer, **ignored: Any) -> dict[str, Any] | None:
        """The whole optimizer state, in the undivided optimizer's form, on rank 0; None elsewhere. Collective."""
        return fsdp_states.gathered(self, optim)

    def local_state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, torch.Tensor]:
        """This rank's part of the parameters, and the buffers."""
        return fsdp_states.local_state(self, prefix)

    get_shard_from_optim_state_dict = fsdp_states.sharded
    load_local_state_dict = fsdp_states.load_local_state
    local_metadata_dict = fsdp_states.local_metadata
    consolidate_shard_weights = staticmethod(fsdp_states.consolidated)


def _in_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype is torch.float16 else value
    if isinstance(value, dict):
        return {key: _in_float32(each) for key, each in value.items()}
    return type(value)(map(_in_float32, value)) if type(value) in (list, tuple) else value


@torch.no_grad()
def _send_from_rank0(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    done = {id(p) for each in wrappers(module) for p in (*each.parameters(), *each.buffers())}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in done:
            dist.broadcast(tensor.detach(), group_src=0, group=group)


def _own_parameters(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are in no wrapper within the module."""
    if isinstance(module, TorchFSDP):
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield path + name, parameter
    for name, child in module.named_children():
        yield from _own_parameters(child, f"{path}{name}.")
