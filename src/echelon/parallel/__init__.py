"""Make a module parallel, and own what that changes: every strategy hides behind the same `Prepared`."""

from __future__ import annotations

from functools import partial

from echelon.parallel import dtensors as dtensors
from echelon.parallel.axes import data_axes
from echelon.parallel.composed import Parallel
from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.dp import DPStrategy
from echelon.parallel.fsdp import FSDPStrategy, HSDPStrategy
from echelon.parallel.fsdp2 import FSDP2Strategy
from echelon.parallel.local_sgd import DiLoCoStrategy, LocalSGDStrategy
from echelon.parallel.strategy import STRATEGIES, NOOPStrategy, Prepared, Strategy
from echelon.parallel.tensor import TPStrategy
from echelon.parallel.zero import ZeROStrategy

__all__ = [
    "STRATEGIES",
    "DDPStrategy",
    "DPStrategy",
    "DiLoCoStrategy",
    "FSDP2Strategy",
    "FSDPStrategy",
    "HSDPStrategy",
    "LocalSGDStrategy",
    "NOOPStrategy",
    "Parallel",
    "Prepared",
    "Strategy",
    "TPStrategy",
    "ZeROStrategy",
    "data_axes",
]

# A new strategy is one file and one line here; every test over strategies then covers it.
STRATEGIES |= {
    "noop": NOOPStrategy,
    "dp": DPStrategy,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "fsdp2": FSDP2Strategy,
    "hsdp": HSDPStrategy,
    "zero1": partial(ZeROStrategy, 1),
    "zero2": partial(ZeROStrategy, 2),
    "zero3": partial(ZeROStrategy, 3),
    "tp": TPStrategy,
    "parallel": Parallel,
    "local_sgd": LocalSGDStrategy,
    "diloco": DiLoCoStrategy,
}
