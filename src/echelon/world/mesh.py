"""The layout of ranks: a grid whose axes are kinds of parallelism, and torch's DeviceMesh over it.

The axes, slowest first, in torchtitan's order: `pp` x `dp_replicate` x `dp_shard` x `cp` x `tp`. Ranks that exchange activations
within a layer (`tp`, then `cp`) are neighbours, which launchers place on one machine; stages of a pipeline are farthest apart.
`ep` is not an axis of its own: experts are divided over `ep` neighbouring ranks of `dp_shard` x `cp`, over which the other
parameters are sharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from echelon.common.errors import LayoutError
from echelon.world.init import ensure_group
from echelon.world.timeout import inherit_timeout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "ParallelDims"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # slowest first


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the axes; their product without `ep` is the world size. `ParallelDims.of` checks that and infers a missing size.

    Args:
        dp_replicate: replicas of the model, on different samples. Each may be spread over several ranks.
        dp_shard: ranks over which parameters are sharded, on different samples.
        tp: ranks over which single layers are split, on the same samples.
        cp: ranks over which each sequence is split; parameters are sharded over them as over `dp_shard`.
        pp: ranks with different layers, on the same samples. Each has one or more stages of the pipeline.
        ep: ranks of `dp_shard` x `cp` over which the experts of a layer are divided.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        dp_replicate: int = 1,
        dp_shard: int | None = None,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
    ) -> ParallelDims:
        """The layout of `world_size` ranks.

        Args:
            dp_shard: by default the world size divided by the other axes. -1 requests this for one of the axes; then the
                default of `dp_shard` is 1.
        Raises:
            UsageError: the sizes do not multiply to the world size (the nearest that do are named), or `ep` does not divide
                `dp_shard` x `cp`.
        """
        axes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        for name, size in {**axes, "ep": ep}.items():
            if size is not None and size < 1 and (size != -1 or name == "ep"):
                rest = "" if name == "ep" else ", or -1 for what the other axes leave"
                raise LayoutError(f"{name} must be at least 1{rest}, got {size}.")
        rest_of = [name for name, size in axes.items() if size == -1]
        if len(rest_of) > 1:
            raise LayoutError(f"only one axis can be -1, which stands for what the others leave, got {' and '.join(rest_of)}.")
        free = rest_of[0] if rest_of else "dp_shard" if dp_shard is None else None
        known = {name: 1 if size is None else size for name, size in axes.items() if name != free}
        sizes = dict(known)
        if free is not None and world_size % math.prod(known.values()) == 0:
            sizes[free] = world_size // math.prod(known.values())
        if math.prod(sizes.values()) != world_size or len(sizes) < len(axes):
            raise LayoutError(
                _misfit(world_size, {n: s for n, s in sizes.items() if s > 1 or (axes[n] == s and n == "dp_shard")})
            )
        shards = sizes["dp_shard"] * sizes["cp"]
        if shards % ep:
            raise LayoutError(
                f"ep must divide dp_shard x cp, the ranks that share parameters, got ep={ep} for dp_shard {sizes['dp_shard']} x "
                f"cp {sizes['cp']} = {shards}. Set ep to {' or '.join(str(d) for d in _divisors(shards))}."
            )
        return cls(ep=ep, **sizes)

    @property
    def size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp_size(self) -> int:
        """The number of ranks, or groups of ranks, with different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def used(self) -> dict[str, int]:
        """The axes with more than one rank, in the order of AXES, then `ep`."""
        return {name: size for name in (*AXES, "ep") if (size := getattr(self, name)) > 1}

    def place(self, rank: int) -> dict[str, int]:
        """A rank's number along each axis."""
        numbers: dict[str, int] = {}
        for name in reversed(AXES):
            rank, numbers[name] = divmod(rank, getattr(self, name))
        return numbers

    def dp_rank(self, rank: int) -> int:
        place = self.place(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def speaks(self, rank: int) -> bool:
        """Whether this rank's loss and weight count. Among ranks with the same samples and tokens that is the first one of the
        last pipeline stage; only this stage computes the loss.
        """
        place = self.place(rank)
        return place["tp"] == 0 and place["pp"] == self.pp - 1

    # --- meshes; each method is collective when it is first called for these sizes

    def data_mesh(self, device: torch.device) -> DeviceMesh:
        """The axes over which gradients are averaged, for `fully_shard`: (shards,), or (dp_replicate, shards).

        The axis of shards is `dp_shard`, or with context parallelism `dp_shard_cp`, which joins both axes.
        """
        shards = "dp_shard" if self.cp == 1 else "dp_shard_cp"
        return self.root_mesh(device)[("dp_replicate", shards) if self.dp_replicate > 1 else (shards,)]

    def samples_mesh(self, device: torch.device) -> DeviceMesh:
        """The axes whose ranks have different samples: 1-D, or 2-D (dp_replicate, dp_shard) if there are replicas."""
        return self._axes(device)[("dp_replicate", "dp_shard") if self.dp_replicate > 1 else ("dp_shard",)]

    def tp_mesh(self, device: torch.device) -> DeviceMesh:
        """The tensor-parallel axis, 1-D, of the same grid as `data_mesh`."""
        return self.root_mesh(device)["tp"]

    def pp_mesh(self, device: torch.device) -> DeviceMesh:
        """The pipeline axis, 1-D."""
        return self.root_mesh(device)["pp"]

    def cp_mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks that share sequences, 1-D."""
        return self._axes(device)["cp"]

    def ep_mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks over which experts are divided, 1-D."""
        return self._experts(device)["ep"]

    def ep_data_mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks that have the same experts: (dp_shard_ep,), or (dp_replicate, dp_shard_ep) if there are replicas."""
        return self._experts(device)[("dp_replicate", "dp_shard_ep") if self.dp_replicate > 1 else ("dp_shard_ep",)]

    def root_mesh(self, device: torch.device) -> DeviceMesh:
        """The mesh that contains the axes of `data_mesh`, `tp_mesh` and `pp_mesh`."""
        shards = "dp_shard" if self.cp == 1 else "dp_shard_cp"
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate, shards: self.dp_shard * self.cp, "tp": self.tp}
        return self._grid(device, sizes, shards)

    def _axes(self, device: torch.device) -> DeviceMesh:
        if self.cp == 1:
            return self.root_mesh(device)
        return self._grid(device, {name: getattr(self, name) for name in AXES}, "dp_shard")

    def _experts(self, device: torch.device) -> DeviceMesh:
        sizes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard_ep": self.dp_shard * self.cp // self.ep,
            "ep": self.ep,
            "tp": self.tp,
        }
        return self._grid(device, sizes, "dp_shard_ep", "ep")

    def _grid(self, device: torch.device, sizes: dict[str, int], *always: str) -> DeviceMesh:
        """The mesh over the used axes. It is made once per default group, because each axis costs a process group."""
        from torch.distributed.device_mesh import init_device_mesh

        ensure_group(device)
        if self.size != dist.get_world_size():
            raise LayoutError(_misfit(dist.get_world_size(), {name: getattr(self, name) for name in AXES}))
        global _made_under
        if _made_under is not dist.group.WORLD:
            _meshes.clear()  # they belong to a default group that is gone
            _made_under = dist.group.WORLD
        # `fully_shard` needs an axis to shard over, even of one rank; other axes of one rank are left out.
        names = tuple(n for n, s in sizes.items() if s > 1 or n in always)
        key = (device.type, tuple((name, sizes[name]) for name in names))
        if key not in _meshes:
            mesh = _meshes[key] = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=names)
            for name in names:
                inherit_timeout(mesh.get_group(name))
        return _meshes[key]


# By device type and layout, for the current default group.
_meshes: dict[tuple[str, tuple[tuple[str, int], ...]], DeviceMesh] = {}
_made_under: dist.ProcessGroup | None = None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _misfit(world_size: int, given: dict[str, int]) -> str:
    product = math.prod(given.values())
    asked = " x ".join(f"{name} {size}" for name, size in given.items())
    sizes = f"{asked}{f' = {product}' if len(given) > 1 else ''}"
    message = f"the axes must multiply to the {world_size} ranks that run, got {sizes}."
    # Remedies that change one thing: the size of one axis, or the number of ranks.
    remedies = []
    for name, size in given.items():
        rest = product // size
        if world_size % rest == 0 and size != world_size // rest:
            remedies.append(f"set {name} to {world_size // rest}")
    multiple = max(1, round(world_size / product)) * product
    divisors = _divisors(world_size)
    if len(given) == 1 and product not in divisors:
        name, size = next(iter(given.items()))
        near = sorted(divisors, key=lambda d: (abs(d - size), d))[:2]
        remedies = [f"set {name} to {' or '.join(str(d) for d in sorted(near))}"]
    if multiple != world_size:
        remedies.append(f"start {multiple} ranks")
    return f"{message} {', or '.join(remedies).capitalize()}."
