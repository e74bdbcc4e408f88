"""`lightning.pytorch.strategies`: those of DistributedDataParallel and FSDP, with torch's options."""

from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.fsdp import FSDPStrategy

__all__ = ["DDPStrategy", "FSDPStrategy"]
