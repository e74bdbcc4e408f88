"""torchtnt.utils.prepare_module: make a module parallel, for those who write their own unit."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.common.errors import NotHereError, UsageError
from echelon.compat import older_options
from echelon.compat.older_options import ActivationCheckpointParams
from echelon.compat.torchtnt.absent import ARGUMENTS
from echelon.compat.torchtnt.utils.fsdp2 import FSDP2Strategy
from echelon.compat.torchtnt.utils.fsdp_utils import BackwardPrefetch, MixedPrecision, ShardingStrategy, StateDictType
from echelon.parallel import parallelize
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.fsdp import fsdp
from echelon.parallel.gradients.clip import clip_by_norm_
from echelon.parallel.layouts import resolve
from echelon.parallel.meta.materialize import materialize
from echelon.parallel.patching import in_front_of, replace_class
from echelon.parallel.recipe.activation import checkpoint_activations
from echelon.parallel.recipe.compilation import TorchCompileParams
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.strategy import NOOPStrategy, Strategy

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "ActivationCheckpointParams",
    "DDPStrategy",
    "FSDP2Strategy",
    "FSDPStrategy",
    "NOOPStrategy",
    "Strategy",
    "TorchCompileParams",
    "apply_ac",
    "apply_torch_compile",
    "convert_str_to_strategy",
    "materialize_meta_params",
    "on_meta_device",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_fsdp2",
    "prepare_module",
]

# Options that TorchTNT takes as strings, and what converts them.
_OF_STRINGS: dict[str, Any] = {
    "sharding_strategy": ShardingStrategy.to_native_sharding_strategy,
    "backward_prefetch": BackwardPrefetch.to_native_backward_prefetch,
    "state_dict_type": StateDictType.to_native_state_dict_type,
}


class FSDPStrategy(older_options.FSDPStrategy):
    """`echelon.FSDPStrategy` that also takes the options of the older FullyShardedDataParallel. Strings become torch's values.

    Raises:
        UsageError, a ValueError: a string is not the name of such a value.
    """

    def __init__(self, process_group: Any = None, sharding_strategy: Any = None, *others: Any, **options: Any) -> None:
        names = list(inspect.signature(older_options.FSDPStrategy).parameters)
        given = {**dict(zip(names, (process_group, sharding_strategy, *others), strict=False)), **options}
        for name, native in _OF_STRINGS.items():
            if isinstance(value := given.get(name), str):
                given[name] = native(value)
        if isinstance(mixed := given.get("mixed_precision"), MixedPrecision):
            given["mixed_precision"] = mixed.to_native_mixed_precision()
        super().__init__(**given)


class BackendError(UsageError, RuntimeError):
    """torch.compile has no such backend."""


def convert_str_to_strategy(strategy: str) -> Strategy:
    """A strategy with its defaults: "ddp", "fsdp", "fsdp2", "noop", and echelon's other names.

    Raises:
        UsageError, a ValueError: an unknown name.
    """
    if strategy in (own := {"fsdp": FSDPStrategy, "fsdp2": FSDP2Strategy}):
        return own[strategy]()  # type: ignore[no-any-return]
    try:
        resolved = resolve(strategy)
    except UsageError as error:
        raise UsageError(
            f"Strategy {strategy} not supported. Please use one of ['ddp', 'fsdp', 'fsdp2', 'noop']. {error}"
        ) from None
    assert resolved is not None
    return resolved


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
        NotHereError: `global_mesh` or compiled autograd is given.
    """
    refuse_arguments("prepare_module", other)
    if isinstance(strategy, str):
        strategy = convert_str_to_strategy(strategy)
    elif strategy is not None and not isinstance(strategy, Strategy):
        raise UsageError(
            f"Unknown strategy received: {strategy}. Expect either str (one of 'ddp', 'fsdp', or 'noop') or Strategy dataclass"
        )
    made = parallelize.prepare_module(
        module,
        device,
        layout=strategy,
        compile=compilable(torch_compile_params),
        recompute=activation_checkpoint_params,
    )
    is_older = isinstance(strategy, fsdp.FSDPStrategy) and not isinstance(strategy, FSDP2Strategy)
    return _with_older_methods(made) if is_older else made


def refuse_arguments(where: str, given: dict[str, Any]) -> None:
    """Refuse arguments of TorchTNT that compat lacks, since no public program was found to give them.

    Raises:
        NotHereError: one of them is given, and is not false, as the defaults are.
        TypeError: an argument is unknown.
    """
    for name, value in given.items():
        remedy = ARGUMENTS.get(name)
        if remedy is None:
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}")
        if value:
            raise NotHereError(f"{where}({name}=...) is not part of echelon.compat. Instead: {remedy}")


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


def compilable(params: Any) -> Any:
    """The parameters, unchanged.

    Raises:
        BackendError, a RuntimeError: torch has no such backend.
    """
    backend = getattr(params, "backend", None)
    if isinstance(backend, str) and backend not in torch.compiler.list_backends(exclude_tags=()):
        raise BackendError(f"Invalid backend: {backend!r}, see `torch._dynamo.list_backends()` for available backends.")
    return params


class _OlderMethods:
    """Methods that programs for FullyShardedDataParallel call on a module."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes only accumulate gradients on each rank."""
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
    """Apply activation checkpointing to submodules, in place."""
    checkpoint_activations(module, activation_checkpoint_params)


def apply_torch_compile(module: nn.Module, torch_compile_params: TorchCompileParams) -> None:
    """Compile the module, or the submodules that the parameters name, in place."""
    Recipe(torch_compile=compilable(torch_compile_params)).applied(module)


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
