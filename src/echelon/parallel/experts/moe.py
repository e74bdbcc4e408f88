"""A layer of experts: a router chooses a few experts for each token, and the weighted sum of their results is the output.

    logits = gate(x)        p = softmax(logits), or sigmoid(logits)
    chosen = the k experts with the largest p + bias;  y = sum over these of weight_i * expert_i(x),  weight_i = p_i (/ their sum)

Sources: Shazeer et al. 2017 (top-k gating), Fedus et al. 2021 (top-1, auxiliary loss), Wang et al. 2024, arXiv 2408.15664 (biases
instead of an auxiliary loss). There is no capacity: no token is dropped, whatever the load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from echelon.common.arguments import flags
from echelon.common.errors import ExpertsError, require
from echelon.common.numbers import number, whole
from echelon.parallel.experts.stacks import Experts, Order, experts_of

__all__ = ["Added", "MoE", "Router"]


# The statistics of a router. A layer counts in its backward pass, so that recomputation does not count twice.


class Seen:
    """The statistics of a router.

    Attributes:
        counted: for the current update: choices of each expert, the sum of entropies, the number of tokens. None before any.
        latest: the same for the latest update, over all ranks.
        counts: the weight of the micro-batch in its forward pass, a number or a tensor; 0 if it does not count. Its backward
            pass may come after the forward passes of other micro-batches.
        auxiliary: the auxiliary loss of the latest forward pass with gradients, until `auxiliary_loss` takes it.
        was_added: whether the current update's losses contain an auxiliary loss.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.counted: torch.Tensor | None = None
        self.latest: torch.Tensor | None = None
        self.counts: Any = 1
        self.auxiliary: torch.Tensor | None = None
        self.was_added = False

    def add(self, counted: torch.Tensor, counts: Any) -> None:
        if isinstance(counts, torch.Tensor):
            counted = counted * (counts != 0)
        elif not counts:
            counted = torch.zeros_like(counted)
        self.counted = counted if self.counted is None else self.counted + counted

    def forget(self) -> None:
        self.counted, self.auxiliary, self.was_added = None, None, False

    def __deepcopy__(self, memo: Any) -> Seen:
        return Seen(self.num_experts)


class Counted(torch.autograd.Function):
    """Identity on a layer's results. The backward pass adds the layer's counts to the statistics."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, seen: Seen, counted: torch.Tensor) -> torch.Tensor:
        ctx.seen, ctx.counted, ctx.counts = seen, counted, seen.counts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.add(ctx.counted, ctx.counts)
        return grads[0], None, None


class Added(torch.autograd.Function):
    """Identity on an auxiliary loss. The backward pass notes that it was added to the loss."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, seen: Seen) -> torch.Tensor:
        ctx.seen = seen
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.was_added = True
        return grads[0], None


Balance = Literal["loss_free", "auxiliary"] | None


class _Gate(nn.Linear):
    """Computes at least in float32, also under autocast: rounding changes the choice of experts (Fedus et al. 2021, 2.4)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(dtype), self.weight.to(dtype))


class Router(nn.Module):
    """Chooses experts for tokens, and counts the choices. See `MoE` for the arguments.

    Attributes:
        expert_bias: (num_experts,), added to the scores when experts are chosen, with `balance="loss_free"`.
        load: (num_experts,), each expert's share of the choices in the latest update, with `balance="auxiliary"`.
        seen: the statistics of the current and the latest update.
        ranks_agree: its buffers have the same values on all ranks, because they are computed from sums over all ranks.
    """

    ranks_agree = True

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        balance: Balance,
        score: Literal["softmax", "sigmoid"],
        normalize: bool,
        bias_update_rate: float,
        coefficient: float,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.balance, self.score, self.normalize = balance, score, normalize
        self.bias_update_rate, self.coefficient = bias_update_rate, coefficient
        self.gate = _Gate(dim, num_experts, bias=False)
        self.expert_bias: torch.Tensor | None
        self.load: torch.Tensor | None
        self.register_buffer("expert_bias", torch.zeros(num_experts) if balance == "loss_free" else None)
        self.register_buffer("load", torch.full((num_experts,), 1 / num_experts) if balance == "auxiliary" else None)
        self.seen = Seen(num_experts)

    def reset_parameters(self) -> None:
        """Reset the buffers; the gate has a `reset_parameters` of its own."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        if self.load is not None:
            self.load.fill_(1 / self.num_experts)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(N, D) -> weights (N, k), experts (N, k), rows of each expert (num_experts,), statistics (num_experts + 2,).

        Args:
            mask: (N,), True for tokens that count in the statistics and in balancing.
        """
        logits = self.gate(x)
        p = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        with torch.no_grad():
            wanted = p if self.expert_bias is None else p + self.expert_bias.to(p.dtype)
            chosen = wanted.topk(self.top_k, sorted=False).indices.sort(-1).values
        weights = p.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        shares = p if self.score == "softmax" else p / p.sum(-1, keepdim=True)
        if self.load is not None and torch.is_grad_enabled():
            self.seen.auxiliary = self._auxiliary(shares, mask)
        rows = torch.bincount(chosen.reshape(-1), minlength=self.num_experts)
        return weights, chosen, rows, self._count(shares.detach(), chosen, rows, mask)

    def _auxiliary(self, shares: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """E * sum_i f_i P_i (Fedus et al. 2021, equations 4 to 6), with f of the latest update and P of this micro-batch."""
        assert self.load is not None
        counts = shares.new_ones(len(shares)) if mask is None else mask.to(shares.dtype)
        mean = counts @ shares / counts.sum().clamp(min=1)
        return self.coefficient * self.num_experts * (self.load.to(mean.dtype).detach() @ mean)

    @torch.no_grad()
    def _count(self, shares: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The choices of each expert, the sum of entropies, and the number of tokens: (num_experts + 2,). In float64, which adds
        counts exactly.
        """
        entropies = torch.special.entr(shares).sum(-1)
        if mask is None:
            return torch.cat([rows.double(), entropies.sum().double()[None], rows.new_full((1,), len(chosen)).double()])
        ones = mask.to(chosen.dtype)
        choices = chosen.new_zeros(self.num_experts).index_add_(0, chosen.reshape(-1), ones.repeat_interleave(self.top_k))
        return torch.cat([choices.double(), torch.stack([(entropies @ ones.to(shares.dtype)).double(), ones.sum().double()])])

    def extra_repr(self) -> str:
        return f"top {self.top_k} of {self.num_experts}, balance={self.balance!r}"


class MoE(nn.Module):
    """A mixture of experts: (..., dim) -> (..., dim). In one process plain PyTorch; `Layout(ep=n)` divides the experts.

    Args:
        dim: features of a token.
        experts: modules from (rows, dim) to (rows, dim) that differ only in their values; a function that makes one; or
            GroupedExperts(dim, hidden, num_experts), which are faster because they are multiplied together. Their parameters are
            stacked: the first dim counts experts.
        num_experts: the number of experts, with a function.
        top_k: experts per token.
        balance: how loads are balanced. "loss_free": a bias for each expert, which takes part in the choice but not in the
            weights. Each update moves it by `bias_update_rate` towards the mean load. "auxiliary": a loss that `compute_loss`
            must add: `loss + echelon.nn.auxiliary_loss(module)`. None: no balancing.
        score: "softmax" over the experts, or "sigmoid" of each.
        normalize: divide the weights of a token by their sum. Default: only if `top_k` > 1, since with one expert the weight
            would be 1 and the router would get no gradient.
        bias_update_rate: the default is that of DeepSeek-V3 (arXiv 2412.19437).
        auxiliary_coefficient: the default is that of Switch Transformer (arXiv 2101.03961).
        shared: a module that every token goes to as well, as in DeepSeekMoE (arXiv 2401.06066).

    Loads are those of the whole update on all ranks, so training gives the same numbers on any number of ranks and for any
    division into micro-batches. The auxiliary loss uses the load f of the previous update: its gradient flows only through the
    mean probabilities P.
    """

    def __init__(
        self,
        dim: int,
        experts: Experts | Sequence[nn.Module] | nn.ModuleList | Callable[[], nn.Module],
        *,
        num_experts: int | None = None,
        top_k: int = 2,
        balance: Balance = "loss_free",
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool | None = None,
        bias_update_rate: float = 0.001,
        auxiliary_coefficient: float = 0.01,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        require(
            balance in ("loss_free", "auxiliary", None), "balance", "'loss_free', 'auxiliary' or None", balance, kind=ExpertsError
        )
        require(score in ("softmax", "sigmoid"), "score", "'softmax' or 'sigmoid'", score, kind=ExpertsError)
        require(isinstance(shared, nn.Module | None), "shared", "a torch.nn.Module or None", shared, kind=ExpertsError)
        number("bias_update_rate", bias_update_rate, "a number of at least 0", lambda rate: rate >= 0, kind=ExpertsError)
        number(
            "auxiliary_coefficient", auxiliary_coefficient, "a number of at least 0", lambda size: size >= 0, kind=ExpertsError
        )
        if normalize is not None:
            flags(normalize=normalize, kind=ExpertsError)
        dim, top_k = whole("dim", dim, at_least=1, kind=ExpertsError), whole("top_k", top_k, at_least=1, kind=ExpertsError)
        made = experts_of(experts, num_experts)
        if top_k > made.num_experts:
            raise ExpertsError(f"top_k must be at most the number of experts, {made.num_experts}, got {top_k}.")
        self.router = Router(
            dim,
            made.num_experts,
            top_k,
            balance=balance,
            score=score,
            normalize=top_k > 1 if normalize is None else normalize,
            bias_update_rate=float(bias_update_rate),
            coefficient=float(auxiliary_coefficient),
        )
        self.experts = made
        self.shared = shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """(..., dim) -> (..., dim).

        Args:
            mask: (...), True for tokens that count in the loads and the auxiliary loss; padding should not. All tokens are
                computed.
        """
        tokens = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = self._routed(tokens, None if mask is None else mask.reshape(-1)).to(x.dtype)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.reshape(x.shape)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the host must know how many tokens go where
    def _routed(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        weights, chosen, counts, counted = self.router(tokens, mask)
        k = self.router.top_k
        order = Order(chosen.reshape(-1), k)
        rows = order.undo(self.experts(order.sort(tokens), counts)).view(len(tokens), k, -1)
        y = (rows * weights.to(rows.dtype)[..., None]).sum(1)
        result: torch.Tensor = Counted.apply(y, self.router.seen, counted)  # type: ignore[no-untyped-call]
        return result
