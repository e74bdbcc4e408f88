"""torchtnt.utils.loggers.utils."""

from echelon.observe.loggers.logger import scalar_to_float

__all__ = ["scalar_to_float"]
