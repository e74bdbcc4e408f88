"""`lightning.pytorch.strategies`: those of DistributedDataParallel and FSDP, with torch's options."""

from echelon.compat.older_options import FSDPStrategy
from echelon.parallel.ddp import DDPStrategy

__all__ = ["DDPStrategy", "FSDPStrategy"]
