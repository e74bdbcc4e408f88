"""Which ranks work on different samples, and over which ranks a layout averages gradients.

The module's wrappers and shards show both: ranks along an axis that averages gradients have different samples; ranks along an
axis that splits layers have the same samples. An unclear axis is refused, by name, until the user calls `data_axes`.
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

# Names that suggest a model-parallel axis. They decide nothing: if gradients are averaged over an axis with such a name, the user
# must say which axes have different samples.
_DOUBTFUL = {"cp", "context", "sp", "seq", "sequence", "tp", "tensor", "model", "mp", "pp", "pipeline", "stage", "ep", "expert"}


@dataclass(frozen=True)
class Axis:
    """One axis of ranks.

    Args:
        name: the mesh's name for it; "" if it has none.
        rank: this rank's index along it.
        size: number of ranks along it.
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
        """A hash of the ranks: equal for the same ranks, different for different ranks, and short for any number of ranks."""
        return hashlib.sha256(str(self.ranks).encode()).hexdigest()[:32]


class DataAxes:
    """Which share of every global batch this rank works on, and over which ranks gradients are averaged.

    Args:
        axes: axes over which gradients are averaged; empty if every process trains by itself.
        share: (index, count) of this rank's share; or a message that says why it is unknown, and what to do.
        is_divided: ranks have different samples or communicate in a pass; False if every process is by itself.
    Attributes:
        averaged_over: number of ranks over which gradients are averaged: `size`, or more if some have the same samples.
        is_replica: another rank works on the same samples and counts them, so this rank's samples weigh nothing; None until that
            is known.
    """

    def __init__(self, axes: Sequence[Axis] = (), share: tuple[int, int] | str = (0, 1), *, is_divided: bool) -> None:
        self.axes, self._share = list(axes), share
        self.is_divided = is_divided
        self.averaged_over = math.prod(axis.size for axis in self.axes)
        self.is_replica: bool | None = None

    @classmethod
    def of(cls, module: nn.Module, averaged: Sequence[Axis], *, is_divided: bool) -> DataAxes:
        """Axes that average gradients have different samples, unless the user has declared others with `data_axes`."""
        declared_mesh = declared(module)
        if declared_mesh is not None:
            return cls(averaged, _number(axes_of(declared_mesh)), is_divided=is_divided)
        for axis in averaged:
            if axis.size > 1 and _DOUBTFUL & set(axis.name.lower().split("_")):
                unknown = (
                    f"gradients of {type(module).__name__} are averaged over the axis {axis.name!r} of {axis.size} ranks, "
                    "whose name does not say whether they have different samples. Say which axes do: "
                    f'echelon.layouts.data_axes(module, mesh["{axis.name}"]) if this one does, or the mesh of those that do, '
                    'such as mesh["dp"].'
                )
                return cls(averaged, unknown, is_divided=is_divided)
        return cls(averaged, _number(averaged), is_divided=is_divided)

    @property
    def rank(self) -> int:
        """Which of the `size` shares this rank works on.

        Raises:
            UsageError: nothing says which ranks have different samples.
        """
        return self._known_share()[0]

    @property
    def size(self) -> int:
        return self._known_share()[1]

    @property
    def rank_and_size(self) -> tuple[int, int] | None:
        """`rank` and `size`; None if every process is by itself, so its loader decides."""
        return self._known_share() if self.is_divided else None

    def _known_share(self) -> tuple[int, int]:
        if isinstance(self._share, str):
            raise LayoutError(self._share)
        return self._share

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """The process groups over which gradients are averaged, one for each axis."""
        return [axis.group for axis in self.axes]

    def find_replicas(self) -> None:
        """Set `is_replica`: whether another rank counts this rank's samples. Collective if the module is parallel."""
        if self.is_replica is not None:
            return
        if not (agree.is_joined() and self.is_divided):
            self.is_replica = False
            return
        share = 0 if isinstance(self._share, str) else self._share[0]
        shares = agree.gather([share, [axis.digest for axis in self.axes]])
        self.is_replica = speaks_for(shares, dist.get_rank()) != dist.get_rank()


# The meshes that users gave to `data_axes`.
_declared: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()


def data_axes(module: nn.Module, mesh: DeviceMesh) -> None:
    """Say which ranks have different samples, for a module that is made parallel by hand, before a unit gets it.

    Needed if the module does not show it: gradients are averaged over an axis whose ranks share samples, as with context
    parallelism. Loaders then give the same samples to ranks that differ on other axes only.

    Args:
        module: as the unit gets it, or the module inside its wrapper.
        mesh: the axes whose ranks have different samples: `mesh["dp"]`, or `mesh["dp_replicate", "dp_shard"]`.
    Raises:
        UsageError: this rank is not in the mesh.
    """
    require(isinstance(module, nn.Module), "module", "a torch.nn.Module", module, kind=LayoutError)
    require(hasattr(mesh, "get_coordinate"), "mesh", "a DeviceMesh", mesh, kind=LayoutError)
    if mesh.get_coordinate() is None:
        raise LayoutError(f"data_axes: mesh must contain every rank, got {mesh} without rank {dist.get_rank()}.")
    _declared[module] = mesh


def declared(module: nn.Module) -> DeviceMesh | None:
    """The mesh that `data_axes` was given for the module or for the module inside it."""
    inner = getattr(module, "module", None)
    mesh = _declared.get(module)
    return mesh if mesh is not None or not isinstance(inner, nn.Module) else _declared.get(inner)


def axes_of(mesh: DeviceMesh, numbers: Sequence[int] | None = None) -> list[Axis]:
    """The axes of a mesh that this rank is in: all, or those with the indices `numbers`."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return [Axis.of(mesh.get_group(i), names[i]) for i in (range(mesh.ndim) if numbers is None else numbers)]


def mesh_of(module: nn.Module) -> dict[str, int]:
    """Sizes of axes by name, of the mesh with the most axes over which a parameter is split; {} if none is split."""
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


def sharded_axes(module: nn.Module, *, without: Collection[nn.Parameter] = ()) -> list[Axis]:
    """The axes over which `fully_shard` reduces gradients, read off the parameters, which must be sharded now.

    The axes of `fully_shard` come first in a parameter's mesh: the axis of replicas, if there is one, then the axis of shards.
    Axes after them split layers.
    """
    meshes: dict[tuple[int, bool], DeviceMesh] = {}
    for parameter in module.parameters():
        if parameter not in without and (mesh := getattr(parameter, "device_mesh", None)) is not None:
            copies = mesh.ndim > 1 and parameter.placements[0].is_replicate()  # type: ignore[attr-defined]
            meshes.setdefault((id(mesh), copies), mesh)
    axes_of_shards: dict[str, list[Axis]] = {}
    for (_, copies), mesh in meshes.items():
        axes = axes_of(mesh, [0, 1] if copies else [0])
        axes_of_shards.setdefault(" ".join(axis.digest for axis in axes), axes)
    if len(axes_of_shards) > 1:
        logger.warning(
            "%s: fully_shard reduces some parameters over the ranks %s, others over %s; the first are taken for the ranks that "
            "have different samples",
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
    """The first lower rank that has the same samples and is not averaged with this rank; this rank itself if there is none.

    Args:
        shares: for each rank, the index of its share and the digests of the axes over which its gradients are averaged. Ranks of
            one axis have the same digest. Digests, because the size of lists of ranks would grow with the square of the ranks.
    """
    along: dict[str, list[int]] = {}
    for each, (_, digests) in enumerate(shares):
        for digest in digests:
            along.setdefault(digest, []).append(each)
    averaged, alike = {rank}, [rank]
    for each in alike:  # which grows in this loop
        new = {peer for digest in shares[each][1] for peer in along.pop(digest, ())} - averaged
        averaged |= new
        alike += new
    return next((r for r in range(rank) if shares[r][0] == shares[rank][0] and r not in averaged), rank)
