"""Data parallelism with whole models: torch's DistributedDataParallel.

Communication: a broadcast of parameters and buffers at the start; then all-reduces of gradient buckets in the backward pass of a
window's last micro-batch, overlapped with the computation.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.common.arguments import several
from echelon.common.errors import LayoutError
from echelon.common.numbers import number
from echelon.parallel.axes import Axis, split_axes
from echelon.parallel.ddp.bypass import Passes, send_through
from echelon.parallel.ddp.sync_batchnorm import sync_batchnorm
from echelon.parallel.ddp.wrapper import DistributedDataParallel as Reaching
from echelon.parallel.fsdp.move_and_sync import equalize
from echelon.parallel.gradients.fixed_order import reduce_bucket
from echelon.parallel.gradients.unreduced_params import average_
from echelon.parallel.guards.guard import Guard
from echelon.parallel.meta.materialize import materialize
from echelon.parallel.names import Kind, plain_names, register
from echelon.parallel.older_torch import ddp_options
from echelon.parallel.patching import for_now
from echelon.parallel.prepared import Extras, MicroBatch, Prepared, WrapperPrepared
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.state.partition import Partition
from echelon.parallel.strategy import Strategy
from echelon.world.init import World, ensure_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DDPPrepared", "DDPStrategy", "ZeROPrepared"]

O = TypeVar("O")  # noqa: E741


# If a parameter gets no gradient, a DistributedDataParallel averages no gradient of the same bucket.
#
# torch raises only in the next forward pass, after the optimizer has stepped with unaveraged gradients; after the last step it
# never raises.

_SAYS = "Expected to have finished reduction in the prior iteration"
_NUMBERS = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class Awaited(Guard):
    """Checks that the parameters for which a wrapper awaits gradients get one.

    Attributes:
        named: these parameters, with their names: those in its buckets, which required a gradient when it was made.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module, ignored = module, set(module.parameters_to_ignore)
        pairs = zip(module.module.named_parameters(), plain_names(module), strict=True)
        self.named = [named for (name, p), named in pairs if p.requires_grad and name not in ignored]
        alone = dist.get_world_size(module.process_group) == 1
        self._may_lack = bool(alone or module.find_unused_parameters or module.static_graph)

    def check_gradients(self, *, frozen_too: bool) -> None:
        """Called after an update's last backward pass, before its step.

        Args:
            frozen_too: torch also waited for parameters that have been frozen since.

        Raises:
            UsageError: a gradient is missing, so others were not averaged.
        """
        if self._may_lack:
            return
        lacking = [named for named in self.named if named[1].grad is None and (frozen_too or named[1].requires_grad)]
        if lacking:
            raise self._said(lacking)

    def explain(self, error: BaseException) -> LayoutError | None:
        if not isinstance(error, RuntimeError) or _SAYS not in str(error):
            return None
        match = _NUMBERS.search(str(error))
        numbers = [int(n) for n in match[1].split()] if match is not None else []
        return self._said([self.named[n] for n in numbers if n < len(self.named)])

    def _said(self, unused: list[tuple[str, nn.Parameter]]) -> LayoutError:
        there = set(self._module.parameters())
        return _of_replaced(*gone) if (gone := [name for name, p in unused if p not in there]) else _of_unused(unused)


def _of_replaced(name: str, *others: str) -> LayoutError:
    what = name + (f" and {len(others)} more" if others else "")
    return LayoutError(
        f"a parameter must stay the one that the module was made parallel with, but another took the place of {what}, as by "
        "`self.weight = nn.Parameter(...)` in forward: the new one is neither averaged over the ranks nor in the optimizer. "
        "Write into it, by p.copy_(...) under torch.no_grad(). If no loss trains it, as a codebook by moving averages, make it a "
        "buffer (register_buffer), and reduce over the ranks what it is written from."
    )


def _of_unused(unused: list[tuple[str, nn.Parameter]]) -> LayoutError:
    others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    what = unused[0][0] + others if unused else "all parameters"
    why = " (frozen since the module was made parallel)" if unused and not any(p.requires_grad for _, p in unused) else ""
    return LayoutError(
        f"the loss must depend on all trained parameters, got no gradient of {what}{why}. A DistributedDataParallel then leaves "
        "other gradients unaveraged. Set DDPStrategy(find_unused_parameters=True); or freeze parameters that are never used or "
        "trained before the module is made parallel; or train under 'fsdp', which does not wait for them."
    )


# Keep the order in which DistributedDataParallel sums gradients across a resume.
#
# After its first backward pass DistributedDataParallel rebuilds its buckets in the order in which that pass made gradients; a
# resumed process would start with the original buckets again. A ring of three or more ranks sums an element's terms in an order
# that depends on the element's place in a bucket, so the first update after a resume would differ in its last bits. So the order
# of the first pass is recorded, saved in the checkpoint, and replayed through a backward pass that computes nothing.
#
# With `find_unused_parameters` or `static_graph` torch has other rules, and this does nothing. A communication hook that keeps a
# state sees one more all-reduce, of zeros. Tested with torch 2.13.

# Two ranks add two numbers: the order does not matter.
_ORDER_MATTERS_FROM = 3

_orders: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()


class BucketOrder(Extras):
    """Parameter names in the order in which a wrapper's first reducing backward pass made their gradients."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def keep(self) -> None:
        if _is_sorted_later(self._module) and self._module not in _orders:
            _Listener(self._module)

    def state_dict(self) -> dict[str, Any]:
        order = _orders.get(self._module)
        is_known = order is not None and len(order) == len(_trained(self._module))
        return {"reduction_order": order} if is_known else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the module rebuild its buckets as after a backward pass in the saved order. Collective; clears gradients."""
        module, order = self._module, state_dict.get("reduction_order", ())
        if _is_sorted_later(module) and module not in _orders and sorted(order) == sorted(_trained(module)):
            _backward(module, order)
            _orders[module] = list(order)


def _is_sorted_later(module: nn.Module) -> bool:
    return (
        isinstance(module, DistributedDataParallel)
        and not module.find_unused_parameters
        and not module.static_graph
        and dist.get_world_size(module.process_group) >= _ORDER_MATTERS_FROM
    )


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class _Listener:
    """Records the order of gradients in the first reducing backward pass, by hooks that then remove themselves."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        trained = _trained(module)
        self._missing = set(trained)
        _orders[module] = []
        self._hooks = [p.register_post_accumulate_grad_hook(lambda _, name=name: self._hear(name)) for name, p in trained.items()]

    def _hear(self, name: str) -> None:
        module = self._module()
        if module is None or not module.require_backward_grad_sync or name not in self._missing:
            return
        self._missing.remove(name)
        _orders[module].append(name)
        if not self._missing:
            for hook in self._hooks:
                hook.remove()


class _Sum(nn.Module):
    """A loss whose gradients become ready in a given order, and are zero."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._parameters_in_order = tuple(parameters)  # a tuple: they are not this module's own

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        total = start
        for parameter in reversed(self._parameters_in_order):  # the last one used gets its gradient first
            some = parameter.sum() * 0
            total = total + (some.real if some.is_complex() else some).to(total.dtype)
        return total


def _backward(module: DistributedDataParallel, order: Sequence[str]) -> None:
    trained = _trained(module)
    parameters = [trained[name] for name in order]
    # torch fails at an empty broadcast: it would send the module's buffers, and finds none.
    with for_now(module, module=_Sum(parameters), require_forward_param_sync=False), torch.enable_grad():
        module(torch.zeros((), device=parameters[0].device)).backward()
    for parameter in parameters:
        parameter.grad = None


class _LastReference(tuple[Any, ...]):
    """A tuple, which the garbage collector does not clear. Copies and pickles of it are empty."""

    def __reduce__(self) -> Any:
        return _LastReference, ()


def _outlive_reducer(module: DistributedDataParallel) -> None:
    """Make Python hold the last reference to the process group, after the module's reducer has dropped its own.

    The destructor of a gloo group joins the group's threads. If the reducer frees the group, the destructor runs with the GIL
    held, and one of these threads may be waiting for the GIL to free the tensors of the last collective: a program that destroys
    its groups and returns hangs now and then. If Python's object frees the group, it releases the GIL first. A module's
    attributes are freed in the order in which they were set, so this one must be set last.

    Source: https://github.com/pytorch/pytorch/issues/56297 (open); seen with torch 2.13.0.
    """
    vars(module).pop("_group_of_reducer", None)
    vars(module)["_group_of_reducer"] = _LastReference((module.process_group,))


class DDPPrepared(WrapperPrepared[DistributedDataParallel]):
    """A module in DistributedDataParallel, ours or the user's own."""

    def __init__(self, module: DistributedDataParallel, world: World) -> None:
        _outlive_reducer(module)
        mesh = vars(module).get("device_mesh")
        names = mesh.mesh_dim_names if mesh is not None else None
        super().__init__(module, [Axis.of(module.process_group, names[0] if names else "")])
        self._passes: Passes | None = None
        self._of_window: list[bool] = []  # for each: trained in a micro-batch since the last update
        self._alone: list[tuple[nn.Parameter, bool]] = []  # all of these, if this micro-batch's gradients bypass the buckets
        self._awaited = Awaited(module)
        self._in_buckets = [p for _, p in self._awaited.named]
        self.guards.append(self._awaited)
        self._reduce_unfrozen()
        self.extras = BucketOrder(module)

    def optimizer(self, make: Callable[[DistributedDataParallel], O]) -> O:
        """Call `make` with the module inside our own wrapper, so that parameters have the same names as under other layouts."""
        if not isinstance(self.module, Reaching):
            return super().optimizer(make)
        inner: Any = self.unwrapped
        reached = not hasattr(inner, "module")
        if reached:  # scripts written for one layout use `module.module` to reach through the wrapper
            vars(inner)["module"] = inner
        try:
            return make(inner)
        finally:
            if reached:
                del vars(inner)["module"]

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        if not last and self.module.static_graph:
            raise LayoutError(
                "static_graph must be False where gradients are accumulated, got True: torch takes the first backward pass as "
                "the pattern for all later ones, and reduces none of these. Leave static_graph out, or make every batch an "
                "update."
            )
        if self._passes is None:
            self._passes = Passes(self.module)
        self._passes.ran = False
        trained = [p.requires_grad for p in self._in_buckets]
        self._of_window = list(map(or_, self._of_window, trained)) if self._of_window else trained
        self._alone = []
        torch_can = self.module.find_unused_parameters and trained == self._of_window
        if last and not all(trained) and not torch_can:  # torch would wait for frozen parameters, so bypass its buckets
            self._alone = list(zip(self._in_buckets, self._of_window, strict=True))
        context = super().accumulate(last and not self._alone)
        if last:
            self._reduces, self._of_window = True, []
        return context

    def discard_window(self) -> None:
        super().discard_window()
        self._of_window = []

    def before_backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
        assert self._passes is not None
        if self._reduces and not self._passes.ran and not self._alone:
            self._passes.ran = True
            return send_through(self.module, loss)
        if self._reduces and not self._alone and self.module.find_unused_parameters and not self.module.static_graph:
            # torch searched the graph of the outputs, where it finds tensors in them; the loss may depend on more.
            self.module.reducer.prepare_for_backward([loss])
        return loss

    def after_backward(self, loss: torch.Tensor) -> None:
        super().after_backward(loss)
        if self._alone:
            # requires_grad is read again: the code of the loss may have frozen or unfrozen layers since.
            alone = [p for p, was_trained in self._alone if was_trained or p.requires_grad]
            average_(alone, self.data.groups, in_order=self._order_is_fixed)
            self.module.require_forward_param_sync = True  # as after torch's own: the next forward broadcasts buffers
        if self._reduces:
            self._awaited.check_gradients(frozen_too=not self._alone)

    @property
    def forward_is_collective(self) -> bool:  # type: ignore[override]
        """Whether a forward broadcasts rank 0's buffers."""
        return bool(self.module.broadcast_buffers) and any(True for _ in self.module.buffers())

    def before_evaluation(self) -> bool:
        """Broadcast rank 0's buffers now, in place of the next forward pass, which need not be collective then."""
        group, ignored = self.module.process_group, self.module.parameters_to_ignore
        for name, buffer in self.module.module.named_buffers() if self.forward_is_collective else ():
            if name not in ignored:
                dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)
        self.module.require_forward_param_sync = False
        return False

    def end_training(self) -> None:
        super().end_training()
        self.before_evaluation()

    def parameters_written(self) -> None:
        # Averages may have replaced buffers, too. After a forward pass that only accumulated, torch would not broadcast them.
        self.module.require_forward_param_sync = True

    def fix_order(self) -> None:
        super().fix_order()
        try:
            # A lambda: torch compares annotations, which are strings here, with its own types.
            self.module.register_comm_hook(self.module.process_group, lambda group, bucket: reduce_bucket(group, bucket))
        except RuntimeError as error:  # torch takes one hook
            raise LayoutError(
                "comm_hook must be None in bit-equal training, which reduces gradients in its own hook. Leave it out."
            ) from error


class ZeROPrepared(DDPPrepared):
    """A module in DistributedDataParallel whose optimizer is partitioned: stage 1 of ZeRO (Rajbhandari et al. 2020)."""

    _divides_optimizer = True

    def optimizer(self, make: Callable[[DistributedDataParallel], O]) -> O:
        made = super().optimizer(make)
        optimizer = made[0] if isinstance(made, tuple) and made else made
        if isinstance(optimizer, torch.optim.Optimizer):
            Partition(optimizer, self.module.process_group, {p: n for n, p in self.unwrapped.named_parameters()})
        return made


register(Kind("ddp", lambda module: isinstance(module, DistributedDataParallel), DDPPrepared, inner="module"))


# Options that `DDPStrategy.wrap` handles itself.
_NOT_TORCHS = {
    *("broadcast_buffers", "forward_sync_buffers", "device_ids", "comm_state", "comm_hook"),
    *("sync_batchnorm", "shard_optimizer"),
}


@dataclass(frozen=True, repr=False)
class DDPStrategy(Strategy):
    """DistributedDataParallel's options, under its names; defaults are torch's, except for `gradient_as_bucket_view`.

    torch's documentation describes the options that are not listed here.

    Args:
        broadcast_buffers: broadcast rank 0's buffers (batch-norm statistics) before each forward.
        forward_sync_buffers: torch's newer name for `broadcast_buffers`; False still broadcasts once, at the start.
        bucket_cap_mb: size of a gradient bucket in MiB; None is torch's 25. `bucket_cap_mb_list` gives one for each bucket.
        gradient_as_bucket_view: gradients share memory with the buckets, which saves a copy; the values are the same.
        comm_hook, comm_state: replace the all-reduce of a bucket, as `register_comm_hook` describes.
        check_reduction: torch accepts it and has not used it for years.
        sync_batchnorm: batch norm over the global batch.
        device_ids: accepted from scripts that wrap by hand; must be this rank's device: `[device.index]`, on a CPU `[None]`.
        shard_optimizer: each rank keeps and updates the optimizer state of a part of the parameters: layout "zero1". The
            optimizer is partitioned when it is built, so a unit of your own must build it by `prepared.optimizer(...)`.
    """

    output_device: int | torch.device | None = None
    dim: int = 0
    broadcast_buffers: bool = True
    process_group: dist.ProcessGroup | None = None
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    comm_state: object | None = None
    comm_hook: Callable[[Any, Any], Any] | None = None
    sync_batchnorm: bool = False
    device_ids: Sequence[int | torch.device] | None = None
    init_sync: bool = True
    device_mesh: DeviceMesh | None = None
    forward_sync_buffers: bool | None = None
    skip_all_reduce_unused_params: bool = False
    bucket_cap_mb_list: Sequence[int] | None = None
    batched_grad_copy: bool = False
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_cap_mb is not None:
            number(
                "bucket_cap_mb",
                self.bucket_cap_mb,
                "a number of MiB, or None for torch's 25",
                lambda size: size >= 0,
                kind=LayoutError,
            )
        for name in ("device_ids", "bucket_cap_mb_list"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, several(name, given, "a list or None", kind=LayoutError))

    @property
    def name(self) -> str:  # type: ignore[override]
        return "zero1" if self.shard_optimizer else "ddp"

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        self._check(world)
        self._refuse_split(module)
        ensure_group(world.device)
        module = materialize(module, world.device).to(world.device)
        if not any(p.requires_grad for p in module.parameters()):  # nothing to reduce
            plain = [t for t in (*module.parameters(), *module.buffers()) if type(t) in (torch.Tensor, nn.Parameter)]
            equalize(plain, world.device, [self.process_group] if self.init_sync else [])  # not quantized subclasses
            prepared = Prepared(recipe.applied(module), [Axis.of(self.process_group)])
            prepared._reduce_unfrozen()
            return prepared
        kind = ZeROPrepared if self.shard_optimizer else DDPPrepared
        return kind(self.wrap(module, world, recipe), world)

    @staticmethod
    def _refuse_split(module: nn.Module) -> None:
        for axis in split_axes(module):
            raise LayoutError(
                f"layers of {type(module).__name__} are split over the axis {axis.name!r}: under DistributedDataParallel they "
                'would be missing from the state and from norms. Use FSDPStrategy(device_mesh=mesh["dp"]), with the name of your '
                "data axis."
            )

    def wrap(self, module: nn.Module, world: World, recipe: Recipe) -> DistributedDataParallel:
        """Wrap a module, which is on its device and has a trained parameter, in DistributedDataParallel."""
        if self.sync_batchnorm:
            module = sync_batchnorm(module, world.device, self.process_group)
        module = recipe.applied(module)
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_TORCHS}
        devices = [world.device.index] if world.device.type == "cuda" else None
        wrapped = Reaching(module, devices, **ddp_options(DistributedDataParallel, options | self._buffers()))
        if self.comm_hook is not None:
            wrapped.register_comm_hook(self.comm_state, self.comm_hook)
        return wrapped

    def _buffers(self) -> dict[str, Any]:
        # torch 2.13 warns if `broadcast_buffers` is passed, so it is left out where it equals the default.
        if self.forward_sync_buffers is not None:
            return {"forward_sync_buffers": self.forward_sync_buffers}
        return {} if self.broadcast_buffers else {"broadcast_buffers": False}

    def _check(self, world: World) -> None:
        # [device.index], as on TorchTNT's page, is [None] on a CPU.
        own_device = [world.device, world.device.index] if world.device.type == "cuda" else [None, world.device]
        if self.device_ids is not None and (len(self.device_ids) > 1 or any(d not in own_device for d in self.device_ids)):
            raise LayoutError(
                f"device_ids must be this rank's device, {world.device}, got {list(self.device_ids)}. Leave it out; use layout "
                "'dp' for one process that drives several devices."
            )
