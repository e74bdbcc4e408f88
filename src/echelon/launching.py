"""Ways to start ranks for programs written for other systems, and `World`, a rank's place among all ranks."""

from echelon.launcher.dragon.group import CollectiveGroup
from echelon.launcher.dragon.system import Policy, System
from echelon.launcher.functions.launch import spawn
from echelon.world.init import World

__all__ = ["CollectiveGroup", "Policy", "System", "World", "spawn"]
