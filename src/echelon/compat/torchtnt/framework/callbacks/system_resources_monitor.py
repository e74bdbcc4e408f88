"""torchtnt.framework.callbacks.system_resources_monitor."""

from echelon.loop.callbacks.system_resources import SystemResourcesMonitor

__all__ = ["SystemResourcesMonitor"]
