"""echelon: train PyTorch models on many processes, from a laptop to a cluster, with the same script.

Names are resolved when they are first used, so that `import echelon` costs nothing and the command line works without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.contracts.errors import DataError, EchelonError
    from echelon.contracts.rank import RankInfo
    from echelon.contracts.run_dir import RunDir
    from echelon.data.loader import Loader
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
    from echelon.loop.pretrained import save_pretrained
    from echelon.loop.progress import Progress
    from echelon.loop.run import evaluate, fit, predict, test, train
    from echelon.loop.state import ActivePhase, EntryPoint, PhaseState, State
    from echelon.loop.trainer import Trainer
    from echelon.loop.unit import EvalUnit, PredictUnit, TestUnit, TrainUnit
    from echelon.parallel.activation import ActivationCheckpointParams, checkpoint_wrapper
    from echelon.parallel.axes import data_axes
    from echelon.parallel.ddp import DDPStrategy
    from echelon.parallel.deferred import on_meta
    from echelon.parallel.dp import DPStrategy
    from echelon.parallel.fsdp import FSDPStrategy, HSDPStrategy
    from echelon.parallel.fsdp2 import FSDP2Strategy
    from echelon.parallel.parallelize import prepare_ddp, prepare_fsdp, prepare_fsdp2, prepare_module
    from echelon.parallel.precision import Precision
    from echelon.parallel.recipe import TorchCompileParams
    from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy
    from echelon.parallel.tensor import TPStrategy
    from echelon.parallel.zero import ZeROStrategy
    from echelon.prover.prove import Proof, prove
    from echelon.world.init import World, init_from_env
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
    "DistributedCheckpointSaver",
    "EchelonError",
    "EntryPoint",
    "EvalUnit",
    "FSDP2Strategy",
    "FSDPStrategy",
    "HSDPStrategy",
    "Loader",
    "Mean",
    "Mixture",
    "NOOPStrategy",
    "Packed",
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
    "checkpoint_wrapper",
    "count_tokens",
    "cu_seqlens",
    "data_axes",
    "evaluate",
    "fit",
    "init_from_env",
    "launch",
    "on_meta",
    "predict",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_fsdp2",
    "prepare_module",
    "prove",
    "save_pretrained",
    "seed",
    "slurm_fn",
    "spawn",
    "test",
    "train",
    "write_tokens",
]

# Where each name lives, below `echelon.`; a test holds this against `__all__` and the imports above.
_HOMES = {
    "ActivationCheckpointParams": "parallel.activation",
    "ActivePhase": "loop.state",
    "AutoPredictUnit": "loop.auto_predict",
    "AutoUnit": "loop.auto",
    "AveragedWeights": "loop.averaged",
    "BestCheckpointConfig": "loop.checkpointing.saver",
    "ByteText": "data.text",
    "Callback": "loop.callback",
    "CollectiveGroup": "launcher.dragon.group",
    "DDPStrategy": "parallel.ddp",
    "DPStrategy": "parallel.dp",
    "DataError": "contracts.errors",
    "DistributedCheckpointSaver": "loop.checkpointing.saver",
    "EchelonError": "contracts.errors",
    "EntryPoint": "loop.state",
    "EvalUnit": "loop.unit",
    "FSDP2Strategy": "parallel.fsdp2",
    "FSDPStrategy": "parallel.fsdp",
    "HSDPStrategy": "parallel.fsdp",
    "Loader": "data.loader",
    "Mean": "loop.metrics",
    "Mixture": "data.views",
    "NOOPStrategy": "parallel.strategy",
    "Packed": "data.packed",
    "PhaseState": "loop.state",
    "Policy": "launcher.dragon.system",
    "Precision": "parallel.precision",
    "PredictUnit": "loop.unit",
    "Prepared": "parallel.strategy",
    "Progress": "loop.progress",
    "Proof": "prover.prove",
    "RankInfo": "contracts.rank",
    "RestoreOptions": "loop.checkpointing.options",
    "RollBack": "loop.checkpointing.rollback",
    "RunDir": "contracts.run_dir",
    "SWALRParams": "loop.averaged",
    "SWAParams": "loop.averaged",
    "SaveOptions": "loop.checkpointing.options",
    "SlurmConfig": "launcher.cluster.slurm_config",
    "State": "loop.state",
    "Strategy": "parallel.strategy",
    "StreamLoader": "data.stream",
    "System": "launcher.dragon.system",
    "TPStrategy": "parallel.tensor",
    "TestUnit": "loop.unit",
    "TokenWriter": "data.tokens",
    "Tokens": "data.tokens",
    "TorchCompileParams": "parallel.recipe",
    "TrainStepResults": "loop.auto",
    "TrainUnit": "loop.unit",
    "Trainer": "loop.trainer",
    "Weighted": "data.views",
    "World": "world.init",
    "ZeROStrategy": "parallel.zero",
    "checkpoint_wrapper": "parallel.activation",
    "count_tokens": "loop.loss",
    "cu_seqlens": "data.packed",
    "data_axes": "parallel.axes",
    "evaluate": "loop.run",
    "fit": "loop.run",
    "init_from_env": "world.init",
    "launch": "launcher.functions.run",
    "on_meta": "parallel.deferred",
    "predict": "loop.run",
    "prepare_ddp": "parallel.parallelize",
    "prepare_fsdp": "parallel.parallelize",
    "prepare_fsdp2": "parallel.parallelize",
    "prepare_module": "parallel.parallelize",
    "prove": "prover.prove",
    "save_pretrained": "loop.pretrained",
    "seed": "world.rng",
    "slurm_fn": "launcher.cluster.slurm_fn",
    "spawn": "launcher.functions.run",
    "test": "loop.run",
    "train": "loop.run",
    "write_tokens": "data.tokens",
}


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
