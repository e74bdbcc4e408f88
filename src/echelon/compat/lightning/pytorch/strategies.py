"""`lightning.pytorch.strategies`: DDP and FSDP with torch's options; and the supported names of `plugins`."""

from typing import Any

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch.absent import ENVIRONMENTS, Accepted, accepted
from echelon.compat.older_options import FSDPStrategy
from echelon.parallel.ddp.ddp import DDPStrategy

__all__ = ["DDPPlugin", "DDPStrategy", "FSDPStrategy", "among_plugins"]

DDPPlugin = DDPStrategy  # in Lightning 1


globals().update(accepted(ENVIRONMENTS, __name__))


def among_plugins(plugins: Any, strategy: Any) -> tuple[Any, list[Accepted]]:
    """(the strategy, which in Lightning 1 may be among the plugins; the environments).

    Raises:
        UsageError: any other plugin, or two strategies.
    """
    environments = []
    for each in plugins if isinstance(plugins, (list, tuple)) else [plugins] if plugins else []:
        if isinstance(each, Accepted):
            environments.append(each)
        elif not isinstance(each, DDPStrategy):
            raise UsageError(
                f"Trainer(plugins=...): {type(each).__name__} is not known here. Instead: Trainer(precision=...), and the "
                "options of a strategy, such as FSDPStrategy(...)."
            )
        elif strategy not in ("auto", "ddp", None):
            raise UsageError(f"Trainer(plugins=DDPPlugin(...), strategy={strategy!r}): two strategies. Give one.")
        else:
            strategy = each
    return strategy, environments
