"""`lightning.pytorch.utilities.exceptions`: what a Trainer raises of a value that cannot work."""

from echelon.common.errors import UsageError as MisconfigurationException

__all__ = ["MisconfigurationException"]
