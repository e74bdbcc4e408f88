"""The errors that echelon raises: each is an EchelonError and also subclasses the builtin exception that it resembles."""

from echelon.common.errors import *  # noqa: F403
from echelon.common.errors import __all__ as _names

__all__: list[str] = [name for name in _names if name.endswith("Error")]
