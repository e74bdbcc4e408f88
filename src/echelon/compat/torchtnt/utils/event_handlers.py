"""torchtnt.utils.event_handlers: events to whoever is installed under the entry point group "tnt_event_handlers"."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Protocol, runtime_checkable

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils.event import Event, EventMetadataValue

__all__ = ["EventHandler", "get_event_handlers", "log_event", "log_interval"]

logger = logging.getLogger(__name__)


@runtime_checkable
class EventHandler(Protocol):
    """Takes events."""

    def handle_event(self, event: Event) -> None: ...


class HandlerError(UsageError, RuntimeError):
    """An entry point makes what takes no events."""


@cache
def get_event_handlers() -> list[EventHandler]:
    """What the factories of the entry points make; once.

    Raises:
        HandlerError, a RuntimeError: a factory that makes something else.
    """
    handlers = []
    for entry in importlib.metadata.entry_points(group="tnt_event_handlers"):
        handler = entry.load()()
        if not isinstance(handler, EventHandler):
            raise HandlerError(f"The factory function for {entry.value} did not return a EventHandler object: no handle_event.")
        handlers.append(handler)
    return handlers


def log_event(event: Event) -> None:
    """Give an event to all handlers. What fails in one is logged and ends nothing else."""
    for handler in get_event_handlers():
        try:
            handler.handle_event(event)
        except Exception:
            logger.exception("%s failed on the event %s", type(handler).__name__, event.name)


@contextlib.contextmanager
def log_interval(name: str, metadata: Mapping[str, EventMetadataValue] | None = None) -> Iterator[None]:
    """An event with `action` "start" and one with "end", of the same `unique_id`, around what is inside.

    The second comes after an exception too, with its kind as `exception`.
    """
    # Not from the stream that the user seeds.
    fields: dict[str, EventMetadataValue] = {**(metadata or {}), "unique_id": random.Random().randrange(2**63)}
    log_event(Event(name, {**fields, "action": "start"}))
    try:
        yield
    except BaseException as error:
        log_event(Event(name, {**fields, "action": "end", "exception": type(error).__name__}))
        raise
    log_event(Event(name, {**fields, "action": "end"}))
