"""The errors of echelon. Each is also the builtin exception that it resembles, so `except ValueError` keeps working.

EchelonError
 ├── UsageError (ValueError)              a value that cannot work, with the remedy
  │    ├── LauncherEnvironmentError        incomplete or contradictory RANK, WORLD_SIZE, ...
  │    ├── CommandError · ScriptError · RunFolderError · ClusterError · LaunchError · DeviceError   starting ranks
  │    ├── LoaderError · DatasetError      loading data
  │    ├── LayoutError                     layout of the model over the ranks
 │    │    └── TensorParallelError · ContextParallelError · PipelineError · ExpertsError
  │    ├── PrecisionError · RecomputeError · CompileError · OptimizerError                          computing
  │    ├── LoopError · OwnLoopError · TrainerError · CallbackError · LoggerError                    training
  │    ├── CheckpointOptionError           options for checkpoints
  │    ├── ProveError · PlanError          options of prove and plan
  │    └── NotHereError                    a name of another library that echelon lacks
  ├── UnitError (TypeError)                a unit without a method that its entry point needs
 ├── LossError (TypeError)                a loss that cannot be differentiated
 ├── NonFiniteError (FloatingPointError)  losses or gradients that stay inf or nan
  ├── DivergedError (ArithmeticError)      a loss that diverged again and again, although the run rolled back
  ├── DataError (RuntimeError)             a sample that cannot be read, or a data worker that died
  ├── RanksDisagreeError (RuntimeError)    ranks hold different values of something that must be the same
 ├── RankFailedError (RuntimeError)       a rank raised, exited or was killed
  │    └── RankTimeoutError (TimeoutError) ranks did not finish in time; has the stacks of all ranks
 └── CheckpointError (RuntimeError)       a checkpoint that cannot be written or read
      ├── CheckpointNotFoundError (FileNotFoundError)
            ├── CheckpointUnreadableError (PermissionError)   it exists, but this process may not read it
            ├── CheckpointCorruptError          it differs from what was written
            ├── CheckpointMismatchError         it is whole, but belongs to another model, optimizer or dataset
      ├── CheckpointWriteError (OSError)  the storage refused a save: a full disk, a permission
      └── CheckpointInUseError            another live run writes into the folder

Each class has a `code`, which stays the same when messages change. `error_pages` has a page for each: `echelon explain CODE`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

__all__ = [
    "CallbackError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointInUseError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointOptionError",
    "CheckpointUnreadableError",
    "CheckpointWriteError",
    "ClusterError",
    "CommandError",
    "CompileError",
    "ContextParallelError",
    "DataError",
    "DatasetError",
    "DeviceError",
    "DivergedError",
    "EchelonError",
    "ExpertsError",
    "LaunchError",
    "LauncherEnvironmentError",
    "LayoutError",
    "LoaderError",
    "LoggerError",
    "LoopError",
    "LossError",
    "NonFiniteError",
    "NotHereError",
    "OptimizerError",
    "OwnLoopError",
    "PipelineError",
    "PlanError",
    "PrecisionError",
    "ProveError",
    "RankFailedError",
    "RankTimeoutError",
    "RanksDisagreeError",
    "RecomputeError",
    "RunFolderError",
    "ScriptError",
    "TensorParallelError",
    "TrainerError",
    "UnitError",
    "UsageError",
    "require",
]


TOLD_BY = "This rank was told of the error by rank"  # in a note of such an error: launchers show the other rank's own error


class EchelonError(Exception):
    """Base of every error that echelon raises. Its text is written for the user.

    Attributes:
        code: the kind of error, the same in every release: `echelon explain CODE` says more.
        fields: facts about the error by name, for programs; they can be pickled.
    """

    code = "E-ECHELON"

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args)
        self.fields = fields


class UsageError(EchelonError, ValueError):
    """An invalid value from the user. The text names the value and the remedy.

    For an argument, `fields` has "name", "expected" and "got".
    """

    code = "E-USAGE"


_SHOWN = 300  # characters of a value: enough to recognise it


def require(holds: bool, name: str, what: str, value: object, remedy: str = "", kind: type[UsageError] = UsageError) -> None:
    """Refuse a parameter unless `holds`: "`name` must be `what`, got `value`. `remedy`".

    Raises:
        UsageError: it does not hold.
    """
    if not holds:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise kind(f"{name} must be {what}, got {shown}.{remedy and ' '}{remedy}", name=name, expected=what, got=shown)


class LauncherEnvironmentError(UsageError):
    """The launcher's environment variables are incomplete or contradict each other."""

    code = "E-ENVIRONMENT"


class CommandError(UsageError):
    """An option or argument of a command."""

    code = "E-COMMAND"


class ScriptError(UsageError):
    """A script or module that a command should start."""

    code = "E-SCRIPT"


class RunFolderError(UsageError):
    """A run folder: its name, its owner, its contents."""

    code = "E-RUN-FOLDER"


class ClusterError(UsageError):
    """A job of Slurm or Dragon: its request, or the cluster's answer."""

    code = "E-CLUSTER"


class LaunchError(UsageError):
    """A function to run on ranks of this machine, or the number of ranks."""

    code = "E-LAUNCH"


class DeviceError(UsageError):
    """A device that this process cannot use."""

    code = "E-DEVICE"


class LoaderError(UsageError):
    """A loader, its batches, its workers, or how ranks divide it."""

    code = "E-LOADER"


class DatasetError(UsageError):
    """A dataset or its files."""

    code = "E-DATASET"


class LayoutError(UsageError):
    """The layout of a model over the ranks: an unknown word or axis, or a model that does not support it."""

    code = "E-LAYOUT"


class TensorParallelError(LayoutError):
    """A layer that cannot be split over ranks by its plan."""

    code = "E-TENSOR-PARALLEL"


class ContextParallelError(LayoutError):
    """A model, mask, position or loss that needs whole sequences."""

    code = "E-CONTEXT-PARALLEL"


class PipelineError(LayoutError):
    """A model that cannot be cut into stages, or that does what stages cannot do."""

    code = "E-PIPELINE"


class ExpertsError(LayoutError):
    """Experts that cannot be divided over ranks."""

    code = "E-EXPERTS"


class PrecisionError(UsageError):
    """The number types in which a model computes."""

    code = "E-PRECISION"


class RecomputeError(UsageError):
    """The choice of activations to compute again in the backward pass."""

    code = "E-RECOMPUTE"


class CompileError(UsageError):
    """The choice of modules for torch.compile."""

    code = "E-COMPILE"


class OptimizerError(UsageError):
    """An optimizer or scheduler, and the parameters that it holds."""

    code = "E-OPTIMIZER"


class LoopError(UsageError):
    """Training of a unit: its limits, its loaders, its options."""

    code = "E-LOOP"


class OwnLoopError(UsageError):
    """A loop of one's own: the order of prepare, epochs, window, backward and step."""

    code = "E-OWN-LOOP"


class TrainerError(UsageError):
    """A Trainer: its arguments, or values that cannot be sent to other processes."""

    code = "E-TRAINER"


class CallbackError(UsageError):
    """A callback, or the number that it watches."""

    code = "E-CALLBACK"


class LoggerError(UsageError):
    """A logged number, or its destination."""

    code = "E-LOGGER"


class CheckpointOptionError(UsageError):
    """Options for saving, keeping or restoring checkpoints."""

    code = "E-CHECKPOINT-OPTION"


class ProveError(UsageError):
    """A script or options that `prove` cannot try."""

    code = "E-PROVE"


class PlanError(UsageError):
    """A script or options that `plan` cannot handle."""

    code = "E-PLAN"


class NotHereError(UsageError):
    """A name of another library that `echelon.compat` covers, but echelon does not have."""

    code = "E-NOT-HERE"


class UnitError(EchelonError, TypeError):
    """A unit lacks a method or a base class that the entry point needs."""

    code = "E-UNIT"


class LossError(EchelonError, TypeError):
    """`compute_loss` returned a value that has no gradient or is not a scalar."""

    code = "E-LOSS"


class NonFiniteError(EchelonError, FloatingPointError):
    """Losses or gradients were inf or nan for too many updates in a row, or once with `detect_anomaly`."""

    code = "E-NOT-FINITE"


class DivergedError(EchelonError, ArithmeticError):
    """The loss left its bounds more often than allowed, or there was no checkpoint to roll back to. Names step and samples."""

    code = "E-DIVERGED"


class DataError(EchelonError, RuntimeError):
    """A sample could not be read, or its data worker died or did not answer in time. Names the sample and the worker."""

    code = "E-DATA"


class RanksDisagreeError(EchelonError, RuntimeError):
    """Ranks hold different values of something that must be the same on all. Raised on every rank."""

    code = "E-RANKS-DISAGREE"


class RankFailedError(EchelonError, RuntimeError):
    """A rank of a launched job raised, exited with an error or was killed.

    Attributes:
        rank: the rank that failed first.
        exit_code: its exit code; 128 + n if signal n ended it.
        logs: folder with the output of every rank, or None.
    """

    code = "E-RANK-FAILED"

    def __init__(self, message: str, *, rank: int, exit_code: int, logs: str | None = None) -> None:
        super().__init__(message, rank=rank, exit_code=exit_code)
        self.rank = rank
        self.exit_code = exit_code
        self.logs = logs

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), rank=self.rank, exit_code=self.exit_code, logs=self.logs), self.args, vars(self)


class RankTimeoutError(RankFailedError, TimeoutError):
    """The ranks of a launched job did not finish in time. The text holds the stacks of all of them."""

    code = "E-RANK-TIMEOUT"


class CheckpointError(EchelonError, RuntimeError):
    """A checkpoint could not be written or read."""

    code = "E-CHECKPOINT"


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given path."""

    code = "E-CHECKPOINT-NOT-FOUND"


class CheckpointUnreadableError(CheckpointError, PermissionError):
    """There is a checkpoint, but this process may not read it. Unlike a missing one, it does not fall back to an older one."""

    code = "E-CHECKPOINT-UNREADABLE"


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, cut off or changed. The text names it."""

    code = "E-CHECKPOINT-CORRUPT"


class CheckpointMismatchError(CheckpointError):
    """A whole checkpoint of another model, optimizer, dataset or batch size. The text has a table of what changed."""

    code = "E-CHECKPOINT-MISMATCH"


class CheckpointInUseError(CheckpointError):
    """Another live run writes into the same folder. The text says which one."""

    code = "E-CHECKPOINT-IN-USE"


class CheckpointWriteError(CheckpointError, OSError):
    """The storage refused a save: a full disk, a missing permission, an I/O error. Older checkpoints are unchanged."""

    code = "E-CHECKPOINT-WRITE"
