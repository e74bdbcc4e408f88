"""The only place where the forward, the class or a method of somebody's object is replaced: by whom, in which order, and undone.

A replacement lies around those before it. With a layout of several directions the order of a module's forward is, from inside:
the author's, tensor, experts, context, recompute, compile; a pipeline's gates are in its class.
`replaced` tells it of an object; `tests/shape` sees to it that nothing else in the library replaces any of these.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

__all__ = [
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


class _Replacement(NamedTuple):
    what: str
    by: str


# The latest last. Without what was put there, which holds its object: it would never be freed.
_replaced: weakref.WeakKeyDictionary[Any, list[_Replacement]] = weakref.WeakKeyDictionary()


def replaced(thing: object) -> list[tuple[str, str]]:
    """What of an object is replaced and by whom, such as ("forward", "recompute"), from the inside to the outside."""
    return [(each.what, each.by) for each in _replaced.get(thing, ())]


def replace(thing: Any, name: str, by: str, new: Any) -> Callable[[], None]:
    """Put `new` in the place of an attribute of the object itself, such as its `forward`; whom it is to call, `new` knows.

    Returns:
        what takes it away again; before, what others have put around it must be taken away.
    """
    own = vars(thing)
    undo = functools.partial(own.__setitem__, name, own[name]) if name in own else functools.partial(own.pop, name, None)
    own[name] = new
    return _note(thing, name, by, undo)


def take_out(thing: Any, name: str) -> Any:
    """What is in the place of an attribute of the object's class, which shows again; for who puts it elsewhere."""
    return vars(thing).pop(name)


def replace_class(thing: Any, by: str, kind: type) -> Callable[[], None]:
    """As `replace`, of the object's class: it stays the same object, with its tensors, hooks and place in a module."""
    undo = functools.partial(setattr, thing, "__class__", type(thing))
    thing.__class__ = kind
    return _note(thing, "class", by, undo)


def in_front_of(kind: type, front: type, **own: Any) -> type:
    """`front` before a class, with its name. `own`: what it has besides."""
    return type(kind.__name__, (front, kind), own)


def replace_of_class(kind: type, name: str, by: str, new: Any) -> None:
    """Put `new` in the place of a method that a class has from its bases, for good."""
    setattr(kind, name, new)
    _note(kind, name, by, functools.partial(delattr, kind, name))


@contextlib.contextmanager
def own_taken_out(things: Iterable[Any], name: str) -> Iterator[None]:
    """Context in which objects have what their classes have under a name, whatever scripts have put on the objects themselves."""
    own = [(thing, vars(thing).pop(name)) for thing in things if name in vars(thing)]
    try:
        yield
    finally:
        for thing, value in own:
            vars(thing)[name] = value


@contextlib.contextmanager
def for_now(thing: Any, **values: Any) -> Iterator[None]:
    """Context in which an object has other attributes, submodules of a module among them, in place of those that it has now."""
    before = {name: getattr(thing, name) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


@contextlib.contextmanager
def class_for_now(things: Iterable[Any], by: str, kind_of: Callable[[type], type]) -> Iterator[None]:
    """Context in which objects have the classes that `kind_of` makes of theirs."""
    with contextlib.ExitStack() as stack:
        for each in things:
            stack.callback(replace_class(each, by, kind_of(type(each))))
        yield


def _note(thing: Any, what: str, by: str, undo: Callable[[], None]) -> Callable[[], None]:
    noted = _replaced.setdefault(thing, [])
    replacement = _Replacement(what, by)
    noted.append(replacement)

    def take_away() -> None:
        if not any(each is replacement for each in noted):  # it was already
            return
        latest = next(each for each in reversed(noted) if each.what == what)
        if latest is not replacement:
            raise RuntimeError(f"the {what} of {type(thing).__name__} by {by} must be taken away after that by {latest.by}")
        undo()
        noted[:] = [each for each in noted if each is not replacement]

    return take_away
