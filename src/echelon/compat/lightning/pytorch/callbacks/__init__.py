"""`lightning.pytorch.callbacks`: those that have a meaning here; the others say what to use."""

from typing import Any

from echelon.compat.lightning.pytorch.absent import CALLBACKS, DISPLAYS, missing
from echelon.compat.lightning.pytorch.callbacks.base import Callback, LambdaCallback
from echelon.compat.lightning.pytorch.callbacks.early_stopping import EarlyStopping
from echelon.compat.lightning.pytorch.callbacks.learning_rate_monitor import LearningRateMonitor
from echelon.compat.lightning.pytorch.callbacks.model_checkpoint import Checkpoint, ModelCheckpoint

__all__ = [  # noqa: PLE0604  # names of a table
    "Callback",
    "Checkpoint",
    "Display",
    "EarlyStopping",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    *DISPLAYS,
]


class Display(Callback):
    """Taken with any arguments, and shows nothing. Hooks of a subclass of it run.

    Attributes:
        in_place: what echelon shows.
    """

    in_place = ""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__}.{name}: it shows nothing here. Instead: {self.in_place}.")


for _name, _shown in DISPLAYS.items():
    globals()[_name] = type(_name, (Display,), {"__module__": __name__, "__doc__": Display.__doc__, "in_place": _shown})


def __getattr__(name: str) -> Any:
    return missing(__name__, name, CALLBACKS)
