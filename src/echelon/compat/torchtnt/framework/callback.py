"""torchtnt.framework.callback."""

from echelon.loop.callback import Callback

__all__ = ["Callback"]
