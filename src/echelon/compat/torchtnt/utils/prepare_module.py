"""torchtnt.utils.prepare_module, fsdp_utils and precision: make a module parallel, for those who write their own unit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision

from echelon.compat.older_options import ActivationCheckpointParams, FSDPStrategy
from echelon.compat.torchtnt.absent import absent, refuse_arguments
from echelon.compat.torchtnt.utils.fsdp2 import FSDP2Strategy
from echelon.parallel import parallelize
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.fsdp import fsdp
from echelon.parallel.gradients.clip import clip_by_norm_
from echelon.parallel.layouts import resolve
from echelon.parallel.meta.materialize import materialize
from echelon.parallel.patching import in_front_of, replace_class
from echelon.parallel.recipe.activation import checkpoint_activations
from echelon.parallel.recipe.compilation import TorchCompileParams
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import NOOPStrategy, Strategy

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "ActivationCheckpointParams",
    "BackwardPrefetch",
    "DDPStrategy",
    "FSDP2Strategy",
    "FSDPStrategy",
    "MixedPrecision",
    "NOOPStrategy",
    "ShardingStrategy",
    "StateDictType",
    "Strategy",
    "TorchCompileParams",
    "apply_ac",
    "apply_torch_compile",
    "convert_precision_str_to_dtype",
    "convert_str_to_strategy",
    "materialize_meta_params",
    "on_meta_device",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_fsdp2",
    "prepare_module",
]


@dataclass
class MixedPrecision(TorchMixedPrecision):
    """torch's MixedPrecision, whose types may be written "fp16", "bf16", "fp32" or as torch names them, and whose classes by
    their full names.
    """

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, _dtype(value))
        kinds = self._module_classes_to_ignore
        self._module_classes_to_ignore = tuple(resolve_name(kind) if isinstance(kind, str) else kind for kind in kinds)


def _dtype(value: str) -> torch.dtype:
    return Precision.of(getattr(torch, value.removeprefix("torch."), value)).dtype or torch.float32


def convert_precision_str_to_dtype(precision: str) -> torch.dtype | None:
    """torch.float16 for "fp16", torch.bfloat16 for "bf16", None for "fp32".

    Raises:
        UsageError, a ValueError: anything else.
    """
    return Precision.of(precision).dtype


def convert_str_to_strategy(strategy: str) -> Strategy:
    """A strategy with its defaults: "ddp", "fsdp", "fsdp2", "noop", and echelon's other names.

    Raises:
        UsageError, a ValueError: an unknown name.
    """
    own: dict[str, type[Strategy]] = {"fsdp": FSDPStrategy, "fsdp2": FSDP2Strategy}
    found = own[strategy]() if strategy in own else resolve(strategy)
    assert found is not None
    return found


def prepare_module(
    module: nn.Module,
    device: torch.device,
    *,
    strategy: Strategy | str | None = None,
    torch_compile_params: TorchCompileParams | None = None,
    activation_checkpoint_params: ActivationCheckpointParams | None = None,
    **other: Any,
) -> nn.Module:
    """As `echelon.layouts.prepare_module`.

    Raises:
        NotHereError: `global_mesh`, or compiled autograd, is asked for.
    """
    refuse_arguments("prepare_module", other)
    layout = convert_str_to_strategy(strategy) if isinstance(strategy, str) else strategy
    made = parallelize.prepare_module(
        module, device, layout=layout, compile=torch_compile_params, recompute=activation_checkpoint_params
    )
    return _with_older_methods(made) if isinstance(layout, fsdp.FSDPStrategy) else made


def prepare_ddp(module: nn.Module, device: torch.device, strategy: DDPStrategy | None = None) -> DistributedDataParallel:
    """As `echelon.layouts.prepare_ddp`."""
    return parallelize.prepare_ddp(module, device, strategy)


def prepare_fsdp(module: nn.Module, device: torch.device, strategy: FSDPStrategy | None = None) -> nn.Module:
    """As `echelon.layouts.prepare_fsdp`: `fully_shard` in place, with the older class's `no_sync` and `clip_grad_norm_`."""
    return _with_older_methods(parallelize.prepare_fsdp(module, device, strategy))


def prepare_fsdp2(module: nn.Module, device: torch.device, strategy: FSDP2Strategy | None = None, **other: Any) -> nn.Module:
    """`fully_shard` in place, with its own options."""
    refuse_arguments("prepare_fsdp2", other)
    return parallelize.prepare_fsdp(module, device, strategy or FSDP2Strategy())


class _OlderMethods:
    """What programs for FullyShardedDataParallel call on a module."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes only add gradients up on each rank."""
        sharded: Any = self
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before. Collective."""
        module: Any = self
        return clip_by_norm_(module.parameters(), max_norm, norm_type)


def _with_older_methods(module: nn.Module) -> nn.Module:
    kind = type(module)
    if not isinstance(module, _OlderMethods):
        replace_class(module, "torchtnt", in_front_of(kind, _OlderMethods))  # as `fully_shard` itself does it
    return module


def apply_ac(module: nn.Module, activation_checkpoint_params: ActivationCheckpointParams) -> None:
    """Let submodules recompute their activations, in place."""
    checkpoint_activations(module, activation_checkpoint_params)


def apply_torch_compile(module: nn.Module, torch_compile_params: TorchCompileParams) -> None:
    """Compile the module, or the submodules that the parameters name, in place."""
    Recipe(torch_compile=torch_compile_params).compile(module)


def on_meta_device(module: nn.Module) -> bool:
    """Whether the module's own parameters, not those of its submodules, are on the meta device."""
    first = next(module.parameters(recurse=False), None)
    return first is not None and first.is_meta


def materialize_meta_params(module: nn.Module, device: torch.device) -> None:
    """Give a module that was built on the meta device the values of its initialisation. Collective.

    Raises:
        UsageError: nothing gives a value to one of its tensors.
    """
    materialize(module, device)


__getattr__ = absent(__name__)
