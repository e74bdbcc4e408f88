"""Pipeline parallelism: each rank has some of the layers and sends activations to the next.

`stages` says where a module is cut, `gates` runs the author's own forward pass for one stage, `walk` finds out which tensors the
stages exchange, `schedules` builds torch's schedules, `pipeline` runs an update.
"""

from echelon.parallel.pipeline.pipeline import Pipeline
from echelon.parallel.pipeline.plan import Stages, cut_into_stages, plan_stages
from echelon.parallel.pipeline.schedules import SCHEDULES

__all__ = ["SCHEDULES", "Pipeline", "Stages", "cut_into_stages", "plan_stages"]
