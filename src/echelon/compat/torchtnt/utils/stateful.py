"""torchtnt.utils.stateful: what can be saved."""

from echelon.compat.torchtnt.absent import absent
from echelon.loop.unit import Stateful

__all__ = ["Stateful"]

__getattr__ = absent("utils.stateful")
