"""Which ranks work on other samples, and over which of them a layout averages gradients.

Both are read off what was done to the module: the axes over which a wrapper averages carry other samples; an axis that splits
layers carries the same ones. What cannot be read off is refused, with the axis's name, until the user says it: `data_axes`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError, require
from echelon.parallel.shards import is_split
from echelon.world import agree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Axis", "DataAxes", "axes_of", "data_axes", "mesh_of", "sharded_axes", "speaks_for", "split_axes"]

logger = logging.getLogger(__name__)

# Words for axes whose ranks compute parts of the same samples. They decide nothing: where gradients are averaged over an axis of
# such a name, somebody must say which samples its ranks have.
_DOUBTFUL = {"cp", "context", "sp", "seq", "sequence", "tp", "tensor", "model", "mp", "pp", "pipeline", "stage", "ep", "expert"}


@dataclass(frozen=True)
class Axis:
    """One axis of ranks.

    Args:
        name: as the mesh has it; "" if it has none.
        rank: this rank's place along it.
        size: ranks along it.
        group: these ranks; None is the default group.
    """

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, name: str = "") -> Axis:
        return cls(name, dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    @property
    def digest(self) -> str:
        """The same for the same ranks, and another for others, however many they are."""
        return hashlib.sha256(str(self.ranks).encode()).hexdigest()[:32]


class DataAxes:
    """Which share of every global batch this rank works on, and over which ranks gradients are averaged.

    Args:
        axes: over which gradients are averaged; none where every process trains by itself.
        share: the number of this rank's share, and how many there are; or why they are not known, and what to do.
        is_divided: ranks have other samples or meet in a pass; else every process is by itself.
    Attributes:
        averaged_over: ranks over which gradients are averaged: `size`, or more where ranks have the same samples.
        is_replica: another rank works on the very same samples and speaks for them, so what this one counts weighs nothing;
            None until that is known.
    """

    def __init__(self, axes: Sequence[Axis] = (), share: tuple[int, int] | str = (0, 1), *, is_divided: bool) -> None:
        self.axes, self._share = list(axes), share
        self.is_divided = is_divided
        self.averaged_over = math.prod(axis.size for axis in self.axes)
        self.is_replica: bool | None = None

    @classmethod
    def of(cls, module: nn.Module, averaged: Sequence[Axis], *, is_divided: bool) -> DataAxes:
        """If gradients are averaged over these axes: their ranks have other samples, unless the user said which have."""
        declared_mesh = declared(module)
        if declared_mesh is not None:
            return cls(averaged, _number(axes_of(declared_mesh)), is_divided=is_divided)
        for axis in averaged:
            if axis.size > 1 and _DOUBTFUL & set(axis.name.lower().split("_")):
                unknown = (
                    f"gradients of {type(module).__name__} are averaged over the axis {axis.name!r} of {axis.size} ranks, "
                    "whose name does not say that they have other samples. Say which axes have: "
                    f'echelon.layouts.data_axes(module, mesh["{axis.name}"]) if this one has, or the mesh of those that have, '
                    'such as mesh["dp"].'
                )
                return cls(averaged, unknown, is_divided=is_divided)
        return cls(averaged, _number(averaged), is_divided=is_divided)

    @property
    def rank(self) -> int:
        """Which of the `size` shares this rank works on.

        Raises:
            UsageError: nothing says which ranks have other samples.
        """
        return self._known_share()[0]

    @property
    def size(self) -> int:
        return self._known_share()[1]

    @property
    def rank_and_size(self) -> tuple[int, int] | None:
        """Both; None where every process is by itself, so that its loader decides."""
        return self._known_share() if self.is_divided else None

    def _known_share(self) -> tuple[int, int]:
        if isinstance(self._share, str):
            raise LayoutError(self._share)
        return self._share

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """The groups of ranks over which gradients are averaged, one for each axis."""
        return [axis.group for axis in self.axes]

    def find_replicas(self) -> None:
        """Learn whether another rank speaks for this one's samples. Collective if the module is parallel."""
        if self.is_replica is not None:
            return
        if not (agree.is_joined() and self.is_divided):
            self.is_replica = False
            return
        share = 0 if isinstance(self._share, str) else self._share[0]
        shares = agree.gather([share, [axis.digest for axis in self.axes]])
        self.is_replica = speaks_for(shares, dist.get_rank()) != dist.get_rank()


# As the user said; by the module that was given.
_declared: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()


def data_axes(module: nn.Module, mesh: DeviceMesh) -> None:
    """Say which ranks have other samples, for a module that is made parallel by hand, before a unit gets it.

    Needed where it cannot be read off: gradients are averaged over an axis whose ranks share samples, as with context
    parallelism. Loaders then give the same samples to ranks that differ on other axes only.

    Args:
        module: as the unit gets it, or what is inside its wrapper.
        mesh: the axes whose ranks have other samples: `mesh["dp"]`, or `mesh["dp_replicate", "dp_shard"]`.
    Raises:
        UsageError: this rank is not in the mesh.
    """
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", module, kind=LayoutError)
    require(hasattr(mesh, "get_coordinate"), "mesh", "a DeviceMesh", mesh, kind=LayoutError)
    if mesh.get_coordinate() is None:
        raise LayoutError(f"data_axes: mesh must contain every rank, got {mesh} without rank {dist.get_rank()}.")
    _declared[module] = mesh


def declared(module: nn.Module) -> DeviceMesh | None:
    """What `data_axes` was told of the module or of what it wraps."""
    inner = getattr(module, "module", None)
    mesh = _declared.get(module)
    return mesh if mesh is not None or not isinstance(inner, nn.Module) else _declared.get(inner)


def axes_of(mesh: DeviceMesh, numbers: Sequence[int] | None = None) -> list[Axis]:
    """Axes of a mesh that this rank is in, all or those with these numbers."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return [Axis.of(mesh.get_group(i), names[i]) for i in (range(mesh.ndim) if numbers is None else numbers)]


def mesh_of(module: nn.Module) -> dict[str, int]:
    """The largest mesh over which a parameter is split: its axes by name, and their sizes; {} if none is."""
    sizes: dict[str, int] = {}
    for mesh in (p.device_mesh for p in module.parameters() if is_split(p)):  # type: ignore[attr-defined]
        if mesh.ndim > len(sizes):
            names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
            sizes = {name: mesh.size(i) for i, name in enumerate(names)}
    return sizes


def split_axes(module: nn.Module, *, without: Collection[nn.Parameter] = ()) -> list[Axis]:
    """The axes over which some parameter is split."""
    meshes: dict[tuple[int, tuple[int, ...]], DeviceMesh] = {}
    for parameter in module.parameters():
        if parameter not in without and (mesh := getattr(parameter, "device_mesh", None)) is not None:
            split = (i for i, placement in enumerate(parameter.placements) if not placement.is_replicate())  # type: ignore[attr-defined]
            meshes.setdefault((id(mesh), tuple(split)), mesh)
    axes_by_digest: dict[str, Axis] = {}
    for (_, numbers), mesh in meshes.items():
        axes_by_digest |= {axis.digest: axis for axis in axes_of(mesh, numbers)}
    return list(axes_by_digest.values())


def sharded_axes(module: nn.Module) -> list[Axis]:
    """The axes that `fully_shard` reduces over, read off the parameters, which must be shards now.

    In a parameter's mesh its axes come first: that of the copies, if there are any, then that of the shards. Axes after them
    split layers.
    """
    meshes: dict[tuple[int, bool], DeviceMesh] = {}
    for parameter in module.parameters():
        if (mesh := getattr(parameter, "device_mesh", None)) is not None:
            copies = mesh.ndim > 1 and parameter.placements[0].is_replicate()  # type: ignore[attr-defined]
            meshes.setdefault((id(mesh), copies), mesh)
    axes_of_shards: dict[str, list[Axis]] = {}
    for (_, copies), mesh in meshes.items():
        axes = axes_of(mesh, [0, 1] if copies else [0])
        axes_of_shards.setdefault(" ".join(axis.digest for axis in axes), axes)
    if len(axes_of_shards) > 1:
        logger.warning(
            "%s: fully_shard reduces some parameters over the ranks %s, others over %s; the first are taken for the data's",
            type(module).__name__,
            *([axis.ranks for axis in axes] for axes in list(axes_of_shards.values())[:2]),
        )
    return next(iter(axes_of_shards.values()), [Axis.of(None)])


def _number(axes: Sequence[Axis]) -> tuple[int, int]:
    rank, size = 0, 1
    for axis in axes:
        rank, size = rank * axis.size + axis.rank, size * axis.size
    return rank, size


def speaks_for(shares: Sequence[tuple[int, Sequence[str]]], rank: int) -> int:
    """The first rank that has the same samples as this one, or itself if its gradient counts beside theirs.

    Args:
        shares: of each rank, the number of its share and the digests of the axes over which its gradients are averaged. Ranks of
            one axis have the same digest. Lists of ranks would be as many numbers as the square of the ranks.
    """
    along: dict[str, list[int]] = {}
    for each, (_, digests) in enumerate(shares):
        for digest in digests:
            along.setdefault(digest, []).append(each)
    averaged, alike = {rank}, [rank]
    for each in alike:  # grows meanwhile
        new = {peer for digest in shares[each][1] for peer in along.pop(digest, ())} - averaged
        averaged |= new
        alike += new
    return next((r for r in range(rank) if shares[r][0] == shares[rank][0] and r not in averaged), rank)
