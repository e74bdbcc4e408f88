"""Arguments that Python would take for something else: the text "no" for true, a text for a list, an iterator for a list."""

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
    """Refuse what Python would only take for true or false, by name.

    Raises:
        UsageError: neither True nor False, nor 1 or 0.
    """
    for name, value in given.items():
        flag = plain(value)
        require(isinstance(flag, int) and flag in (0, 1), name, "True or False", value, kind=kind)


def flags_of(options: Any, *, kind: type[UsageError] = UsageError) -> None:
    """`flags` of the fields of a dataclass that are declared as `bool`, and of those as `bool | None` that are not None."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.type in (bool, "bool") or (field.type == "bool | None" and value is not None):
            flags(kind=kind, **{field.name: value})


def options_of(options: type[T], name: str, given: T | None, *, kind: type[UsageError] = UsageError) -> T:
    """The options that were given, or those by default for None.

    Raises:
        UsageError: something else.
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
    """As a tuple, so that an iterator can be read more than once.

    Raises:
        UsageError: a text, a mapping or nothing to iterate over; or some of them are not as they must be, and are shown.
    """
    require(is_list(given), name, what, given, kind=kind)
    items = tuple(given)
    wrong = [each for each in items if not holds(each)]
    require(not wrong, name, what, wrong, kind=kind)
    return items


class Given:
    """The checks of what is given, with errors of one kind: `_given = Given(LoopError)`, then `_given.whole("skip", skip)`."""

    def __init__(self, kind: type[UsageError]) -> None:
        self.require = partial(require, kind=kind)
        self.whole, self.number = partial(whole, kind=kind), partial(number, kind=kind)
        self.flags, self.flags_of = partial(flags, kind=kind), partial(flags_of, kind=kind)
        self.several = partial(several, kind=kind)


def is_list(value: Any) -> bool:
    """Whether it can be iterated over, and is no text and no mapping."""
    iterates = hasattr(value, "__iter__") or hasattr(value, "__getitem__")
    return iterates and not isinstance(value, (str, bytes, Mapping, type)) and getattr(value, "ndim", 1) != 0  # no scalar tensor


def mapping(name: str, given: Any, *, kind: type[UsageError] = UsageError) -> dict[str, Any]:
    """A dict by names; empty for None.

    Raises:
        UsageError: something else.
    """
    is_dict = isinstance(given, Mapping) and all(isinstance(key, str) for key in given)
    require(given is None or is_dict, name, "a dict by names, or None", given, kind=kind)
    return dict(given or {})


def is_path(value: Any) -> bool:
    """Whether it can name a file or folder. The empty text does not, though Path takes it for the present folder."""
    return isinstance(value, os.PathLike) or (isinstance(value, str) and value != "")


def check_hooks(cls: type) -> None:
    """What a class overrides of the library's hooks must take what the loop gives it: told as the class is made, not in a run.

    Raises:
        UnitError: with what the hook is given.
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
