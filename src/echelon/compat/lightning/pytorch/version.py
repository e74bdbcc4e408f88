"""Of Lightning, whose names these are: programs ask."""

__all__ = ["__version__"]

__version__ = "2.6.6"
