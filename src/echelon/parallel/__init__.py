"""Make a module parallel, and own what that changes: every strategy hides behind the same `Prepared`."""

from __future__ import annotations

from collections.abc import Callable

from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.fsdp import FSDPStrategy
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy

__all__ = ["STRATEGIES", "DDPStrategy", "FSDPStrategy", "NOOPStrategy", "Prepared", "Strategy"]

# A new strategy is one file and one line here; every test over strategies then covers it.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "noop": NOOPStrategy,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
}
