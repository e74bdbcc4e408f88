"""`lightning.pytorch.strategies`: those of DistributedDataParallel and FSDP, with torch's options."""

from typing import Any

from echelon.compat.lightning.pytorch.successors import STRATEGIES, missing
from echelon.compat.older_options import FSDPStrategy
from echelon.parallel.ddp.ddp import DDPStrategy

__all__ = ["DDPStrategy", "FSDPStrategy"]


def __getattr__(name: str) -> Any:
    return missing(__name__, name, STRATEGIES)
