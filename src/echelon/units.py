"""What surrounds units: the states and counts of a loop, averaged weights, units and loops of other phases."""

from echelon.loop.auto.auto import TrainStepResults
from echelon.loop.auto.averaged import AveragedWeights, SWALRParams, SWAParams
from echelon.loop.auto.prepared_unit import AutoPredictUnit
from echelon.loop.own.batch_window import OwnWindow
from echelon.loop.progress import Progress
from echelon.loop.run import test
from echelon.loop.state import ActivePhase, EntryPoint, PhaseState
from echelon.loop.unit import TestUnit

__all__ = [
    "ActivePhase",
    "AutoPredictUnit",
    "AveragedWeights",
    "EntryPoint",
    "OwnWindow",
    "PhaseState",
    "Progress",
    "SWALRParams",
    "SWAParams",
    "TestUnit",
    "TrainStepResults",
    "test",
]
