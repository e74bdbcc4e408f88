"""echelon: train PyTorch models on many processes, from a laptop to a cluster, with the same script.

Names are resolved when they are first used, so that `import echelon` costs nothing and the command line works without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.contracts.errors import EchelonError
    from echelon.contracts.rank import RankInfo
    from echelon.contracts.run_dir import RunDir
    from echelon.data.loader import Loader
    from echelon.data.text import ByteText
    from echelon.launcher.function import launch, spawn
    from echelon.loop.auto import AutoUnit, TrainStepResults
    from echelon.loop.auto_predict import AutoPredictUnit
    from echelon.loop.callback import Callback
    from echelon.loop.callbacks.saver import DistributedCheckpointSaver, RestoreOptions
    from echelon.loop.metrics import Mean
    from echelon.loop.progress import Progress
    from echelon.loop.run import evaluate, fit, predict, test, train
    from echelon.loop.state import ActivePhase, EntryPoint, PhaseState, State
    from echelon.loop.unit import EvalUnit, PredictUnit, TestUnit, TrainUnit
    from echelon.parallel.ddp import DDPStrategy
    from echelon.parallel.fsdp import FSDPStrategy
    from echelon.parallel.parallelize import (
        ActivationCheckpointParams,
        TorchCompileParams,
        prepare_ddp,
        prepare_fsdp,
        prepare_module,
    )
    from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy
    from echelon.world.init import World, init_from_env
    from echelon.world.streams import seed

__all__ = [
    "ActivationCheckpointParams",
    "ActivePhase",
    "AutoPredictUnit",
    "AutoUnit",
    "ByteText",
    "Callback",
    "DDPStrategy",
    "DistributedCheckpointSaver",
    "EchelonError",
    "EntryPoint",
    "EvalUnit",
    "FSDPStrategy",
    "Loader",
    "Mean",
    "NOOPStrategy",
    "PhaseState",
    "PredictUnit",
    "Prepared",
    "Progress",
    "RankInfo",
    "RestoreOptions",
    "RunDir",
    "State",
    "Strategy",
    "TestUnit",
    "TorchCompileParams",
    "TrainStepResults",
    "TrainUnit",
    "World",
    "evaluate",
    "fit",
    "init_from_env",
    "launch",
    "predict",
    "prepare_ddp",
    "prepare_fsdp",
    "prepare_module",
    "seed",
    "spawn",
    "test",
    "train",
]

# Where each name lives, below `echelon.`; a test holds this against `__all__` and the imports above.
_HOMES = {
    "ActivationCheckpointParams": "parallel.parallelize",
    "ActivePhase": "loop.state",
    "AutoPredictUnit": "loop.auto_predict",
    "AutoUnit": "loop.auto",
    "ByteText": "data.text",
    "Callback": "loop.callback",
    "DDPStrategy": "parallel.ddp",
    "DistributedCheckpointSaver": "loop.callbacks.saver",
    "EchelonError": "contracts.errors",
    "EntryPoint": "loop.state",
    "EvalUnit": "loop.unit",
    "FSDPStrategy": "parallel.fsdp",
    "Loader": "data.loader",
    "Mean": "loop.metrics",
    "NOOPStrategy": "parallel.strategy",
    "PhaseState": "loop.state",
    "PredictUnit": "loop.unit",
    "Prepared": "parallel.strategy",
    "Progress": "loop.progress",
    "RankInfo": "contracts.rank",
    "RestoreOptions": "loop.callbacks.saver",
    "RunDir": "contracts.run_dir",
    "State": "loop.state",
    "Strategy": "parallel.strategy",
    "TestUnit": "loop.unit",
    "TorchCompileParams": "parallel.parallelize",
    "TrainStepResults": "loop.auto",
    "TrainUnit": "loop.unit",
    "World": "world.init",
    "evaluate": "loop.run",
    "fit": "loop.run",
    "init_from_env": "world.init",
    "launch": "launcher.function",
    "predict": "loop.run",
    "prepare_ddp": "parallel.parallelize",
    "prepare_fsdp": "parallel.parallelize",
    "prepare_module": "parallel.parallelize",
    "seed": "world.streams",
    "spawn": "launcher.function",
    "test": "loop.run",
    "train": "loop.run",
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
