"""torchtnt.framework.callbacks.module_summary."""

from echelon.loop.callbacks.summary import ModuleSummary

__all__ = ["ModuleSummary"]
