"""`fairscale.optim`: an optimizer whose state is divided over the ranks, and the scaler that goes with it."""

from echelon.compat.fairscale.grad_scaler import ShardedGradScaler
from echelon.compat.fairscale.oss import OSS

__all__ = ["OSS", "ShardedGradScaler"]
