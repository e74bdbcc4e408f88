"""Experts of other libraries, such as those of Mixtral or Qwen-MoE in transformers, divided over ranks unchanged.

They are recognised by their form, not by a class: every parameter is a stack whose first dim counts experts, and
`forward(tokens, experts, weights)` returns for each token the weighted sum of its experts' results. So their own forward can
compute a rank's part of the experts, whatever is inside an expert: each row that arrives is a token with one expert and a weight
of 1. A test with random values checks this sum before anything is divided.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.common.errors import ExpertsError
from echelon.parallel.experts.stacks import Dispatch, Experts, Order, part_of_stack
from echelon.parallel.patching import Snapshot, for_now
from echelon.parallel.tensor.layers import exchanged

__all__ = ["DividedForward", "check_foreign", "foreign_experts", "num_experts"]

_TOKENS = 16  # tokens of the test. Most go first to the same expert, to find experts with a capacity


def foreign_experts(module: nn.Module) -> dict[str, nn.Module]:
    """By name, the submodules that look like experts, except those of `echelon.nn.MoE`. Perhaps they cannot be divided."""
    return {name: part for name, part in module.named_modules() if _looks_like_experts(part)}


def _looks_like_experts(part: nn.Module) -> bool:
    own = list(part.parameters(recurse=False))
    if isinstance(part, Experts) or not any(p.dim() > 1 for p in own) or any(p.dim() == 0 for p in own):
        return False
    named = "expert" in type(part).__name__.lower() or bool(_counts(part))
    return named and len({p.shape[0] for p in own}) == 1 and num_experts(part) > 1 and len(_arguments(part)) == 3


def num_experts(part: nn.Module) -> int:
    """The number of experts of a layer, on all ranks together."""
    return next(part.parameters(recurse=False)).shape[0]


def _counts(part: nn.Module) -> list[str]:
    """The attributes that hold the number of experts, such as num_experts."""
    count = num_experts(part)
    return [name for name, value in vars(part).items() if "expert" in name.lower() and type(value) is int and value == count]


def _arguments(part: nn.Module) -> list[str]:
    try:
        taken = list(inspect.signature(type(part).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    return [each.name for each in taken if each.kind in (each.POSITIONAL_OR_KEYWORD, each.POSITIONAL_ONLY)]


def check_foreign(part: nn.Module) -> str | None:
    """Why experts cannot be divided; None if they can. Not collective."""
    if "forward" in vars(part):
        return "its forward was replaced on the instance"
    for name, parameter in part.named_parameters():
        if parameter.dim() == 0 or parameter.shape[0] != num_experts(part):
            return f"its {name} is {tuple(parameter.shape)}, not a stack of {num_experts(part)} experts"
        if not parameter.is_floating_point():
            return f"its {name} is of {parameter.dtype}"
    if (buffer := next((name for name, _ in part.named_buffers()), None)) is not None:
        return f"it has a buffer, {buffer}"
    before = Snapshot(part)
    part.eval()
    try:
        return None if _is_a_sum(part) else _NO_SUM
    finally:
        before.restore()


_NO_SUM = (
    "its forward(tokens, experts, weights) does not give, for each token by itself, the sum of its experts' results, each times "
    "its weight"
)


@torch.no_grad()
def _is_a_sum(part: nn.Module) -> bool:
    """Whether two experts of these shapes, with random values, compute the sum that `DividedForward` assumes."""
    source, call = torch.Generator().manual_seed(0), partial(_with_stacks, part, _counts(part))
    stacks = {name: _random(tuple(p.shape[1:]), source) for name, p in part.named_parameters()}
    second = {name: stack[1:] for name, stack in stacks.items()}
    widths = {size for stack in stacks.values() for size in stack.shape[1:]}
    likely = [getattr(part, name, None) for name in ("hidden_size", "hidden_dim")]
    experts = (torch.arange(_TOKENS) >= _TOKENS - 3).long()  # the first expert of each token; its second is the other one
    for width in sorted(widths, key=lambda size: size not in likely):
        tokens = torch.randn(_TOKENS, width, generator=source, dtype=torch.float32)
        weights = torch.rand(_TOKENS, 2, generator=source, dtype=torch.float32) + 0.5
        zeros, ones = torch.zeros(_TOKENS, 1, dtype=torch.long), torch.ones(_TOKENS, 1)
        try:
            got = call(stacks, tokens, torch.stack([experts, 1 - experts], 1), weights)
            each = [call(stacks, tokens, zeros + i, ones) for i in range(2)]
            alone = call(second, tokens, zeros, ones)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
            continue  # not the width of a token
        chosen = experts.bool()[:, None]
        wanted = torch.where(chosen, each[1], each[0]) * weights[:, :1] + torch.where(chosen, each[0], each[1]) * weights[:, 1:]
        return _close(got, wanted) and _close(alone, each[1]) and not _close(*each)
    return False


def _random(shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    scale: float = max(shape, default=1) ** -0.5
    return torch.randn(2, *shape, generator=source, dtype=torch.float32) * scale


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return False
    return bool((a - b).norm() <= 1e-3 * b.norm() + 1e-12)


def _with_stacks(part: nn.Module, counts: list[str], stacks: Mapping[str, torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """Call the author's own forward with the stacks of some of the experts in place of the parameters.

    Args:
        counts: the attributes that hold the number of experts.
    """
    of = {parameter: stacks[name] for name, parameter in part.named_parameters()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(for_now(part, **dict.fromkeys(counts, len(next(iter(stacks.values()))))))
        for each in part.modules():
            stack.enter_context(exchanged(each, {name: of[p] for name, p in each.named_parameters(recurse=False)}))
        made: torch.Tensor = type(part).forward(part, *given)
    return made


class DividedForward:
    """Replaces the author's forward of experts that are divided over ranks.

    Args:
        part: the experts, before anything else has replaced their forward.
        dispatch: the ranks over which they are divided.
    """

    def __init__(self, part: nn.Module, dispatch: Dispatch) -> None:
        self._dispatch, self._num_experts = dispatch, num_experts(part)
        self._part, self._counts, self._name = part, _counts(part), type(part).__name__
        self._names = [name for name, _ in part.named_parameters()]
        self._arguments = inspect.Signature(list(inspect.signature(type(part).forward).parameters.values())[1:])

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the host must know how many tokens go where
    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        """(N, D), (N, k) integers, (N, k) -> (N, D)."""
        tokens, experts, weights = self._arguments.bind(*args, **named).arguments.values()
        counts = torch.bincount(experts.reshape(-1), minlength=self._num_experts)
        if len(counts) > self._num_experts or tokens.dim() != 2:
            raise ExpertsError(
                f"{self._name} must be called with (tokens, features) and expert numbers below {self._num_experts} under ep, "
                f"got {tuple(tokens.shape)} and numbers up to {len(counts) - 1}."
            )
        order = Order(experts.reshape(-1), k := experts.shape[1])
        rows = order.undo(self._dispatch(order.sort(tokens), counts, self._compute)).view(len(tokens), k, -1)
        made: torch.Tensor = (rows * weights[..., None]).sum(1).to(tokens.dtype)
        return made

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Compute the rows with this rank's experts."""
        stacks = {name: part_of_stack(self._part.get_parameter(name), self._dispatch) for name in self._names}
        if not len(rows):  # the backward pass must still reach the all-to-all and the parameters
            return rows + torch.stack([stack.reshape(-1)[:0].sum() for stack in stacks.values()]).sum().to(rows.dtype)
        experts = torch.arange(len(counts), device=rows.device).repeat_interleave(counts, output_size=len(rows))
        return _with_stacks(self._part, self._counts, stacks, rows, experts[:, None], rows.new_ones(len(rows), 1))

    def __deepcopy__(self, memo: Any) -> DividedForward:
        raise TypeError(f"{self._name} has its experts on several ranks and cannot be copied.")
