"""Take a snapshot of all states, divide the writing over the ranks, and write without pickle.

States keyed by parameter name consist of the pieces that ranks hold: the planner of torch.distributed.checkpoint says which
rank has which. Each rank writes one `tensors-N.safetensors`; `index.json` has every tensor's dtype, shape and pieces. The rest is
small, equal on all ranks and written once (`state.safetensors`). State of one rank alone, such as its RNG state, is
in `rank-N.safetensors`. Planning is collective; each rank writes by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from echelon.checkpoint import plain, staging, strict, tensorfile
from echelon.checkpoint.buffers import Buffers
from echelon.checkpoint.header import SIZES
from echelon.checkpoint.layout import INDEX, STATE, NamedState, Stateful, in_file, own_file, tensors_file, this_rank
from echelon.checkpoint.location import Location
from echelon.checkpoint.spread import Piece, spread
from echelon.common.errors import CheckpointError
from echelon.world import agree, rank0

__all__ = ["Planned", "Snapshot", "snapshot"]


@dataclass
class Snapshot:
    """What one rank has to write. Its tensors are the living ones until `copy` is called.

    Attributes:
        pieces: by name in the file, this rank's share of all tensors.
        index: of all ranks' tensors, on rank 0, which writes it; empty on other ranks.
        rest, own: what all ranks share and what this rank alone has: the encoded state and its tensors.
    """

    rank: int
    pieces: dict[str, torch.Tensor]
    index: dict[str, Any]
    rest: tuple[Any, dict[str, torch.Tensor]]
    own: tuple[Any, dict[str, torch.Tensor]]

    def copy(self, buffers: Buffers) -> Callable[[], None]:
        """Replace the living tensors by copies in host memory; `buffers` keeps that memory from save to save.

        Returns:
            a function that waits for the copies; see `staging.copy`. The program may change its tensors once `copy` returns.
        """
        views = buffers.of(self._keyed())
        work = []
        for group, tensors in self._groups():
            for name, tensor in tensors.items():
                view = views[f"{group}.{name}"]
                work.append((view, tensor.detach()))
                tensors[name] = view
        return staging.copy(work)

    def prepare(self, buffers: Buffers) -> None:
        """Start to allocate the memory that `copy` needs for such a snapshot."""
        buffers.prepare(self._keyed())

    def _keyed(self) -> dict[str, torch.Tensor]:
        return {f"{group}.{name}": tensor for group, tensors in self._groups() for name, tensor in tensors.items()}

    def _groups(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        return [("piece", self.pieces), ("rest", self.rest[1]), ("own", self.own[1])]

    def write(self, folder: Location) -> dict[str, Any]:
        """Write this rank's files. Returns their entries for the manifest. Not collective.

        Raises:
            CheckpointError: another thread kept changing the living tensors.
        """
        living = [tensor for _, tensors in self._groups() for tensor in tensors.values()]
        before = staging.versions(living)
        files = self._write(folder)
        if staging.versions(living) != before:  # another thread changed them: the files mix old and new values
            self.copy(Buffers())()
            for name in files:
                (folder / name).unlink()
            files = self._write(folder)
        return files

    def _write(self, folder: Location) -> dict[str, Any]:
        files: dict[str, Any] = {}

        def save(name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
            sources = [(key, t.dtype, t.shape, lambda t=t: t) for key, t in tensors.items()]
            files[name] = tensorfile.write(folder / name, sources, metadata)

        if self.pieces:
            save(tensors_file(self.rank), self.pieces)
        save(own_file(self.rank), self.own[1], {"state": json.dumps(self.own[0])})
        if self.rank == 0:
            save(STATE, self.rest[1], {"state": json.dumps(self.rest[0])})
            text = json.dumps(self.index)
            try:
                strict.check_size(text)
            except strict.Wrong as error:
                raise CheckpointError(f"{INDEX} is too large: {error}.") from None
            files[INDEX] = tensorfile.write_text(folder / INDEX, text)
        return files


class Planned:
    """Which rank writes which pieces, kept from save to save: agreed again only if the pieces of some rank have changed."""

    def __init__(self) -> None:
        self._listing: list[Any] | None = None
        self._mine: set[Piece] = set()
        self._index: dict[str, Any] = {}

    def assign(self, listing: list[Any]) -> tuple[set[Piece], dict[str, Any]]:
        """The pieces that this rank writes; and on rank 0 the index of all pieces. Collective.

        Rank 0 decides: it gets each distinct listing once, and answers each rank with one bit a piece.

        Args:
            listing: for each piece that this rank could write: name, offsets, sizes, dtype, the tensor's shape, and whether ranks
                may hold different values, of which the first rank's are saved.
        """
        if agree.any_rank(listing != self._listing):
            assignment, index = rank0.gather(listing), dict[str, Any]()

            def decide() -> list[bytes]:
                assert assignment is not None  # on rank 0
                writes, made = spread(*assignment)
                index.update(made)
                return writes

            bits = rank0.scatter(decide)
            pieces = [(name, tuple(offsets)) for name, offsets, *_ in listing]
            self._mine = {piece for at, piece in enumerate(pieces) if bits[at // 8] >> at % 8 & 1}
            self._listing, self._index = listing, index
        return self._mine, self._index


def snapshot(states: dict[str, Stateful], rank_state: dict[str, Any], planned: Planned | None = None) -> Snapshot:
    """Take a snapshot of all states; ranks share the writing. Collective.

    Raises:
        CheckpointError: on every rank, if on any rank a state needs pickle, or its `state_dict` fails.
    """
    taken = _taken(states)
    failure, cause = taken.failure, taken.cause
    rank, _ = this_rank()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(taken.tensors, is_coordinator=rank == 0)
    items, listing = _listed(planner, taken.of_first)
    own_pieces, index = (planned or Planned()).assign(listing)
    pieces: dict[str, Any] = {in_file(*piece): planner.resolve_data(item) for piece, item in items.items() if piece in own_pieces}
    encoded = []
    odd = [f"{name}, of type {dtype}," for name, _, _, dtype, *_ in listing if dtype not in SIZES]
    if odd:
        failure = failure or f"{odd[0]} is none of the types that are saved."
    for what, value in (("the state of ", taken.rest), ("this rank's ", rank_state)):
        aside: dict[str, torch.Tensor] = {}
        try:
            encoded.append((plain.encode(value, aside), aside))
        except CheckpointError as error:
            failure = failure or f"{what}{error}."
        except RuntimeError as error:  # a container that another thread changed meanwhile
            failure, cause = failure or f"{what}checkpoint cannot be read: {error}", error
    try:
        agree.raise_on_all(failure, CheckpointError)
    except CheckpointError as error:
        raise error from cause
    return Snapshot(rank, pieces, index, encoded[0], encoded[1])


@dataclass
class _Taken:
    """The states as they are now.

    Attributes:
        tensors: those of states that are keyed by parameter name; `rest` is everything else.
        of_first: names of the tensors of which the first rank's values are saved.
        failure, cause: why the first failing state could not be read.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    of_first: set[str] = field(default_factory=set)
    failure: str | None = None
    cause: Exception | None = None


def _taken(states: dict[str, Stateful]) -> _Taken:
    taken = _Taken()
    for name, stateful in states.items():
        try:
            values = stateful.state_dict()
        except Exception as error:  # of a user's state_dict: the other ranks must not wait for this one
            if isinstance(stateful, NamedState):
                raise
            taken.failure = taken.failure or f"the state_dict of {name} failed: {type(error).__name__}: {error}"
            taken.cause, values = error, {}
        if isinstance(stateful, NamedState):
            taken.tensors |= {f"{name}.{k}": v for k, v in values.items() if isinstance(v, torch.Tensor)}
            taken.of_first |= {f"{name}.{k}" for k in getattr(stateful, "of_first_rank", ())}
            taken.rest[name] = {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
        else:
            taken.rest[name] = values
    return taken


def _listed(planner: DefaultSavePlanner, of_first: set[str]) -> tuple[dict[Piece, Any], list[Any]]:
    """The pieces that this rank could write: torch's write item of each, and the listing for `Planned.assign`."""
    items: dict[Piece, Any] = {}
    listing = []
    for item in planner.create_local_plan().items:
        data = item.tensor_data
        assert data is not None
        if data.size.numel() and not data.chunk.sizes.numel():
            continue  # this rank holds nothing of a small tensor
        name, offsets = item.index.fqn, tuple(data.chunk.offsets)
        items[name, offsets] = item
        dtype = str(data.properties.dtype)
        listing.append([name, list(offsets), list(data.chunk.sizes), dtype, list(data.size), name in of_first])
    return items, listing
