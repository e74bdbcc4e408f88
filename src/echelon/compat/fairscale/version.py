"""Of FairScale, whose names these are: programs ask."""

__all__ = ["__version__", "__version_tuple__"]

__version_tuple__ = (0, 4, 13)
__version__ = ".".join(map(str, __version_tuple__))
