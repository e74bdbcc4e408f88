"""torchtnt.framework.test, of its newer sources."""

from echelon.loop.run import test

__all__ = ["test"]
