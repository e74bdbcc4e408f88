"""TorchTNT's small modules in one: progress, precision, stateful, rank_zero_log, version and others."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler as TLRScheduler

from echelon.common.errors import UsageError
from echelon.compat.torchtnt.utils.distributed import get_global_rank
from echelon.loop import progress
from echelon.loop.callbacks.early_stopping import EarlyStopChecker
from echelon.loop.callbacks.monitors import learning_rates as extract_lr_from_optimizer
from echelon.loop.unit import Stateful
from echelon.parallel.recipe.precision import Precision

__all__ = [
    "EarlyStopChecker",
    "MultiStateful",
    "Progress",
    "Stateful",
    "TLRScheduler",
    "convert_precision_str_to_dtype",
    "extract_lr_from_optimizer",
    "is_torch_version_geq",
    "private_names",
    "rank_zero_critical",
    "rank_zero_debug",
    "rank_zero_error",
    "rank_zero_info",
    "rank_zero_print",
    "rank_zero_warn",
]


def private_names(*names: str) -> dict[str, property]:
    """Properties for a class body: each attribute can also be read and set under its name with an underscore."""

    def of(name: str) -> property:
        return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))

    return {f"_{name}": of(name) for name in names}


class Progress(progress.Progress):
    """As echelon's. Attributes that programs set by private names, since TorchTNT has no other, can be set here."""

    locals().update(
        private_names(
            "num_epochs_completed", "num_steps_completed", "num_steps_completed_in_epoch", "num_steps_completed_in_prev_epoch"
        )
    )


def convert_precision_str_to_dtype(precision: str) -> torch.dtype | None:
    """torch.float16 for "fp16", torch.bfloat16 for "bf16", None for "fp32".

    Raises:
        UsageError, a ValueError: anything else.
    """
    try:
        return Precision.of(precision).dtype
    except UsageError:
        raise UsageError(f"Precision {precision} not supported. Please use one of ['fp16', 'bf16', 'fp32']") from None


class MultiStateful:
    """Several Statefuls as one, by name.

    Args:
        stateful_objs: name -> what is saved under it.
        strict: passed to each `load_state_dict` that takes it, such as a module's.
    """

    def __init__(self, stateful_objs: Mapping[str, Any], strict: bool = True) -> None:
        self.stateful_objs, self.strict = stateful_objs, strict

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.stateful_objs.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the objects whose state is in the dict; the others stay as they are.

        Raises:
            KeyError: the dict has a state that belongs to none of them.
        """
        for name, state in state_dict.items():
            each = self.stateful_objs[name]
            takes_strict = "strict" in inspect.signature(each.load_state_dict).parameters
            each.load_state_dict(state, **({"strict": self.strict} if takes_strict else {}))


_logger = logging.getLogger(__name__)


def rank_zero_print(*args: Any, **kwargs: Any) -> None:
    if get_global_rank() == 0:
        print(*args, **kwargs)


def _at(level: int) -> Callable[..., None]:
    def log(*args: Any, logger: logging.Logger | None = None, stacklevel: int = 1, **kwargs: Any) -> None:
        if get_global_rank() == 0:
            (logger or _logger).log(level, *args, stacklevel=stacklevel + 1, **kwargs)

    return log


rank_zero_debug, rank_zero_info, rank_zero_warn = _at(logging.DEBUG), _at(logging.INFO), _at(logging.WARNING)
rank_zero_error, rank_zero_critical = _at(logging.ERROR), _at(logging.CRITICAL)


def is_torch_version_geq(version: str) -> bool:
    """Whether torch is at least this version."""
    installed: Any = torch.__version__  # compares as a version, not as text
    return bool(installed >= version)
