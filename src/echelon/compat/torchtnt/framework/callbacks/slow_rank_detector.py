"""torchtnt.framework.callbacks.slow_rank_detector."""

from echelon.loop.callbacks.slow_rank import SlowRankDetector

__all__ = ["SlowRankDetector"]
