"""Make a module parallel, and own what that changes: every strategy hides behind the same `Prepared`."""

from __future__ import annotations

from echelon.parallel import dtensors as dtensors
from echelon.parallel.axes import data_axes
from echelon.parallel.composed import Layout
from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.dp import DPStrategy
from echelon.parallel.fsdp import FSDPStrategy, HSDPStrategy
from echelon.parallel.fsdp2 import FSDP2Strategy
from echelon.parallel.layouts import LAYOUTS, resolve
from echelon.parallel.local_sgd import DiLoCoStrategy, LocalSGDStrategy
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy
from echelon.parallel.tensor import TPStrategy
from echelon.parallel.zero import ZeROStrategy

__all__ = [
    "LAYOUTS",
    "DDPStrategy",
    "DPStrategy",
    "DiLoCoStrategy",
    "FSDP2Strategy",
    "FSDPStrategy",
    "HSDPStrategy",
    "Layout",
    "LocalSGDStrategy",
    "NOOPStrategy",
    "Prepared",
    "Strategy",
    "TPStrategy",
    "ZeROStrategy",
    "data_axes",
    "resolve",
]
