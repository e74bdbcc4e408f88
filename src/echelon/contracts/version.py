"""The version of echelon: the one place. pyproject.toml reads it here, without importing anything."""

__all__ = ["__version__"]

__version__ = "0.1.0"
