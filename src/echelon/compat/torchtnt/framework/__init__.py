"""torchtnt.framework: units, loops, state and callbacks, by their names there."""

from echelon.compat.torchtnt.absent import absent
from echelon.compat.torchtnt.framework.auto_unit import AutoPredictUnit, AutoUnit
from echelon.compat.torchtnt.framework.callback import Callback
from echelon.compat.torchtnt.framework.evaluate import evaluate
from echelon.compat.torchtnt.framework.fit import fit
from echelon.compat.torchtnt.framework.predict import predict
from echelon.compat.torchtnt.framework.state import ActivePhase, EntryPoint, PhaseState, State
from echelon.compat.torchtnt.framework.train import train
from echelon.compat.torchtnt.framework.unit import (
    EvalUnit,
    PredictUnit,
    TEvalUnit,
    TPredictUnit,
    TrainUnit,
    TTrainUnit,
)

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

__getattr__ = absent("framework")
