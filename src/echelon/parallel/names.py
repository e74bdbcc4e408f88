"""Modules and names as the author wrote them, without wrappers and the parts that wrappers add to names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from echelon.world.init import World

__all__ = [
    "Kind",
    "class_name",
    "imported",
    "kind_of",
    "matching",
    "names_of_each",
    "plain_buffers",
    "plain_modules",
    "plain_name",
    "plain_names",
    "plainly",
    "register",
    "tied_names",
    "unwrapped",
    "without_compile",
    "wrapper_of",
]

T = TypeVar("T")

# What torch.compile, activation checkpointing and the older FSDP put into names.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a registered wrapper; any other module itself."""
    kind = wrapper_of(module)
    return module if kind is None or kind.inner is None else module.get_submodule(kind.inner)


def class_name(module: nn.Module) -> str:
    """The author's class name: `fully_shard` makes a new class, with FSDP before the name."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if hasattr(module, "set_requires_gradient_sync") else name


def without_compile(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` wrapped; any other module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def plain_names(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that the module's author gave; a tied parameter by its first name, or by every name."""
    yield from plainly(module, module.named_parameters(remove_duplicate=not every_name))


def plain_buffers(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers by the names that the module's author gave; a shared buffer by its first name, or by every name."""
    yield from plainly(module, module.named_buffers(remove_duplicate=not every_name))


def plain_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Modules by every name that their author gave; a wrapper's name stands for the module inside."""
    return dict(plainly(module, module.named_modules(remove_duplicate=False)))


def plain_name(name: str) -> str:
    """A name without the parts that compilation, activation checkpointing and the older FSDP put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def names_of_each(named: Iterable[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter; a tied parameter has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named:
        names.setdefault(parameter, []).append(name)
    return names


def tied_names(named: Iterable[tuple[str, nn.Parameter]]) -> list[list[str]]:
    """The names of each tied parameter."""
    return [names for names in names_of_each(named).values() if len(names) > 1]


def plainly(module: nn.Module, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Anything by names within the module, by the names that its author gave."""
    kinds = ((name, wrapper_of(m)) for name, m in module.named_modules(remove_duplicate=False))
    inside = {name: kind.inner for name, kind in kinds if kind is not None and kind.inner is not None}
    for name, each in named:
        parts = name.split(".")
        kept = [p for i, p in enumerate(parts) if p not in _WRAPPED and inside.get(".".join(parts[:i])) != p]
        yield ".".join(kept), each


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The dotted names that match a pattern such as "blocks.*.up". Its wildcards do not match dots."""
    parts = pattern.split(".")
    return [name for name in names if len(p := name.split(".")) == len(parts) and all(map(fnmatchcase, p, parts))]


# The registry of kinds of parallel modules. The file that handles a kind registers it.
#
# Wrappers are recognised only here: the rest of the library asks `Prepared`, and `Prepared.of` looks the kind up.


@dataclass(frozen=True)
class Kind:
    """One way in which a module can be parallel already.

    Args:
        name: name of the layout in checkpoints, such as "ddp".
        recognises: whether a module is of this kind. Called for every module, so it must be fast and import nothing.
        prepared: makes the `Prepared` of such a module.
        inner: the wrapper's attribute that holds the user's module; None if the module is changed in place.
        by_parameters: only the parameters show this kind. Tried last; a layout may be applied on top.
        module_state: makes such a module's state by name, if it is not a `ModuleState`.
        optimizer_state: makes the state by name of an optimizer over such modules, if it is not an `OptimizerState`.
    """

    name: str
    recognises: Callable[[nn.Module], bool]
    prepared: Callable[[Any, World], Any]
    inner: str | None = None
    by_parameters: bool = False
    module_state: Callable[[Any], Any] | None = None
    optimizer_state: Callable[[Mapping[str, nn.Module], torch.optim.Optimizer], Any] | None = None


_kinds: list[Kind] = []
_by_parameters: list[Kind] = []


def register(kind: Kind) -> None:
    """Have `Prepared.of` recognise one more kind. Kinds exclude one another, so their order does not matter."""
    (_by_parameters if kind.by_parameters else _kinds).append(kind)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of this module itself, not of modules inside; None if it is as its author wrote it."""
    wrapper = wrapper_of(module)
    return wrapper if wrapper is not None else next((kind for kind in _by_parameters if kind.recognises(module)), None)


def wrapper_of(module: nn.Module) -> Kind | None:
    """As `kind_of`, but without the kinds that only parameters show."""
    return next((kind for kind in _kinds if kind.recognises(module)), None)


def imported(module: str, name: str) -> type | tuple[()]:
    """A class for isinstance, without importing its module: `()`, which matches nothing, if nobody has imported it yet."""
    return getattr(sys.modules.get(module), name, ())
