"""A layer of experts: each token goes to the few that its router chooses, and gets the weighted sum of their results.

    logits = gate(x)        p = softmax(logits), or sigmoid(logits)
    chosen = the k experts with the largest p + bias;  y = sum over these of weight_i * expert_i(x),  weight_i = p_i (/ their sum)

Sources: Shazeer et al. 2017 (top-k gating), Fedus et al. 2021 (top-1, auxiliary loss), Wang et al. 2024, arXiv 2408.15664 (biases
instead of it). No token is left out, whatever the load: there is no capacity.
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


# What a router has seen of an update so far. A layer counts in its backward pass, so that nothing counts twice.


class Seen:
    """What a router has seen.

    Attributes:
        counted: of the update under way: choices of each expert, the sum of entropies, tokens. None if there are none.
        latest: the same of the latest update, over all ranks.
        counts: whether the micro-batch counts whose forward pass runs: a number or a tensor, 0 for no. Its backward pass may come
            after the forward passes of others.
        auxiliary: the loss of the latest forward pass that has a gradient, until it is taken.
        was_added: whether the update's losses had it.
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
    """A layer's results as they are; their backward pass counts what was chosen."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, seen: Seen, counted: torch.Tensor) -> torch.Tensor:
        ctx.seen, ctx.counted, ctx.counts = seen, counted, seen.counts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.seen.add(ctx.counted, ctx.counts)
        return grads[0], None, None


class Added(torch.autograd.Function):
    """An auxiliary loss as it is; its backward pass notes that it was added to the loss."""

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
    """In float32 at least, also under autocast: rounded logits send tokens to other experts (Fedus et al. 2021, section 2.4)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(dtype), self.weight.to(dtype))


class Router(nn.Module):
    """Chooses experts for tokens, and keeps account of the choice. See `MoE` for the arguments.

    Attributes:
        expert_bias: (num_experts,), what is added when experts are chosen, with `balance="loss_free"`.
        load: (num_experts,), each expert's share of the choices in the latest update, with `balance="auxiliary"`.
        seen: of the update under way, and of the latest one.
        ranks_agree: all ranks give its buffers the same values, from sums over all of them.
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
        """Buffers only: the gate resets itself."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        if self.load is not None:
            self.load.fill_(1 / self.num_experts)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(N, D) -> weights (N, k), experts (N, k), rows for each expert (num_experts,), and what is counted of them.

        Args:
            mask: (N,), True for tokens that count in statistics and balance.
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
        """E * sum_i f_i P_i (Fedus et al. 2021, equations 4 to 6), with the latest update's f and this micro-batch's P."""
        assert self.load is not None
        counts = shares.new_ones(len(shares)) if mask is None else mask.to(shares.dtype)
        mean = counts @ shares / counts.sum().clamp(min=1)
        return self.coefficient * self.num_experts * (self.load.to(mean.dtype).detach() @ mean)

    @torch.no_grad()
    def _count(self, shares: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """(num_experts + 2,) in float64, where counts add up exactly: choices of each expert, the sum of entropies, tokens."""
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
        experts: modules from (rows, dim) to (rows, dim), alike but for their values; a function that makes one; or
            GroupedExperts(dim, hidden, num_experts), which are multiplied together and faster. Their parameters are stacked: the
            first dim counts experts.
        num_experts: with a function, how many.
        top_k: experts for each token.
        balance: how the load of the experts is kept even. "loss_free": a bias for each expert, moved by `bias_update_rate`
            after each update towards the mean load, which takes part in the choice and not in the weights. "auxiliary": a loss,
            which `compute_loss` adds: `loss + echelon.nn.auxiliary_loss(module)`. None: nothing.
        score: "softmax" over the experts, or "sigmoid" of each.
        normalize: divide the weights of a token by their sum; by default with more than one expert for each token, since a
            single weight of 1 would give the router no gradient.
        bias_update_rate: as DeepSeek-V3 has it (arXiv 2412.19437).
        auxiliary_coefficient: as Switch Transformer has it (arXiv 2101.03961).
        shared: a module that every token goes to besides, as in DeepSeekMoE (arXiv 2401.06066).

    Loads are those of the whole update, on all ranks, so training gives the same numbers on any number of ranks, for any division
    into micro-batches. The auxiliary loss takes the load f of the update before, as its gradient is that of the mean
    probabilities P alone.
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
            mask: (...), True for tokens that count in the loads and the auxiliary loss; padding should not. All of them are
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
