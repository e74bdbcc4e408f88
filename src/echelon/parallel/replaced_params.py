"""Parameters in whose place a layout has put others, as splitting does: what would go on with the old ones is refused.

An optimizer that was made before holds them and would train nothing (tests/parallel/test_stale_optimizer.py). A hook that clips
gradients by `p.register_hook(...)` would never be called (tests/parallel/test_strategy_limits.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from echelon.common.errors import LayoutError

__all__ = ["name_before", "refuse_unheard", "replaced"]

_names = WeakTensorKeyDictionary()  # of those that were replaced: nobody else knows them any more

_REMEDY = (
    "To change gradients before they are used, call optimizer.register_step_pre_hook(...), which sees those of the update, or "
    "train under 'ddp' or 'zero1', which keep parameters as they are."
)


def replaced(before: Iterable[tuple[str, nn.Parameter]], after: Mapping[str, nn.Parameter], layout: str) -> None:
    """Remember what was replaced, by its name.

    Args:
        before: a module's parameters by name, before it was made parallel.
        after: its parameters afterwards; what another rank holds altogether is not among them.
    Raises:
        UsageError: another parameter is in the place of one with a hook of autograd.
    """
    kept = {id(parameter) for parameter in after.values()}
    for name, parameter in before:
        if id(parameter) not in kept:  # whatever it is called now
            _names[parameter] = name
        if after.get(name, parameter) is not parameter and _is_hooked(
            parameter, "_backward_hooks", "_post_accumulate_grad_hooks"
        ):
            raise LayoutError(
                f"layout {layout!r} puts another parameter in the place of {name}, whose hook (register_hook, or "
                f"register_post_accumulate_grad_hook) would never be called. Take it away before. {_REMEDY}"
            )


def name_before(parameter: nn.Parameter) -> str | None:
    """The name that it had in a module that holds another one now; None if nothing took its place."""
    found: str | None = _names.get(parameter)
    return found


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
