"""`ShardedDataParallel`, which is echelon's own."""

from __future__ import annotations

from echelon.parallel.sharded_ddp import ShardedDataParallel

__all__ = ["ShardedDataParallel"]
