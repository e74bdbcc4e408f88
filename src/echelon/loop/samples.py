"""The weight of a batch: its number of samples or tokens. Also checks the return value of `compute_loss`.

The number of samples comes from the loader, if it says so, and from the batch.

Batches are tensors or structures of tensors. A list may have one item for each field, as in `[x, y]`, or one for each sample, as
in `[image, image, image]`. A tensor may have the samples in its second dimension, or no samples at all. So each field of a
structure allows several numbers; the one that all fields allow is taken. If the loader says how many samples it gave, that number
decides, unless the batch clearly has another, for example because some samples were filtered.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from echelon.common.errors import LoopError
from echelon.world import agree

__all__ = [
    "are_images",
    "as_scalar",
    "count_tokens",
    "problem_with",
    "rows",
    "samples_of",
    "sizes_in",
    "slots_of",
    "summable",
    "tell_of_doubts",
    "weighted",
]

logger = logging.getLogger(__name__)

_DEPTH = 4  # of structures within structures


def samples_of(data: Any, given: int | None = None) -> tuple[int, str | None]:
    """Number of samples in a batch; and, if it is unclear, the numbers that its fields allow, as text, else None.

    Args:
        given: number of samples that the loader gave, if it knows.
    """
    # Fast path for the usual kinds of batches.
    usual: Sequence[Any] = (data,) if type(data) is torch.Tensor else data if type(data) in (tuple, list) else ()
    first = None
    for each in usual:
        if type(each) is not torch.Tensor or not each.dim() or each.size(0) != (each.size(0) if first is None else first):
            break
        first = each.size(0)
    else:
        if first is not None and (first == given or (given is None and (len(usual) == 1 or usual[0].dim() < 3))):
            return first, None
    values = _fields(data, 0)
    items = len(data) if _is_list(data) else None
    read = _read([data] if values is None else values, 0)
    if not read:
        return _of_nothing(data, given, items), None
    common = set.intersection(*read)
    if given is not None:
        return _with_given(data, given, read, common, items)
    if items is not None and not common and _are_alike(data):
        return items, None
    if items is not None and are_images(data):
        return items, _shown([{items}, *read])
    if len(common) == 1:
        return common.pop(), None
    return _most_frequent(read, common), _shown(read)


def sizes_in(data: Any) -> set[int]:
    """All numbers of samples that any field of a batch allows."""
    values = _fields(data, 0)
    return set().union(*_read([data] if values is None else values, 0))


def _of_nothing(data: Any, given: int | None, items: int | None) -> int:
    """Number of samples in a batch whose fields tell nothing."""
    if data is None:  # if the loader knows its samples, all were filtered; another loader may give None on purpose
        return 1 if given is None else 0
    if isinstance(data, Mapping) and not data:
        return 0
    if items is not None and (not items or (type(data) is list and len({type(each) for each in data}) == 1)):
        return items
    return 1 if given is None else given


def _with_given(data: Any, given: int, read: list[set[int]], common: set[int], items: int | None) -> tuple[int, str | None]:
    if given in common:
        return given, None
    of_samples = items is not None and _may_be_samples(data)
    if of_samples and items is not None:
        fewer = len(common) == 1 and min(common) < given and not _have_colours(data)  # some samples were filtered
        if are_images(data):
            return items, None
        if items == given and not fewer:  # the items may also be two fields with several rows for each sample
            return items, _shown([{items}, *read]) if len(common) == 1 and len({_shape(each) for each in data}) > 1 else None
    if _are_second(data, given):
        return given, None
    if len(common) == 1:  # some samples were filtered, or all were concatenated
        return common.pop(), None
    if not common and any(given in sizes for sizes in read):
        return given, None
    if of_samples and items is not None and not common:
        return items, None
    count = _most_frequent(read, common)
    # A minority does not decide: a graph's edge_index has size 2, too.
    is_likely = count < given and 2 * sum(count in sizes for sizes in read) > len(read)
    return (count if is_likely else given), _shown(read)


def _most_frequent(read: list[set[int]], common: set[int]) -> int:
    counts = Counter(size for sizes in read for size in sorted(sizes, reverse=True) if not common or size in common)
    return counts.most_common(1)[0][0]


def _shown(read: list[set[int]]) -> str:
    return ", ".join(" or ".join(map(str, sorted(sizes)[:3])) for sizes in read[:6])


def tell_of_doubts(unit: str, data: Any, samples: int, doubts: str, given: int | None) -> None:
    """Warn of a batch whose number of samples is unclear, even if the loader gave one. On rank 0; not collective."""
    if agree.is_rank0():
        logger.warning(
            "%s: a batch (%s) was taken for %s samples, but may have another number: its fields have %s. The number is the "
            "batch's weight in the mean. Give the right weight: `ech.window(model, weight=...)`, or a unit's weight(data)%s",
            unit,
            type(data).__name__,
            samples,
            doubts,
            ", or give echelon.Loader, which knows it" if given is None else f"; the loader gave {given}",
        )


# --- numbers of samples that a value allows


def _read(values: Sequence[Any], depth: int) -> list[set[int]]:
    """The numbers that each value allows, without values that tell nothing. Empty values count only if all are empty."""
    read = [sizes for value in values if (sizes := _sizes(value, depth))]
    return [sizes for sizes in read if sizes != {0}] or read


def _sizes(value: Any, depth: int) -> set[int]:
    """The numbers of samples that a value allows; empty if it tells nothing."""
    if isinstance(value, torch.Tensor):
        return {value.size(0)} if value.dim() else set()
    if value is None or isinstance(value, (str, bytes, int, float, complex)):
        return set()
    if isinstance(value, PackedSequence):
        return {int(value.batch_sizes[0])}
    if isinstance(shape := getattr(value, "shape", None), tuple):  # arrays and tables
        return {int(shape[0])} if shape else set()
    if (size := _said(value)) is not None:
        return {size}
    fields = _fields(value, depth)
    if fields is None:
        return set()
    if depth < _DEPTH and not (_is_list(value) and value and isinstance(value[0], (str, bytes, int, float))):
        inner = _read(fields, depth + 1)
        sizes = (set.intersection(*inner) or set.union(*inner)) if inner else set()
    else:
        sizes = set()
    return sizes | {len(value)} if _is_list(value) else sizes


def _said(value: Any) -> int | None:
    """The `batch_size` of an object such as a batch of graphs or a TensorDict."""
    if isinstance(value, (Mapping, Sequence)):
        return None
    size = getattr(value, "batch_size", None)
    size = size[0] if isinstance(size, tuple) and size else size
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _is_list(value: Any) -> bool:
    """Whether a value's items may be samples: it is a sequence, and they have no field names."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and not hasattr(value, "_fields")


def _fields(value: Any, depth: int) -> list[Any] | None:
    """The values in a structure; None if the value is no structure."""
    if isinstance(value, (torch.Tensor, str, bytes, PackedSequence, nn.Module, type)) or value is None:
        return None
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, Sequence):
        return list(value)
    if isinstance(getattr(value, "shape", None), tuple) or _said(value) is not None:
        return None
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if depth and not hasattr(value, "__attrs_attrs__"):
        return None
    slots = [name for kind in type(value).__mro__ for name in slots_of(kind)]
    values = [*vars(value).values()] if hasattr(value, "__dict__") else []
    return [*values, *(getattr(value, name, None) for name in slots)] or None


def slots_of(kind: type) -> list[str]:
    """Names of the slots that a class itself defines."""
    named = vars(kind).get("__slots__", ())
    return [name for name in ((named,) if isinstance(named, str) else named) if name not in ("__dict__", "__weakref__")]


# --- whether the items of a list are samples or fields


def _are_alike(items: Sequence[Any]) -> bool:
    """Whether the items look like samples rather than fields: all have the same form."""
    first, kinds = items[0], {type(item) for item in items}
    if len(kinds) != 1:
        return False
    if isinstance(first, torch.Tensor):
        return len({(item.dim(), item.dtype) for item in items}) == 1
    if isinstance(first, Mapping):
        return all(item.keys() == first.keys() for item in items)
    return not isinstance(first, Sequence) or len({len(item) for item in items}) == 1


def _may_be_samples(items: Sequence[Any]) -> bool:
    """Whether the items of a list may be samples. The items of a tuple of tensors are fields, unless they are images."""
    if not items or not _are_alike(items):
        return False
    return type(items) is list or not isinstance(items[0], torch.Tensor) or _have_colours(items)


def _shape(item: Any) -> Any:
    return getattr(item, "shape", None)


def _have_colours(items: Sequence[Any]) -> bool:
    first = items[0]
    return isinstance(first, torch.Tensor) and first.dim() > 2 and first.size(0) in (1, 3)


def are_images(items: Any) -> bool:
    """Whether the items are samples with the same first dimension, such as colours, that differ in other dimensions."""
    if not _is_list(items) or len(items) < 2 or not all(type(item) is torch.Tensor for item in items):
        return False
    return _have_colours(items) and _are_alike(items) and len({item.shape for item in items}) > 1


def _are_second(data: Any, given: int) -> bool:
    """Whether all tensors of a batch have `given` samples in their second dimension, after the time dimension."""
    tensors = [value for value in _fields(data, 0) or [data] if isinstance(value, torch.Tensor) and value.dim()]
    return bool(tensors) and all(value.dim() > 1 and value.size(1) == given for value in tensors)


# --- the loss of a batch, and its weight in the mean over the global batch


def problem_with(made: Any, module: torch.nn.Module) -> str | None:
    """Describe what is wrong with the return value of `compute_loss`; None if nothing is."""
    if not isinstance(made, tuple) or len(made) != 2:
        return f"{type(made).__name__}; return the pair (loss, outputs)."
    loss = made[0]
    if not isinstance(loss, torch.Tensor):
        return f"a loss of type {type(loss).__name__}; it must be a scalar tensor."
    if loss.numel() != 1:
        return f"a loss of shape {tuple(loss.shape)}; it must be a scalar: take its mean."
    if not loss.requires_grad and not any(p.requires_grad for p in module.parameters()):
        return (
            "a loss without a gradient, because no parameter of the module requires one: all are frozen (requires_grad=False), "
            "or there are none. Unfreeze the parameters to train before the unit is built."
        )
    if not loss.requires_grad:
        return "a loss without a gradient: was it detached, or computed under no_grad?"
    return None


def as_scalar(loss: torch.Tensor) -> torch.Tensor:
    """A loss of one element, such as `mean() + 0 * outputs[0]`, as a scalar: torch's own backward takes it, too."""
    return loss.reshape(()) if loss.dim() else loss


def rows(data: Any, given: int | None = None) -> int:
    """Number of samples in a batch; see `samples_of`."""
    return samples_of(data, given)[0]


def count_tokens(data: Any, *, next_token: bool, ignore_index: int = -100, key: str = "labels") -> torch.Tensor:
    """Count the labels over which a model of transformers takes its mean loss: the weight of a micro-batch.

        def weight(self, data):
            return echelon.count_tokens(data, next_token=True)

    Args:
        data: a batch with `key`, as a mapping or an attribute, or the labels themselves, (..., T) whole numbers.
        next_token: True for causal language models, which predict each token from the tokens before it, so that a row's first
            label is never predicted. False for masked language models, encoder-decoders, and classification of tokens or rows.
        ignore_index: labels that do not count.
    Returns:
        a 0-dim tensor on the labels' device, for which nothing waits. A micro-batch without labels that count, whose loss is
        nan, has weight 0.
    Raises:
        UsageError: there are no labels.
    """
    labels = data
    if not isinstance(data, torch.Tensor):
        shifted = data.get("shift_labels") if isinstance(data, Mapping) and next_token and key == "labels" else None
        if isinstance(shifted, torch.Tensor):  # context parallelism shifts labels before it cuts sequences
            return (shifted != ignore_index).sum()
        labels = data.get(key) if isinstance(data, Mapping) else getattr(data, key, None)
    if not isinstance(labels, torch.Tensor):
        raise LoopError(
            f"the batch of count_tokens must have a tensor {key!r}, or be the labels themselves, got {type(data).__name__}."
        )
    if next_token:
        labels = labels[..., 1:]
    return (labels != ignore_index).sum()


def weighted(loss: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
    """loss * weight; with weight zero always zero, even if the loss is nan."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight == 0, torch.zeros_like(loss), loss) * weight
    return loss * weight if weight else torch.zeros_like(loss)


def summable(weight: torch.Tensor) -> float | torch.Tensor:
    """Convert a weight for summing in windows. float32 counts exactly only to 16 million; reading from a CPU costs no wait."""
    return float(weight) if weight.device.type == "cpu" else weight.double()
