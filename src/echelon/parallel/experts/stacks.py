"""Experts of a layer with stacked parameters: the first dim counts experts.

So names are the same in every layout, a rank's part is a slice, and any layout reads the checkpoints of another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import ExpertsError, require
from echelon.common.numbers import whole
from echelon.parallel.shards import local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Dispatch", "Experts", "GroupedExperts", "Order", "StackedExperts", "experts_of", "part_of_stack"]


class Experts(nn.Module):
    """Base class of experts. Subclasses compute rows that are sorted by expert.

    Attributes:
        num_experts: the number of experts on all ranks together.
        dispatch: the ranks over which they are divided; None if each rank has all.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = whole("num_experts", num_experts, at_least=1, kind=ExpertsError)
        self.dispatch: Dispatch | None = None

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(N, D) -> (N, D).

        Args:
            rows: sorted by expert.
            counts: (num_experts,) integers: the rows of each expert.
        """
        return self.compute(rows, counts) if self.dispatch is None else self.dispatch(rows, counts, self.compute)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """As `forward`, with this rank's experts."""
        raise NotImplementedError

    def mine(self, stack: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter, (experts, ...)."""
        return local(stack) if self.dispatch is None else part_of_stack(stack, self.dispatch)


def part_of_stack(stack: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """This rank's part of a divided parameter, (experts, ...).

    Its gradient is divided by the size of the expert-parallel group. This rank gets tokens of all ranks of the group, so the
    gradient is already their sum, but it is then averaged over fewer ranks than the gradients of other parameters.
    `fully_shard`'s `set_gradient_divide_factor` cannot do this: over a single rank torch 2.13 divides twice.
    """
    if not hasattr(stack, "placements"):  # whole, as `echelon plan` has those of other pipeline stages
        return stack.chunk(dispatch.size)[dispatch.mesh.get_local_rank()]
    part: torch.Tensor = _Part.apply(stack, 1 / dispatch.size)  # type: ignore[no-untyped-call]
    return part


class _Part(torch.autograd.Function):
    """This rank's part of a DTensor, with its gradient multiplied by a factor: `to_local` in one node of the graph."""

    @staticmethod
    def forward(ctx: Any, stack: Any, factor: float) -> torch.Tensor:
        ctx.factor, ctx.mesh, ctx.placements = factor, stack.device_mesh, stack.placements
        part = local(stack)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(grads[0] * ctx.factor, ctx.mesh, ctx.placements, run_check=False), None


class _Contiguous(torch.autograd.Function):
    """Identity that makes the gradient contiguous: `grouped_mm` rejects an expanded one (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].contiguous()


class GroupedExperts(Experts):
    """SwiGLU experts, `w2(silu(w1 x) * w3 x)`, with one grouped kernel for all experts instead of one kernel for each.

    Args:
        dim: features of a token.
        hidden: features inside an expert.
        num_experts: the number of experts.

    `w1` and `w3` are (num_experts, hidden, dim), `w2` is (num_experts, dim, hidden); each expert starts like an nn.Linear.
    In float64, with sizes that are not multiples of 16 bytes, and with a torch without `grouped_mm`, experts are computed one by
    one.
    """

    def __init__(self, dim: int, hidden: int, num_experts: int) -> None:
        super().__init__(num_experts)
        self.dim = whole("dim", dim, at_least=1, kind=ExpertsError)
        self.hidden = whole("hidden", hidden, at_least=1, kind=ExpertsError)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random values for all experts."""
        for weight in (self.w1, self.w2, self.w3):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        weights = [self.mine(w) for w in (self.w1, self.w2, self.w3)]
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
        rows, (w1, w2, w3) = rows.to(dtype), (w.to(dtype) for w in weights)
        grouped = getattr(nn.functional, "grouped_mm", None)
        # Rows must begin at multiples of 16 bytes (torch 2.13).
        fits = all(size * dtype.itemsize % 16 == 0 for size in (self.dim, self.hidden))
        if grouped is None or not fits or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            parts = zip(rows.split(counts.tolist()), w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
            each = [
                nn.functional.linear(nn.functional.silu(nn.functional.linear(x, a)) * nn.functional.linear(x, c), b)
                for x, a, b, c in parts
            ]
            return torch.cat(each)
        ends = counts.cumsum(0).to(torch.int32)
        hidden = nn.functional.silu(grouped(rows, w1.mT, offs=ends)) * grouped(rows, w3.mT, offs=ends)
        out: torch.Tensor = _Contiguous.apply(grouped(hidden, w2.mT, offs=ends))  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, {self.dim} -> {self.hidden} -> {self.dim}"


class StackedExperts(Experts):
    """The user's own modules as experts, computed one by one. A module maps (rows, D) to (rows, D), also with zero rows.

    The parameters of all modules are stacked under the names of one: `each.up.weight` is (num_experts, ...). Except for the
    parameters, the first module is used for all experts: its forward, its options.

    Args:
        modules: one for each expert, of equal class and shapes; their values are copied.
    Raises:
        UsageError: they have no parameters, have buffers, or use a parameter twice.
    """

    _template: tuple[nn.Module]

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(len(modules))
        first = copy.deepcopy(modules[0])
        _check(first)
        stacks, _ = torch.func.stack_module_state(list(modules))  # torch refuses other classes and shapes
        self.each = nn.Module()
        for name, stacked in stacks.items():
            *path, last = name.split(".")
            holder = self.each
            for part in path:
                if part not in dict(holder.named_children()):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_parameter(last, nn.Parameter(stacked, requires_grad=stacked.requires_grad))
        # Not a submodule: its own parameters are unused, and layouts must not change its layers.
        object.__setattr__(self, "_template", (first.to("meta"),))

    def train(self, mode: bool = True) -> StackedExperts:
        self._template[0].train(mode)
        super().train(mode)
        return self

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        names, stacks = zip(*((name, self.mine(stack).unbind()) for name, stack in self.each.named_parameters()), strict=True)
        template = self._template[0]
        # An expert without rows is called as well, so that its gradients are zero and not None on every layout.
        parts = zip(rows.split(counts.tolist()), zip(*stacks, strict=True), strict=True)
        each = [torch.func.functional_call(template, dict(zip(names, weights, strict=True)), (part,)) for part, weights in parts]
        return torch.cat(each)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x {type(self._template[0]).__name__}"


def _check(module: nn.Module) -> None:
    kind, own = type(module).__name__, dict(module.named_parameters())
    if not own:
        raise ExpertsError(f"an expert must have parameters, got a {kind} without any.")
    if (buffer := next((name for name, _ in module.named_buffers()), None)) is not None:
        raise ExpertsError(
            f"an expert must have no buffers, got a {kind} with {buffer}: the tokens it sees depend on the number of ranks. "
            "Use a norm without running statistics."
        )
    if len(list(module.named_parameters(remove_duplicate=False))) != len(own):
        raise ExpertsError(f"an expert must not use a parameter under two names, got a {kind} that does.")


def experts_of(experts: Any, num_experts: int | None) -> Experts:
    """Make `Experts` from GroupedExperts, a list of modules, or a function that makes a module and their number.

    Raises:
        UsageError: `experts` is none of these.
    """
    if isinstance(experts, Experts):
        made = experts
    else:
        if callable(experts) and not isinstance(experts, nn.Module):
            if num_experts is None:
                raise ExpertsError("num_experts must be given with a function that makes an expert, got None.")
            experts = [experts() for _ in range(whole("num_experts", num_experts, at_least=1, kind=ExpertsError))]
        is_list = isinstance(experts, Sequence | nn.ModuleList) and len(experts) > 0
        is_list = is_list and all(isinstance(each, nn.Module) for each in experts)
        require(
            is_list, "experts", "a list of modules, a function that makes one, or GroupedExperts(...)", experts, kind=ExpertsError
        )
        made = StackedExperts(list(experts))
    if num_experts is not None and num_experts != made.num_experts:
        raise ExpertsError(f"num_experts must be the number of experts, {made.num_experts}, got {num_experts}. Leave it out.")
    return made


# How tokens get to the experts and back: sorted by expert, and sent to the ranks that have the experts.
#
# Communication of a layer with experts on n ranks: the number of tokens for each expert (n times the experts of a rank,
# integers), then the tokens, then their results; in the backward pass the gradients of both, in the reverse order. All are
# all-to-alls of uneven parts, so nothing is padded or dropped. An expert gets tokens in the order of the ranks, and within a rank
# in the order of its batch: the same in every run.


class _Gather(torch.autograd.Function):
    """Gathers rows of tokens, `k` rows per token, in a given order. Gradients are summed in a fixed order, also on a GPU."""

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
    """The order of rows sorted by their expert.

    Args:
        experts: (rows,), the expert of each row. A token has `k` consecutive rows.
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
    """The ranks over which the experts of a layer are divided: rank i has the i-th part of them.

    Attributes:
        mesh: 1-D, the ranks over which the experts are divided.
        data_mesh: the ranks with the same experts and other samples: 1-D, or 2-D with replicas of the shards.
        size: the number of ranks in `mesh`.
    """

    def __init__(self, mesh: DeviceMesh, data_mesh: DeviceMesh) -> None:
        self.mesh, self.data_mesh, self.size = mesh, data_mesh, mesh.size()
        self._group = mesh.get_group()

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, compute: Any) -> torch.Tensor:
        """Send the rows to their experts and return the results. Collective over `mesh`.

        Args:
            rows: (N, D), sorted by expert.
            counts: (experts,) integers: this rank's rows for each expert.
            compute: called with (rows, counts) for this rank's experts.
        """
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        arriving = arriving.view(self.size, -1)  # (from rank, own expert)
        # The host needs the sizes to allocate memory: it waits once for the device.
        sent, received = torch.stack([counts.view(self.size, -1).sum(1), arriving.sum(1)]).tolist()
        own_rows = _AllToAll.apply(rows, sent, received, self._group)  # type: ignore[no-untyped-call]
        # The rows arrive sorted by rank, then by expert. Sort them by expert only.
        experts = torch.arange(arriving.shape[1], device=rows.device).repeat(self.size)
        order = Order(experts.repeat_interleave(arriving.reshape(-1), output_size=sum(received)))
        done = order.undo(compute(order.sort(own_rows), arriving.sum(0)))
        return _AllToAll.apply(done, received, sent, self._group)  # type: ignore[no-any-return, no-untyped-call]

    def placement(self, parameter: torch.Tensor) -> Any:
        """How `fully_shard` shards a stack over `data_mesh`: by experts if their number is divisible, else within experts."""
        from torch.distributed.tensor import Shard

        shards = self.data_mesh.size(self.data_mesh.ndim - 1)
        by_experts = parameter.shape[0] // self.size % shards == 0
        return Shard(0 if by_experts or parameter.dim() < 2 or parameter.shape[1] % shards else 1)

    def __deepcopy__(self, memo: Any) -> Dispatch:
        return self  # groups cannot be copied
