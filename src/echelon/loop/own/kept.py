"""Which session a model, an optimizer or a loader belongs to, as long as it lives."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["keep", "keep_for_copy", "kept_for", "kept_for_copy"]

# By what `prepare` has returned. A session holds all of that, so it must not be held here: they would stay for good.
_sessions: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class _Kept:
    """Keeps a session as long as its model; a copy of the model has none."""

    def __init__(self, session: Any = None) -> None:
        self.session = session

    def __deepcopy__(self, memo: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()


def keep(session: Any, module: nn.Module, things: Iterable[Any]) -> None:
    """Remember the session by each of the things; it lives as long as the module does, at least."""
    for each in things:
        _sessions[each] = weakref.ref(session)
    vars(module)["_echelon_session"] = _Kept(session)


def keep_for_copy(session: Any, copy: nn.Module) -> None:
    """Of a copy that a session has, which a later one may have as well, such as a teacher that another session has trained."""
    vars(copy)["_echelon_session_of_copy"] = _Kept(session)


def kept_for_copy(thing: Any) -> Any:
    """The latest session that has it as a copy; None for what is none."""
    kept = vars(thing).get("_echelon_session_of_copy") if isinstance(thing, nn.Module) else None
    return None if kept is None else kept.session


def kept_for(thing: Any) -> Any:
    """The session, None for what belongs to none."""
    try:
        kept = _sessions.get(thing)
    except TypeError:  # what has no weak references or hashes was not made by `prepare`
        return None
    return None if kept is None else kept()
