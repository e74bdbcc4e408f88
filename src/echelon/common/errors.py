"""The errors of echelon. Each also is the builtin exception it resembles, so that `except ValueError` keeps working.

EchelonError
 ├── UsageError (ValueError)              a value that cannot work, with the remedy
 │    ├── LauncherEnvironmentError        half-set or contradictory RANK, WORLD_SIZE, ...
 │    ├── CommandError · ScriptError · RunFolderError · ClusterError · LaunchError · DeviceError   what starts ranks
 │    ├── LoaderError · DatasetError      what feeds them
 │    ├── LayoutError                     how the model lies over the ranks
 │    │    └── TensorParallelError · ContextParallelError · PipelineError · ExpertsError
 │    ├── PrecisionError · RecomputeError · CompileError · OptimizerError                          how it computes
 │    ├── LoopError · OwnLoopError · TrainerError · CallbackError · LoggerError                    how it is trained
 │    ├── CheckpointOptionError           how it is saved
 │    ├── ProveError · PlanError          what is asked of its evidence
 │    └── NotHereError                    what a library has under its name, and echelon has not
 ├── UnitError (TypeError)                a unit without what its entry point needs
 ├── LossError (TypeError)                a loss that cannot be differentiated
 ├── NonFiniteError (FloatingPointError)  losses or gradients that stay inf or nan
 ├── DivergedError (ArithmeticError)      a loss that grew or was lost again and again, in spite of going back
 ├── DataError (RuntimeError)             a sample that cannot be read, or a worker that died reading
 ├── RanksDisagreeError (RuntimeError)    ranks hold different values for what must be one
 ├── RankFailedError (RuntimeError)       a rank raised, exited or was killed
 │    └── RankTimeoutError (TimeoutError) ranks did not finish in time; holds the stacks of all
 └── CheckpointError (RuntimeError)       a checkpoint that cannot be written or read
      ├── CheckpointNotFoundError (FileNotFoundError)
      ├── CheckpointUnreadableError (PermissionError)   it is there, and the system does not let us read it
      ├── CheckpointCorruptError          it is not what was written
      ├── CheckpointMismatchError         it is whole, and belongs to another model, optimizer or data
      ├── CheckpointWriteError (OSError)  the storage refused a save: a full disk, a permission
      └── CheckpointInUseError            another live run writes into the folder

Each class has a `code`, which stays as it is when words change. `error_pages` has a page for each: `echelon explain CODE`.
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


TOLD_BY = "This rank was told of the error by rank"  # in a note of such an error: launchers show the other rank's


class EchelonError(Exception):
    """Base of every error that echelon raises itself. Its text is written for the person who reads it.

    Attributes:
        code: what kind of error it is, the same in every release: `echelon explain CODE` says more.
        fields: facts of it by name, for programs; they can be pickled.
    """

    code = "E-ECHELON"

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args)
        self.fields = fields


class UsageError(EchelonError, ValueError):
    """A value given by the user cannot work. The text names the value and the remedy; so do `fields` where it is an argument's:
    "name", "expected", "got".
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
    """The launcher's environment variables are half-set or contradict each other."""

    code = "E-ENVIRONMENT"


class CommandError(UsageError):
    """An option or argument of a command."""

    code = "E-COMMAND"


class ScriptError(UsageError):
    """The program that a command was asked to start."""

    code = "E-SCRIPT"


class RunFolderError(UsageError):
    """The folder of a run: its name, its owner, what lies in it."""

    code = "E-RUN-FOLDER"


class ClusterError(UsageError):
    """A job of Slurm or Dragon: what it asks for, and what the cluster says."""

    code = "E-CLUSTER"


class LaunchError(UsageError):
    """A function that ranks of this machine should run, and how many of them."""

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
    """How a model lies over the ranks: a word, an axis, or a model that cannot lie so."""

    code = "E-LAYOUT"


class TensorParallelError(LayoutError):
    """A layer that cannot be split over ranks as its plan says."""

    code = "E-TENSOR-PARALLEL"


class ContextParallelError(LayoutError):
    """A model, mask, position or loss that needs whole sequences."""

    code = "E-CONTEXT-PARALLEL"


class PipelineError(LayoutError):
    """A model that cannot be cut into stages, or does what stages cannot."""

    code = "E-PIPELINE"


class ExpertsError(LayoutError):
    """Experts that cannot be divided over ranks."""

    code = "E-EXPERTS"


class PrecisionError(UsageError):
    """The number types of a model's computing."""

    code = "E-PRECISION"


class RecomputeError(UsageError):
    """Which activations are computed again in the backward pass."""

    code = "E-RECOMPUTE"


class CompileError(UsageError):
    """What torch.compile should compile."""

    code = "E-COMPILE"


class OptimizerError(UsageError):
    """An optimizer or scheduler, and the parameters that it holds."""

    code = "E-OPTIMIZER"


class LoopError(UsageError):
    """A unit's training: its limits, its loaders, its options."""

    code = "E-LOOP"


class OwnLoopError(UsageError):
    """A loop of one's own: the order of prepare, epochs, window, backward and step."""

    code = "E-OWN-LOOP"


class TrainerError(UsageError):
    """A Trainer: its arguments, or what cannot be sent to other processes."""

    code = "E-TRAINER"


class CallbackError(UsageError):
    """A callback, or the number that it watches."""

    code = "E-CALLBACK"


class LoggerError(UsageError):
    """A logged number, or where it goes."""

    code = "E-LOGGER"


class CheckpointOptionError(UsageError):
    """How checkpoints are saved, kept or restored."""

    code = "E-CHECKPOINT-OPTION"


class ProveError(UsageError):
    """What `prove` cannot try."""

    code = "E-PROVE"


class PlanError(UsageError):
    """What `plan` cannot know."""

    code = "E-PLAN"


class NotHereError(UsageError):
    """What another library has under a name that echelon answers to, and echelon has not."""

    code = "E-NOT-HERE"


class UnitError(EchelonError, TypeError):
    """A unit lacks a method or a base class that the entry point needs."""

    code = "E-UNIT"


class LossError(EchelonError, TypeError):
    """`compute_loss` returned something that has no gradient or is no scalar."""

    code = "E-LOSS"


class NonFiniteError(EchelonError, FloatingPointError):
    """Losses or gradients were inf or nan for too many updates in a row, or once where `detect_anomaly` was asked for."""

    code = "E-NOT-FINITE"


class DivergedError(EchelonError, ArithmeticError):
    """The loss left its bounds more often than was allowed, or nothing was there to go back to. It names step and samples."""

    code = "E-DIVERGED"


class DataError(EchelonError, RuntimeError):
    """A sample could not be read, or the worker that read it died or gave nothing in time. Names the sample and the worker."""

    code = "E-DATA"


class RanksDisagreeError(EchelonError, RuntimeError):
    """Ranks hold different values for something that must be the same on all. Raised on every rank."""

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
    """There is no checkpoint at the path that was named."""

    code = "E-CHECKPOINT-NOT-FOUND"


class CheckpointUnreadableError(CheckpointError, PermissionError):
    """There is a checkpoint, and the system does not let us read it. Not the same as none: nothing falls back from it."""

    code = "E-CHECKPOINT-UNREADABLE"


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, cut off or changed. The text names it."""

    code = "E-CHECKPOINT-CORRUPT"


class CheckpointMismatchError(CheckpointError):
    """A whole checkpoint of another model, optimizer, dataset or batch size. The text has a table of what changed."""

    code = "E-CHECKPOINT-MISMATCH"


class CheckpointInUseError(CheckpointError):
    """Another live run writes into the same folder. The text says whose it is."""

    code = "E-CHECKPOINT-IN-USE"


class CheckpointWriteError(CheckpointError, OSError):
    """The storage refused a save: a full disk, a missing permission, an I/O error. Older checkpoints are as they were."""

    code = "E-CHECKPOINT-WRITE"
