"""torchtnt.utils.memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

import torch

from echelon.observe.memory import RSSProfiler, measure_rss_deltas

__all__ = ["RSSProfiler", "get_tensor_size_bytes_map", "measure_rss_deltas"]


def get_tensor_size_bytes_map(obj: object) -> dict[torch.Tensor, int]:
    """The tensors within an object, however deep, and the bytes of each. Each once, also where objects refer to one another."""
    found: dict[torch.Tensor, int] = {}
    seen: dict[int, Any] = {}  # with the objects, since the number of one that is gone may be another's
    left: deque[Any] = deque([obj])
    while left:
        value = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            found[value] = value.numel() * value.element_size()
        elif isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (str, bytes, bytearray, range)):
            left.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, (Enum, type)):
            left.extend(vars(value).values())
    return found
