"""Parameters without a gradient in a DistributedDataParallel, which then averages no gradient of the same bucket, either.

torch raises in the next forward pass, when the optimizer has stepped with what each rank had; after the last step it never does.
"""

from __future__ import annotations

import re

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.common.errors import LayoutError
from echelon.parallel.guards.guard import Guard
from echelon.parallel.names import plain_names

__all__ = ["Awaited"]

_SAYS = "Expected to have finished reduction in the prior iteration"
_NUMBERS = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


class Awaited(Guard):
    """The parameters of which a wrapper awaits gradients: those that required one when it was made."""

    def __init__(self, module: DistributedDataParallel) -> None:
        ignored = set(module.parameters_to_ignore)
        pairs = zip(module.module.named_parameters(), plain_names(module), strict=True)
        self._named = [named for (name, p), named in pairs if p.requires_grad and name not in ignored]
        alone = dist.get_world_size(module.process_group) == 1
        self._may_lack = bool(alone or module.find_unused_parameters or module.static_graph)

    def check_gradients(self, *, frozen_too: bool) -> None:
        """After an update's last backward pass, and before its step.

        Args:
            frozen_too: torch has waited for those, too, that were frozen since.

        Raises:
            UsageError: a gradient is missing, so that others were not averaged.
        """
        if self._may_lack:
            return
        lacking = [named for named in self._named if named[1].grad is None and (frozen_too or named[1].requires_grad)]
        if lacking:
            raise _said(lacking)

    def explain(self, error: BaseException) -> LayoutError | None:
        if not isinstance(error, RuntimeError) or _SAYS not in str(error):
            return None
        found = _NUMBERS.search(str(error))
        numbers = [int(n) for n in found[1].split()] if found is not None else []
        return _said([self._named[n] for n in numbers if n < len(self._named)])


def _said(unused: list[tuple[str, nn.Parameter]]) -> LayoutError:
    others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    what = unused[0][0] + others if unused else "all parameters"
    why = " (frozen since the module was made parallel)" if unused and not any(p.requires_grad for _, p in unused) else ""
    return LayoutError(
        f"the loss must depend on all trained parameters, got no gradient of {what}{why}. Without it a DistributedDataParallel "
        "does not average the others. Give DDPStrategy(find_unused_parameters=True); or freeze what is never used or trained "
        "before the module is made parallel; or train under 'fsdp', which does not wait."
    )
