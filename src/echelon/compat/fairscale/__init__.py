"""FairScale's names: `from fairscale.x import y` becomes `from echelon.compat.fairscale.x import y`. See docs/migrating.md."""

from echelon.compat.fairscale import absent
from echelon.compat.fairscale.version import __version__ as __version__

absent.register(__name__)
