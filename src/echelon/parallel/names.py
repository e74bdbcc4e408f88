"""A module as its author wrote it, and the names that its author gave: without what wrappers put around and into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn

from echelon.parallel.registry import wrapper_of

__all__ = [
    "class_name",
    "matching",
    "names_of_each",
    "plain_buffers",
    "plain_modules",
    "plain_name",
    "plain_names",
    "tied_names",
    "unwrapped",
    "without_compile",
]

T = TypeVar("T")

# What torch.compile, activation checkpointing and the older FSDP put into names.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def unwrapped(module: nn.Module) -> nn.Module:
    """What a wrapper of the registry holds; any other module is itself."""
    kind = wrapper_of(module)
    return module if kind is None or kind.inner is None else module.get_submodule(kind.inner)


def class_name(module: nn.Module) -> str:
    """That of the module's author: `fully_shard` makes a class of its own, FSDP before the name."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if hasattr(module, "set_requires_gradient_sync") else name


def without_compile(module: nn.Module) -> nn.Module:
    """What `torch.compile(module)` made a callable of; any other module is itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def plain_names(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that the module's author gave them; of a tied one the first, or every one."""
    yield from _plainly(module, module.named_parameters(remove_duplicate=not every_name))


def plain_buffers(module: nn.Module, *, every_name: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers by the names that the module's author gave them; of a shared one the first, or every one."""
    yield from _plainly(module, module.named_buffers(remove_duplicate=not every_name))


def plain_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names that their author gave them, every one; of a wrapper what is in it."""
    return dict(_plainly(module, module.named_modules(remove_duplicate=False)))


def plain_name(name: str) -> str:
    """A name without what compilation, activation checkpointing and the older FSDP put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def names_of_each(named: Iterable[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in named:
        names.setdefault(parameter, []).append(name)
    return names


def tied_names(named: Iterable[tuple[str, nn.Parameter]]) -> list[list[str]]:
    """The names of each parameter that has several."""
    return [names for names in names_of_each(named).values() if len(names) > 1]


def _plainly(module: nn.Module, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    kinds = ((name, wrapper_of(m)) for name, m in module.named_modules())
    inside = {name: kind.inner for name, kind in kinds if kind is not None and kind.inner is not None}
    for name, each in named:
        parts = name.split(".")
        kept = [p for i, p in enumerate(parts) if p not in _WRAPPED and inside.get(".".join(parts[:i])) != p]
        yield ".".join(kept), each


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The dotted names that a pattern such as "blocks.*.up" describes: its wildcards stand for a part between two dots."""
    parts = pattern.split(".")
    return [name for name in names if len(p := name.split(".")) == len(parts) and all(map(fnmatchcase, p, parts))]
