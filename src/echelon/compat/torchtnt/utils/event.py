"""torchtnt.utils.event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Event", "EventMetadataValue"]

EventMetadataValue: TypeAlias = str | int | float | bool | None


@dataclass
class Event:
    """Something that happened, for the handlers that are installed."""

    name: str
    metadata: dict[str, EventMetadataValue] = field(default_factory=dict)
