"""A module as its author wrote it, and the names that its author gave: without what wrappers put around and into them."""

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


# What is known of modules that are parallel already: a row for each kind, which the file that handles the kind adds.
#
# A wrapper is recognised here and nowhere else: the rest of the library asks `Prepared`, and `Prepared.of` looks it up.


@dataclass(frozen=True)
class Kind:
    """One way in which a module can have been made parallel.

    Args:
        name: what a checkpoint says of the run: "ddp".
        recognises: whether a module is of this kind. It is asked of every module, so it must be fast and import nothing.
        prepared: makes the Prepared of such a module.
        inner: the attribute with which a wrapper holds the module of the user; None if the module is changed in place.
        by_parameters: it is seen in the parameters alone, and asked of what is no other kind; a layout may be applied on top.
        unknown_to_torch: `torch.distributed.checkpoint.state_dict` leaves the wrapper in names.
        module_state: makes the state by name of such a module, where it is not a `ModuleState`.
        optimizer_state: makes the state by name of an optimizer over such modules, where it is not an `OptimizerState`.
    """

    name: str
    recognises: Callable[[nn.Module], bool]
    prepared: Callable[[Any, World], Any]
    inner: str | None = None
    by_parameters: bool = False
    unknown_to_torch: bool = False
    module_state: Callable[[Any], Any] | None = None
    optimizer_state: Callable[[Mapping[str, nn.Module], torch.optim.Optimizer], Any] | None = None


_kinds: list[Kind] = []
_by_parameters: list[Kind] = []


def register(kind: Kind) -> None:
    """Have `Prepared.of` recognise one more kind. Kinds exclude one another, so that their order does not matter."""
    (_by_parameters if kind.by_parameters else _kinds).append(kind)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of this very module, whatever is inside; None if it is as its author wrote it."""
    wrapper = wrapper_of(module)
    return wrapper if wrapper is not None else next((kind for kind in _by_parameters if kind.recognises(module)), None)


def wrapper_of(module: nn.Module) -> Kind | None:
    """As `kind_of`, without looking at parameters."""
    return next((kind for kind in _kinds if kind.recognises(module)), None)


def imported(module: str, name: str) -> type | tuple[()]:
    """A class for isinstance, without an import: what has an instance has been imported already. Else `()`, that matches none."""
    return getattr(sys.modules.get(module), name, ())
