"""echelon: train PyTorch models on many processes, from a laptop to a cluster, with the same script.

A loop of your own:
    prepare                     make model, optimizer and loaders parallel, in a loop of your own
    epochs                      the epochs of a run, from where a restored run stands
    window                      the context of one batch: forward pass, backward pass, optimizer step
    evaluating                  evaluation in such a loop

Units and loops:
    AutoUnit                    one module and its loss; precision, accumulation, clipping and layout are values
    UnitOptions                 what few units need besides, such as a schedule by epochs
    TrainUnit                   a training step of your own
    EvalUnit                    an evaluation step of your own
    PredictUnit                 a prediction step of your own
    train                       train a unit
    fit                         train, and evaluate now and then
    evaluate                    evaluate a unit
    predict                     predict with a unit
    Trainer                     start ranks from a plain script and train a unit in them
    State                       what a loop knows: phases, stop(), log()
    Callback                    hooks around all that a loop does
    EarlyStopping               stop when a number no longer improves
    Mean                        a weighted mean over steps and ranks
    count_tokens                how many labels of a batch count

Data:
    Loader                      batches of a dataset, by the size of the global batch
    StreamLoader                batches of an iterable dataset
    Tokens                      a dataset of token files
    Packed                      documents packed into rows of one length
    Mixture                     several datasets, mixed by weight

Layouts:
    Layout                      axes of ranks together: data, tensor, context, pipeline, expert
    DDPStrategy                 a copy of the model on each rank
    FSDPStrategy                parameters, gradients and optimizer state split over the ranks
    Strategy                    the base of layouts; write your own
    on_meta                     build a model without memory, to be filled where it is split
    gather                      the rows of all ranks, with gradients
    gathered_rows               where this rank's rows are among them
    all_mean                    a weighted mean over the ranks

Checkpoints:
    Checkpoints                 where a run is saved, when, and what stays; restored by itself
    DistributedCheckpointSaver  the callback that saves and restores
    save_pretrained             the whole weights as a model of transformers, or as one file

Evidence:
    prove                       does a script train what one process trains?
    Proof                       what prove found
    EchelonError                the base of all errors; they are in echelon.errors
    UsageError                  a value that cannot work, with the remedy
    CheckpointError             a checkpoint that cannot be written or read
    RankFailedError             a rank raised, exited or was killed

Launch:
    launch                      run a function on local ranks
    slurm_fn                    run a function as a Slurm job
    SlurmConfig                 what that job asks for
    init_from_env               pick the device and join the ranks
    RankInfo                    this process's place among the ranks
    rank                        its number
    world_size                  how many there are
    is_main                     whether it is rank 0
    seed                        seed all random number generators alike

More, by subject:
    echelon.nn                  experts, losses of large vocabularies, sequences in parts
    echelon.data                loaders' options, token files, views of datasets
    echelon.units               states and counts of loops, averaged weights, other phases
    echelon.callbacks           all callbacks, and the options of saving and restoring
    echelon.loggers             where numbers go besides the run's folder
    echelon.layouts             all layouts and their options, modules made parallel by hand
    echelon.errors              all errors
    echelon.evidence            what commands find in run folders, as values
    echelon.launching           ways to start ranks of other systems
    echelon.compat              the names of other libraries

Names are resolved when they are first used, so that `import echelon` costs nothing and the command line works without torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from echelon.contracts.version import __version__ as __version__

if TYPE_CHECKING:
    from echelon import callbacks as callbacks
    from echelon import compat as compat
    from echelon import data as data
    from echelon import errors as errors
    from echelon import evidence as evidence
    from echelon import launching as launching
    from echelon import layouts as layouts
    from echelon import loggers as loggers
    from echelon import nn as nn
    from echelon import units as units
    from echelon.common.errors import CheckpointError, EchelonError, RankFailedError, UsageError
    from echelon.compat.trainer.trainer import Trainer
    from echelon.contracts.rank import RankInfo
    from echelon.data.loader import Loader
    from echelon.data.packed import Packed
    from echelon.data.stream import StreamLoader
    from echelon.data.tokens import Tokens
    from echelon.data.views import Mixture
    from echelon.launcher.cluster.slurm_config import SlurmConfig
    from echelon.launcher.cluster.slurm_fn import slurm_fn
    from echelon.launcher.functions.run import launch
    from echelon.loop.auto.auto import AutoUnit
    from echelon.loop.auto.unit_options import UnitOptions
    from echelon.loop.callback import Callback
    from echelon.loop.callbacks import EarlyStopping
    from echelon.loop.checkpointing.checkpoints import Checkpoints
    from echelon.loop.checkpointing.save_pretrained import save_pretrained
    from echelon.loop.checkpointing.saver import DistributedCheckpointSaver
    from echelon.loop.loss import count_tokens
    from echelon.loop.own.prepare import epochs, evaluating, prepare, window
    from echelon.loop.records.metrics import Mean
    from echelon.loop.run import evaluate, fit, predict, train
    from echelon.loop.state import State
    from echelon.loop.unit import EvalUnit, PredictUnit, TrainUnit
    from echelon.parallel.composed import Layout
    from echelon.parallel.ddp.ddp import DDPStrategy
    from echelon.parallel.fsdp.fsdp import FSDPStrategy
    from echelon.parallel.meta.deferred import on_meta
    from echelon.parallel.over_ranks import all_mean, gather, gathered_rows
    from echelon.parallel.strategy import Strategy
    from echelon.prover.prove import Proof, prove
    from echelon.world.init import init_from_env, is_main, rank, world_size
    from echelon.world.rng import seed

__all__ = [
    "AutoUnit",
    "Callback",
    "CheckpointError",
    "Checkpoints",
    "DDPStrategy",
    "DistributedCheckpointSaver",
    "EarlyStopping",
    "EchelonError",
    "EvalUnit",
    "FSDPStrategy",
    "Layout",
    "Loader",
    "Mean",
    "Mixture",
    "Packed",
    "PredictUnit",
    "Proof",
    "RankFailedError",
    "RankInfo",
    "SlurmConfig",
    "State",
    "Strategy",
    "StreamLoader",
    "Tokens",
    "TrainUnit",
    "Trainer",
    "UnitOptions",
    "UsageError",
    "all_mean",
    "count_tokens",
    "epochs",
    "evaluate",
    "evaluating",
    "fit",
    "gather",
    "gathered_rows",
    "init_from_env",
    "is_main",
    "launch",
    "on_meta",
    "predict",
    "prepare",
    "prove",
    "rank",
    "save_pretrained",
    "seed",
    "slurm_fn",
    "train",
    "window",
    "world_size",
]

# Where each name lives, below `echelon.`; a test holds this against `__all__`, the imports and the page above.
_NAMES = {
    "common.errors": ["CheckpointError", "EchelonError", "RankFailedError", "UsageError"],
    "contracts.rank": ["RankInfo"],
    "data.loader": ["Loader"],
    "data.packed": ["Packed"],
    "data.stream": ["StreamLoader"],
    "data.tokens": ["Tokens"],
    "data.views": ["Mixture"],
    "launcher.cluster.slurm_config": ["SlurmConfig"],
    "launcher.cluster.slurm_fn": ["slurm_fn"],
    "launcher.functions.run": ["launch"],
    "loop.auto.auto": ["AutoUnit"],
    "loop.auto.unit_options": ["UnitOptions"],
    "loop.callback": ["Callback"],
    "loop.callbacks": ["EarlyStopping"],
    "loop.checkpointing.checkpoints": ["Checkpoints"],
    "loop.checkpointing.saver": ["DistributedCheckpointSaver"],
    "loop.loss": ["count_tokens"],
    "loop.records.metrics": ["Mean"],
    "loop.own.prepare": ["epochs", "evaluating", "prepare", "window"],
    "loop.checkpointing.save_pretrained": ["save_pretrained"],
    "loop.run": ["evaluate", "fit", "predict", "train"],
    "loop.state": ["State"],
    "compat.trainer.trainer": ["Trainer"],
    "loop.unit": ["EvalUnit", "PredictUnit", "TrainUnit"],
    "parallel.composed": ["Layout"],
    "parallel.ddp.ddp": ["DDPStrategy"],
    "parallel.meta.deferred": ["on_meta"],
    "parallel.fsdp.fsdp": ["FSDPStrategy"],
    "parallel.over_ranks": ["all_mean", "gather", "gathered_rows"],
    "parallel.strategy": ["Strategy"],
    "prover.prove": ["Proof", "prove"],
    "world.init": ["init_from_env", "is_main", "rank", "world_size"],
    "world.rng": ["seed"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

# Modules that a name may be asked of without an import of its own: `ech.nn.MoE`.
_MODULES = ("nn", "data", "units", "callbacks", "loggers", "layouts", "errors", "evidence", "launching", "compat")

# Names that were at the root, by the module that has them now.
_MOVED = {
    "callbacks": ["BestCheckpointConfig", "RestoreOptions", "RollBack", "SaveOptions"],
    "data": ["ByteText", "LoaderOptions", "StreamOptions", "TokenWriter", "Weighted", "cu_seqlens", "write_tokens"],
    "errors": ["DataError"],
    "evidence": ["RunDir"],
    "launching": ["CollectiveGroup", "Policy", "System", "World", "spawn"],
    "layouts": [
        "ActivationCheckpointParams",
        "DPStrategy",
        "DiLoCoStrategy",
        "Float8",
        "LocalSGDStrategy",
        "Precision",
        "Prepared",
        "TorchCompileParams",
        "data_axes",
        "prepare_ddp",
        "prepare_fsdp",
        "prepare_module",
        "tp_plan",
    ],
    "compat.torchtnt.utils.prepare_module": ["FSDP2Strategy", "NOOPStrategy", "prepare_fsdp2"],
    "loggers": ["get_logger"],
    "nn": [
        "GroupedExperts",
        "MoE",
        "auxiliary_loss",
        "balance_experts",
        "checkpoint_wrapper",
        "expert_loads",
        "linear_cross_entropy",
        "positions",
        "whole_sequence",
    ],
    "units": [
        "ActivePhase",
        "AutoPredictUnit",
        "AveragedWeights",
        "EntryPoint",
        "PhaseState",
        "Progress",
        "SWALRParams",
        "SWAParams",
        "TestUnit",
        "TrainStepResults",
        "test",
    ],
}
# Which make what has taken their place, and say so.
_OLDER = ("HSDPStrategy", "Parallel", "TPStrategy", "ZeROStrategy")
_NOW = {name: f"echelon.{home}.{name}" for home, names in _MOVED.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"echelon.{name}")
    home = "parallel.older_layouts" if name in _OLDER else _HOMES.get(name)
    if home is None:
        text = f"echelon.{name} is now {_NOW[name]}" if name in _NOW else f"module 'echelon' has no attribute {name!r}"
        # `from echelon import NAME` would hide an AttributeError behind a text of its own.
        imports = name in _NOW and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
        raise ImportError(text) if imports else AttributeError(text)
    value = getattr(importlib.import_module(f"echelon.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _print_uncaught(*exception: Any) -> None:
    from echelon.common.traces import print_uncaught  # only a script that fails pays for it

    print_uncaught(*exception)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _print_uncaught
