"""echelon: train PyTorch models on many processes, from a laptop to a cluster, with the same script."""

from __future__ import annotations

import importlib
import re
import sys
from typing import TYPE_CHECKING, Any

from echelon.contracts.version import __version__ as __version__

# The public names: what each is for, and where below `echelon.` it lives. They are imported when they are first used, so that
# `import echelon` costs nothing and the command line works without torch. Type checkers read the imports further below instead.
_PAGE = """
A loop of your own:
    prepare                     make model, optimizer and loaders parallel, in a loop of your own  [loop.own.prepare]
    epochs                      the epochs of a run; a restored run continues at its own  [loop.own.prepare]
    window                      the context of one batch: forward pass, backward pass, optimizer step  [loop.own.prepare]
    evaluating                  evaluation in such a loop  [loop.own.prepare]

Units and loops:
    AutoUnit                    one module and its loss; precision, accumulation, clipping and layout are values  [loop.auto.auto]
    UnitOptions                 rarer options of a unit, such as a schedule by epochs  [loop.auto.unit_options]
    TrainUnit                   a training step of your own  [loop.unit]
    EvalUnit                    an evaluation step of your own  [loop.unit]
    PredictUnit                 a prediction step of your own  [loop.unit]
    train                       train a unit  [loop.run]
    fit                         train, and evaluate now and then  [loop.run]
    evaluate                    evaluate a unit  [loop.run]
    predict                     predict with a unit  [loop.run]
    Trainer                     start ranks from a plain script and train a unit in them  [compat.trainer.trainer]
    State                       what a loop knows: phases, stop(), log()  [loop.state]
    Callback                    hooks at each point of a loop  [loop.callback]
    EarlyStopping               stop when a number no longer improves  [loop.callbacks.early_stopping]
    Mean                        a weighted mean over steps and ranks  [loop.records.metrics]
    count_tokens                how many labels of a batch count  [loop.samples]

Data:
    Loader                      batches of a dataset, by the size of the global batch  [data.loader]
    StreamLoader                batches of an iterable dataset  [data.stream]
    Tokens                      a dataset of token files  [data.tokens]
    Packed                      documents packed into rows of one length  [data.packed]
    Mixture                     several datasets, mixed by weight  [data.views]

Layouts:
    Layout                      axes of ranks together: data, tensor, context, pipeline, expert  [parallel.composed]
    DDPStrategy                 a copy of the model on each rank  [parallel.ddp.ddp]
    FSDPStrategy                parameters, gradients and optimizer state split over the ranks  [parallel.fsdp.fsdp]
    Strategy                    the base of layouts; write your own  [parallel.strategy]
    on_meta                     build a model without memory; its shards are filled later  [parallel.meta.deferred]
    gather                      the rows of all ranks, with gradients  [parallel.over_ranks]
    gathered_rows               where this rank's rows are in the result of gather  [parallel.over_ranks]
    all_mean                    a weighted mean over the ranks  [parallel.over_ranks]

Checkpoints:
    Checkpoints                 where and when to save a run, and what to keep; restores it  [loop.checkpointing.checkpoints]
    DistributedCheckpointSaver  the callback that saves and restores  [loop.checkpointing.saver]
    save_pretrained             write the whole weights, as a transformers model or one file  [loop.checkpointing.save_pretrained]

Evidence:
    prove                       does a script train what one process trains?  [prover.prove]
    Proof                       what prove found  [prover.prove]
    plan                        will it fit, how fast, and what will it cost?  [planner.plan]
    Plan                        what plan found  [planner.plan]
    module_summary              a model by its submodules: parameters, FLOPs, shapes, times  [planner.summary]
    EchelonError                the base of all errors; they are in echelon.errors  [common.errors]
    UsageError                  a value that cannot work, with the remedy  [common.errors]
    CheckpointError             a checkpoint that cannot be written or read  [common.errors]
    RankFailedError             a rank raised, exited or was killed  [common.errors]

Launch:
    launch                      run a function on local ranks  [launcher.functions.launch]
    slurm_fn                    run a function as a Slurm job  [launcher.cluster.slurm_fn]
    SlurmConfig                 the resources of such a job  [launcher.cluster.slurm_config]
    init_from_env               pick the device and join the ranks  [world.init]
    RankInfo                    this process's place among the ranks  [contracts.rank]
    rank                        this process's rank  [world.init]
    world_size                  the number of ranks  [world.init]
    is_main                     whether it is rank 0  [world.init]
    seed                        seed all random number generators alike  [world.rng]

More, by subject:
    echelon.nn                  experts, losses of large vocabularies, sequences split over ranks
    echelon.data                loaders' options, token files, views of datasets
    echelon.units               states and counts of loops, averaged weights, other phases
    echelon.callbacks           all callbacks, and the options of saving and restoring
    echelon.loggers             destinations of numbers besides the run's folder
    echelon.layouts             all layouts and their options, modules made parallel by hand
    echelon.errors              all errors
    echelon.evidence            what commands find in run folders, as values
    echelon.launching           ways to start ranks of other systems
    echelon.compat              the names of other libraries
"""
_HOMES = dict(re.findall(r"^    (\w+) .*  \[([\w.]+)\]$", _PAGE, re.M))
_MODULES = tuple(re.findall(r"^    echelon\.(\w+) ", _PAGE, re.M))
__all__ = sorted(_HOMES)  # noqa: PLE0605
__doc__ = f"{__doc__}\n" + re.sub(r"  \[.*", "", _PAGE)

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
    from echelon.common.errors import CheckpointError as CheckpointError
    from echelon.common.errors import EchelonError as EchelonError
    from echelon.common.errors import RankFailedError as RankFailedError
    from echelon.common.errors import UsageError as UsageError
    from echelon.compat.trainer.trainer import Trainer as Trainer
    from echelon.contracts.rank import RankInfo as RankInfo
    from echelon.data.loader import Loader as Loader
    from echelon.data.packed import Packed as Packed
    from echelon.data.stream import StreamLoader as StreamLoader
    from echelon.data.tokens import Tokens as Tokens
    from echelon.data.views import Mixture as Mixture
    from echelon.launcher.cluster.slurm_config import SlurmConfig as SlurmConfig
    from echelon.launcher.cluster.slurm_fn import slurm_fn as slurm_fn
    from echelon.launcher.functions.launch import launch as launch
    from echelon.loop.auto.auto import AutoUnit as AutoUnit
    from echelon.loop.auto.unit_options import UnitOptions as UnitOptions
    from echelon.loop.callback import Callback as Callback
    from echelon.loop.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from echelon.loop.checkpointing.checkpoints import Checkpoints as Checkpoints
    from echelon.loop.checkpointing.save_pretrained import save_pretrained as save_pretrained
    from echelon.loop.checkpointing.saver import DistributedCheckpointSaver as DistributedCheckpointSaver
    from echelon.loop.own.prepare import epochs as epochs
    from echelon.loop.own.prepare import evaluating as evaluating
    from echelon.loop.own.prepare import prepare as prepare
    from echelon.loop.own.prepare import window as window
    from echelon.loop.records.metrics import Mean as Mean
    from echelon.loop.run import evaluate as evaluate
    from echelon.loop.run import fit as fit
    from echelon.loop.run import predict as predict
    from echelon.loop.run import train as train
    from echelon.loop.samples import count_tokens as count_tokens
    from echelon.loop.state import State as State
    from echelon.loop.unit import EvalUnit as EvalUnit
    from echelon.loop.unit import PredictUnit as PredictUnit
    from echelon.loop.unit import TrainUnit as TrainUnit
    from echelon.parallel.composed import Layout as Layout
    from echelon.parallel.ddp.ddp import DDPStrategy as DDPStrategy
    from echelon.parallel.fsdp.fsdp import FSDPStrategy as FSDPStrategy
    from echelon.parallel.meta.deferred import on_meta as on_meta
    from echelon.parallel.over_ranks import all_mean as all_mean
    from echelon.parallel.over_ranks import gather as gather
    from echelon.parallel.over_ranks import gathered_rows as gathered_rows
    from echelon.parallel.strategy import Strategy as Strategy
    from echelon.planner.plan import Plan as Plan
    from echelon.planner.plan import plan as plan
    from echelon.planner.summary import module_summary as module_summary
    from echelon.prover.prove import Proof as Proof
    from echelon.prover.prove import prove as prove
    from echelon.world.init import init_from_env as init_from_env
    from echelon.world.init import is_main as is_main
    from echelon.world.init import rank as rank
    from echelon.world.init import world_size as world_size
    from echelon.world.rng import seed as seed

# Former names of this module that no module above has.
_OLDER = dict.fromkeys(("FSDP2Strategy", "NOOPStrategy", "prepare_fsdp2"), "compat.torchtnt.utils.prepare_module")
_TRANSLATED = ("HSDPStrategy", "Parallel", "TPStrategy", "ZeROStrategy")  # each warns and makes the layout that replaced it


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"echelon.{name}")
    home = "parallel.layouts" if name in _TRANSLATED else _HOMES.get(name)
    if home is None:
        now = _place(name)
        text = f"echelon.{name} is now echelon.{now}.{name}" if now else f"module 'echelon' has no attribute {name!r}"
        # `from echelon import NAME` replaces the text of an AttributeError, but not that of an ImportError.
        imports = now and sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
        raise ImportError(text) if imports else AttributeError(text)
    value = getattr(importlib.import_module(f"echelon.{home}"), name)
    globals()[name] = value
    return value


def _place(name: str) -> str | None:
    """The module that has a name that the root lacks; None if none has."""
    if name.startswith("_"):
        return None
    has = (each for each in _MODULES if name in getattr(importlib.import_module(f"echelon.{each}"), "__all__", ()))
    return _OLDER.get(name) or next(has, None)


def __dir__() -> list[str]:
    return __all__


def _print_uncaught(*exception: Any) -> None:
    from echelon.common.traces import print_uncaught  # imported only when a script fails

    print_uncaught(*exception)


if sys.excepthook is sys.__excepthook__:
    sys.excepthook = _print_uncaught
