"""echelon: train PyTorch models on many processes, from a laptop to a cluster, with the same script.

Names are resolved when they are first used, so that `import echelon` costs nothing and the command line works without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from echelon.contracts.version import __version__ as __version__

if TYPE_CHECKING:
    from echelon.contracts.errors import DataError, EchelonError
    from echelon.contracts.rank import RankInfo
    from echelon.contracts.run_dir import RunDir
    from echelon.data.loader import Loader
    from echelon.data.options import LoaderOptions, StreamOptions
    from echelon.data.packed import Packed, cu_seqlens
    from echelon.data.stream import StreamLoader
    from echelon.data.text import ByteText
    from echelon.data.tokens import Tokens, TokenWriter, write_tokens
    from echelon.data.views import Mixture, Weighted
    from echelon.launcher.cluster.slurm_config import SlurmConfig
    from echelon.launcher.cluster.slurm_fn import slurm_fn
    from echelon.launcher.dragon.group import CollectiveGroup
    from echelon.launcher.dragon.system import Policy, System
    from echelon.launcher.functions.run import launch, spawn
    from echelon.loop.auto import AutoUnit, TrainStepResults
    from echelon.loop.auto_predict import AutoPredictUnit
    from echelon.loop.averaged import AveragedWeights, SWALRParams, SWAParams
    from echelon.loop.callback import Callback
    from echelon.loop.checkpointing.options import RestoreOptions, SaveOptions
    from echelon.loop.checkpointing.rollback import RollBack
    from echelon.loop.checkpointing.saver import BestCheckpointConfig, DistributedCheckpointSaver
    from echelon.loop.loss import count_tokens
    from echelon.loop.metrics import Mean
    from echelon.loop.own.prepare import epochs, evaluating, prepare, window
    from echelon.loop.pretrained import save_pretrained
    from echelon.loop.progress import Progress
    from echelon.loop.run import evaluate, fit, predict, test, train
    from echelon.loop.state import ActivePhase, EntryPoint, PhaseState, State
    from echelon.loop.trainer import Trainer
    from echelon.loop.unit import EvalUnit, PredictUnit, TestUnit, TrainUnit
    from echelon.observe.loggers.ranks import get_logger
    from echelon.parallel.activation import ActivationCheckpointParams, checkpoint_wrapper
    from echelon.parallel.axes import data_axes
    from echelon.parallel.composed import Parallel
    from echelon.parallel.context_active import positions, whole_sequence
    from echelon.parallel.ddp import DDPStrategy
    from echelon.parallel.deferred import on_meta
    from echelon.parallel.dp import DPStrategy
    from echelon.parallel.experts import GroupedExperts, MoE, auxiliary_loss, balance_experts, expert_loads
    from echelon.parallel.float8 import Float8
    from echelon.parallel.fsdp import FSDPStrategy, HSDPStrategy
    from echelon.parallel.fsdp2 import FSDP2Strategy
    from echelon.parallel.linear_cross_entropy import linear_cross_entropy
    from echelon.parallel.local_sgd import DiLoCoStrategy, LocalSGDStrategy
    from echelon.parallel.over_ranks import all_mean, gather, gathered_rows
    from echelon.parallel.parallelize import prepare_ddp, prepare_fsdp, prepare_fsdp2, prepare_module
    from echelon.parallel.precision import Precision
    from echelon.parallel.recipe import TorchCompileParams
    from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy
    from echelon.parallel.tensor import TPStrategy
    from echelon.parallel.tensor_plans import tp_plan
    from echelon.parallel.zero import ZeROStrategy
    from echelon.prover.prove import Proof, prove
    from echelon.world.init import World, init_from_env, is_main, rank, world_size
    from echelon.world.rng import seed

__all__ = [
    "ActivationCheckpointParams",
    "ActivePhase",
    "AutoPredictUnit",
    "AutoUnit",
    "AveragedWeights",
    "BestCheckpointConfig",
    "ByteText",
    "Callback",
    "CollectiveGroup",
    "DDPStrategy",
    "DPStrategy",
    "DataError",
    "DiLoCoStrategy",
    "DistributedCheckpointSaver",
    "EchelonError",
    "EntryPoint",
    "EvalUnit",
    "FSDP2Strategy",
    "FSDPStrategy",
    "Float8",
    "GroupedExperts",
    "HSDPStrategy",
    "Loader",
    "LoaderOptions",
    "LocalSGDStrategy",
    "Mean",
    "Mixture",
    "MoE",
    "NOOPStrategy",
    "Packed",
    "Parallel",
    "PhaseState",
    "Policy",
    "Precision",
    "PredictUnit",
    "Prepared",
    "Progress",
    "Proof",
    "RankInfo",
    "RestoreOptions",
    "RollBack",
    "RunDir",
    "SWALRParams",
    "SWAParams",
    "SaveOptions",
    "SlurmConfig",
    "State",
    "Strategy",
    "StreamLoader",
    "StreamOptions",
    "System",
    "TPStrategy",
    "TestUnit",
    "TokenWriter",
    "Tokens",
    "TorchCompileParams",
    "TrainStepResults",
    "TrainUnit",
    "Trainer",
    "Weighted",
    "World",
    "ZeROStrategy",
    "all_mean",
    "auxiliary_loss",
    "balance_experts",
    "checkpoint_wrapper",
    "count_tokens",
    "cu_seqlens",
    "data_axes",
    "epochs",
    "evaluate",
    "evaluating",
    "expert_loads",
    "fit",
    "gather",
    "gathered_rows",
    "get_logger",
    "init_from_env",
    "is_main",
    "launch",
    "linear_cross_entropy",
    "on_meta",
    "positions",
    "predict",
    "prepare",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_fsdp2",
    "prepare_module",
    "prove",
    "rank",
    "save_pretrained",
    "seed",
    "slurm_fn",
    "spawn",
    "test",
    "tp_plan",
    "train",
    "whole_sequence",
    "window",
    "world_size",
    "write_tokens",
]

# Where each name lives, below `echelon.`; a test holds this against `__all__` and the imports above.
_NAMES = {
    "contracts.errors": ["DataError", "EchelonError"],
    "contracts.rank": ["RankInfo"],
    "contracts.run_dir": ["RunDir"],
    "data.loader": ["Loader"],
    "data.options": ["LoaderOptions", "StreamOptions"],
    "data.packed": ["Packed", "cu_seqlens"],
    "data.stream": ["StreamLoader"],
    "data.text": ["ByteText"],
    "data.tokens": ["TokenWriter", "Tokens", "write_tokens"],
    "data.views": ["Mixture", "Weighted"],
    "launcher.cluster.slurm_config": ["SlurmConfig"],
    "launcher.cluster.slurm_fn": ["slurm_fn"],
    "launcher.dragon.group": ["CollectiveGroup"],
    "launcher.dragon.system": ["Policy", "System"],
    "launcher.functions.run": ["launch", "spawn"],
    "loop.auto": ["AutoUnit", "TrainStepResults"],
    "loop.auto_predict": ["AutoPredictUnit"],
    "loop.averaged": ["AveragedWeights", "SWALRParams", "SWAParams"],
    "loop.callback": ["Callback"],
    "loop.checkpointing.options": ["RestoreOptions", "SaveOptions"],
    "loop.checkpointing.rollback": ["RollBack"],
    "loop.checkpointing.saver": ["BestCheckpointConfig", "DistributedCheckpointSaver"],
    "loop.loss": ["count_tokens"],
    "loop.metrics": ["Mean"],
    "loop.own.prepare": ["epochs", "evaluating", "prepare", "window"],
    "loop.pretrained": ["save_pretrained"],
    "loop.progress": ["Progress"],
    "loop.run": ["evaluate", "fit", "predict", "test", "train"],
    "loop.state": ["ActivePhase", "EntryPoint", "PhaseState", "State"],
    "loop.trainer": ["Trainer"],
    "loop.unit": ["EvalUnit", "PredictUnit", "TestUnit", "TrainUnit"],
    "observe.loggers.ranks": ["get_logger"],
    "parallel.activation": ["ActivationCheckpointParams", "checkpoint_wrapper"],
    "parallel.axes": ["data_axes"],
    "parallel.context_active": ["positions", "whole_sequence"],
    "parallel.composed": ["Parallel"],
    "parallel.ddp": ["DDPStrategy"],
    "parallel.deferred": ["on_meta"],
    "parallel.dp": ["DPStrategy"],
    "parallel.experts": ["GroupedExperts", "MoE", "auxiliary_loss", "balance_experts", "expert_loads"],
    "parallel.float8": ["Float8"],
    "parallel.fsdp": ["FSDPStrategy", "HSDPStrategy"],
    "parallel.fsdp2": ["FSDP2Strategy"],
    "parallel.linear_cross_entropy": ["linear_cross_entropy"],
    "parallel.local_sgd": ["DiLoCoStrategy", "LocalSGDStrategy"],
    "parallel.parallelize": ["prepare_ddp", "prepare_fsdp", "prepare_fsdp2", "prepare_module"],
    "parallel.precision": ["Precision"],
    "parallel.recipe": ["TorchCompileParams"],
    "parallel.strategy": ["NOOPStrategy", "Prepared", "Strategy"],
    "parallel.tensor": ["TPStrategy"],
    "parallel.tensor_plans": ["tp_plan"],
    "parallel.zero": ["ZeROStrategy"],
    "prover.prove": ["Proof", "prove"],
    "parallel.over_ranks": ["all_mean", "gather", "gathered_rows"],
    "world.init": ["World", "init_from_env", "is_main", "rank", "world_size"],
    "world.rng": ["seed"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"echelon.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _print_uncaught(*exception: Any) -> None:
    from echelon.contracts.traces import print_uncaught  # only a script that fails pays for it

    print_uncaught(*exception)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _print_uncaught
