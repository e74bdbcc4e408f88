"""A device that is no CPU, in plain Python: its tensors compute on the CPU, and all that crosses to or from the host is noted.

torch lets Python stand in for a device ("PrivateUse1"), autograd included, which fake tensors of CUDA do not get in a build of
torch without CUDA (torch 2.13: the first backward pass ends the process). So a whole training step runs, with right numbers,
and shows each copy and each wait that it would cost on a GPU. Not there: streams, pinned memory, process groups, and storages
that can be freed, so `fully_shard` cannot be seen this way.

Private to torch, for want of a public way, and of tests only; seen with torch 2.13: `_setup_privateuseone_for_python_backend`
("experimental", says torch) and `torch._C._acc.create_empty_tensor`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"


class FakeGPU:
    """Install the device in this process, once and for all; so call it in a process of its own.

    Attributes:
        to_device, to_host: copies, by the shape of what was copied.
        waits: operators whose answer the host waited for.
    """

    def __init__(self) -> None:
        self.to_device: Counter[tuple[int, ...]] = Counter()
        self.to_host: Counter[tuple[int, ...]] = Counter()
        self.waits: Counter[str] = Counter()
        _setup_privateuseone_for_python_backend(NAME)
        self.device = torch.device(NAME, 0)
        self._library = torch.library.Library("_", "IMPL")
        self._library.fallback(self._run, "PrivateUse1")
        _give_storages_a_size()

    def forget(self) -> None:
        for counter in (self.to_device, self.to_host, self.waits):
            counter.clear()

    def _run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Any operator with a tensor of the device: computed on the CPU tensors behind them."""
        name = op._schema.name.removeprefix("aten::")
        given, form = pytree.tree_flatten((args, kwargs))
        behind = [_behind(value) for value in given]
        if name == "_copy_from":  # source, destination
            self._copied(given[0], given[1])
            behind[1].copy_(behind[0])
            return given[1]
        if name == "as_strided":  # strides as torch sees them, for whom every tensor of the device is contiguous
            whole, (size, stride, *offset) = behind[0], args[1:]
            whole = whole.contiguous()
            return _on_device(whole.as_strided(size, stride, whole.storage_offset() + (offset[0] if offset else 0)), {})
        if name in ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"):
            self.waits[name] += 1
        known = {id(inner): value for inner, value in zip(behind, given, strict=True) if isinstance(inner, torch.Tensor)}
        args, kwargs = pytree.tree_unflatten(behind, form)
        return pytree.tree_map(lambda made: _on_device(made, known), op(*args, **kwargs))

    def _copied(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        if source.device.type == "cpu":
            self.to_device[tuple(source.shape)] += 1
        elif destination.device.type == "cpu":
            self.to_host[tuple(source.shape)] += 1


def _behind(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type == NAME:
        return value.untyped_storage().behind  # type: ignore[attr-defined]
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _on_device(made: Any, known: dict[int, Any]) -> Any:
    if not isinstance(made, torch.Tensor):
        return made
    given = known.get(id(made))
    if given is not None and given.shape == made.shape:
        return given
    out = torch._C._acc.create_empty_tensor(made.shape, made.dtype)  # type: ignore[attr-defined]
    out.untyped_storage().behind = made  # of the storage, since a Parameter and its data share only that
    if given is not None:  # resized in place
        given.data = out
    return out if given is None else given


def _give_storages_a_size() -> None:
    plain = torch.UntypedStorage.size

    def size(self: torch.UntypedStorage) -> int:
        return self.behind.untyped_storage().size() if hasattr(self, "behind") else plain(self)

    torch.UntypedStorage.size = size  # type: ignore[method-assign]
