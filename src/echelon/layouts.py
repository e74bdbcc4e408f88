"""How a model lies over the ranks: every layout with its options, precision and recomputation, modules made parallel by hand."""

from echelon.parallel import (
    DDPStrategy,
    DiLoCoStrategy,
    DPStrategy,
    FSDP2Strategy,
    FSDPStrategy,
    HSDPStrategy,
    Layout,
    LocalSGDStrategy,
    NOOPStrategy,
    Prepared,
    Strategy,
    TPStrategy,
    ZeROStrategy,
    data_axes,
)
from echelon.parallel.activation import ActivationCheckpointParams
from echelon.parallel.deferred import on_meta
from echelon.parallel.float8 import Float8
from echelon.parallel.parallelize import prepare_ddp, prepare_fsdp, prepare_fsdp2, prepare_module
from echelon.parallel.precision import Precision
from echelon.parallel.recipe import TorchCompileParams
from echelon.parallel.tensor_plans import tp_plan

__all__ = [
    "ActivationCheckpointParams",
    "DDPStrategy",
    "DPStrategy",
    "DiLoCoStrategy",
    "FSDP2Strategy",
    "FSDPStrategy",
    "Float8",
    "HSDPStrategy",
    "Layout",
    "LocalSGDStrategy",
    "NOOPStrategy",
    "Precision",
    "Prepared",
    "Strategy",
    "TPStrategy",
    "TorchCompileParams",
    "ZeROStrategy",
    "data_axes",
    "on_meta",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_fsdp2",
    "prepare_module",
    "tp_plan",
]
