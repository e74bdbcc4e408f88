"""What the author or the user has put into a module and parallel training would lose in silence: it is refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from echelon.contracts.errors import UsageError
from echelon.parallel.names import class_name
from echelon.parallel.prepared import Prepared
from echelon.parallel.shards import is_split

__all__ = ["hook_on_shards", "refuse_lost"]


def refuse_lost(prepared: Prepared[Any], before: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
    """
    Args:
        before: the parameters by name, before the module was made parallel.
    Raises:
        UsageError: one in whose place there is another has a hook, which nothing calls any more; an embedding has max_norm.
    """
    _refuse_max_norm(prepared)
    now = dict(prepared.named_parameters(every_name=True))
    for name, parameter in before:
        if now.get(name, parameter) is not parameter and _is_hooked(parameter):
            raise UsageError(_said(f"{class_name(prepared.unwrapped)}.{name}"))


def hook_on_shards(prepared: Prepared[Any]) -> str | None:
    """What is wrong with hooks that were registered afterwards; None if nothing is."""
    for name, parameter in prepared.named_parameters() if prepared.replaces_parameters else ():
        if is_split(parameter) and getattr(parameter, "_backward_hooks", None):
            return _said(f"{class_name(prepared.unwrapped)}.{name}")
    return None


def _is_hooked(parameter: nn.Parameter) -> bool:
    return any(getattr(parameter, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def _said(name: str) -> str:
    return (
        f"the parameter {name} has a hook (register_hook), which is not called where parameters are sharded. Do it with the "
        "gradients, between the backward pass and the optimizer's step, as clip_grad_norm does; or train under 'ddp' or 'zero1'."
    )


def _refuse_max_norm(prepared: Prepared[Any]) -> None:
    """Such an embedding writes into its weight in forward passes, of which each rank has others."""
    if prepared.averaged_over == 1 and not prepared.replaces_parameters:
        return
    for name, part in prepared.unwrapped.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise UsageError(
                f"{class_name(prepared.unwrapped)}.{name} has max_norm={part.max_norm}: its forward pass writes into the weights "
                "of a rank's own words, so that they would differ between ranks. Leave it out, and scale the outputs."
            )
