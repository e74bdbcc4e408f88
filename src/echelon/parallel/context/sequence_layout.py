"""How a sequence is cut over the ranks of a context-parallel group, and put together again.

The sequence becomes 2 x size chunks of one length; rank i has chunk i and chunk 2 x size - 1 - i. With a causal mask a late
token has more to attend to than an early one, and so every rank gets the same work. Everything follows from the length of a
rank's part alone, so nothing has to be remembered from the batch to the attention.
Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from echelon.common.errors import ContextParallelError
from echelon.parallel.older_torch import all_gather_single, reduce_scatter_single

__all__ = ["SequenceParts"]


@dataclass(frozen=True)
class SequenceParts:
    """The parts of a sequence, one for each rank of a group.

    Args:
        rank: this rank's place in the group.
        size: ranks in it.
        group: these ranks; None is the default group.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def over(cls, group: dist.ProcessGroup | None) -> SequenceParts:
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def chunk_of(self, length: int, name: str = "the sequence") -> int:
        """The length of a chunk, of a whole sequence.

        Raises:
            UsageError: the chunks would not be of one length.
        """
        chunk, rest = divmod(length, 2 * self.size)
        if rest or not chunk:
            pieces = 2 * self.size
            near = sorted({max(1, length // pieces) * pieces, -(-length // pieces) * pieces})
            raise ContextParallelError(
                f"{name} must have a length that 2 x cp = {pieces} divides, so that each of {self.size} context-parallel ranks "
                f"gets an early and a late chunk, got {length}. Take {' or '.join(map(str, near))}, by cutting or padding "
                f"(pad_to_multiple_of={pieces} in a collator of transformers). If these are tokens that compute_loss shifts "
                "itself, as data[:, :-1] and data[:, 1:], let the dataset give inputs and targets instead."
            )
        return chunk

    def chunk_of_part(self, length: int, name: str) -> int:
        """The length of a chunk, of one rank's part."""
        if length % 2 or not length:
            raise ContextParallelError(
                f"{name} has {length} tokens of this rank's part of the sequence, which is an early and a late chunk of one "
                "length, and so an even number. Was the part shifted or cut after it came from the loader, as data[:, :-1]? "
                "Let the dataset give inputs and targets, so that they are shifted before they are split."
            )
        return length // 2

    def bounds(self, chunk: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last position (exclusive) of this rank's two chunks."""
        first, second = self.rank, 2 * self.size - 1 - self.rank
        return (first * chunk, (first + 1) * chunk), (second * chunk, (second + 1) * chunk)

    def cut(self, whole: torch.Tensor, dim: int, name: str = "the sequence") -> torch.Tensor:
        """This rank's part along `dim`, a copy."""
        (first, _), (second, _) = self.bounds(chunk := self.chunk_of(whole.shape[dim], name))
        return torch.cat([whole.narrow(dim, first, chunk), whole.narrow(dim, second, chunk)], dim)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Where the tokens of a part of this length stand in the whole sequence: (length,), int64."""
        # Not kept: made in inference mode, or under a FakeTensorMode, they would be of no use to training.
        return torch.cat([torch.arange(first, last, device=device) for first, last in self.bounds(length // 2)])

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The sequence in its order, from the parts of all ranks; gradients go back to the ranks. Collective."""
        return _Whole.apply(part, dim % part.dim(), self)  # type: ignore[no-any-return,no-untyped-call]


class _Whole(torch.autograd.Function):
    """Forward: all-gather, laid in order. Backward: what all ranks' losses say of this rank's part, summed up: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, parts: SequenceParts) -> torch.Tensor:
        ctx.dim, ctx.parts = dim, parts
        ctx.crosses_ranks = True  # `pass_zeros` must not stop what comes from the others
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
        # A rank's two chunks side by side, the ranks one after the other in the first dimension.
        mine = grad.new_empty(*grad.shape[:dim], 2 * chunk, *grad.shape[dim + 1 :])
        laid = grad.new_empty(size, *mine.shape)
        for rank, part in enumerate(laid):
            part.narrow(dim, 0, chunk).copy_(chunks[rank])
            part.narrow(dim, chunk, chunk).copy_(chunks[-1 - rank])
        reduce_scatter_single(mine, laid.flatten(0, 1), group=parts.group)
        return mine, None, None
