"""Arguments that another library has and that would do nothing here: refused with the reason, never accepted in silence."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from echelon.contracts.errors import UsageError

__all__ = ["refuses"]

C = TypeVar("C", bound=Callable[..., Any])


def refuses(**reasons: str) -> Callable[[C], C]:
    """Decorate a function, or a class for its constructor: these arguments are a UsageError that says why.

    None is let through, since it means "not given" wherever these names come from.

    Args:
        reasons: name -> why it is not there, as the end of a sentence, and what to do.
    """

    def decorate(target: C) -> C:
        function: Any = target.__init__ if isinstance(target, type) else target
        who = target.__name__

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in reasons.keys() & kwargs.keys():
                if kwargs.pop(name) is not None:
                    raise UsageError(f"{who} has no {name}: {reasons[name]}")
            return function(*args, **kwargs)

        if not isinstance(target, type):
            return checked  # type: ignore[return-value]
        target.__init__ = checked  # type: ignore[misc]
        return target

    return decorate
