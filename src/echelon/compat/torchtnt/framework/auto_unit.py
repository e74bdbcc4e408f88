"""torchtnt.framework.auto_unit."""

from echelon.loop.auto import AutoUnit, TrainStepResults
from echelon.loop.auto_predict import AutoPredictUnit
from echelon.loop.averaged import SWALRParams, SWAParams

__all__ = ["AutoPredictUnit", "AutoUnit", "SWALRParams", "SWAParams", "TrainStepResults"]
