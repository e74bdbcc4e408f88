"""Give values to a module that was built on the meta device: after sharding, one parameter at a time.

    remember(module)              before anything is sharded: store how each tensor gets its value
    ... shard, on meta ...
    materialize(module, device)   allocate this rank's parts, and fill in the values

Values come from the recording of `on_meta()`: those of a plain build, bit for bit. A module built under a bare
`torch.device("meta")` has no recording. Then each layer's own `reset_parameters` is recorded now, in the order of construction,
which gives a plain build's values only if the constructors did nothing else. Besides its own parts, a rank holds only the tensors
that one parameter depends on. `fill` decides which rank computes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LayoutError, UsageError
from echelon.parallel.meta.deferred import Value, is_meta, leaves, mapped, origins, recording
from echelon.parallel.shards import local
from echelon.world import agree

__all__ = ["check_kept", "is_recorded", "materialize", "on_meta_tensors", "remember"]

logger = logging.getLogger(__name__)

_remembered: WeakKeyDictionary[nn.Module, list[Origin]] = WeakKeyDictionary()
# By name of a tensor, the names of the tensors from which its values were computed.
_computed_from: WeakKeyDictionary[nn.Module, dict[str, set[str]]] = WeakKeyDictionary()


def on_meta_tensors(module: nn.Module) -> bool:
    """Whether a parameter, a buffer or a tensor among the attributes has no values."""
    return any(tensor.is_meta for _, tensor in _named(module)) or any(True for _ in _attributes(module))


def is_recorded(module: nn.Module) -> bool:
    """Whether all of its tensors have values, or a recording of them: a copy made after `on_meta()` has neither."""
    return all(not tensor.is_meta or tensor.untyped_storage() in origins for _, tensor in _named(module))


def remember(module: nn.Module) -> None:
    """Store how each tensor without values gets them. A module with all values is left alone.

    Raises:
        UsageError: nothing gives a value to one of these tensors.
    """
    if module in _remembered or not on_meta_tensors(module):
        return
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in _named(module):
        if tensor.is_meta:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    if any(Value.of(t) is None for t in tensors.values()):
        _record_resets(module)
    origins = []
    for key, tensor in tensors.items():
        value = Value.of(tensor)
        if value is None or not value.is_set:
            raise LayoutError(
                f"{type(module).__name__}.{names[key][0]} {tuple(tensor.shape)} is on the meta device and nothing gives it a "
                "value. Build the module under `with echelon.on_meta():`, which repeats what its constructor does, or give the "
                "submodule that holds it a method reset_parameters()."
            )
        origins.append(Origin(names[key], value))
    for holder, name, tensor in list(_attributes(module)):
        attribute = Value.of(tensor)
        if tensor.grad_fn is not None:  # as of the older weight_norm: its graph would keep the current parameters alive
            _exchanged(holder, lambda t: t.detach() if t.grad_fn is not None else t)
        if id(tensor) not in tensors and attribute is not None and attribute.is_set:
            origins.append(Origin([name], attribute, holder))
    _remembered[module] = origins


def materialize(
    module: nn.Module, device: torch.device, *, buffers: torch.device | None = None, same_on_all: bool = True
) -> nn.Module:
    """Move a module with meta tensors to `device`, and give tensors without values their initial ones.

    Parameters keep their identity, so tied parameters stay tied. Collective if `same_on_all`. Buffers get a form into which
    torch can broadcast and a checkpoint can be read.

    Args:
        module: with its parameters in their final form, DTensors or plain.
        device: for this rank's parts.
        buffers: for buffers, if it is another device.
        same_on_all: use rank 0's RNG states on all ranks; False keeps each rank's own.
    Raises:
        UsageError: as in `remember`, which is called if it was not before; or ranks have built different models.
    """
    if not on_meta_tensors(module):
        _make_writable(module)
        return module
    remember(module)
    origins = _remembered.pop(module)
    if same_on_all:
        _agree_on_streams(origins)
    kept = {name: tensor.detach() for name, tensor in _named(module) if not tensor.is_meta}
    _allocate(module, device)
    targets = dict(_named(module))
    with torch.no_grad():
        for name, tensor in kept.items():
            fill_in(targets[name], tensor)
        fill([origin for origin in origins if origin.holder is None], targets, device, same_on_all=same_on_all)
        for origin in origins:
            if origin.holder is not None:  # a plain attribute: stays on the CPU, as in a plain build
                value = origin.computed()
                _exchanged(origin.holder, lambda t, o=origin, v=value: v if Value.of(t) == o.value else t)  # type: ignore[misc]
        for buffer in module.buffers():
            buffer.data = buffer.data.to(buffers or device)
    _make_writable(module)
    _computed_from[module] = _sources(origins)
    return module


def _make_writable(module: nn.Module) -> None:
    """Give a buffer that repeats its elements (`expand`) memory for each, and usual strides to dims of size 1.

    torch refuses to write into the first, and DistributedDataParallel into a lone buffer with unusual strides, such as a table of
    positions after `unsqueeze(0).transpose(0, 1)`.
    """
    for buffer in module.buffers():
        is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided
        if is_plain and (buffer.is_contiguous() or 0 in buffer.stride()):
            buffer.data = buffer.data.contiguous().view(-1).view(buffer.shape)


def check_kept(module: nn.Module, kept: Collection[str]) -> None:
    """Check that weights of another program can be read into a module. Call it before they are read.

    Args:
        kept: names that the file need not contain, such as those of adapters. They keep their values.
    Raises:
        UsageError: the module was built on meta, and a kept tensor was computed from one that the file will change.
    """
    for part in module.modules():
        for name, sources in _computed_from.get(part, {}).items():
            if name in kept and (given := sources.difference(kept)):
                raise LayoutError(
                    f"{name} is computed from the values of {min(given)} when the model is built, but the file replaces "
                    "these values afterwards. Build the model with its weights (from_pretrained), without on_meta."
                )


def _sources(origins: list[Origin]) -> dict[str, set[str]]:
    named = {(o.value.tape, o.value.storage): o.names[0] for o in origins if o.holder is None}
    sources_of: dict[str, set[str]] = {}
    for origin in origins:
        if sources := {named[each] for each in origin.value.needs() if each in named} - {*origin.names}:
            sources_of |= dict.fromkeys(origin.names, sources)
    return sources_of


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _attributes(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Recorded tensors in plain attributes of modules, alone or in lists, tuples and dicts, such as tables of positions."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _MODULES_OWN:
                for tensor in _within(value):
                    yield part, f"{path}.{name}" if path else name, tensor


# Where nn.Module keeps its parameters and buffers, which `_named` finds, and its submodules.
_MODULES_OWN = {"_parameters", "_buffers", "_modules"}


def _within(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(value) if _is_recorded(leaf))


def _is_recorded(value: Any) -> bool:
    return is_meta(value) and Value.of(value) is not None


def _exchanged(holder: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the recorded tensors in a module's plain attributes by `change` of them."""
    for name, value in list(vars(holder).items()):
        if name not in _MODULES_OWN and any(True for _ in _within(value)):
            vars(holder)[name] = mapped(lambda leaf: change(leaf) if _is_recorded(leaf) else leaf, value)


def _record_resets(module: nn.Module) -> None:
    """Record the `reset_parameters` of layers without values, innermost layers first, in the order of construction."""
    logger.warning(
        "%s was built on the meta device without a recording: its initial values come from reset_parameters of each layer; other "
        "initialisation by constructors is lost. Build it under `with echelon.on_meta():` for the values of a plain build.",
        type(module).__name__,
    )
    resets: list[Callable[[], Any]] = []

    def find(layer: nn.Module) -> None:
        own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        reset = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
        if callable(reset) and any(t.is_meta and Value.of(t) is None for t in own):
            resets.append(reset)

    module.apply(find)  # innermost layers first
    with recording(), torch.no_grad():
        for reset in resets:
            reset()


def _agree_on_streams(origins: list[Origin]) -> None:
    """Broadcast rank 0's generator states: a few kilobytes per draw instead of the values.

    Raises:
        RanksDisagreeError: ranks initialise differently, because of something other than torch's generators.
    """
    if not agree.is_joined():
        return
    tapes = list(dict.fromkeys(origin.value.tape for origin in origins))
    for each in tapes:  # the list grows during the loop
        tapes += [source for source in each.sources if source not in tapes]
    draws = [call for each in tapes for call in each.calls if call.state is not None]
    states = [call.state for call in draws if call.state is not None]
    seeded = [each for each in tapes if each.on_device]
    agree.same_on_all("the number of random initialisations of the model", len(states), "Build the same model on every rank.")
    digest = 0
    for each in tapes:
        digest = each.digest(digest)
    agree.same_on_all(
        "the numbers that initialise the model",
        digest,
        "Values from numpy, random or a file must be the same on every rank: seed them alike (echelon.seed does).",
    )
    if seeded:
        seeds = torch.tensor([each.seed for each in seeded])
        dist.broadcast(seeds, src=0, group=agree.control_group())
        for each, seed in zip(seeded, seeds.tolist(), strict=True):
            each.seed = seed
    if not states:
        return
    common = torch.stack(states)
    dist.broadcast(common, src=0, group=agree.control_group())
    for call, state in zip(draws, common, strict=True):
        call.state = state.clone()  # torch reads a state from the start of its storage


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate all tensors. Parameters are swapped in place, which keeps ties and the references of sharding."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# Computing the values of tensors and filling them in.
#
# Computing a value takes as long as in a plain build. So large ones are divided over the ranks: each rank computes some of them
# and broadcasts them to the others, which keep their parts. Values recorded by `on_meta(on_device=True)` are computed by every
# rank on its device.

# Smaller values are computed by every rank: sending one takes as long.
SENT_BYTES = 1 << 20


@dataclass
class Origin:
    """A tensor without values, with all its names."""

    names: list[str]
    value: Value
    holder: nn.Module | None = None  # the module, if the tensor is in a plain attribute

    def computed(self, device: torch.device | None = None) -> torch.Tensor:
        """Compute its values.

        Raises:
            UsageError: a part of the tensor gets no value.
        """
        value = self.value.compute(device)
        if self.value.may_be_unset and value.is_floating_point() and bool(value.isnan().any()):
            raise LayoutError(
                f"{self.names[0]} {tuple(value.shape)} was made by torch.empty, or before on_meta began, and a part of it is "
                "given no value, or nan. A plain build would leave that part uninitialised. Initialise all of it."
            )
        return value

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.value.size).numel() * self.value.dtype.itemsize


def fill(origins: Sequence[Origin], targets: dict[str, torch.Tensor], device: torch.device, *, same_on_all: bool) -> None:
    """Fill the values of origins into the targets. Collective if `same_on_all`.

    Args:
        targets: tensors by name.
        device: where this rank computes.
    """
    together = same_on_all and agree.is_joined() and dist.get_world_size() > 1
    divided = [o for o in origins if together and not o.value.tape.on_device and o.size_bytes >= SENT_BYTES]
    for origin in origins:
        if origin not in divided and origin.names[0] in targets:  # tensors of other pipeline stages are not here
            fill_in(targets[origin.names[0]], origin.computed(device))
    _fill_divided(divided, targets, device)


def _fill_divided(origins: list[Origin], targets: dict[str, torch.Tensor], device: torch.device) -> None:
    """Compute each value on one rank, and broadcast it. Collective.

    Raises:
        UsageError: on all ranks: a rank cannot compute a value.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if origins else (0, 1)
    origins = sorted(origins, key=lambda origin: -origin.size_bytes)  # so that the ranks compute equally large values in a turn
    for start in range(0, len(origins), size):
        turn = origins[start : start + size]
        own_value, problem = None, None
        if rank < len(turn):
            try:
                own_value = turn[rank].computed().contiguous()
            except UsageError as error:
                problem = str(error)
        agree.raise_on_all(problem)
        for owner, origin in enumerate(turn):
            if owner == rank:
                assert own_value is not None
                value, own_value = own_value.to(device), None
            else:
                value = torch.empty(origin.value.size, dtype=origin.value.dtype, device=device)
            dist.broadcast(value.view(torch.uint8) if value.dtype is torch.bool else value, src=owner)
            if origin.names[0] in targets:
                fill_in(targets[origin.names[0]], value)
            del value  # before the next value is allocated


def fill_in(target: torch.Tensor, value: torch.Tensor) -> None:
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or getattr(value, "device_mesh", None) is not None:
        target.copy_(value)
        return
    from torch.distributed.tensor import DTensor, Replicate

    # Each rank has the whole value and keeps its part: no communication.
    whole = DTensor.from_local(value.to(target.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    local(target).copy_(local(whole.redistribute(mesh, target.placements)))  # type: ignore[attr-defined]
