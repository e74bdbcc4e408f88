"""Fully sharded data parallelism: torch's `fully_shard` splits parameters, gradients and optimizer state over the ranks.

`FSDPStrategy` has the options of `fully_shard`, and those of the older FullyShardedDataParallel that apply to it. Only
`FSDPStrategy.shard` calls `fully_shard`, for every layout that uses it.

Communication, per block of layers: an all-gather of its parameters before the forward and again before the backward, and a
reduce-scatter of its gradients after the backward. With replicas of the shards, an all-reduce over the replicas after the
backward of a window's last micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.arguments import several
from echelon.common.errors import LayoutError, require
from echelon.common.numbers import whole
from echelon.hf.layers import layer_drop
from echelon.parallel.axes import Axis, axes_of, sharded_axes, split_axes
from echelon.parallel.experts.distribute import divided_parameters
from echelon.parallel.fsdp.move_and_sync import Buffers, place
from echelon.parallel.fsdp.units import (
    Unit,
    always_under_autocast,
    decides,
    expert_units,
    experts_apart,
    follow_unfreezing,
    give_no_views,
    hear_of_all_outputs,
    hear_of_loss,
    keep_readable,
    of_another_type,
    policy_for,
    prefetch,
    resharded,
    units_of,
    unsplittable,
)
from echelon.parallel.gradients.fixed_order import TreeReduceScatter
from echelon.parallel.gradients.unreduced_params import AfterEachBackward, Joined, hook_backward
from echelon.parallel.guards.call_order import SameCalls, SameGradients
from echelon.parallel.guards.guard import SameDraws
from echelon.parallel.guards.lost_writes import LostWrites
from echelon.parallel.guards.messages import SplitMessages, gathers_in
from echelon.parallel.guards.trained_params import refuse_unheard
from echelon.parallel.meta.materialize import materialize, remember
from echelon.parallel.names import Kind, class_name, register
from echelon.parallel.prepared import NO_CONTEXT, Form, MicroBatch, Prepared
from echelon.parallel.recipe.blocks import Blocks, blocks_by_policy, chosen_blocks
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.shards import GatheredInPasses, average_reads, is_fully_sharded, is_split, local, refuse_copies, reshard
from echelon.parallel.state.sharded import take_whole_states, tell_when_module_is_pickled
from echelon.parallel.strategy import Strategy
from echelon.parallel.tensor.tensor import check_same_loss, check_whole_layers
from echelon.world.init import World, ensure_group, rank_info
from echelon.world.mesh import ParallelDims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FSDPModule, MixedPrecision, MixedPrecisionPolicy
    from torch.distributed.fsdp import ShardingStrategy as TorchShardingStrategy

__all__ = ["FSDPPrepared", "FSDPStrategy"]

logger = logging.getLogger(__name__)
B = TypeVar("B")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
P = TypeVar("P", bound="FSDPPrepared")


class FSDPPrepared(Prepared[nn.Module]):
    """A module that `fully_shard` has split, called by us or by the user. Its parameters are DTensors.

    Attributes:
        requires_gradient_sync, requires_all_reduce: as in FSDPStrategy: which gradients are reduced before a window's last
            micro-batch.
        draws: compares the random numbers of ranks that share layers; None if no ranks do.
        passes: has parameters gathered in passes only.
    """

    requires_gradient_sync, requires_all_reduce = True, False
    draws: SameDraws | None = None
    forward_is_collective = True
    form = Form("others")

    def __init__(self, module: nn.Module, world: World, averaged: Sequence[Axis] | None = None) -> None:
        reshard(module)
        super().__init__(module, sharded_axes(module, without=divided_parameters(module)) if averaged is None else averaged)
        self._joined = Joined(())  # nothing reduces what `fully_shard` has left whole
        self._same: SameGradients | None = None
        self._is_checked = self._is_known = self._compares_calls = False
        self.passes = GatheredInPasses(module)
        self.guards += [SplitMessages(module), LostWrites(module, self.passes, set_on_gathered)]
        average_reads(self.data.groups)
        refuse_copies(module)

    def _adopt(self) -> None:
        self.passes.trains = True
        Buffers.keep_equal(self.module, self.data.groups, begin=True)

    def optimizer(self, make: Callable[[nn.Module], O]) -> O:
        self.parameters_written()  # as in `add_extra_params`
        return super().optimizer(make)

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        self.passes.trains = True
        if last == self._reduces:
            return NO_CONTEXT
        sharded: FSDPModule = self.module  # type: ignore[assignment]
        self._reduces = last
        if not self.requires_gradient_sync:
            if self.form.gathered_in is not None and not self._is_known:
                self._is_known = True
                _gather_each(self.module)
            sharded.set_requires_gradient_sync(last)
        elif not self.requires_all_reduce and len(self.data.axes) > 1:
            sharded.set_requires_all_reduce(last)
            if self._same is None:
                self._compare_gradients(together=self.trains != "scheduled")
        return NO_CONTEXT

    def before_backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        if self._same is not None:
            self._same.settle()
        hear_of_loss(self.module, loss)
        return local(loss)

    def after_backward(self, loss: torch.Tensor) -> None:
        super().after_backward(loss)
        self.passes.trains = False
        if self._reduces and not self._is_checked:
            if self.draws is not None:  # first: different draws make the losses differ, and the next check would blame the layers
                self.draws.check_now(0)
            self._check_first(loss)
        if self._same is not None:
            self._same.end_backward(last=self._reduces)
            if self._reduces:
                self._same.settle()

    def _check_first(self, loss: torch.Tensor) -> None:
        """Check the first update, after its backward passes have reduced gradients. Collective over ranks that share layers."""
        check_same_loss(self.module, loss)
        self._check_gradients()
        self._is_checked = True

    def _check_gradients(self) -> None:
        check_whole_layers(self.module)
        refuse_unheard((name, p) for name, p in self.named_parameters() if is_split(p))

    def discard_window(self) -> None:
        super().discard_window()
        if not self._reduces:  # the gradients that fully_shard keeps would be added to the next window
            forget_gradients(self.module)

    def _compare_gradients(self, *, together: bool) -> None:
        """Compare from the next forward pass on which parameters get gradients on each rank."""
        self._same = SameGradients(self.module, together=together)
        self.guards.append(self._same)

    def _compare_calls(self) -> None:
        if not self._compares_calls and self.data.averaged_over > 1 and self.trains != "scheduled":  # each stage has other blocks
            self._compares_calls = True
            reshard(self.module)
            self.guards.append(SameCalls(self.module, reduces=not self._order_is_fixed))

    def before_evaluation(self) -> bool:
        self._compare_calls()
        return super().before_evaluation()

    def end_training(self) -> None:
        super().end_training()
        self.passes.trains = False
        reshard(self.module)
        Buffers.settle(self.module)

    def add_extra_params(self, others: list[nn.Parameter]) -> None:
        if self.data.averaged_over > 1:
            _refuse_layer_drop(self.module)
        self.parameters_written()  # a pass whose backward pass never came leaves gathered parameters
        by_itself = AfterEachBackward.of(self.module)
        if by_itself is not None:
            by_itself.enabled = False
        super().add_extra_params(others)
        self._compare_calls()

    def fix_order(self) -> None:
        super().fix_order()
        for module in self.module.modules():
            if is_fully_sharded(module):
                module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[operator]

    def parameters_written(self) -> None:
        reshard(self.module)
        Buffers.expire(self.module)  # averages may have replaced buffers, too


def _gather_each(module: nn.Module) -> None:
    """Gather each block once: torch 2.13 casts kept gradients of all blocks, and fails at a block that was never gathered.
    Collective.
    """
    for part in module.modules():
        if is_fully_sharded(part):
            part.unshard()  # type: ignore[operator]
            part.reshard()  # type: ignore[operator]


register(Kind("fsdp", is_fully_sharded, FSDPPrepared))


@dataclass(frozen=True, repr=False)
class FSDPStrategy(Strategy):
    """Shard parameters, gradients and optimizer state with `fully_shard`; the older FSDP's options keep their meaning.

    Args:
        process_group: the ranks to shard over; a pair is (ranks of one replica, ranks with the same shard).
        sharding_strategy: FULL_SHARD, SHARD_GRAD_OP (whole parameters between forward and backward), HYBRID_SHARD and
            _HYBRID_SHARD_ZERO2 (the same with replicas: one on each machine; on a single machine two, or the smallest number
            that divides its ranks); torch's members or their names. For another number of replicas:
            Layout(dp_replicate=..., fsdp=FSDPStrategy(...)).
        cpu_offload: keep shards and optimizer state in host memory: True, or torch's CPUOffload or CPUOffloadPolicy.
        auto_wrap_policy: which submodules to shard one by one: a set of classes, or a policy of torch's or your own.
        mixed_precision: torch's MixedPrecision or MixedPrecisionPolicy; the unit's precision decides what it leaves open. So
            MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) sums gradients in bfloat16 whatever the precision is.
        ignored_modules, ignored_states: modules and parameters that stay whole. Their gradients are not reduced, so they must be
            frozen.
        param_init_fn: initializes the parameters of a submodule on the meta device, without those of its children.
        sync_module_states: start from rank 0's values on every rank.
        forward_prefetch: gather the next block's parameters while one computes; a number says how many blocks ahead.
        backward_prefetch: how many blocks ahead in the backward pass; by default one, as `fully_shard` does by itself.
        device_mesh: instead of a process group: 1-D, or 2-D (ranks with the same shard, ranks of one replica).
        blocks: names or classes of the submodules to shard one by one; by default the repeated blocks of the model.
        reshard_after_forward: free a block's gathered parameters after its forward and gather them again for the backward.
            False keeps them (less traffic, more memory). A number keeps shards over that many ranks instead. A dict sets it for
            some blocks, by patterns of their names: {"blocks.0": False, "blocks.*": True}. By default `sharding_strategy`
            decides.
        requires_gradient_sync: reduce-scatter gradients in every micro-batch of an accumulation window, so that a rank keeps only
            its shards of them. False reduces in the last micro-batch only: less traffic, but whole float32 gradients on every
            rank until then.
        requires_all_reduce: with replicas, also all-reduce over them in every micro-batch. By default only in the last one.
        shard_placement_fn: the `Shard` for a parameter, as in `fully_shard`; by default along the first dimension.
    """

    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    sharding_strategy: TorchShardingStrategy | str | None = None
    cpu_offload: bool | CPUOffload | CPUOffloadPolicy | None = None
    auto_wrap_policy: Callable[..., bool] | Iterable[type[nn.Module]] | None = None
    mixed_precision: MixedPrecision | MixedPrecisionPolicy | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool = True
    forward_prefetch: bool | int = False
    backward_prefetch: int | None = None
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None
    device_mesh: DeviceMesh | None = None
    blocks: Sequence[str | type[nn.Module]] | None = None
    reshard_after_forward: bool | int | Mapping[str, bool | int] | None = None
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = False
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.forward_prefetch, bool):
            whole("forward_prefetch", self.forward_prefetch, at_least=0, kind=LayoutError)
        if self.backward_prefetch is not None:
            whole("backward_prefetch", self.backward_prefetch, at_least=1, or_none="for what fully_shard does", kind=LayoutError)
        value = self.reshard_after_forward
        one_by_one = value.values() if isinstance(value, Mapping) else [0 if value is None else value]
        known = all(isinstance(each, int) for each in one_by_one)
        what = "True, False, a number of ranks, a dict of these by names, or None"
        require(known, "reshard_after_forward", what, value, kind=LayoutError)
        for name, what, kind in (
            ("ignored_modules", "a list of modules", nn.Module),
            ("ignored_states", "a list of modules or parameters", (nn.Module, torch.Tensor)),
        ):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, several(name, given, what, partial(_is_a, kind), kind=LayoutError))

    @property
    def name(self) -> str:  # type: ignore[override]
        reshard, replicas = sharding_named(self.sharding_strategy)
        keeps_whole = not reshard if self.reshard_after_forward is None else self.reshard_after_forward is False
        return "hsdp" if replicas else "zero2" if keeps_whole else "fsdp"

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        return self.shard(module, world, recipe, FSDPPrepared)

    def shard(self, module: nn.Module, world: World, recipe: Recipe, made: type[P]) -> P:
        """Split the module in place over the data-parallel ranks, and return a `made`. Collective.

        Each block is initialized or moved to the device, made equal on all ranks, and split before the next block. So no rank's
        device ever holds more than its shards and one whole block.
        """
        self._check()
        reshard, replicas = sharding_named(self.sharding_strategy)
        resharding = reshard if self.reshard_after_forward is None else self.reshard_after_forward
        root_policy, policy = precision_policies(self.mixed_precision, module)
        offload = offload_policy(self.cpu_offload)
        mesh, blocks, ignored = self._mesh(world, replicas), self.blocks_of(module), self._ignored()
        if self.param_init_fn is None:
            remember(module)
        ranks = mesh.mesh.flatten().tolist()
        _refuse_split(module, ranks)
        _refuse_loose(module, ignored, len(ranks))
        ignored |= (left_whole := unsplittable(module))
        precision = recipe.precision
        reshards = True if isinstance(resharding, Mapping) else resharding
        units = units_of(module, blocks, precision, policy, reshards, world.device)
        if isinstance(resharding, Mapping):
            units = resharded(units, module, resharding)
        apart = set() if offload else experts_apart(module, precision, policy)
        units = [*expert_units(module, precision, policy, reshards, apart), *units]
        ignored |= apart
        gathers_as = policy_for(module, precision, root_policy)
        module = recipe.applied(module)
        left_whole |= (others := of_another_type(module, [unit.modules for unit in units], ignored))
        ignored |= others
        self._split(module, units, gathers_as, ignored, world, mesh, offload=offload, reshard=resharding)
        materialize(module, torch.device("cpu") if offload else world.device, buffers=world.device)
        for parameter in left_whole:  # never offloaded
            parameter.data = parameter.data.to(world.device)
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        if len(ranks) > 1 and (trained := [p for p in module.parameters() if p in left_whole and p.requires_grad]):
            AfterEachBackward(module, trained, groups)
        Buffers.keep_equal(module, groups)
        refuse_second_derivatives(module)
        take_whole_states(module)
        tell_when_module_is_pickled(module)
        prepared = made(module, world, axes_of(mesh))
        if precision is not None and decides(precision, root_policy):
            always_under_autocast(module, precision, world.device)
        prepared.form = Form("others", gathers_as.param_dtype)
        prepared.requires_gradient_sync = self.requires_gradient_sync
        prepared.requires_all_reduce = self.requires_all_reduce
        return prepared

    def _split(
        self,
        module: nn.Module,
        units: list[Unit],
        root_policy: MixedPrecisionPolicy,
        ignored: set[nn.Parameter],
        world: World,
        mesh: DeviceMesh,
        *,
        offload: CPUOffloadPolicy | None,
        reshard: bool | int | Mapping[str, bool | int],
    ) -> None:
        """Call `fully_shard` on each unit, then on the root."""
        gathers_in(module, root_policy.param_dtype)
        from torch.distributed.fsdp import fully_shard

        options: dict[str, Any] = {
            "mesh": mesh,
            "shard_placement_fn": self.shard_placement_fn,
            "ignored_params": ignored or None,
        }
        if offload is not None:  # pinned memory makes copies to a GPU asynchronous; without a GPU there is none
            options["offload_policy"] = replace(offload, pin_memory=offload.pin_memory and world.device.type == "cuda")
        done: set[nn.Module] = set()
        split: set[nn.Parameter] = set()
        # None leaves it to torch, which does not reshard the root: its backward begins where its forward ended.
        rest = Unit("", (module,), root_policy, None if reshard is True or isinstance(reshard, Mapping) else reshard)
        for unit in (*units, rest):
            for part in unit.modules:
                place(part, done, world, mesh, from_rank0=self.sync_module_states, init=self.param_init_fn)
            together = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            own = {} if unit.mesh is None else {"mesh": unit.mesh, "shard_placement_fn": unit.placement}
            fully_shard(together, **{**options, **own}, reshard_after_forward=unit.reshard, mp_policy=unit.policy)
            follow_unfreezing(unit.modules, split)
            for part in unit.modules:
                give_no_views(part)
                hear_of_all_outputs(part)
        keep_readable(module, [part for unit in units if unit.is_read for part in unit.modules])
        prefetch(units, int(self.forward_prefetch), self.backward_prefetch)

    def _check(self) -> None:
        if self.blocks is not None and self.auto_wrap_policy is not None:
            raise LayoutError("blocks and auto_wrap_policy both choose what is sharded. Give one of them.")
        if self.process_group is not None and self.device_mesh is not None:
            raise LayoutError("process_group and device_mesh both choose the ranks. Give one of them.")

    def _mesh(self, world: World, replicas: bool) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        ensure_group(world.device)
        if self.device_mesh is not None:
            return self.device_mesh
        if isinstance(self.process_group, tuple):
            shards, copies = self.process_group
            grid = _grid(shards, copies)
            return DeviceMesh.from_group([copies, shards], world.device.type, grid, mesh_dim_names=("dp_replicate", "dp_shard"))
        if self.process_group is not None:
            return DeviceMesh.from_group(self.process_group, world.device.type, mesh_dim_names=("dp_shard",))
        size = replicas_default(world.size, rank_info().local_world_size) if replicas else world.size
        return ParallelDims.of(world.size, dp_replicate=world.size // size, dp_shard=size).data_mesh(world.device)

    def _ignored(self) -> set[nn.Parameter]:
        ignored = {p for m in self.ignored_modules or () for p in m.parameters()}
        for state in self.ignored_states or ():
            ignored |= set(state.parameters()) if isinstance(state, nn.Module) else {state}
        return ignored

    def blocks_of(self, module: nn.Module) -> Blocks | None:
        """The blocks that the user chose to shard one by one; None leaves the choice to echelon."""
        if self.auto_wrap_policy is not None:
            return blocks_by_policy(module, self.auto_wrap_policy, self._ignored())
        return None if self.blocks is None else chosen_blocks(module, self.blocks, "FSDPStrategy(blocks=...)")


def _refuse_layer_drop(module: nn.Module) -> None:
    if (dropped := layer_drop(module)) is not None:
        name, often = dropped
        raise LayoutError(
            f"{class_name(module)} skips layers at random ({name}={often}): each rank would skip different layers, but all ranks "
            f"must gather blocks in the same order. Set {name}=0; or train under DDPStrategy(find_unused_parameters=True)."
        )


def _refuse_split(module: nn.Module, ranks: list[int]) -> None:
    for axis in split_axes(module, without=divided_parameters(module)):
        if len(set(axis.ranks) & set(ranks)) > 1:
            raise LayoutError(
                f"layers of {type(module).__name__} are already split over the axis {axis.name!r}, and would be sharded over "
                'the same ranks. Use FSDPStrategy(device_mesh=mesh["dp"]), with the name of your data axis.'
            )


def _refuse_loose(module: nn.Module, ignored: set[nn.Parameter], ranks: int) -> None:
    loose = [n for n, p in module.named_parameters() if p in ignored and p.requires_grad]
    if loose and ranks > 1:
        raise LayoutError(
            f"ignored_modules, ignored_states: gradients of {loose[0]} would not be reduced over the ranks. Freeze it first."
        )


def _is_a(kind: Any, value: Any) -> bool:
    return isinstance(value, kind)


def _grid(shards: dist.ProcessGroup, copies: dist.ProcessGroup) -> torch.Tensor:
    """All ranks as a (replicas, shards) tensor: each replica contributes its row of ranks. Collective."""
    row = torch.tensor(dist.get_process_group_ranks(shards))
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(copies))]
    dist.all_gather(rows, row, group=copies)
    return torch.stack(rows)


def replicas_default(world_size: int, local_size: int) -> int:
    """Ranks that shard one replica: a machine's, where traffic is fast; on a single machine the most that leave two replicas."""
    if 1 < local_size < world_size and world_size % local_size == 0:
        return local_size
    return next((d for d in range(world_size // 2, 0, -1) if world_size % d == 0), 1)


# Options of the older FullyShardedDataParallel, translated to those of `fully_shard`.

# (reshard after the forward, replicas of the shards)
_SHARDINGS = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True),
}


def sharding_named(value: Any) -> tuple[bool, bool]:
    """A ShardingStrategy, or its name, as (reshard after the forward, replicas of the shards). None is FULL_SHARD.

    Raises:
        UsageError: NO_SHARD, for which there is layout "ddp"; an unknown strategy.
    """
    name = getattr(value, "name", value) or "FULL_SHARD"
    if name == "NO_SHARD":
        raise LayoutError("sharding_strategy must shard something, got NO_SHARD. Use layout 'ddp' instead.")
    require(name in _SHARDINGS, "sharding_strategy", f"one of {', '.join(_SHARDINGS)}", value, kind=LayoutError)
    return _SHARDINGS[name]


def offload_policy(value: Any) -> CPUOffloadPolicy | None:
    """`fully_shard`'s policy, if the state is kept in host memory, from a bool or from torch's CPUOffload or a policy."""
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if isinstance(value, OffloadPolicy):
        return value if isinstance(value, CPUOffloadPolicy) else None
    wanted = value.offload_params if isinstance(value, CPUOffload) else value
    what = "True, False, or torch's CPUOffload or CPUOffloadPolicy"
    require(wanted is None or isinstance(wanted, bool), "cpu_offload", what, value, kind=LayoutError)
    return CPUOffloadPolicy() if wanted else None


def precision_policies(value: Any, module: nn.Module) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """The older FSDP's MixedPrecision, or `fully_shard`'s policy, as policies for (the root, the blocks).

    Raises:
        UsageError: an option without a counterpart.
    """
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if value is None or isinstance(value, MixedPrecisionPolicy):
        policy = value or MixedPrecisionPolicy()
        return policy, policy
    if not isinstance(value, MixedPrecision):
        raise LayoutError(f"mixed_precision must be torch's MixedPrecision or MixedPrecisionPolicy, got {type(value).__name__}.")
    if value.keep_low_precision_grads:
        raise LayoutError(
            "keep_low_precision_grads must be False in MixedPrecision, got True: gradients have the parameters' dtype. For "
            "gradients in half precision, build the module in that dtype."
        )
    if value.buffer_dtype is not None:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(value.buffer_dtype)
    types = {"param_dtype": value.param_dtype, "reduce_dtype": value.reduce_dtype or value.param_dtype}
    root = MixedPrecisionPolicy(**types, cast_forward_inputs=value.cast_root_forward_inputs or value.cast_forward_inputs)
    return root, MixedPrecisionPolicy(**types, cast_forward_inputs=value.cast_forward_inputs)


# Second derivatives, such as for a gradient penalty, are refused for a module that `fully_shard` has split.
#
# The first backward pass frees the parameters that were gathered for it, and the second would read them again: torch 2.13 ends
# the process with SIGSEGV.


def refuse_second_derivatives(module: nn.Module) -> None:
    """From now on a backward pass with `create_graph=True` through the module raises UsageError."""
    name = class_name(module)

    def refuse(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward pass: only with create_graph=True
            raise LayoutError(
                f"create_graph=True must be left out in a backward pass through {name}, whose parameters are sharded: this pass "
                "frees them, and a backward pass through its gradients would read them. Train it under 'ddp' or 'zero1'."
            )

    def listen(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            hook_backward(output, refuse)

    module.register_forward_hook(torch.compiler.disable(listen))


# Drop the gradients of a discarded accumulation window that `fully_shard` keeps outside of the parameters.
#
# `FSDPModule.reset_iter_state` (torch 2.13) drops gradients that wait for an all-reduce. Whole gradients that wait for their
# reduce-scatter stay, and have no public name. Tested with torch 2.13; tests/loop/test_accumulation.py notices a change.


def forget_gradients(module: nn.Module) -> None:
    """Drop the gradients kept by a root of `fully_shard`. Call between two forward passes."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()  # type: ignore[operator]
    for parameter in _gathered_by_torch(module):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def set_on_gathered(module: nn.Module) -> bool:
    """Whether a gathered parameter has a gradient of the script's, between two updates: torch's own are reduced by then. Zeros
    are none: a loop of one's own marks a parameter by them (`loop/own/cleared.py`).
    """
    gathered = (getattr(parameter, "_unsharded_param", None) for parameter in _gathered_by_torch(module))
    return any(parameter is not None and parameter.grad is not None and bool(parameter.grad.any()) for parameter in gathered)


def _gathered_by_torch(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if is_fully_sharded(part):
            for group in getattr(part._get_fsdp_state(), "_fsdp_param_groups", ()):  # type: ignore[operator]
                yield from group.fsdp_params
