"""Which rank sees which sample, in which order, and where to resume."""

from echelon.data.loader import Loader
from echelon.data.options import LoaderOptions, StreamOptions
from echelon.data.packed import Packed, cu_seqlens
from echelon.data.stream import StreamLoader
from echelon.data.text import ByteText, split_files
from echelon.data.tokens import Tokens, TokenWriter, write_tokens
from echelon.data.views import Mixture, Weighted

__all__ = [
    "ByteText",
    "Loader",
    "LoaderOptions",
    "Mixture",
    "Packed",
    "StreamLoader",
    "StreamOptions",
    "TokenWriter",
    "Tokens",
    "Weighted",
    "cu_seqlens",
    "split_files",
    "write_tokens",
]
