"""Tensors split over the ranks: this rank's part, and the whole. The only place that tells a DTensor from a plain tensor."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import stateless
from torch.utils._pytree import tree_leaves

from echelon.common.errors import LayoutError
from echelon.parallel.names import class_name, imported
from echelon.parallel.patching import class_for_now, replace, replace_of_class, replaced

__all__ = [
    "GatheredInPasses",
    "authors_classes",
    "average_reads",
    "gathered_copy",
    "is_fully_sharded",
    "is_split",
    "local",
    "numbers_of_whole",
    "ranks_apart",
    "refuse_copies",
    "reshard",
    "set_apart",
    "watch_numbers",
    "whole",
]

logger = logging.getLogger(__name__)

_of_whole: ContextVar[bool] = ContextVar("_of_whole", default=False)
_DATA: Any = torch.Tensor.data
_told: set[str] = set()  # file:line that read a number and was warned of


def is_split(tensor: Any) -> bool:
    """Whether it is a DTensor, which lives on a mesh of ranks. It may be replicated."""
    return hasattr(tensor, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; a plain tensor is its own part."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered, on its mesh's device; collective for such a tensor. A plain tensor is returned as it is."""
    full_tensor = getattr(tensor, "full_tensor", None)
    if full_tensor is None:
        return tensor
    mesh_type = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    if tensor.device.type != mesh_type:  # offloaded: collectives run on the mesh's devices
        full_tensor = tensor.to(mesh_type).full_tensor  # type: ignore[attr-defined]
    gathered: torch.Tensor = full_tensor()
    return gathered


def gathered_copy(parameter: Any) -> Any:
    """A shard of `fully_shard`, gathered without its module; anything else as it is. Each backward pass averages the gradient
    over the ranks into the shard's, as `fully_shard` does. The tp axis stays split. Collective.
    """
    if not is_split(parameter):
        return parameter
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = parameter.device_mesh
    placed = dict(zip(mesh.mesh_dim_names or range(mesh.ndim), parameter.placements, strict=True))
    kept = [placement if axis == "tp" else Replicate() for axis, placement in placed.items()]
    averaged = [placement if axis == "tp" else Partial("avg") for axis, placement in placed.items()]
    whole = parameter.redistribute(placements=kept).to_local(grad_placements=averaged)
    if "tp" not in placed:
        return whole
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(whole, mesh["tp"], [placed["tp"]], run_check=False, shape=shape, stride=stride)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on this module itself."""
    return isinstance(module, imported("torch.distributed.fsdp", "FSDPModule"))


def _authors_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class from which `fully_shard` made this one. Several classes may have been put in front of it."""
    line = kind.__mro__
    own_class: type[nn.Module] = line[line.index(imported("torch.distributed.fsdp", "FSDPModule")) + 1]
    return own_class


@contextmanager
def authors_classes(module: nn.Module) -> Iterator[None]:
    """Context in which sharded modules have their authors' classes, by which other libraries recognise them."""
    with class_for_now([part for part in module.modules() if is_fully_sharded(part)], _authors_class):
        yield


def reshard(module: nn.Module) -> None:
    """Free the gathered parameters and use shards again. An evaluation leaves a root of `fully_shard` gathered."""
    for part in module.modules():
        if is_fully_sharded(part):
            part.reshard()  # type: ignore[operator]


class GatheredInPasses:
    """Has a module that `fully_shard` has split gathered in its passes only: reshards it after a forward pass that no backward
    pass follows at once. That is one without gradients, of a frozen teacher, or outside of training steps.

    torch leaves the root gathered then, and with `reshard_after_forward=False` all blocks. What code writes to gathered
    parameters is lost when they are freed, and an optimizer of gathered parameters steps on freed memory.

    Attributes:
        trains: a training step is under way. Else every pass is such a one, as a copy's for an average; a backward pass through
            it gathers again.
    """

    def __init__(self, module: nn.Module) -> None:
        self.trains = self._are_shared = False
        self._depth = 0  # a forward may call the module itself, for example to recycle its outputs
        module.register_forward_pre_hook(torch.compiler.disable(self._begin))
        module.register_forward_hook(torch.compiler.disable(self._end), always_call=True)

    def _begin(self, module: nn.Module, args: object) -> None:
        self._depth += 1

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        self._depth -= 1
        if self._depth or self._are_shared:
            return
        if not (self.trains and torch.is_grad_enabled() and any(map(_may_have_gradient, tree_leaves(output)))):
            reshard(module)

    @contextmanager
    def shared(self, module: nn.Module) -> Iterator[None]:
        """Context whose passes share what the first gathers, as those of an evaluation."""
        self._are_shared = True
        try:
            yield
        finally:
            self.settle(module)

    def settle(self, module: nn.Module) -> None:
        """No longer share what is gathered."""
        self._are_shared = False
        reshard(module)


def _may_have_gradient(value: Any) -> bool:
    """Whether a tensor requires a gradient. True for other objects, which may hold tensors."""
    return bool(value.requires_grad) if isinstance(value, torch.Tensor) else not isinstance(value, str | float | int | None)


def watch_numbers() -> None:
    """Warn once from now on if code reads a number of a tensor that is not replicated, as `weight.norm().item()` does.

    torch 2.13 gives the number of this rank's part. Gathering here would hang if only one rank reads it. Also makes
    `p.data = value` work for DTensors; in torch it does nothing.
    """
    kind: Any = imported("torch.distributed.tensor", "DTensor")
    for name in ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__complex__"):
        if name not in vars(kind):
            replace_of_class(kind, name, "shards", _watched(getattr(kind, name)))
    if "data" not in vars(kind):
        replace_of_class(kind, "data", "shards", property(_DATA.__get__, _put))


# Groups of ranks over which `fully_shard` averages gradients.
_averaging: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def average_reads(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """From now on, a gradient that comes to a shard through `full_tensor()` is the mean over these groups of ranks, as that of
    `fully_shard` is, which does not see it.

    A penalty on weights, or a head tied to the embedding of a block, is read so. torch takes the gradient of a gathered tensor to
    be equal on all ranks: each shard would get that of its own rank's samples, at the scale of this rank's part of the batch.
    """
    _averaging.update(known for group in groups if (known := group or dist.group.WORLD) is not None)
    kind: Any = imported("torch.distributed.tensor", "DTensor")
    if not any(name == "full_tensor" for name, _ in replaced(kind)):
        replace_of_class(kind, "full_tensor", "shards", _averaged(kind.full_tensor))


def _averaged(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(gather)
    def full_tensor(tensor: Any, **options: Any) -> torch.Tensor:
        gathered = gather(tensor, **options)
        if gathered.requires_grad and options.get("grad_placements") is None:
            mesh = tensor.device_mesh
            groups = [group for i in range(mesh.ndim) if (group := mesh.get_group(i)) in _averaging]
            if groups:
                gathered = _Averaged.apply(gathered, groups)  # type: ignore[no-untyped-call]
        return gathered

    return full_tensor


class _Averaged(torch.autograd.Function):
    """The tensor itself. The backward pass averages its gradient over the groups of ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, groups: Iterable[dist.ProcessGroup]) -> torch.Tensor:
        ctx.groups = groups
        ctx.crosses_ranks = True  # gradients of other ranks' losses arrive here: `pass_zeros` must not stop them
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        mean = gradients[0].clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            dist.all_reduce(mean.div_(dist.get_world_size(group)), group=group)
        return mean, None


@contextmanager
def numbers_of_whole() -> Iterator[None]:
    """Context in which numbers are read of whole tensors, for code that all ranks run alike."""
    before = _of_whole.set(True)
    try:
        yield
    finally:
        _of_whole.reset(before)


def _put(tensor: Any, value: Any) -> None:
    if is_split(value) and value.shape == tensor.shape and value.dtype == tensor.dtype:
        value = value.detach().redistribute(tensor.device_mesh, tensor.placements)
        local(tensor.detach()).data.copy_(local(value))  # hidden from autograd, as `p.data = value` is for plain tensors
    else:
        _DATA.__set__(tensor, value)


def _watched(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def watched(tensor: Any, *args: Any) -> Any:
        if not all(placement.is_replicate() for placement in tensor.placements):
            if _of_whole.get():
                tensor = whole(tensor)
            elif not _told:
                frame = sys._getframe(1)
                while frame.f_globals.get("__name__", "").startswith("torch.") and frame.f_back is not None:
                    frame = frame.f_back
                _told.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                logger.warning(
                    "%s reads a number of a tensor that is split over the ranks, and gets that of this rank's part. Gather the "
                    "tensor first, on all ranks: weight.norm().full_tensor().item(). state.log(name, weight.norm()) gathers it",
                    *_told,
                )
        return read(tensor, *args)

    return watched


# Modules whose parameters differ entirely by rank: pipeline stages.


@dataclass(frozen=True)
class _Apart:
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: Any) -> _Apart:  # a copy of the module has the same peers
        return self


def set_apart(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Record the ranks over which the module's layers are divided, and refuse `save_pretrained`."""
    vars(module)["_ranks_apart"] = _Apart(group)
    refuse_own_saving(module)


def ranks_apart(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that together hold the module's layers; None if each rank has all parameter names."""
    group = vars(module).get("_ranks_apart")
    return group.group if isinstance(group, _Apart) else None


def refuse_copies(module: nn.Module) -> None:
    """Make operations that need whole modules, such as `copy.deepcopy`, raise with the remedy."""

    def deepcopy(memo: Any) -> NoReturn:
        raise LayoutError(
            "a module that is split over the ranks cannot be copied, as timm's ModelEmaV3 and others do to average weights. For "
            "averages pass ema=0.999 to the unit: they are split like the module. For a target network, or in a loop of your "
            "own, copy the module before a unit or prepare() gets it, and give prepare() the copy, too. "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(module) returns the values."
        )

    for part in module.modules():
        if is_fully_sharded(part):
            vars(part)["__deepcopy__"] = deepcopy
    refuse_own_saving(module)
    if not replaced(stateless):
        replace(stateless, "_functional_call", "shards", _with_whole_parameters(stateless._functional_call))


def _with_whole_parameters(call: Callable[..., Any]) -> Callable[..., Any]:
    """torch's functional_call, which refuses modules that `fully_shard` has split.

    Such a module gathers its own parameters in place of the given ones, and the caller is left with freed memory: torch 2.13 ends
    the process with SIGSEGV.
    """

    @functools.wraps(call)
    def functional_call(module: nn.Module, given: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        split = any(is_fully_sharded(part) for part in module.modules())
        if split and not given.keys().isdisjoint(dict(module.named_parameters())):
            raise LayoutError(
                f"torch.func.functional_call must have a module with whole parameters, got {class_name(module)}, whose "
                "parameters are split over the ranks. Train it under 'ddp' or 'zero1'."
            )
        return call(module, given, *args, **options)

    return functional_call


def refuse_own_saving(module: nn.Module) -> None:
    """Make the module's `save_pretrained`, which would write only this rank's part, raise with the remedy."""
    own = getattr(type(module), "save_pretrained", None)
    if not callable(own):
        return

    def save_pretrained(*args: Any, **options: Any) -> Any:
        if options.get("state_dict") is None:
            raise LayoutError(
                f"{type(module).__name__}.save_pretrained: this rank holds only a part of the weights. Call, on every rank, what "
                "gathers them and writes on rank 0: echelon.save_pretrained(unit, folder) with a unit, "
                "trainer.save_model(folder) with transformers' Trainer, trainer.save_checkpoint(path) with Lightning's, whose "
                "file load_from_checkpoint turns into a whole model."
            )
        return own(module, *args, **options)

    vars(module)["save_pretrained"] = save_pretrained
