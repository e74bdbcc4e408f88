"""What `deferred` asks of a function that is called: where its result would lie, what it changes, which tensors it is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from echelon.common.errors import LayoutError
from echelon.world.tensor_bytes import flat_bytes

__all__ = [
    "DEFAULT",
    "HERE",
    "META",
    "as_bytes",
    "asks_for_meta",
    "changes_real",
    "is_meta",
    "leaves",
    "mapped",
    "mark",
    "not_away",
    "on_cpu",
    "on_device",
    "on_meta_device",
    "reach",
    "refuse_loading",
    "tensors_in",
    "written_to",
]

# What `torch.device` gives to functions that were told no device: tells them from those that were told "cpu" or "meta".
DEFAULT = torch.device("cpu", 0)
META, _CPU = torch.device("meta"), torch.device("cpu")
# What recorded tensors say of themselves. Known again by identity: who makes a tensor "where that one is" makes a recorded one.
HERE = torch.device("cpu")

_SETTERS = {vars(kind)[name].__set__ for kind in torch.Tensor.__mro__ for name in ("data", "grad") if name in vars(kind)}


def reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last in memory."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def mark(*tensors: torch.Tensor) -> None:
    """nan for what nothing has set yet, so that it cannot pass for a value."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))


def _is_default(leaf: Any) -> bool:
    return leaf is HERE or (isinstance(leaf, torch.device) and leaf == DEFAULT)


def on_meta_device(leaf: Any) -> Any:
    return META if _is_default(leaf) else leaf


def on_cpu(leaf: Any) -> Any:
    return _CPU if _is_default(leaf) else leaf


def on_device(leaf: Any, device: torch.device) -> Any:
    """What a call was told of the CPU, on another device: the place itself, and tensors that lie there."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device)
    is_cpu = isinstance(leaf, torch.device) and leaf.type == "cpu"
    return device if is_cpu or (isinstance(leaf, str) and leaf in ("cpu", "cpu:0")) else leaf


def not_away(leaf: Any) -> Any:
    """This place instead of the CPU."""
    is_cpu = isinstance(leaf, torch.device) and leaf.type == "cpu"
    return HERE if is_cpu or (isinstance(leaf, str) and leaf in ("cpu", "cpu:0")) else leaf


def asks_for_meta(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "meta") or (isinstance(device, str) and device == "meta")


def refuse_loading() -> None:
    """`from_pretrained` makes a model on meta of its own, then puts in loaded values: a whole model on every rank.

    Raises:
        UsageError: the caller is within one.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "from_pretrained":
            raise LayoutError(
                "from_pretrained inside on_meta() would load the whole model on every rank. Call it outside, without on_meta; "
                "or, for a model too large for that, build it from its configuration inside (AutoModel.from_config(config)), and "
                "read the weights with DistributedCheckpointSaver.restore(FOLDER_OF_SAFETENSORS, unit): each rank reads its part."
            )
        frame = frame.f_back  # type: ignore[assignment]


def changes_real(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function puts something into a tensor that has values already."""
    target = [args[0]] if func in _SETTERS else targets(name, args, kwargs)
    return any(not is_meta(t) for t in target)


def written_to(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The meta tensors that a function changes."""
    return [t for t in targets(name, args, kwargs) if is_meta(t)]


_NOT_IN_PLACE = {"__invert__", "__int__", "__index__", "__iter__"}


def targets(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function changes, by torch's conventions of naming."""
    changed: list[torch.Tensor] = list(tensors_in(kwargs.get("out")))
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if in_place or name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE):
        first = args[0] if args else next((kwargs[k] for k in ("tensor", "input", "self") if k in kwargs), None)
        changed += list(tensors_in(first))
    return changed


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(mapped(change, leaf) for leaf in tree)
    if type(tree) is dict:
        return {key: mapped(change, leaf) for key, leaf in tree.items()}
    return change(tree)


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from leaves(leaf)
    elif type(tree) is dict:
        for key, leaf in tree.items():
            yield key
            yield from leaves(leaf)
    else:
        yield tree


def as_bytes(leaf: Any) -> bytes:
    """What ranks compare of an argument."""
    if isinstance(leaf, torch.Tensor):
        return flat_bytes(leaf).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    if isinstance(leaf, (bool, int, float, complex, str, type(None), torch.dtype)):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()  # nothing that says more is the same in two processes


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from tensors_in(leaf)
    elif type(tree) is dict:
        for leaf in tree.values():
            yield from tensors_in(leaf)
