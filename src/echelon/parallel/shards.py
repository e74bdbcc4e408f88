"""Tensors that are split over the ranks: this rank's part, and the whole. The one place that tells a DTensor from a tensor."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
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
    "authors_classes",
    "is_fully_sharded",
    "is_split",
    "local",
    "numbers_of_whole",
    "ranks_apart",
    "refuse_copies",
    "reshard",
    "reshard_after_looking",
    "set_apart",
    "watch_numbers",
    "whole",
]

logger = logging.getLogger(__name__)

_of_whole: ContextVar[bool] = ContextVar("_of_whole", default=False)
_DATA: Any = torch.Tensor.data
_told: set[str] = set()  # where a number was read


def is_split(tensor: Any) -> bool:
    """Whether it lives on a mesh of ranks: a DTensor. It may be whole on each of them."""
    return hasattr(tensor, "device_mesh")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; a plain tensor is its own part."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor gathered, on the device of its mesh: collective then. A plain tensor is whole."""
    full_tensor = getattr(tensor, "full_tensor", None)
    if full_tensor is None:
        return tensor
    mesh_type = tensor.device_mesh.device_type  # type: ignore[attr-defined]
    if tensor.device.type != mesh_type:  # offloaded: ranks speak to one another from their devices
        full_tensor = tensor.to(mesh_type).full_tensor  # type: ignore[attr-defined]
    gathered: torch.Tensor = full_tensor()
    return gathered


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with this very module."""
    return isinstance(module, imported("torch.distributed.fsdp", "FSDPModule"))


def _authors_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of which `fully_shard` made this one, by putting its own and perhaps more in front of it."""
    line = kind.__mro__
    own_class: type[nn.Module] = line[line.index(imported("torch.distributed.fsdp", "FSDPModule")) + 1]
    return own_class


@contextmanager
def authors_classes(module: nn.Module) -> Iterator[None]:
    """Context in which sharded modules have the classes that their authors gave them, by which libraries know them."""
    with class_for_now([part for part in module.modules() if is_fully_sharded(part)], "authors_classes", _authors_class):
        yield


def reshard(module: nn.Module) -> None:
    """Put shards back in the place of whole parameters, which an evaluation leaves in a root of `fully_shard`."""
    for part in module.modules():
        if is_fully_sharded(part):
            part.reshard()  # type: ignore[operator]


def reshard_after_looking(module: nn.Module) -> None:
    """From now on a forward pass that no backward pass follows leaves shards, as one with a backward pass does.

    There is none without gradients, nor of a frozen teacher's outputs. For steps of the user's own, which may write into
    parameters: whole ones are thrown away, with what was written.
    """

    depth = 0  # a forward may call the module itself, as for recycling

    def before(module: nn.Module, args: object) -> None:
        nonlocal depth
        depth += 1

    def after(module: nn.Module, args: object, output: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0 and not (torch.is_grad_enabled() and any(map(_may_have_gradient, tree_leaves(output)))):
            reshard(module)

    module.register_forward_pre_hook(torch.compiler.disable(before))
    module.register_forward_hook(torch.compiler.disable(after), always_call=True)


def _may_have_gradient(value: Any) -> bool:
    """What is no tensor may hold some, such as an object of the user's."""
    return bool(value.requires_grad) if isinstance(value, torch.Tensor) else not isinstance(value, str | float | int | None)


def watch_numbers() -> None:
    """From now on a number read of a split tensor of which ranks have parts, as by `weight.norm().item()`, is told once.

    torch 2.13 gives that of this rank's part. To gather it here would hang where one rank alone reads it. And `p.data = value`
    puts the value there, where torch does nothing.
    """
    kind: Any = imported("torch.distributed.tensor", "DTensor")
    for name in ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__complex__"):
        if name not in vars(kind):
            replace_of_class(kind, name, "shards", _watched(getattr(kind, name)))
    if "data" not in vars(kind):
        replace_of_class(kind, "data", "shards", property(_DATA.__get__, _put))


@contextmanager
def numbers_of_whole() -> Iterator[None]:
    """Numbers that are read within are of whole tensors, for code that all ranks run alike."""
    before = _of_whole.set(True)
    try:
        yield
    finally:
        _of_whole.reset(before)


def _put(tensor: Any, value: Any) -> None:
    if is_split(value) and value.shape == tensor.shape and value.dtype == tensor.dtype:
        value = value.detach().redistribute(tensor.device_mesh, tensor.placements)
        local(tensor.detach()).data.copy_(local(value))  # autograd is not told, as with whole tensors
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
                    "%s reads a number of a tensor that is split over the ranks, and gets that of this rank's part. Gather it "
                    "first, on all ranks: weight.norm().full_tensor().item(). state.log(name, weight.norm()) does so by itself",
                    *_told,
                )
        return read(tensor, *args)

    return watched


# Modules of which other ranks hold other parameters altogether, as the stages of a pipeline do.


@dataclass(frozen=True)
class _Apart:
    group: dist.ProcessGroup

    def __deepcopy__(self, memo: Any) -> _Apart:  # a copy of the module has the same peers
        return self


def set_apart(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Remember the ranks among which the module is divided."""
    vars(module)["_ranks_apart"] = _Apart(group)
    refuse_own_saving(module)


def ranks_apart(module: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold all of the module between them; None if each has all of its names."""
    group = vars(module).get("_ranks_apart")
    return group.group if isinstance(group, _Apart) else None


def refuse_copies(module: nn.Module) -> None:
    """Make operations that need whole modules, such as `copy.deepcopy`, raise with the remedy."""

    def deepcopy(memo: Any) -> NoReturn:
        raise LayoutError(
            "a module that is split over the ranks cannot be copied, as timm's ModelEmaV3 and others do to average weights. For "
            "averages pass ema=0.999 to the unit: they are split like the module. For a target network, or in a loop of your "
            "own, copy it before the unit or prepare() has it, and give prepare() the copy, too. get_model_state_dict(module) "
            "of torch.distributed.checkpoint.state_dict has the values."
        )

    for part in module.modules():
        if is_fully_sharded(part):
            vars(part)["__deepcopy__"] = deepcopy
    refuse_own_saving(module)
    if not replaced(stateless):
        replace(stateless, "_functional_call", "shards", _with_whole_parameters(stateless._functional_call))


def _with_whole_parameters(call: Callable[..., Any]) -> Callable[..., Any]:
    """torch's functional_call, but for modules that `fully_shard` has split.

    These gather their own parameters in the place of those that they are given, and leave the caller with memory that was freed:
    torch 2.13 ends the process with SIGSEGV.
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
    """Make a `save_pretrained` of the module's own, which would write what this rank holds, raise with the remedy."""
    own = getattr(type(module), "save_pretrained", None)
    if not callable(own):
        return

    def save_pretrained(*args: Any, **options: Any) -> Any:
        if options.get("state_dict") is None:
            raise LayoutError(
                f"{type(module).__name__}.save_pretrained: this rank holds a part of the weights only. Let what trains it gather "
                "them, on every rank, and rank 0 write: echelon.save_pretrained(unit, folder) with a unit, "
                "trainer.save_model(folder) with transformers' Trainer, trainer.save_checkpoint(path) with Lightning's, of which "
                "load_from_checkpoint makes a whole model."
            )
        return own(module, *args, **options)

    vars(module)["save_pretrained"] = save_pretrained
