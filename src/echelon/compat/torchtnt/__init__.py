"""TorchTNT's names: `echelon.compat.torchtnt` for `torchtnt`. See docs/moving/torchtnt.md."""

from echelon.compat.names import register
from echelon.compat.torchtnt import framework, utils
from echelon.compat.torchtnt.absent import ALIASES, MODULES

__all__ = ["framework", "utils"]

register("torchtnt", __name__, {module: told for module, (_, told) in MODULES.items()}, ALIASES)
