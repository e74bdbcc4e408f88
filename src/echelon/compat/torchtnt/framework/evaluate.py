"""torchtnt.framework.evaluate."""

from echelon.loop.run import evaluate

__all__ = ["evaluate"]
