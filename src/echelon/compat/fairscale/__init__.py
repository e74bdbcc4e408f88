"""FairScale's names: `from fairscale.x import y` becomes `from echelon.compat.fairscale.x import y`. See docs/migrating.md."""

from echelon.compat.fairscale import absent

__version__ = "0.4.13"  # of FairScale, whose names these are: programs ask

absent.register(__name__)
