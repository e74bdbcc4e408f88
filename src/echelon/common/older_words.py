"""Older spellings of arguments: translated, with a DeprecationWarning that names the new spelling."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from echelon.common.errors import UsageError

__all__ = ["is_now", "renames", "translated", "unknown"]

F = TypeVar("F", bound=Callable[..., Any])


def translated(
    function: str,
    older: Mapping[str, Any],
    words: Mapping[str, str],
    own: Mapping[str, Any],
    *,
    others: Iterable[str] = (),
    where: Callable[[str], str] = "{}=...".format,
) -> dict[str, Any]:
    """`own` with the values that were given under older names.

    Args:
        older: further arguments of the function, by name.
        words: the new name of each older one.
        own: the function's own arguments; None is not given.
        others: further names that the function accepts.
        where: formats the new name.
    Raises:
        UsageError: a value under both names; or an unknown name, with the nearest known one.
    """
    values = dict(own)
    for name, value in older.items():
        if name not in words:
            raise unknown(function, name, [*own, *others], older=words)
        new = words[name]
        if value is not None and values.get(new) is not None:
            raise UsageError(f"{function} was given {name} and {new}, which are the same. Give {new} alone.")
        is_now(f"{function}({name}=...)", where(new))
        values[new] = value if value is not None else values.get(new)
    return values


def renames(**words: str) -> Callable[[F], F]:
    """`translated` as a decorator, for functions whose new argument has a default: `@renames(strategy="layout")`."""

    def decorate(function: F) -> F:
        name = function.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        known = [each for each, parameter in parameters.items() if parameter.kind is not parameter.VAR_POSITIONAL]

        @functools.wraps(function)
        def renamed(*args: Any, **given: Any) -> Any:
            for older in words.keys() & given.keys():
                new = words[older]
                if new in given:
                    raise UsageError(f"{name} was given {older} and {new}, which are the same. Give {new} alone.")
                is_now(f"{name}({older}=...)", f"{new}=...")
                given[new] = given.pop(older)
            if not takes_any and (others := given.keys() - known):
                raise unknown(name, min(others), known, older=words)
            return function(*args, **given)

        return cast(F, renamed)

    return decorate


def is_now(older: str, new: str) -> None:
    """Warn of an older spelling, at the line outside of echelon that uses it."""
    frame, level = sys._getframe(0), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "echelon":
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{older} is now {new}", DeprecationWarning, stacklevel=level)


def unknown(function: str, name: str, known: Iterable[str], remedy: str = "", *, older: Iterable[str] = ()) -> UsageError:
    """The error for a name that `function` does not accept."""
    near = difflib.get_close_matches(name, [*known, *older], 1)
    remedy = remedy or (f"Is it {near[0]}?" if near else f"It knows {', '.join(known)}.")
    return UsageError(f"{function} has no argument {name!r}. {remedy}")
