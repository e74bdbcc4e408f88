"""FairScale's names: `echelon.compat.fairscale` for `fairscale`. See docs/moving/fairscale.md."""

from echelon.compat.fairscale import absent

__version_tuple__ = (0, 4, 13)  # programs ask
__version__ = ".".join(map(str, __version_tuple__))

absent.register(__name__)
