"""Pipeline parallelism: ranks have other layers, and pass on activations.

`stages` says where a module is cut, `gates` runs the author's own forward pass for one stage, `walk` finds out what passes
between stages, `schedules` has the orders, which are torch's, `pipeline` the steps.
"""

from echelon.parallel.pipeline.pipeline import Pipeline
from echelon.parallel.pipeline.plan import Stages, cut_into_stages, plan_stages
from echelon.parallel.pipeline.schedules import SCHEDULES

__all__ = ["SCHEDULES", "Pipeline", "Stages", "cut_into_stages", "plan_stages"]
