"""The header of a tensor file in the safetensors layout: which tensors it holds, and where. Works without torch.

8 bytes  length of the header
header   JSON: name -> dtype, shape, data_offsets; "__metadata__": strings
data     the tensors, one after the other, without gaps
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from echelon.checkpoint import strict
from echelon.checkpoint.strict import Wrong, short

__all__ = ["FOREIGN_BYTES", "NAMES", "OTHERS", "SIZES", "Entry", "Header", "parse", "read", "size_of_all"]

# Dtypes that a checkpoint can hold, by torch's name, with the bytes of one element. Tensors of other dtypes are not saved.
SIZES = {
    "torch.bool": 1,
    "torch.uint8": 1,
    "torch.int8": 1,
    "torch.int16": 2,
    "torch.int32": 4,
    "torch.int64": 8,
    "torch.uint16": 2,
    "torch.uint32": 4,
    "torch.uint64": 8,
    "torch.float16": 2,
    "torch.bfloat16": 2,
    "torch.float32": 4,
    "torch.float64": 8,
    "torch.complex32": 4,
    "torch.complex64": 8,
    "torch.complex128": 16,
    "torch.float8_e4m3fn": 1,
    "torch.float8_e5m2": 1,
    "torch.float8_e4m3fnuz": 1,
    "torch.float8_e5m2fnuz": 1,
    "torch.float8_e8m0fnu": 1,
    "torch.float4_e2m1fn_x2": 1,
}
# Dtypes that a state may name, although no tensor in a checkpoint has them.
OTHERS = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)} | {
    f"torch.{name}"
    for name in ("qint8", "qint32", "quint8", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
}
# The names of dtypes in safetensors. Other dtypes are written as bytes; the checkpoint's index has their real dtype.
NAMES = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.int16": "I16",
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.uint16": "U16",
    "torch.uint32": "U32",
    "torch.uint64": "U64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
}
_TYPES = {name: dtype for dtype, name in NAMES.items()}
_METADATA = "__metadata__"
# Size limit of another program's header: that of the safetensors library.
FOREIGN_BYTES = 100_000_000
_MOST_DIMS = 64  # torch's own limit


class Entry(NamedTuple):
    """A tensor in a file. Its bytes are those from `begin` to `end`, counted from the end of the header."""

    dtype: str
    shape: list[int]
    begin: int
    end: int

    def holds(self, dtype: str, shape: list[int]) -> bool:
        """Whether this is how a tensor of that type and shape is written."""
        if dtype in NAMES:
            return self.dtype == dtype and self.shape == shape
        size = size_of_all(dtype, shape)
        return self.dtype == "torch.uint8" and self.shape == [size]


@dataclass(frozen=True)
class Header:
    """What a tensor file holds, and where.

    Attributes:
        start: where in the file the data begins.
    """

    start: int
    metadata: dict[str, str]
    entries: dict[str, Entry]


def size_of_all(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor."""
    return SIZES[dtype] * math.prod(shape)


def read(file: IO[bytes], size: int, most: int = strict.JSON_BYTES) -> Header:
    """Read the header of an open file of `size` bytes.

    Raises:
        Wrong: it is no tensor file, or its header promises more than the file has.
    """
    raw = file.read(8)
    if len(raw) < 8:
        raise Wrong(f"it has {size} bytes")
    (length,) = struct.unpack("<Q", raw)
    if length > min(size - 8, most):
        raise Wrong(f"its header must be at most {most} bytes in a file of {size}, got {length}")
    text = file.read(length)
    if len(text) != length:
        raise Wrong("it is cut off")
    return parse(text, size - 8 - length)


def parse(text: bytes, room: int) -> Header:
    """Parse and check the JSON of a header.

    Args:
        room: bytes of data after the header.
    """
    known = strict.mapping(strict.loads(text), "the header")
    metadata = strict.mapping(known.pop(_METADATA, {}), _METADATA)
    for name, value in metadata.items():
        strict.text(value, f"{_METADATA} {short(name)}")
    entries = {name: _entry(name, each) for name, each in known.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda each: each[1][2:]):
        if entry.begin != end:
            raise Wrong(f"{short(name)} must begin at byte {end}, got {entry.begin}")
        end = entry.end
    if end != room:
        raise Wrong(f"tensors of {end} bytes in {room}")
    return Header(8 + len(text), metadata, entries)


def _entry(name: str, entry: Any) -> Entry:
    strict.mapping(entry, short(name), {"dtype", "shape", "data_offsets"})
    dtype = _TYPES.get(strict.text(entry["dtype"], f"the type of {short(name)}"))
    if dtype is None:
        raise Wrong(f"{short(name)} has dtype {short(entry['dtype'])}, which this echelon does not know")
    shape = shape_of(entry["shape"], f"the shape of {short(name)}")
    begin, end = (strict.whole(n, f"an offset of {short(name)}") for n in strict.listing(entry["data_offsets"], "offsets", 2))
    if end - begin != size_of_all(dtype, shape):
        raise Wrong(f"{short(name)} of shape {short(shape)} has the bytes {begin} to {end}")
    return Entry(dtype, shape, begin, end)


def shape_of(value: Any, what: str) -> list[int]:
    dims = [strict.whole(n, what) for n in strict.listing(value, what)]
    if len(dims) > _MOST_DIMS:
        raise Wrong(f"{what} has {len(dims)} dimensions")
    return dims
