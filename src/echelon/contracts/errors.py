"""The errors of echelon. Each also is the builtin exception it resembles, so that `except ValueError` keeps working.

EchelonError
 ├── UsageError (ValueError)              a value that cannot work, with the remedy
 │    └── LauncherEnvironmentError        half-set or contradictory RANK, WORLD_SIZE, ...
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
"""

from __future__ import annotations

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointInUseError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointUnreadableError",
    "CheckpointWriteError",
    "DataError",
    "DivergedError",
    "EchelonError",
    "LauncherEnvironmentError",
    "LossError",
    "NonFiniteError",
    "RankFailedError",
    "RankTimeoutError",
    "RanksDisagreeError",
    "UnitError",
    "UsageError",
    "require",
]


TOLD_BY = "This rank was told of the error by rank"  # in a note of such an error: launchers show the other rank's


class EchelonError(Exception):
    """Base of every error that echelon raises itself. Its text is written for the person who reads it."""


class UsageError(EchelonError, ValueError):
    """A value given by the user cannot work. The text names the value and the remedy."""


_SHOWN = 300  # characters of a value: enough to recognise it


def require(holds: bool, name: str, what: str, value: object, remedy: str = "") -> None:
    """Refuse a parameter unless `holds`: "`name` must be `what`, got `value`. `remedy`".

    Raises:
        UsageError: it does not hold.
    """
    if not holds:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        raise UsageError(f"{name} must be {what}, got {shown}.{remedy and ' '}{remedy}")


class LauncherEnvironmentError(UsageError):
    """The launcher's environment variables are half-set or contradict each other."""


class UnitError(EchelonError, TypeError):
    """A unit lacks a method or a base class that the entry point needs."""


class LossError(EchelonError, TypeError):
    """`compute_loss` returned something that has no gradient or is no scalar."""


class NonFiniteError(EchelonError, FloatingPointError):
    """Losses or gradients were inf or nan for too many updates in a row, or once where `detect_anomaly` was asked for."""


class DivergedError(EchelonError, ArithmeticError):
    """The loss left its bounds more often than was allowed, or nothing was there to go back to. It names step and samples."""


class DataError(EchelonError, RuntimeError):
    """A sample could not be read, or the worker that read it died or gave nothing in time. Names the sample and the worker."""


class RanksDisagreeError(EchelonError, RuntimeError):
    """Ranks hold different values for something that must be the same on all. Raised on every rank."""


class RankFailedError(EchelonError, RuntimeError):
    """A rank of a launched job raised, exited with an error or was killed.

    Attributes:
        rank: the rank that failed first.
        exit_code: its exit code; 128 + n if signal n ended it.
        logs: folder with the output of every rank, or None.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int, logs: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.logs = logs


class RankTimeoutError(RankFailedError, TimeoutError):
    """The ranks of a launched job did not finish in time. The text holds the stacks of all of them."""


class CheckpointError(EchelonError, RuntimeError):
    """A checkpoint could not be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was named."""


class CheckpointUnreadableError(CheckpointError, PermissionError):
    """There is a checkpoint, and the system does not let us read it. Not the same as none: nothing falls back from it."""


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is missing, cut off or changed. The text names it."""


class CheckpointMismatchError(CheckpointError):
    """A whole checkpoint of another model, optimizer, dataset or batch size. The text has a table of what changed."""


class CheckpointInUseError(CheckpointError):
    """Another live run writes into the same folder. The text says whose it is."""


class CheckpointWriteError(CheckpointError, OSError):
    """The storage refused a save: a full disk, a missing permission, an I/O error. Older checkpoints are as they were."""
