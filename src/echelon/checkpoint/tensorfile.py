"""Tensor files in the safetensors layout: written as a stream with the checksums of their blocks, read by mapping them.

    8 bytes  length of the header
    header   JSON: name -> dtype, shape, data_offsets; "__metadata__": strings
    data     the tensors, one after the other

A type that safetensors has no name for is written as bytes; the checkpoint's index has its real type.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from echelon.checkpoint.manifest import BLOCK_BYTES
from echelon.checkpoint.place import Place
from echelon.contracts.errors import CheckpointCorruptError

__all__ = ["Source", "Span", "TensorFile", "as_bytes", "assemble", "write", "write_text"]

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_PIECE_BYTES = 8 << 20


class Span(NamedTuple):
    """Values that lie in a file as they are to be written."""

    path: Path
    offset: int
    size: int


# Name, type, shape, and what gives the values when their turn comes.
Source = tuple[str, torch.dtype, Iterable[int], Callable[[], torch.Tensor | Span]]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's values in host memory, as they are written."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write(path: Place, sources: Iterable[Source], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """Write tensors one by one; to the disk, if it is a local file. Returns its entry in the manifest: size and checksums.

    Raises:
        FileExistsError: nothing is ever overwritten.
    """
    sources = list(sources)
    text, sizes = _header(sources, metadata)
    sums = _Sums()
    with path.open("xb" if isinstance(path, Path) else "wb") as file:
        file.write(text)
        sums.add(memoryview(text))
        for (name, _, _, values), size in zip(sources, sizes, strict=True):
            value = values()
            assert isinstance(value, torch.Tensor)
            data = as_bytes(value)
            assert len(data) == size, name
            for at in range(0, size, _PIECE_BYTES):
                piece = data[at : at + _PIECE_BYTES]
                file.write(piece)
                sums.add(piece)
        file.flush()
        if isinstance(path, Path):
            os.fsync(file.fileno())
    return {"size": sums.size, "crc32": sums.finished()}


def assemble(path: Path, sources: Iterable[Source], metadata: dict[str, str] | None = None) -> None:
    """As `write`, without checksums: what lies in a file as it should is copied by the system."""
    sources = list(sources)
    text, _ = _header(sources, metadata)
    with open(path, "xb", buffering=0) as file:
        _write_all(file, memoryview(text))
        for _, _, _, values in sources:
            value = values()
            if isinstance(value, Span):
                _send(file, value)
            else:
                _write_all(file, as_bytes(value))
        os.fsync(file.fileno())


def _write_all(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data[: 1 << 30]) :]


def _send(file: Any, span: Span) -> None:
    with open(span.path, "rb") as source:
        done = 0
        while done < span.size:
            sent = os.sendfile(file.fileno(), source.fileno(), span.offset + done, min(span.size - done, 1 << 30))
            if sent == 0:
                raise CheckpointCorruptError(f"{span.path} is cut off.")
            done += sent


def _header(sources: list[Source], metadata: dict[str, str] | None) -> tuple[bytes, list[int]]:
    """The bytes before the data, and each tensor's size."""
    sizes = []
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, dtype, shape, _ in sources:
        dims = list(shape)
        size = dtype.itemsize
        for dim in dims:
            size *= dim
        known = dtype in _NAMES
        entry = {"dtype": _NAMES[dtype] if known else "U8", "shape": dims if known else [size]}
        header[name] = {**entry, "data_offsets": [position, position + size]}
        position += size
        sizes.append(size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, sizes


def write_text(path: Place, text: str) -> dict[str, Any]:
    """Write a text file, and to the disk. Returns its entry in the manifest."""
    data, sums = text.encode(), _Sums()
    with path.open("xb" if isinstance(path, Path) else "wb") as file:
        file.write(data)
        sums.add(memoryview(data))
        file.flush()
        if isinstance(path, Path):
            os.fsync(file.fileno())
    return {"size": sums.size, "crc32": sums.finished()}


class _Sums:
    """The checksums of a stream's blocks."""

    def __init__(self) -> None:
        self.size, self._now, self._done = 0, 0, list[str]()

    def add(self, data: memoryview) -> None:
        while len(data):
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            part, data = data[:room], data[room:]
            self._now = zlib.crc32(part, self._now)
            self.size += len(part)
            if self.size % BLOCK_BYTES == 0:
                self._done.append(f"{self._now:08x}")
                self._now = 0

    def finished(self) -> list[str]:
        return [*self._done, f"{self._now:08x}"] if self.size % BLOCK_BYTES else self._done


class TensorFile:
    """A tensor file, mapped: tensors are views of it, and only what is touched is read. The file is never changed.

    Raises:
        CheckpointCorruptError: it is no tensor file, or its header promises what the file does not have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise CheckpointCorruptError(f"{path} is no tensor file: it has {size} bytes.")
            # Copy on write: torch takes no read-only memory.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        (length,) = struct.unpack("<Q", self._map[:8])
        self._start = 8 + length
        try:
            if self._start > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(self._map[8 : self._start])
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries = {name: self._entry(entry, size - self._start) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorruptError(f"{path} is no tensor file: {error}.") from error

    def _entry(self, entry: Any, room: int) -> tuple[torch.dtype, list[int], int, int]:
        dtype, shape, (begin, end) = _TYPES[entry["dtype"]], [int(n) for n in entry["shape"]], entry["data_offsets"]
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        if not 0 <= begin <= end <= room or size != end - begin or min(shape, default=0) < 0:
            raise ValueError(f"an entry of {shape} at {begin} to {end}, in {room} bytes")
        return dtype, shape, begin, end

    def tensor(self, name: str, dtype: torch.dtype | None = None, shape: Iterable[int] | None = None) -> torch.Tensor:
        """A tensor by name. Give type and shape for what was written as bytes."""
        kind, dims, begin, end = self.entries[name]
        if begin == end:
            flat = torch.empty(0, dtype=kind)
        else:
            flat = torch.frombuffer(self._map, dtype=kind, count=(end - begin) // kind.itemsize, offset=self._start + begin)
        if dtype is not None and dtype != kind:
            return flat.view(dtype).reshape(list(shape or []))
        return flat.reshape(dims)

    def span(self, name: str) -> Span:
        """Where a tensor lies in the file."""
        _, _, begin, end = self.entries[name]
        return Span(self.path, self._start + begin, end - begin)

    def forget(self) -> None:
        """Give back the memory of what was read so far; it is read anew when it is touched."""
        self._map.madvise(mmap.MADV_DONTNEED)
