"""torchtnt.framework: units, loops, state and callbacks, by their names there."""

from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.framework import callbacks
from echelon.compat.torchtnt.framework.auto_unit import AutoPredictUnit, AutoUnit
from echelon.compat.torchtnt.framework.loops import fit, train
from echelon.compat.torchtnt.framework.unit import (
    EvalUnit,
    PredictUnit,
    TEvalUnit,
    TPredictUnit,
    TrainUnit,
    TTrainUnit,
)
from echelon.loop.callback import Callback
from echelon.loop.run import evaluate, predict
from echelon.loop.state import ActivePhase, EntryPoint, PhaseState, State

__all__ = [
    "ActivePhase",
    "AutoPredictUnit",
    "AutoUnit",
    "Callback",
    "EntryPoint",
    "EvalUnit",
    "PhaseState",
    "PredictUnit",
    "State",
    "TEvalUnit",
    "TPredictUnit",
    "TTrainUnit",
    "TrainUnit",
    "callbacks",
    "evaluate",
    "fit",
    "predict",
    "train",
]

TPhaseState = PhaseState  # of torchtnt.framework.state

__getattr__ = absent(__name__)
