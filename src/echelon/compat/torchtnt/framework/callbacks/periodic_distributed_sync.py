"""torchtnt.framework.callbacks.periodic_distributed_sync."""

from echelon.loop.callbacks.sync import PeriodicDistributedSync

__all__ = ["PeriodicDistributedSync"]
