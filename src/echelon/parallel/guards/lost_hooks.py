"""Hooks on parameters, which a layout that puts other parameters in their place would lose without a word.

That saves who clips gradients by `p.register_hook(...)` before `prepare` (tests/parallel/test_strategy_limits.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from echelon.common.errors import LayoutError

__all__ = ["refuse_lost", "refuse_unheard"]

_REMEDY = (
    "To change gradients before they are used, call optimizer.register_step_pre_hook(...), which sees those of the update, or "
    "train under 'ddp' or 'zero1', which keep parameters as they are."
)


def refuse_lost(before: Iterable[tuple[str, nn.Parameter]], after: Mapping[str, nn.Parameter], layout: str) -> None:
    """
    Args:
        before: a module's parameters by name, before it was made parallel.
        after: its parameters afterwards; what another rank holds altogether is not among them.
    Raises:
        UsageError: another parameter is in the place of one with a hook of autograd.
    """
    for name, parameter in before:
        if after.get(name, parameter) is not parameter and _is_hooked(
            parameter, "_backward_hooks", "_post_accumulate_grad_hooks"
        ):
            raise LayoutError(
                f"layout {layout!r} puts another parameter in the place of {name}, whose hook (register_hook, or "
                f"register_post_accumulate_grad_hook) would never be called. Take it away before. {_REMEDY}"
            )


def refuse_unheard(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """
    Args:
        named: shards of `fully_shard`, whose gradients torch sets by itself, beside autograd.
    Raises:
        UsageError: one has a hook that autograd would call.
    """
    for name, parameter in named:
        if _is_hooked(parameter, "_backward_hooks"):
            raise LayoutError(
                f"{name} is split over the ranks, and torch does not call its hook (register_hook). Its gradient is set after "
                f"the backward pass: register_post_accumulate_grad_hook is called then, with this rank's part. {_REMEDY}"
            )


def _is_hooked(parameter: nn.Parameter, *kinds: str) -> bool:
    return any(getattr(parameter, kind, None) for kind in kinds)
