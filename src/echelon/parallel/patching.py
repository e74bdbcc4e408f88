"""The only place that replaces a forward, a class or a method of a foreign object. It records by whom, in order.

Each replacement wraps the earlier ones. With a layout of several axes a module's forward is, from the inside out: the author's,
tensor, experts, context, recompute, compile. A pipeline's gates are in the module's class.
`replaced` lists an object's replacements. `tests/shape` checks that nothing else in the library replaces any of these.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from echelon.parallel.names import plain_buffers

__all__ = [
    "Snapshot",
    "class_for_now",
    "for_now",
    "in_front_of",
    "own_taken_out",
    "replace",
    "replace_class",
    "replace_of_class",
    "replaced",
    "take_out",
]


# (what, by whom), the latest last. Without the replacements themselves: they hold their object, which would never be freed.
_replaced: weakref.WeakKeyDictionary[Any, list[tuple[str, str]]] = weakref.WeakKeyDictionary()


def replaced(thing: object) -> list[tuple[str, str]]:
    """An object's replacements as (what, by whom), such as ("forward", "recompute"), from the inside out."""
    return list(_replaced.get(thing, ()))


def replace(thing: Any, name: str, by: str, new: Any) -> Callable[[], None]:
    """Replace an attribute of the object itself, such as its `forward`, by `new`, which calls the old one if it needs it.

    Returns:
        a function that undoes this, if the attribute has not been replaced again.
    """
    own, noted = vars(thing), _replaced.setdefault(thing, [])
    before = {name: own[name]} if name in own else {}
    own[name] = new
    noted.append((name, by))

    def undo() -> None:
        if own.get(name) is new:
            del own[name]
            own.update(before)
            noted.remove((name, by))

    return undo


def take_out(thing: Any, name: str) -> Any:
    """Remove and return the object's own attribute, so that its class's shows again; for callers that put it elsewhere."""
    return vars(thing).pop(name)


def replace_class(thing: Any, by: str, kind: type) -> None:
    """As `replace`, for the object's class. It stays the same object, with its tensors, hooks and place in a module."""
    thing.__class__ = kind
    _replaced.setdefault(thing, []).append(("class", by))


def in_front_of(kind: type, front: type, **own: Any) -> type:
    """A class named as `kind` that derives from `front`, then `kind`. `own`: its further attributes."""
    return type(kind.__name__, (front, kind), own)


def replace_of_class(kind: type, name: str, by: str, new: Any) -> None:
    """Override a method that a class inherits with `new`, for good."""
    setattr(kind, name, new)
    _replaced.setdefault(kind, []).append((name, by))


@contextlib.contextmanager
def own_taken_out(things: Iterable[Any], name: str) -> Iterator[None]:
    """Context without the objects' own attribute `name`, which scripts may have set: their classes' attribute shows."""
    own = [(thing, vars(thing).pop(name)) for thing in things if name in vars(thing)]
    try:
        yield
    finally:
        for thing, value in own:
            vars(thing)[name] = value


@contextlib.contextmanager
def for_now(thing: Any, **values: Any) -> Iterator[None]:
    """Context in which an object's attributes, or a module's submodules, have other values."""
    before = {name: getattr(thing, name) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


@contextlib.contextmanager
def class_for_now(things: Iterable[Any], kind_of: Callable[[type], type]) -> Iterator[None]:
    """Context in which each object has the class that `kind_of` makes from its own."""
    own = [(each, type(each)) for each in things]
    try:
        for each, kind in own:
            each.__class__ = kind_of(kind)
        yield
    finally:
        for each, kind in own:
            each.__class__ = kind


_PLAIN = (bool, int, float, str, torch.Tensor, type(None))


class Snapshot:
    """What passes may change of a module besides its parameters: buffers, and plain attributes, such as counters and modes.

    Attributes:
        buffers: by plain name, the values of the buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.buffers = {name: buffer.detach().clone() for name, buffer in plain_buffers(module)}
        self._parts = [
            (part, dict(part.named_buffers(recurse=False)), {n: v for n, v in vars(part).items() if isinstance(v, _PLAIN)})
            for part in module.modules()
        ]

    def restore(self) -> None:
        """Restore all of it."""
        self.restore_buffers()
        for part, _, attributes in self._parts:
            vars(part).update({name: value for name, value in attributes.items() if name in vars(part)})

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Restore the buffers, and the attributes of modules that have replaced a buffer: rotary embeddings for a longer sequence
        also note the new length.
        """
        for part, held, attributes in self._parts:
            now = dict(part.named_buffers(recurse=False))
            if any(now.get(name) is not buffer for name, buffer in held.items()):
                for name, value in {**attributes, **held}.items():
                    setattr(part, name, value)
        for name, buffer in plain_buffers(self._module):
            if name in self.buffers:
                buffer.copy_(self.buffers[name])
