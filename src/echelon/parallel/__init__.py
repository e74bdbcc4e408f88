"""Make a module parallel. Every layout is used through the same interface, `Prepared`."""

from __future__ import annotations

from echelon.parallel import adopted as adopted
from echelon.parallel.axes import data_axes
from echelon.parallel.composed import Layout
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.ddp.dp import DPStrategy
from echelon.parallel.ddp.local_sgd import DiLoCoStrategy, LocalSGDStrategy
from echelon.parallel.fsdp.fsdp import FSDPStrategy
from echelon.parallel.layouts import LAYOUTS, resolve
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy

__all__ = [
    "LAYOUTS",
    "DDPStrategy",
    "DPStrategy",
    "DiLoCoStrategy",
    "FSDPStrategy",
    "Layout",
    "LocalSGDStrategy",
    "NOOPStrategy",
    "Prepared",
    "Strategy",
    "data_axes",
    "resolve",
]
