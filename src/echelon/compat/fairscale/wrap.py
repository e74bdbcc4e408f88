"""`fairscale.nn.wrap`: wraps submodules one by one, as the surrounding `enable_wrap` says; outside of one, nothing is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.common.errors import UsageError
from echelon.compat.fairscale.fsdp import FullyShardedDataParallel

__all__ = [
    "ConfigAutoWrap",
    "auto_wrap",
    "auto_wrap_bn",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]

_OF_BATCH_NORMS = {
    "mixed_precision": False,
    "flatten_parameters": False,
    "reshard_after_forward": False,
    "bucket_cap_mb": 0,
    "force_input_to_fp32": False,
}
# (module, recurse, unwrapped_params, module_is_root): whether to look inside, or whether to wrap.
WrapPolicy = Callable[..., bool]


def default_auto_wrap_policy(
    module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool, min_num_params: int = int(1e8), **kinds: Any
) -> bool:
    """Wrap modules that have enough parameters outside of wrapped submodules.

    Args:
        recurse: True asks whether to look inside the module, False whether to wrap it.
        unwrapped_params: how many of its parameters are in no wrapper yet.
        min_num_params: wrap from this number on.
        kinds: `force_leaf_modules`: classes whose submodules are never wrapped, by default MultiheadAttention;
            `exclude_wrap_modules`: classes that are never wrapped themselves, by default ModuleList and ModuleDict.
    """
    return size_based_auto_wrap_policy(module, recurse, unwrapped_params, min_num_params, **kinds)


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Wrap the modules that have an attribute `wrapper_config`, a dict of arguments."""
    return recurse or hasattr(module, "wrapper_config")


class ConfigAutoWrap:
    """The settings of the surrounding `enable_wrap`."""

    in_autowrap_context: ClassVar[bool] = False
    wrapper_cls: ClassVar[Callable[..., nn.Module] | None] = None
    auto_wrap_policy: ClassVar[WrapPolicy | None] = None
    kwargs: ClassVar[dict[str, Any]] = {}


@contextmanager
def enable_wrap(auto_wrap_policy: WrapPolicy | None = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """Context in which `wrap` and `auto_wrap` wrap.

    Args:
        auto_wrap_policy: the policy of `auto_wrap` calls without one.
        wrapper_kwargs: `wrapper_cls`, by default FullyShardedDataParallel, and its arguments.
    """
    if ConfigAutoWrap.in_autowrap_context:
        raise UsageError(
            "You are already within an autowrap context and we currently do not supported nested autowrap. "
            "Leave the inner enable_wrap out."
        )
    ConfigAutoWrap.wrapper_cls = wrapper_kwargs.pop("wrapper_cls", FullyShardedDataParallel)
    ConfigAutoWrap.auto_wrap_policy, ConfigAutoWrap.kwargs = auto_wrap_policy or default_auto_wrap_policy, wrapper_kwargs
    ConfigAutoWrap.in_autowrap_context = True
    try:
        yield
    finally:
        ConfigAutoWrap.in_autowrap_context = False
        ConfigAutoWrap.wrapper_cls, ConfigAutoWrap.auto_wrap_policy, ConfigAutoWrap.kwargs = None, None, {}


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap the module as the surrounding `enable_wrap` says. These arguments have precedence over the module's `wrapper_config`,
    and that over the arguments of `enable_wrap`."""
    if (wrapper := ConfigAutoWrap.wrapper_cls) is None:
        return module
    return wrapper(module, **{**ConfigAutoWrap.kwargs, **getattr(module, "wrapper_config", {}), **wrap_overrides})


def auto_wrap(module: nn.Module, auto_wrap_policy: WrapPolicy | None = None, **kwargs: Any) -> nn.Module:
    """Wrap, innermost first, the submodules and the module that the policy chooses, in place; `kwargs` are for the wrapper."""
    wrapper, policy = ConfigAutoWrap.wrapper_cls, auto_wrap_policy or ConfigAutoWrap.auto_wrap_policy
    if wrapper is None or policy is None:
        return module
    return _wrapped(module, policy, True, kwargs)[0]


def _wrapped(module: nn.Module, policy: WrapPolicy, is_root: bool, kwargs: dict[str, Any]) -> tuple[nn.Module, int]:
    """(the module, wrapped or not; how many of its parameters are in wrappers now)."""
    count = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=count, module_is_root=is_root):
        return module, 0
    taken = 0
    for name, child in list(module.named_children()):
        made, inside = _wrapped(child, policy, False, kwargs)
        setattr(module, name, made)
        taken += inside
    if policy(module=module, recurse=False, unwrapped_params=count - taken, module_is_root=is_root):
        return wrap(module, **kwargs), count
    return module, taken


def auto_wrap_bn(
    module: nn.Module,
    single_rank_pg: bool = False,
    process_group: dist.ProcessGroup | None = None,
    fsdp_config: dict[str, Any] | None = None,
    wrap_it: bool = True,
    assert_on_collision: bool = True,
) -> nn.Module:
    """Wrap every batch norm by itself, in full precision.

    Args:
        single_rank_pg: FairScale's for Apex; refused.
        fsdp_config: arguments for the wrappers; by default full precision, without resharding between forward and backward.
        wrap_it: False only sets `wrapper_config`, for `auto_wrap` with `config_auto_wrap_policy`.
        assert_on_collision: refuse a batch norm that has a `wrapper_config` already.
    """
    if single_rank_pg:
        raise UsageError("auto_wrap_bn(single_rank_pg=True): leave batch norms out of the wrapping, or use nn.SyncBatchNorm.")
    config = _OF_BATCH_NORMS | {"process_group": process_group} if fsdp_config is None else fsdp_config
    for each in module.modules():
        if isinstance(each, _BatchNorm):
            if assert_on_collision and hasattr(each, "wrapper_config"):
                raise UsageError(
                    "Module shouldn't already have a wrapper_config. Is it tagged already by another policy? Remove it, or "
                    "auto_wrap_bn(assert_on_collision=False)."
                )
            each.wrapper_config = config  # type: ignore[assignment]
    with enable_wrap(config_auto_wrap_policy) if wrap_it else nullcontext():
        return auto_wrap(module)
