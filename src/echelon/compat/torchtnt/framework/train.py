"""torchtnt.framework.train."""

from echelon.loop.run import train

__all__ = ["train"]
