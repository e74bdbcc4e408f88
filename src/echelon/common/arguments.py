"""Checks of arguments that Python would misread: the text "no" as true, a text as a list, an iterator as a list."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from echelon.common.errors import UnitError, UsageError, require
from echelon.common.numbers import number, plain, whole

__all__ = ["Given", "check_hooks", "flags", "flags_of", "is_list", "is_path", "mapping", "options_of", "several"]

T = TypeVar("T")


def flags(*, kind: type[UsageError] = UsageError, **given: Any) -> None:
    """Check flags by name. Python would accept any value as true or false.

    Raises:
        UsageError: a value that is not True, False, 1 or 0.
    """
    for name, value in given.items():
        flag = plain(value)
        require(isinstance(flag, int) and flag in (0, 1), name, "True or False", value, kind=kind)


def flags_of(options: Any, *, kind: type[UsageError] = UsageError) -> None:
    """Check the fields of a dataclass declared as `bool`, and those declared as `bool | None` that are not None."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.type in (bool, "bool") or (field.type == "bool | None" and value is not None):
            flags(kind=kind, **{field.name: value})


def options_of(options: type[T], name: str, given: T | None, *, kind: type[UsageError] = UsageError) -> T:
    """The given options, or the default ones for None.

    Raises:
        UsageError: another type.
    """
    require(given is None or isinstance(given, options), name, f"{options.__name__}(...) or None", given, kind=kind)
    return given if given is not None else options()


def several(
    name: str,
    given: Any,
    what: str,
    holds: Callable[[Any], bool] = lambda each: True,
    *,
    kind: type[UsageError] = UsageError,
) -> tuple[Any, ...]:
    """The items as a tuple, so that an iterator can be read more than once.

    Raises:
        UsageError: a text, a mapping, or not iterable; or some items fail `holds`, and are shown.
    """
    require(is_list(given), name, what, given, kind=kind)
    items = tuple(given)
    wrong = [each for each in items if not holds(each)]
    require(not wrong, name, what, wrong, kind=kind)
    return items


class Given:
    """The checks of this module with errors of one kind: `_given = Given(LoopError)`, then `_given.whole("skip", skip)`."""

    def __init__(self, kind: type[UsageError]) -> None:
        self.require = partial(require, kind=kind)
        self.whole, self.number = partial(whole, kind=kind), partial(number, kind=kind)
        self.flags, self.flags_of = partial(flags, kind=kind), partial(flags_of, kind=kind)
        self.several = partial(several, kind=kind)


def is_list(value: Any) -> bool:
    """Whether a value is iterable, and neither a text nor a mapping."""
    iterates = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    return iterates and not isinstance(value, (str, bytes, Mapping, type)) and getattr(value, "ndim", 1) != 0  # no scalar tensor


def mapping(name: str, given: Any, *, kind: type[UsageError] = UsageError) -> dict[str, Any]:
    """A dict with names as keys; empty for None.

    Raises:
        UsageError: anything else.
    """
    is_dict = isinstance(given, Mapping) and all(isinstance(key, str) for key in given)
    require(given is None or is_dict, name, "a dict by names, or None", given, kind=kind)
    return dict(given or {})


def is_path(value: Any) -> bool:
    """Whether a value can be the path of a file or folder. The empty text cannot, though Path takes it for the current folder."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and value != "")


def check_hooks(cls: type) -> None:
    """Check, when a class is created, that its overridden hooks accept the arguments that the loop passes.

    Raises:
        UnitError: names the arguments that the hook gets.
    """
    for name, hook in vars(cls).items():
        if not name.startswith("on_") or not inspect.isfunction(hook):
            continue
        bases = (base for base in cls.__mro__[1:] if name in vars(base) and base.__module__.startswith("echelon."))
        if (base := next(bases, None)) is None:
            continue
        given = inspect.signature(vars(base)[name]).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in given):
            continue
        words = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        try:
            inspect.signature(hook).bind(*words)
        except TypeError:
            wanted, got = (", ".join(list(each)[1:]) for each in (words, map(str, inspect.signature(hook).parameters)))
            raise UnitError(f"{cls.__name__}.{name} must take ({wanted}), got ({got}).") from None
