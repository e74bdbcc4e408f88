"""Tokens on their way to the experts and back: in order of the experts, and over the ranks that have them.

Communication, of a layer with experts on n ranks: how many tokens go to each expert (n times the experts of a rank, integers),
then the tokens, then their results; in the backward pass the gradients of both, in the reverse order. All are all-to-alls of
uneven parts, so nothing is padded and nothing left out. The order of the tokens at an expert is that of the ranks, and on each
that of its batch: the same in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Dispatch", "Order"]


class _Gather(torch.autograd.Function):
    """Rows of tokens, each token `k` times, in another order. Its gradient is added up in a fixed order, also on a GPU."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.k = k
        ctx.save_for_backward(inverse)
        return tokens[order.div(k, rounding_mode="floor") if k > 1 else order]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = grads[0][inverse]
        return rows if ctx.k == 1 else rows.view(-1, ctx.k, *rows.shape[1:]).sum(1), None, None, None


class Order:
    """Rows sorted by the expert that each goes to.

    Args:
        experts: (rows,) the expert of each row, where a token has `k` rows, one after the other.
    """

    def __init__(self, experts: torch.Tensor, k: int = 1) -> None:
        self._order = experts.argsort(stable=True)
        self._inverse = torch.empty_like(self._order)
        self._inverse[self._order] = torch.arange(len(self._order), device=self._order.device)
        self._k = k

    def sort(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, D) -> (tokens * k, D), by expert."""
        return _Gather.apply(tokens, self._order, self._inverse, self._k)  # type: ignore[no-any-return, no-untyped-call]

    def undo(self, rows: torch.Tensor) -> torch.Tensor:
        """(tokens * k, D) by expert -> the same rows, by token."""
        return _Gather.apply(rows, self._inverse, self._order, 1)  # type: ignore[no-any-return, no-untyped-call]


class _AllToAll(torch.autograd.Function):
    """`sent[i]` rows go to the i-th rank of the group, `received[i]` come from it; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        ctx.crosses_ranks = True  # gradients of other ranks' losses come back: `pass_zeros` must not stop them
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class Dispatch:
    """The ranks among which the experts of a layer are divided: rank i has the i-th part of them.

    Attributes:
        mesh: 1-D, the ranks that have all experts between them.
        data_mesh: the ranks that have the same experts as this one, with other samples: 1-D, or 2-D with copies of the shards.
        size: ranks in `mesh`.
    """

    def __init__(self, mesh: DeviceMesh, data_mesh: DeviceMesh) -> None:
        self.mesh, self.data_mesh, self.size = mesh, data_mesh, mesh.size()
        self._group = mesh.get_group()

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, compute: Any) -> torch.Tensor:
        """The rows' results. Collective over `mesh`.

        Args:
            rows: (N, D), sorted by expert.
            counts: (experts,) integers: this rank's rows for each.
            compute: takes (rows, counts) of this rank's experts.
        """
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        arriving = arriving.view(self.size, -1)  # (from rank, expert of mine)
        # The host must know the parts to make room for them: one wait for a device.
        sent, received = torch.stack([counts.view(self.size, -1).sum(1), arriving.sum(1)]).tolist()
        mine = _AllToAll.apply(rows, sent, received, self._group)  # type: ignore[no-untyped-call]
        # By rank, and there by expert: now by expert alone.
        experts = torch.arange(arriving.shape[1], device=rows.device).repeat(self.size)
        order = Order(experts.repeat_interleave(arriving.reshape(-1), output_size=sum(received)))
        done = order.undo(compute(order.sort(mine), arriving.sum(0)))
        return _AllToAll.apply(done, received, sent, self._group)  # type: ignore[no-any-return, no-untyped-call]

    def placement(self, parameter: torch.Tensor) -> Any:
        """How `fully_shard` cuts a stack over `data_mesh`: by experts, or within them where it has more ranks than experts."""
        from torch.distributed.tensor import Shard

        shards = self.data_mesh.size(self.data_mesh.ndim - 1)
        by_experts = parameter.shape[0] // self.size % shards == 0
        return Shard(0 if by_experts or parameter.dim() < 2 or parameter.shape[1] % shards else 1)

    def __deepcopy__(self, memo: Any) -> Dispatch:
        return self  # groups cannot be copied
