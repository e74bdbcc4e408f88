"""What writers and readers of a checkpoint share: the names of files and pieces, and the protocols of states."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from echelon.checkpoint.manifest import INDEX, STATE, in_file
from echelon.world import agree

__all__ = ["INDEX", "STATE", "NamedState", "Stateful", "in_file", "own_file", "tensors_file", "this_rank"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@runtime_checkable
class NamedState(Stateful, Protocol):
    """A Stateful whose state is flat, keyed by parameter name; its tensors may be sharded."""

    keyed_by_name: bool


def this_rank() -> tuple[int, int]:
    """(rank, number of ranks)."""
    return (dist.get_rank(), dist.get_world_size()) if agree.is_joined() else (0, 1)


def tensors_file(rank: int) -> str:
    return f"tensors-{rank:05d}.safetensors"


def own_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
