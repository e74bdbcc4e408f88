"""All layouts with their options, precision and activation checkpointing, and functions that make a module parallel by hand."""

from echelon.parallel import (
    DDPStrategy,
    DiLoCoStrategy,
    DPStrategy,
    FSDPStrategy,
    Layout,
    LocalSGDStrategy,
    Prepared,
    Strategy,
    data_axes,
)
from echelon.parallel.layouts import HSDPStrategy as HSDPStrategy
from echelon.parallel.layouts import TPStrategy as TPStrategy
from echelon.parallel.layouts import ZeROStrategy as ZeROStrategy
from echelon.parallel.meta.deferred import on_meta
from echelon.parallel.parallelize import clip_grad_norm_, prepare_ddp, prepare_fsdp, prepare_module
from echelon.parallel.recipe.activation import ActivationCheckpointParams
from echelon.parallel.recipe.compilation import TorchCompileParams
from echelon.parallel.recipe.float8 import Float8
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.state.partition import Partition
from echelon.parallel.tensor.plans import tp_plan

__all__ = [
    "ActivationCheckpointParams",
    "DDPStrategy",
    "DPStrategy",
    "DiLoCoStrategy",
    "FSDPStrategy",
    "Float8",
    "Layout",
    "LocalSGDStrategy",
    "Partition",
    "Precision",
    "Prepared",
    "Strategy",
    "TorchCompileParams",
    "clip_grad_norm_",
    "data_axes",
    "on_meta",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_module",
    "tp_plan",
]
