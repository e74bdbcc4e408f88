"""All weights of a module, whole, on rank 0: gathered one by one, also from the stages of a pipeline.

The ranks first agree on who holds what. Then each tensor is gathered by those ranks alone that hold parts of it, and goes from
the first of them to rank 0. Stages take turns, so that none waits for rank 0 longer than it takes to write a few tensors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.checkpoint.location import explain
from echelon.checkpoint.plain import dtype_of
from echelon.common.errors import CheckpointOptionError, CheckpointWriteError
from echelon.parallel.shards import is_split, whole
from echelon.parallel.state.state import ModuleState
from echelon.world import agree
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["Entry", "Weights"]


@dataclass(frozen=True)
class Entry:
    """A tensor under one of its names.

    Args:
        stage: which of the different listings of ranks has it.
        same: the first name that this tensor has there; a tied one has several.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    stage: int
    same: str

    def stand_in(self) -> torch.Tensor:
        """One like it, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Weights:
    """What all ranks hold of a module between them.

    Attributes:
        entries: by name; what several stages have, by the first one of them.
        is_cut: ranks hold different parts of the module, as stages do.
    Raises:
        UsageError: on every rank: ranks hold different weights, and are no stages; a tensor of a type that cannot be gathered.
    """

    def __init__(self, state: ModuleState) -> None:
        """Collective."""
        self._values: dict[str, Any] = {n: v for n, v in state.state_dict().items() if isinstance(v, torch.Tensor)}
        firsts = {name: names[0] for names in state.tied() for name in names}
        tensors = [[n, str(v.dtype), list(v.shape), firsts.get(n, n)] for n, v in self._values.items()]
        self.is_cut = state.is_cut
        mine = [self.is_cut, tensors]
        told = agree.kinds(mine)
        self._refuse(told)
        self._stage = told.index(mine)
        stages = agree.gather(self._stage)
        self._speakers = [stages.index(stage) for stage in range(len(told))]
        self.entries: dict[str, Entry] = {}
        for stage, (_, listed) in enumerate(told):
            for name, dtype, shape, same in listed:
                if name not in self.entries:
                    self.entries[name] = Entry(name, dtype_of(dtype), torch.Size(shape), stage, same)

    def _refuse(self, told: list[Any]) -> None:
        if len(told) > 1 and not all(is_cut for is_cut, _ in told):
            kept = [{name: rest for name, *rest in listed} for _, listed in told]
            odd = next((n for one in kept for n in one if any(other.get(n) != one[n] for other in kept)), "their order")
            raise CheckpointOptionError(
                f"save_pretrained: ranks hold different weights: {odd}. Build the same model on every rank."
            )
        kinds = (type(v) for v in self._values.values() if not is_split(v) and type(v) not in (torch.Tensor, nn.Parameter))
        odd_kind = agree.first_told(next((kind.__name__ for kind in kinds), None))
        if odd_kind is not None:
            raise CheckpointOptionError(f"a weight of type {odd_kind} cannot be gathered; use fully_shard's layouts, or ddp.")

    def gather(self, names: Collection[str], folder: Path) -> dict[str, torch.Tensor]:
        """Whole tensors by name, on rank 0, mapped from files in the folder; elsewhere nothing. Collective.

        Raises:
            CheckpointWriteError: on every rank, if rank 0 could not write.
        """
        same: dict[tuple[int, str], torch.Tensor] = {}  # of a tied one, under all its names
        problem: str | None = None
        for number, entry in enumerate(self._in_turns(names)):
            key = entry.stage, entry.same
            if key in same:
                continue
            same[key] = torch.empty(0)
            value = self._on_rank0(entry)
            if value is not None and problem is None:
                try:
                    same[key] = _mapped(value, folder / f"{number}")
                except OSError as error:  # the others are in the middle of gathering
                    problem = f"rank 0: {explain(error, folder)}"
            del value
        agree.raise_on_all(problem, CheckpointWriteError)
        if not agree.is_rank0():
            return {}
        return {name: same[each.stage, each.same] for name, each in self.entries.items() if name in names}

    def _in_turns(self, names: Collection[str]) -> list[Entry]:
        """One of each stage, and again."""
        by_stage: list[list[Entry]] = [[] for _ in self._speakers]
        for name, entry in self.entries.items():
            if name in names:
                by_stage[entry.stage].append(entry)
        return [entry for turn in itertools.zip_longest(*by_stage) for entry in turn if entry is not None]

    def _on_rank0(self, entry: Entry) -> torch.Tensor | None:
        """A whole tensor on rank 0, None elsewhere. Collective over the ranks of its stage and rank 0."""
        value = whole(self._values[entry.name]).detach() if entry.stage == self._stage else None
        speaker = self._speakers[entry.stage]
        rank = dist.get_rank() if agree.is_joined() else 0
        if rank not in (0, speaker):
            return None
        if value is not None:
            value = value.cpu().contiguous()
        if speaker != 0 and entry.shape.numel():
            if value is not None:
                dist.send(flat_bytes(value), dst=0, group=agree.control_group())
            else:
                value = torch.empty(entry.shape, dtype=entry.dtype)
                dist.recv(flat_bytes(value), src=speaker, group=agree.control_group())
        elif value is None:
            value = torch.empty(entry.shape, dtype=entry.dtype)
        return value if rank == 0 else None


def _mapped(tensor: torch.Tensor, file: Path) -> torch.Tensor:
    """The tensor, written to a file and mapped from there."""
    if not tensor.numel():
        return tensor
    with file.open("wb") as stream:
        flat_bytes(tensor).numpy().tofile(stream)
    # What is changed in it goes to the file, too, and not into this process's memory.
    mapped = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    with contextlib.suppress(OSError):
        file.unlink()  # the mapping keeps it
    return mapped.view(tensor.shape)
