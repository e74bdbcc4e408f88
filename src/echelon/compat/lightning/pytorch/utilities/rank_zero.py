"""`lightning.pytorch.utilities.rank_zero`."""

from echelon.compat.lightning.pytorch.utilities import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn

__all__ = ["rank_zero_deprecation", "rank_zero_info", "rank_zero_only", "rank_zero_warn"]
