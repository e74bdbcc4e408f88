"""Wrap submodules one by one, by what a surrounding `enable_wrap` says; outside of it modules stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from echelon.common.errors import UsageError

__all__ = [
    "ConfigAutoWrap",
    "NestedWrapError",
    "WrappedAlreadyError",
    "auto_wrap",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]

# (module, recurse, unwrapped_params, module_is_root): whether to look inside, or whether to wrap.
WrapPolicy = Callable[..., bool]


class NestedWrapError(UsageError, NotImplementedError):
    """enable_wrap inside of enable_wrap."""


class WrappedAlreadyError(UsageError, AssertionError):
    """A module whose submodules are to be chosen has wrapped ones."""


class _DefaultPolicy:
    """Wraps what has enough parameters that no submodule took.

    Args:
        recurse: asks whether to look inside the module; else whether to wrap it.
        unwrapped_params: how many of its parameters are in no wrapper yet.
        min_num_params: from how many on.
        force_leaf_modules: classes whose submodules are never wrapped.
        exclude_wrap_modules: classes that are never wrapped themselves.
        skip_params_check_for_root: wrap the root whatever its size.
    """

    EXCLUDE_WRAP_MODULES: ClassVar[set[type[nn.Module]]] = {nn.ModuleList, nn.ModuleDict}
    FORCE_LEAF_MODULES: ClassVar[set[type[nn.Module]]] = {nn.MultiheadAttention}
    __name__ = "default_auto_wrap_policy"

    def __call__(
        self,
        module: nn.Module,
        recurse: bool,
        unwrapped_params: int,
        module_is_root: bool,
        min_num_params: int = int(1e8),
        force_leaf_modules: set[type[nn.Module]] | None = None,
        exclude_wrap_modules: set[type[nn.Module]] | None = None,
        skip_params_check_for_root: bool = False,
    ) -> bool:
        is_large = unwrapped_params >= min_num_params
        if recurse:
            leaves = self.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
            return is_large and not isinstance(module, tuple(leaves))
        never = self.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
        return (is_large or (module_is_root and skip_params_check_for_root)) and not isinstance(module, tuple(never))


default_auto_wrap_policy = _DefaultPolicy()


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Wraps the modules that have an attribute `wrapper_config`, a dict of arguments."""
    return recurse or hasattr(module, "wrapper_config")


@dataclass(frozen=True)
class _Wrapping:
    wrapper: Callable[..., nn.Module]
    policy: WrapPolicy
    half: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


_current: list[_Wrapping] = []


class _Read(type):
    @property
    def in_autowrap_context(cls) -> bool:
        return bool(_current)

    @property
    def wrapper_cls(cls) -> Callable[..., nn.Module] | None:
        return _current[-1].wrapper if _current else None

    @property
    def auto_wrap_policy(cls) -> WrapPolicy | None:
        return _current[-1].policy if _current else None

    @property
    def move_module_cuda_half(cls) -> bool:
        return bool(_current) and _current[-1].half

    @property
    def kwargs(cls) -> dict[str, Any]:
        return dict(_current[-1].arguments) if _current else {}


class ConfigAutoWrap(metaclass=_Read):
    """What the surrounding `enable_wrap` says, if there is one; an object of it is such a context."""

    def __init__(self, auto_wrap_policy: WrapPolicy | None = None, **kwargs: Any) -> None:
        self._context = enable_wrap(auto_wrap_policy, **kwargs)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._context.__exit__(*exc)

    @staticmethod
    def recursive_wrap(
        module: nn.Module, auto_wrap_policy: WrapPolicy | None, module_is_root: bool, **kwargs: Any
    ) -> tuple[nn.Module, int]:
        """As `auto_wrap`; and how many parameters are in wrappers now."""
        _check_unwrapped(module)
        return _wrapped(module, auto_wrap_policy or _current[-1].policy, module_is_root, kwargs)


@contextmanager
def enable_wrap(auto_wrap_policy: WrapPolicy | None = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap` and `auto_wrap` wrap.

    Args:
        auto_wrap_policy: for `auto_wrap` without a policy of its own.
        wrapper_kwargs: `wrapper_cls`, by default FullyShardedDataParallel, and its arguments. `move_module_cuda_half=True` moves
            modules to the GPU in half precision first.
    """
    if _current:
        raise NestedWrapError(
            "You are already within an autowrap context and we currently do not supported nested autowrap. "
            "Leave the inner enable_wrap out."
        )
    from echelon.compat.fairscale.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel

    wrapper = wrapper_kwargs.pop("wrapper_cls", FullyShardedDataParallel)
    half = wrapper_kwargs.pop("move_module_cuda_half", False)
    _current.append(_Wrapping(wrapper, auto_wrap_policy or default_auto_wrap_policy, half, wrapper_kwargs))
    try:
        yield
    finally:
        _current.pop()


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """The module in the wrapper of the surrounding `enable_wrap`; these arguments go before its `wrapper_config`, and that before
    `enable_wrap`'s."""
    if not _current:
        return module
    now = _current[-1]
    if now.half:
        module = module.cuda().half()
    return now.wrapper(module, **{**now.arguments, **getattr(module, "wrapper_config", {}), **wrap_overrides})


def auto_wrap(module: nn.Module, auto_wrap_policy: WrapPolicy | None = None, **kwargs: Any) -> nn.Module:
    """Wrap, innermost first, the submodules and the module that the policy chooses, in place; `kwargs` are for the wrapper."""
    if not _current:
        return module
    _check_unwrapped(module)
    return _wrapped(module, auto_wrap_policy or _current[-1].policy, True, kwargs)[0]


def _check_unwrapped(module: nn.Module) -> None:
    wrapper = _current[-1].wrapper
    if isinstance(wrapper, type) and any(isinstance(each, wrapper) for each in module.modules()):
        raise WrappedAlreadyError(
            f"{type(module).__name__} has a {wrapper.__name__} in it already. Call auto_wrap before any wrap."
        )


def _wrapped(module: nn.Module, policy: WrapPolicy, is_root: bool, kwargs: dict[str, Any]) -> tuple[nn.Module, int]:
    """The module, wrapped or not, and how many of its parameters are in wrappers now."""
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
