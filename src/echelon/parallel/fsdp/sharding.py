"""Split a module over ranks with torch's `fully_shard`: the one place that calls it, for every layout built on it.

Communication, per block of layers: an all-gather of its parameters before the forward and again before the backward,
a reduce-scatter of its gradients after the backward; with replicas of the shards, an all-reduce over these after the backward of
a window's last micro-batch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from echelon.common.errors import LayoutError
from echelon.hf.layers import layer_drop
from echelon.parallel.axes import Axis, axes_of, sharded_axes, split_axes
from echelon.parallel.experts.distribute import divided_experts
from echelon.parallel.fsdp.move_and_sync import Buffers, place
from echelon.parallel.fsdp.units import (
    Unit,
    always_under_autocast,
    decides,
    expert_units,
    experts_apart,
    keep_readable,
    policy_for,
    prefetch,
    resharded,
    units_of,
)
from echelon.parallel.gradients.fixed_order import TreeReduceScatter
from echelon.parallel.gradients.unreduced_params import AfterEachBackward, hook_backward
from echelon.parallel.guards.call_order import SameCalls, SameGradients
from echelon.parallel.guards.guard import SameDraws
from echelon.parallel.guards.messages import SplitMessages, gathers_in
from echelon.parallel.guards.trained_params import refuse_unheard
from echelon.parallel.meta.materialize import materialize, remember
from echelon.parallel.names import Kind, class_name, register
from echelon.parallel.older_torch import shards_integers
from echelon.parallel.prepared import NO_CONTEXT, Form, MicroBatch, Prepared
from echelon.parallel.recipe.blocks import Blocks
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.shards import is_fully_sharded, is_split, local, refuse_copies, reshard
from echelon.parallel.state.sharded import take_whole_states, tell_when_module_is_pickled
from echelon.parallel.tensor.tensor import check_same_loss, check_whole_layers
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

__all__ = ["FSDPPrepared", "Sharding", "offloads", "shard"]

logger = logging.getLogger(__name__)

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")
P = TypeVar("P", bound="FSDPPrepared")


class FSDPPrepared(Prepared[nn.Module]):
    """A module that `fully_shard` has split, by us or by the user. Its parameters are DTensors.

    Attributes:
        requires_gradient_sync, requires_all_reduce: as FSDPStrategy has them: which gradients travel before a window's last
            micro-batch.
        draws: compares the random numbers of ranks that share layers; None where there are none.
    """

    requires_gradient_sync, requires_all_reduce = True, False
    draws: SameDraws | None = None
    forward_is_collective = True
    form = Form("others")

    def __init__(self, module: nn.Module, world: World, averaged: Sequence[Axis] | None = None) -> None:
        reshard(module)
        super().__init__(module, sharded_axes(module) if averaged is None else averaged)
        self._same: SameGradients | None = None
        self._is_checked = self._is_known = self._compares_calls = False
        self.guards.append(SplitMessages(module))
        refuse_copies(module)

    def _adopt(self) -> None:
        Buffers.keep_equal(self.module, self.data_groups, begin=True)

    def optimizer(self, make: Callable[[nn.Module], O]) -> O:
        self.parameters_written()  # an evaluation leaves whole parameters, which are gone when their shards return
        return super().optimizer(make)

    def _left_alone(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad and not is_split(p)]

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        if last == self._reduces:
            return NO_CONTEXT
        sharded: FSDPModule = self.module  # type: ignore[assignment]
        self._reduces = last
        if not self.requires_gradient_sync:
            if self.form.gathered_in is not None and not self._is_known:
                self._is_known = True
                _gather_each(self.module)
            sharded.set_requires_gradient_sync(last)
        elif not self.requires_all_reduce and len(self._averaged) > 1:
            sharded.set_requires_all_reduce(last)
            if self._same is None:
                self._compare_gradients(together=self.trains != "scheduled")
        return NO_CONTEXT

    def before_backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        if self._same is not None:
            self._same.settle()
        return local(loss)

    def after_backward(self, loss: torch.Tensor) -> None:
        super().after_backward(loss)
        if self._reduces and not self._is_checked:
            if self.draws is not None:  # else the losses would seem to differ for another reason
                self.draws.check_now(0)
            check_same_loss(self.module, loss)
            check_whole_layers(self.module)
            refuse_unheard((name, p) for name, p in self.named_parameters() if is_split(p))
            self._is_checked = True
        if self._same is not None:
            self._same.end_backward(last=self._reduces)
            if self._reduces:
                self._same.settle()

    def discard_window(self) -> None:
        if not self._reduces:  # what it kept would join the next window
            forget_gradients(self.module)

    def _compare_gradients(self, *, together: bool) -> None:
        """From the next forward pass on."""
        self._same = SameGradients(self.module, together=together)
        self.guards.append(self._same)

    def _compare_calls(self) -> None:
        if not self._compares_calls and self.averaged_over > 1 and self.trains != "scheduled":  # each stage has other blocks
            self._compares_calls = True
            reshard(self.module)
            self.guards.append(SameCalls(self.module, reduces=not self._order_is_fixed))

    def before_evaluation(self) -> None:
        super().before_evaluation()
        self._compare_calls()

    def trains_also(self, others: list[nn.Parameter]) -> None:
        if self.averaged_over > 1:
            _refuse_layer_drop(self.module)
        self.parameters_written()  # an evaluation leaves whole parameters, which are gone when their shards return
        by_itself = AfterEachBackward.of(self.module)
        if by_itself is not None:
            by_itself.enabled = False
        super().trains_also(others)
        self._compare_calls()

    def fix_order(self) -> None:
        if any(p.device_mesh.ndim > 1 for p in self.module.parameters() if is_split(p)):  # type: ignore[attr-defined]
            raise LayoutError("bit-equal training needs a mesh with one axis. Use fsdp, not hsdp or tensor parallelism.")
        super().fix_order()
        for module in self.module.modules():
            if is_fully_sharded(module):
                module.set_custom_reduce_scatter(TreeReduceScatter())  # type: ignore[operator]

    def parameters_written(self) -> None:
        reshard(self.module)
        Buffers.expire(self.module)  # averages may have taken their place


def _gather_each(module: nn.Module) -> None:
    """Each block once: torch 2.13 casts kept gradients of all blocks, and fails at one that was never gathered. Collective."""
    for part in module.modules():
        if is_fully_sharded(part):
            part.unshard()  # type: ignore[operator]
            part.reshard()  # type: ignore[operator]


register(Kind("fsdp", is_fully_sharded, FSDPPrepared))


@dataclass(frozen=True)
class Sharding:
    """What an FSDPStrategy means for a module, in `fully_shard`'s words.

    Args:
        options: the FSDPStrategy, for what it says in these words itself.
        mesh: the data-parallel ranks: 1-D, or 2-D (replicas, shards).
        blocks: submodules to split one by one, innermost first; None chooses the repeated ones and reports them.
        policy, root_policy: mixed precision, as the user gives it; what it leaves open is the recipe's.
        offload: shards and optimizer state live in host memory; they visit the device block by block.
        ignored: parameters that stay whole.
    """

    options: Any
    mesh: DeviceMesh
    blocks: Blocks | None
    reshard_after_forward: bool | int | Mapping[str, bool | int]
    policy: MixedPrecisionPolicy
    root_policy: MixedPrecisionPolicy
    offload: bool
    pin_memory: bool
    ignored: Collection[nn.Parameter]


def shard(module: nn.Module, world: World, recipe: Recipe, how: Sharding, made: type[P]) -> P:
    """Split the module in place over `how.mesh`, as a `made`. Collective.

    Block by block: a block is filled or moved to the device, made equal on all ranks, and split before the next one's turn,
    so that no rank's device ever holds more than its shards and one whole block.
    """
    if how.options.param_init_fn is None:
        remember(module)
    if how.mesh.ndim > 2 or (how.mesh.ndim == 2 and how.mesh.mesh_dim_names is None):
        names = "" if how.mesh.mesh_dim_names else " without names"
        raise LayoutError(
            f"the mesh must have one axis, or two with names, got {how.mesh.ndim}{names}. "
            "Make it by init_device_mesh(device, (copies, shards), mesh_dim_names=('dp_replicate', 'dp_shard'))."
        )
    _refuse_container(module)
    ignored = set(how.ignored)
    ranks = how.mesh.mesh.flatten().tolist()
    _refuse_split(module, ranks, {p for _, experts, _ in divided_experts(module) for p in experts.parameters()})
    _refuse_loose(module, ignored, len(ranks))
    ignored |= (whole := unsplittable(module))
    reports, precision = world.rank == 0, recipe.precision
    said = how.reshard_after_forward
    reshards = True if isinstance(said, Mapping) else said
    units = units_of(module, how.blocks, precision, how.policy, reshards, world.device, reports=reports)
    if isinstance(said, Mapping):
        units = resharded(units, module, said)
    apart = set() if how.offload else experts_apart(module, precision, how.policy)
    units = [*expert_units(module, precision, how.policy, reshards, apart), *units]
    ignored |= apart
    root_policy = policy_for(module, precision, how.root_policy)
    module = recipe.compile(recipe.checkpoint_activations(module))
    whole |= (others := of_another_type(module, [unit.modules for unit in units], ignored))
    ignored |= others
    _split(module, units, root_policy, ignored, world, how)
    materialize(module, torch.device("cpu") if how.offload else world.device, buffers=world.device)
    for parameter in whole:  # is never offloaded
        parameter.data = parameter.data.to(world.device)
    groups = [how.mesh.get_group(axis) for axis in range(how.mesh.ndim)]
    if len(ranks) > 1 and (trained := [p for p in module.parameters() if p in whole and p.requires_grad]):
        AfterEachBackward(module, trained, groups)
    Buffers.keep_equal(module, groups)
    refuse_second_derivatives(module)
    take_whole_states(module)
    tell_when_module_is_pickled(module)
    prepared = made(module, world, axes_of(how.mesh))
    if precision is not None and decides(precision, how.root_policy):
        always_under_autocast(module, precision, world.device)
    prepared.form = Form("others", root_policy.param_dtype)
    prepared.requires_gradient_sync = how.options.requires_gradient_sync
    prepared.requires_all_reduce = how.options.requires_all_reduce
    return prepared


def _split(
    module: nn.Module,
    units: list[Unit],
    root_policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
    world: World,
    how: Sharding,
) -> None:
    """The units in turn, then the rest."""
    gathers_in(module, root_policy.param_dtype)
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    given = how.options
    options: dict[str, Any] = {
        "mesh": how.mesh,
        "shard_placement_fn": given.shard_placement_fn,
        "ignored_params": ignored or None,
    }
    if how.offload:  # pinned memory makes copies to a GPU asynchronous; without a GPU there is none
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=how.pin_memory and world.device.type == "cuda")
    done: set[nn.Module] = set()
    kind = type(module).__name__
    # None is torch's own choice for the root: its backward begins where its forward ended.
    said = how.reshard_after_forward
    rest = Unit("", (module,), root_policy, None if said is True or isinstance(said, Mapping) else said)
    for unit in (*units, rest):
        for part in unit.modules:
            name = f"{kind}.{unit.name}" if unit.name else kind
            from_rank0, init = given.sync_module_states, given.param_init_fn
            place(part, done, world, how.mesh, from_rank0=from_rank0, init=init, name=name)
        together = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
        own = {} if unit.mesh is None else {"mesh": unit.mesh, "shard_placement_fn": unit.placement}
        fully_shard(together, **{**options, **own}, reshard_after_forward=unit.reshard, mp_policy=unit.policy)
    keep_readable(module, [part for unit in units if unit.is_read for part in unit.modules])
    prefetch(units, int(given.forward_prefetch), given.backward_prefetch)


def _refuse_layer_drop(module: nn.Module) -> None:
    if (found := layer_drop(module)) is not None:
        name, often = found
        raise LayoutError(
            f"{class_name(module)} leaves out layers at random ({name}={often}): each rank would leave out others, and blocks "
            f"are gathered by the order of calls. Set {name}=0; or train under DDPStrategy(find_unused_parameters=True)."
        )


def _refuse_container(module: nn.Module) -> None:
    if "forward" not in vars(module) and type(module).forward is nn.Module.forward:
        raise LayoutError(
            f"the module must have a forward, got a {type(module).__name__} without one: parameters are put together as it is "
            "called. Write an nn.Module that holds these networks and whose forward calls them; or train under 'ddp' or 'zero1'."
        )


def _refuse_split(module: nn.Module, ranks: list[int], experts: set[nn.Parameter]) -> None:
    for axis in split_axes(module, without=experts):
        if len(set(axis.ranks) & set(ranks)) > 1:
            raise LayoutError(
                f"layers of {type(module).__name__} are split over the axis {axis.name!r} already, and would be sharded over "
                'the same ranks. Use FSDPStrategy(device_mesh=mesh["dp"]), by the name of your data axis.'
            )


def _refuse_loose(module: nn.Module, ignored: set[nn.Parameter], ranks: int) -> None:
    loose = [n for n, p in module.named_parameters() if p in ignored and p.requires_grad]
    if loose and ranks > 1:
        raise LayoutError(f"ignored_modules, ignored_states: {loose[0]} would not be reduced over the ranks. Freeze it first.")


def offloads(value: Any, option: str) -> tuple[bool, bool]:
    """(offload, pin memory) from a bool, or from torch's CPUOffload, OffloadPolicy or CPUOffloadPolicy."""
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if value is None or isinstance(value, bool):
        return bool(value), True
    if isinstance(value, CPUOffload):
        return value.offload_params, True
    if isinstance(value, CPUOffloadPolicy):
        return True, value.pin_memory
    if isinstance(value, OffloadPolicy):
        return False, True
    raise LayoutError(f"{option} must be True, False, or torch's CPUOffload or CPUOffloadPolicy, got {type(value).__name__}.")


# Parameters that `fully_shard` cannot split. They stay whole on every rank: `gradients/unreduced_params` averages theirs.


def unsplittable(module: nn.Module) -> set[nn.Parameter]:
    """Scalars and empty tensors, which `fully_shard` refuses or breaks on; complex ones, which it would gather as real numbers
    where a precision is asked for; with an older torch, all that are no floating-point numbers.
    """
    integers = shards_integers()
    return {
        p
        for p in module.parameters()
        if p.dim() == 0 or p.numel() == 0 or p.is_complex() or not (integers or p.is_floating_point())
    }


def of_another_type(module: nn.Module, units: Iterable[Sequence[nn.Module]], ignored: set[nn.Parameter]) -> set[nn.Parameter]:
    """Trained parameters of another type than most of those they are gathered with: `fully_shard` takes one type at a time.

    Args:
        units: modules that are gathered together; what is in none of them is gathered with the root.
        ignored: parameters that stay whole already.
    """
    found: set[nn.Parameter] = set()
    done = set(ignored)
    for modules in (*units, (module,)):
        mine = dict.fromkeys(p for each in modules for p in each.parameters() if p not in done)  # in order: the same on all ranks
        done |= mine.keys()
        sizes: Counter[torch.dtype] = Counter()
        for parameter in mine:
            sizes[parameter.dtype] += parameter.numel() if parameter.requires_grad else 0
        main = max(sizes, key=sizes.__getitem__, default=None)
        found |= {p for p in mine if p.requires_grad and p.dtype is not main}
    if found:
        first = next(name for name, p in module.named_parameters() if p in found)
        logger.warning(
            "%s parameters, such as %s, are of another type than most of those around them: every rank holds them whole",
            len(found),
            first,
        )
    return found


# Gradients of gradients, such as a gradient penalty's, of a module that `fully_shard` has split: refused.
#
# The first backward pass frees the parameters that were gathered for it, and the second would read them again: torch 2.13 ends
# the process with SIGSEGV.


def refuse_second_derivatives(module: nn.Module) -> None:
    """From now on a backward pass with `create_graph=True` through the module raises UsageError."""
    name = class_name(module)

    def refuse(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # in a backward pass: only where a graph of it is made
            raise LayoutError(
                f"create_graph=True must be left out in a backward pass through {name}, whose parameters are sharded: they are "
                "freed after it, and the backward pass through its gradients would read them. Train it under 'ddp' or 'zero1'."
            )

    def listen(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            hook_backward(output, refuse)

    module.register_forward_hook(torch.compiler.disable(listen))


# Forget the gradients of an accumulation window that is given up, where `fully_shard` keeps them beside the parameters.
#
# `FSDPModule.reset_iter_state` (torch 2.13) forgets what waits for an all-reduce; whole gradients that wait for their
# reduce-scatter stay, and have no public name. Tested with torch 2.13; tests/loop/test_accumulation.py notices a change.


def forget_gradients(module: nn.Module) -> None:
    """Of a root of `fully_shard`, between two forward passes."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()  # type: ignore[operator]
    for part in module.modules():
        if not is_fully_sharded(part):
            continue
        state = part._get_fsdp_state()  # type: ignore[operator]
        for group in getattr(state, "_fsdp_param_groups", ()):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
