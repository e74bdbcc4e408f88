"""FairScale's names: `echelon.compat.fairscale` for `fairscale`. See docs/moving/fairscale.md."""

from echelon.compat.fairscale import absent, nn, optim
from echelon.compat.fairscale.absent import ALIASES, INSTEAD
from echelon.compat.names import complete, register

__all__ = ["nn", "optim"]

__version_tuple__ = (0, 4, 13)  # programs check it
__version__ = ".".join(map(str, __version_tuple__))

register("fairscale", __name__, INSTEAD, ALIASES)
complete(__name__, absent.absent)
