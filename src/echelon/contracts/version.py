"""The version of echelon, defined here alone. pyproject.toml reads it without importing anything."""

__all__ = ["__version__"]

__version__ = "0.1.0"
