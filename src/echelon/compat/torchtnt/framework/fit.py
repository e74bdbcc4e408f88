"""torchtnt.framework.fit."""

from echelon.loop.run import fit

__all__ = ["fit"]
