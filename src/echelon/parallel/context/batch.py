"""How context parallelism cuts batches: which tensors have the sequence, along which dim, and which chunks a rank gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from echelon.common.errors import ContextParallelError
from echelon.common.numbers import whole
from echelon.parallel.older_torch import all_gather_single, reduce_scatter_single
from echelon.world.device import map_named

__all__ = [
    "IGNORED",
    "SequenceDim",
    "SequenceParts",
    "beginning_at",
    "check_sequence_dim",
    "counted",
    "cut_batch",
    "labels_of",
    "named",
    "sequence_dims",
    "size_of",
]


# How a sequence is cut over the ranks of a context-parallel group, and gathered again.
#
# The sequence is cut into 2 x size chunks of equal length; rank i has chunk i and chunk 2 x size - 1 - i. With a causal mask late
# tokens attend to more keys than early ones, so this gives every rank the same work. Everything follows from the length of a
# rank's part, so no state is passed from the batch to the attention.
# Source: Llama 3 (arXiv 2407.21783), section 3.3.2.


@dataclass(frozen=True)
class SequenceParts:
    """The parts of a sequence, one for each rank of a group.

    Args:
        rank: this rank's place in the group.
        size: the number of ranks in the group.
        group: the ranks that share the sequence; None is the default group.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def over(cls, group: dist.ProcessGroup | None) -> SequenceParts:
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def chunk_of(self, length: int, name: str = "the sequence") -> int:
        """The length of a chunk, from the length of the whole sequence.

        Raises:
            UsageError: the sequence cannot be cut into chunks of equal length.
        """
        chunk, rest = divmod(length, 2 * self.size)
        if rest or not chunk:
            pieces = 2 * self.size
            near = sorted({max(1, length // pieces) * pieces, -(-length // pieces) * pieces})
            raise ContextParallelError(
                f"{name} must have a length that 2 x cp = {pieces} divides, so that each of {self.size} context-parallel ranks "
                f"gets an early and a late chunk, got {length}. Use {' or '.join(map(str, near))}, by cutting or padding "
                f"(pad_to_multiple_of={pieces} in a collator of transformers). If compute_loss shifts these tokens "
                "itself, as data[:, :-1] and data[:, 1:], let the dataset give inputs and targets instead."
            )
        return chunk

    def chunk_of_part(self, length: int, name: str) -> int:
        """The length of a chunk, from the length of this rank's part."""
        if length % 2 or not length:
            raise ContextParallelError(
                f"{name}: this rank's part of the sequence must have an even number of tokens, an early and a late chunk of "
                f"equal length, got {length}. Was the part shifted or cut after it came from the loader, as data[:, :-1]? "
                "Let the dataset give inputs and targets, so that they are shifted before they are split."
            )
        return length // 2

    def bounds(self, chunk: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The first and last (exclusive) positions of this rank's two chunks."""
        first, second = self.rank, 2 * self.size - 1 - self.rank
        return (first * chunk, (first + 1) * chunk), (second * chunk, (second + 1) * chunk)

    def cut(self, whole: torch.Tensor, dim: int, name: str = "the sequence") -> torch.Tensor:
        """This rank's part along `dim`, a copy."""
        (first, _), (second, _) = self.bounds(chunk := self.chunk_of(whole.shape[dim], name))
        return torch.cat([whole.narrow(dim, first, chunk), whole.narrow(dim, second, chunk)], dim)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """The positions of the tokens of this rank's part in the whole sequence: (length,), int64."""
        # Not cached: tensors made in inference mode or under a FakeTensorMode cannot be used in training.
        return torch.cat([torch.arange(first, last, device=device) for first, last in self.bounds(length // 2)])

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole sequence in order, gathered from all ranks; gradients go back to the ranks. Collective."""
        return _Whole.apply(part, dim % part.dim(), self)  # type: ignore[no-any-return,no-untyped-call]


class _Whole(torch.autograd.Function):
    """Forward: all-gather, and put the chunks in order. Backward: reduce-scatter of the gradients of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, parts: SequenceParts) -> torch.Tensor:
        ctx.dim, ctx.parts = dim, parts
        ctx.crosses_ranks = True  # gradients of other ranks' losses arrive here: `pass_zeros` must not stop them
        part, size = part.contiguous(), parts.size
        gathered = part.new_empty(size * part.shape[0], *part.shape[1:]) if part.dim() else part
        all_gather_single(gathered, part, group=parts.group)
        each = gathered.view(size, *part.shape)
        chunk = part.shape[dim] // 2
        early = [each[r].narrow(dim, 0, chunk) for r in range(size)]
        late = [each[r].narrow(dim, chunk, chunk) for r in reversed(range(size))]
        return torch.cat([*early, *late], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        dim, parts = ctx.dim, ctx.parts
        size, chunk = parts.size, grad.shape[dim] // (2 * parts.size)
        chunks = grad.split(chunk, dim)
        # (rank, ..., both chunks of the rank, ...)
        own_grad = grad.new_empty(*grad.shape[:dim], 2 * chunk, *grad.shape[dim + 1 :])
        laid = grad.new_empty(size, *own_grad.shape)
        for rank, part in enumerate(laid):
            part.narrow(dim, 0, chunk).copy_(chunks[rank])
            part.narrow(dim, chunk, chunk).copy_(chunks[-1 - rank])
        reduce_scatter_single(own_grad, laid.flatten(0, 1), group=parts.group)
        return own_grad, None, None


# One dim for all tensors that have it; or a dim by name of the tensor, None for tensors that stay whole.
SequenceDim = int | Mapping[str, int | None] | None

_LABELS = ("shift_labels", "labels", "targets")
IGNORED = -100


def check_sequence_dim(value: Any) -> SequenceDim:
    """Check the option `sequence_dim`.

    Raises:
        UsageError: the value is not a SequenceDim.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {
            str(name): None if dim is None else whole(f"sequence_dim[{name!r}]", dim, kind=ContextParallelError)
            for name, dim in value.items()
        }
    return whole("sequence_dim", value, kind=ContextParallelError)


def sequence_dims(batch: Any, given: SequenceDim = None) -> dict[str, int]:
    """The dim of the sequence by name of the tensor, for each tensor that has it. A name is a key, a field, or a tuple index.

    Default: dim 1 of the first integer tensor with at least two dims, or else of the first tensor with at least two dims. Other
    tensors have the sequence in dim 1 if it has the same length; masks (B, 1, T, T) have it in the rows.

    Raises:
        UsageError: no tensor has the sequence, or it is not clear whether one has it.
    """
    tensors = dict(named(batch))
    if (ragged := next((name for name, t in tensors.items() if t.is_nested), None)) is not None:
        raise ContextParallelError(
            f"context parallelism: {_label(ragged)} must have rows of one length, got a nested tensor. Pad the rows in a "
            "collate_fn: torch.nested.to_padded_tensor(t, 0); or train without cp."
        )
    if isinstance(given, int):
        dims = {name: given for name, t in tensors.items() if t.dim() > given}
    elif given is not None:
        if unknown := set(given) - set(tensors):
            raise ContextParallelError(
                f"sequence_dim must name tensors of the batch, {_names(tensors)}, got {sorted(unknown)[0]!r}."
            )
        dims = {name: dim for name, dim in given.items() if dim is not None}
        for name, dim in dims.items():
            if dim >= tensors[name].dim():
                raise ContextParallelError(f"sequence_dim[{name!r}] must be a dimension of {_shape(name, tensors)}, got {dim}.")
    else:
        dims = _guessed(tensors)
    if not dims:
        raise ContextParallelError(
            "context parallelism splits sequences, but no tensor of the batch has one: a tensor of shape (rows, length, ...). "
            f"Got {_names(tensors) or type(batch).__name__}. Set Layout(sequence_dim={{name: dimension}}), or train without cp."
        )
    return dims


def _guessed(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    several = {name: t for name, t in tensors.items() if t.dim() > 1}
    if not several:
        return {}
    first = next((t for t in several.values() if not t.is_floating_point()), next(iter(several.values())))
    rows, length = first.shape[0], first.shape[1]
    dims: dict[str, int] = {}
    for name, t in tensors.items():
        if t.dim() > 1 and t.shape[1] == length:
            dims[name] = 1
        elif t.dim() > 3 and t.shape[-2] == length:
            dims[name] = t.dim() - 2  # a mask: its rows are the queries
        elif t.dim() == 1 and t.shape[0] == length != rows:
            dims[name] = 0  # positions for all rows
        elif length in t.shape and (t.dim() == 1 or length in t.shape[1:]):
            raise ContextParallelError(
                f"context parallelism: the sequence has {length} tokens, and {_shape(name, tensors)} has that many in another "
                "dimension than 1. State the dimension of the sequence by tensor, None for tensors without: "
                f"Layout(sequence_dim={_example(tensors, name)})."
            )
    return dims


def cut_batch(batch: Any, dims: Mapping[str, int], parts: SequenceParts) -> Any:
    """The batch with this rank's part of each tensor in `dims`."""
    return map_named(batch, lambda name, t: parts.cut(t, dims[name], _named_length(name, t, dims)) if name in dims else t)


def size_of(batch: Any, dims: Mapping[str, int]) -> tuple[int, int]:
    """Rows and length of the first tensor with the sequence in dim 1; (0, 0) if there is none."""
    return next(((t.shape[0], t.shape[1]) for name, t in named(batch) if dims.get(name) == 1), (0, 0))


def beginning_at(batch: Any, dims: Mapping[str, int], start: int, length: int, fill: Mapping[str, torch.Tensor]) -> Any:
    """`length` tokens from `start` on, of each tensor in `dims`; masks are cut along their keys as well.

    Args:
        fill: by name of the labels, a mask of the labels to ignore.
    """

    def take(name: str, t: torch.Tensor) -> torch.Tensor:
        if name not in dims:
            return t
        dim, of_all = dims[name], t.shape[dims[name]]
        t = t.narrow(dim, start, length)
        if dim and dim == t.dim() - 2 and t.shape[-1] == of_all:
            t = t.narrow(-1, start, length)
        return t.masked_fill(fill[name].to(t.device), IGNORED) if name in fill else t

    return map_named(batch, take)


def labels_of(batch: Any, dims: Mapping[str, int]) -> tuple[str, torch.Tensor] | None:
    """The labels with their name: the tensor with a name of `_LABELS`, or else the last integer tensor."""
    tensors = dict(named(batch))
    numbers = [n for n in dims if n in tensors and not tensors[n].is_floating_point() and tensors[n].dtype is not torch.bool]
    name = next((n for known in _LABELS for n in numbers if n.rpartition(".")[2] == known), numbers[-1] if numbers else None)
    return None if name is None else (name, tensors[name])


def counted(batch: Any, part: Any, dims: Mapping[str, int], size: int) -> float | torch.Tensor:
    """The part's share of the batch's labels that are not ignored; 1/size if the batch has no labels."""
    labels, own_labels = labels_of(batch, dims), labels_of(part, dims)
    if labels is None or own_labels is None:
        return 1 / size
    counted_here, all_ = (own_labels[1] != IGNORED).sum(), (labels[1] != IGNORED).sum()
    if counted_here.device.type == "cpu":
        return int(counted_here) / max(1, int(all_))
    return counted_here.double() / all_.clamp(min=1)


def _named_length(name: str, t: torch.Tensor, dims: Mapping[str, int]) -> str:
    return f"dimension {dims[name]} of {_label(name)}, of shape {tuple(t.shape)},"


def _shape(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return f"{_label(name)} of shape {tuple(tensors[name].shape)}"


def _label(name: str) -> str:
    return f"item {name} of the batch" if name.isdigit() else name or "the batch"


def _names(tensors: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(_shape(name, tensors) for name in tensors)


def _example(tensors: Mapping[str, torch.Tensor], doubtful: str) -> str:
    return "{" + ", ".join(f'"{name}": {None if name == doubtful else 1}' for name in tensors) + "}"


def named(data: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch by name, in order."""
    tensors: list[tuple[str, torch.Tensor]] = []

    def take(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append((name, value))
        return value

    map_named(data, take)
    yield from tensors
