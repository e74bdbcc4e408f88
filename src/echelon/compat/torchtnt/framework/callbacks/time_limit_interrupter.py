"""torchtnt.framework.callbacks.time_limit_interrupter."""

from echelon.loop.callbacks.time_limit import TimeLimitInterrupter

__all__ = ["TimeLimitInterrupter"]
