"""`FullyShardedDataParallel` with FairScale's options, on torch's class of that name.

For new programs `echelon`'s strategy "fsdp" is the better choice: it builds on `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from echelon.common.errors import LayoutError, NotHereError
from echelon.compat.fairscale.absent import METHODS, NAMES
from echelon.compat.fairscale.clip import clip_owned_
from echelon.compat.fairscale.groups import outlive
from echelon.compat.fairscale.names import later
from echelon.compat.fairscale.nn.data_parallel import local_state
from echelon.compat.fairscale.nn.data_parallel.fsdp_optim_utils import gathered, sharded
from echelon.compat.fairscale.nn.data_parallel.options import Options, ProcessGroupName, check
from echelon.compat.fairscale.nn.data_parallel.torch_fsdp import (
    LowPrecision,
    Offload,
    around_conversion,
    claim,
    divisors,
    forwards_may_precede_backwards,
    is_summoned,
    plain,
    set_divisors,
    without_messages,
    wrappers,
)
from echelon.world.init import World, ensure_group

__all__ = ["FullyShardedDataParallel", "ProcessGroupName"]

if TYPE_CHECKING:
    from collections.abc import Callable

    auto_wrap_bn: Callable[..., nn.Module]

_MODULE = "nn.data_parallel.fully_sharded_data_parallel"

__getattr__ = later(_MODULE, {"auto_wrap_bn": "nn.wrap.batch_norm"}, NAMES[_MODULE])


class FullyShardedDataParallel(TorchFSDP):
    """Parameters, gradients and optimizer state in shards, one flat parameter per wrapped module.

    Parameters keep their names (`use_orig_params`), and start from rank 0's values. Collective. Arguments are attributes.

    Args:
        process_group_reduce_scatter: accepted; torch overlaps its messages in one group.
        reshard_after_forward: free whole parameters between forward and backward.
        mixed_precision: compute and reduce in `compute_dtype` (by default half precision), with float32 shards.
        fp32_reduce_scatter: reduce gradients in float32 nevertheless.
        flatten_parameters: the form of `local_state_dict`, and of names outside of `summon_full_params`.
        buffer_dtype: of buffers; by default `compute_dtype`.
        move_params_to_cpu, cpu_offload: shards live in host memory; `move_grads_to_cpu` goes with them.
        compute_device: by default the GPU, or the CPU where there is none.
        no_broadcast_optim_state: what a wrapper in a group of one rank says to `consolidate_shard_weights`.
        state_dict_device, state_dict_on_rank_0_only: where `state_dict()` puts the whole parameters: on their device, or
            torch.device("cpu"); on all ranks, or on rank 0.
        force_input_to_fp32: half-precision inputs are cast, unless `mixed_precision`.
        gradient_predivide_factor: gradients are divided by it before ranks add them, and by the rest afterwards.
        disable_reshard_on_root, bucket_cap_mb, verbose: accepted; torch decides.
    Raises:
        LayoutError: `move_grads_to_cpu` alone; a parameter that another wrapper has already.
    """

    mixed_precision: Any
    cpu_offload: Any
    append_shared_param: Any = METHODS["append_shared_param"]
    reset_parameters: Any = METHODS["reset_parameters"]
    set_gradient_divide_factors: Any = METHODS["set_gradient_divide_factors"]

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
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
    ) -> None:
        given = Options(  # mypy knows the types of the first tuple only
            *(process_group_reduce_scatter, reshard_after_forward, disable_reshard_on_root, mixed_precision),
            *(fp32_reduce_scatter, flatten_parameters, move_params_to_cpu, compute_dtype, buffer_dtype, move_grads_to_cpu),  # type: ignore[arg-type]
            *(bucket_cap_mb, compute_device, no_broadcast_optim_state, state_dict_device, clear_autocast_cache),  # type: ignore[arg-type]
            *(force_input_to_fp32, verbose, cpu_offload, state_dict_on_rank_0_only, gradient_predivide_factor),  # type: ignore[arg-type]
        )
        is_real = process_group is None or isinstance(process_group, dist.ProcessGroup)
        device = compute_device or World.current().device
        if is_real:
            ensure_group(device)
            outlive(process_group)
        attributes = given.attributes(process_group, device)
        check(module, attributes, device)
        self._build(module, process_group, given, device, is_real)
        self._take(attributes)
        self._set_form_of_state(given, device)

    def _build(self, module: nn.Module, group: Any, given: Options, device: torch.device, is_real: bool) -> None:
        """As torch's class."""
        low = given.low_precision
        if device.type == "cpu" and is_real:  # where torch's `sync_module_states` refuses to work
            _send_from_rank0(module, group)
        super().__init__(
            module,
            group,
            sharding_strategy=ShardingStrategy.FULL_SHARD if given.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP,
            cpu_offload=CPUOffload(offload_params=given.offloads and device.type != "cpu"),
            mixed_precision=MixedPrecision(
                param_dtype=low,
                reduce_dtype=torch.float32 if low and given.fp32_reduce_scatter else low,
                buffer_dtype=given.buffer_dtype or low,
            ),
            device_id=device,
            sync_module_states=device.type != "cpu" and is_real,
            use_orig_params=True,
        )
        if not is_real:
            without_messages(self)

    def _set_form_of_state(self, given: Options, device: torch.device) -> None:
        """Of `state_dict()`."""
        where = given.state_dict_device
        if where is not None or given.state_dict_on_rank_0_only:
            # On a CPU torch 2.13 crashes if it is told to offload, and there is nothing to offload.
            on_cpu = device.type != "cpu" and where is not None and torch.device(where).type == "cpu"
            config = FullStateDictConfig(offload_to_cpu=on_cpu, rank0_only=given.state_dict_on_rank_0_only)
            TorchFSDP.set_state_dict_type(self, StateDictType.FULL_STATE_DICT, config)

    def _take(self, attributes: dict[str, Any]) -> None:
        before = attributes.pop("gradient_predivide_factor")
        # Two that torch's class has as well, with more in them: torch's, as true as FairScale's.
        self.mixed_precision = LowPrecision(**vars(self.mixed_precision))
        self.cpu_offload = Offload(self.cpu_offload.offload_params, is_asked=attributes.pop("cpu_offload"))
        del attributes["mixed_precision"]
        for name, value in {**attributes, "compute_device": self.compute_device}.items():
            setattr(self, name, value)
        self.gradient_predivide_factor = float(before or divisors(self)[0])
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor
        set_divisors(self, self.gradient_predivide_factor, self.gradient_postdivide_factor)
        for each in wrappers(self)[1:]:  # its optimizer state is another on every rank, as experts' is
            if each.world_size == 1 < self.world_size:
                each.no_broadcast_optim_state = True  # type: ignore[assignment]
        claim(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_summoned(self):
            raise LayoutError("FullyShardedDataParallel must run outside of summon_full_params, got a forward within it.")
        if self.force_input_to_fp32 and not self.mixed_precision:
            args, kwargs = _in_float32(args), _in_float32(kwargs)
        with forwards_may_precede_backwards(self):
            outputs = super().forward(*args, **kwargs)
        if self.clear_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotHereError("FullyShardedDataParallel cannot be pickled or copied: a process group cannot. Save state_dict().")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By the unwrapped module's names, where parameters are whole or not flattened."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (name if self.__dict__.get("flatten_parameters", True) else plain(name)), parameter

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate, on each rank.

        Raises:
            RuntimeError: a wrapper is around this one.
        """
        with super().no_sync():
            yield

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`half()`, `float()`, `to(...)`: unless in mixed precision, it computes in the parameters' new type."""
        before = {p.dtype for p in self.parameters()}
        with around_conversion(self):
            super()._apply(*args, **kwargs)
        after = {p.dtype for p in self.parameters()}
        if not self.mixed_precision and after != before and len(after) == 1:
            self.compute_dtype = after.pop()
        return self

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:  # type: ignore[override]
        """Inside, parameters are whole; what is written to them is kept, unless `volatile`. Collective.

        Raises:
            AssertionError: in a forward, a backward or another one of these.
        """
        with TorchFSDP.summon_full_params(self, recurse=recurse, writeback=not volatile):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over all shards. Collective.

        Raises:
            NotImplementedError: wrappers with several process groups.
            LayoutError: a wrapper is around this one.
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
        """The whole optimizer state, as the undivided optimizer has it, on rank 0; None elsewhere. Collective."""
        return gathered(self, optim)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of what `gather_full_optim_state_dict` gave, for the optimizer's `load_state_dict`."""
        return sharded(self, full_optim_state_dict)

    def local_state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, torch.Tensor]:
        """This rank's part of the parameters, and the buffers."""
        return local_state.local_state(self, prefix)

    def load_local_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
        """Take what `local_state_dict` gave to this rank, of as many ranks.

        Raises:
            RuntimeError: other sizes; or, if `strict`, other keys.
        """
        return local_state.load_local_state(self, state_dict, strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What `consolidate_shard_weights` must know about this rank's `local_state_dict`."""
        return local_state.local_metadata(self)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: list[dict[str, torch.Tensor]],
        shard_metadata: list[dict[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, torch.Tensor]:
        """The unwrapped module's state dict from all ranks' local ones; without ranks.

        Raises:
            ValueError: not as many weights as metadata, or none.
        """
        return local_state.consolidated(shard_weights, shard_metadata, with_module_buffers, strict)


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
