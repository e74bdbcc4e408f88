"""torchtnt.framework: units, loops, state and callbacks, under TorchTNT's names."""

from echelon.compat.torchtnt.framework.auto_unit import AutoPredictUnit, AutoUnit
from echelon.compat.torchtnt.framework.loops import evaluate, fit, predict, train
from echelon.compat.torchtnt.framework.state import ActivePhase, EntryPoint, PhaseState, State
from echelon.compat.torchtnt.framework.unit import (
    EvalUnit,
    PredictUnit,
    TEvalUnit,
    TPredictUnit,
    TrainUnit,
    TTrainUnit,
)
from echelon.loop.callback import Callback

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
    "evaluate",
    "fit",
    "predict",
    "train",
]
