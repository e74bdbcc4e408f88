"""Tensor files in the safetensors layout: written as a stream with the checksums of their blocks, read by mapping or in parts.

`header` describes the layout.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from echelon.checkpoint import header as headers
from echelon.checkpoint import strict
from echelon.checkpoint.checksum import Sums, threads
from echelon.checkpoint.header import Entry
from echelon.checkpoint.location import Location, create, open_file
from echelon.checkpoint.manifest import checksums
from echelon.checkpoint.plain import dtype_of
from echelon.checkpoint.ranges import Stored
from echelon.checkpoint.strict import Wrong
from echelon.common.errors import CheckpointCorruptError, CheckpointError
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["Source", "Span", "TensorFile", "as_bytes", "assemble", "write", "write_text"]

_PIECE_BYTES = 8 << 20


class Span(NamedTuple):
    """Bytes of a file that can be copied as they are."""

    path: Path
    offset: int
    size: int


# Name, dtype, shape, and a function that gives the values when they are to be written.
Source = tuple[str, torch.dtype, Iterable[int], Callable[[], torch.Tensor | Span]]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in host memory, as they are written."""
    return memoryview(flat_bytes(tensor.resolve_conj().resolve_neg().cpu()).numpy())  # type: ignore[arg-type]


def write(path: Location, sources: Iterable[Source], metadata: dict[str, str] | None = None) -> dict[str, Any]:
    """Write tensors one by one into a new file; a local one is synced to disk. Returns its manifest entry: size and checksums.

    Raises:
        FileExistsError: the file exists; nothing is ever overwritten.
    """
    sources = list(sources)
    text, sizes = _header(sources, metadata)
    with _summed(path) as (put, entry):
        put(memoryview(text))
        for (name, _, _, values), size in zip(sources, sizes, strict=True):
            value = values()
            assert isinstance(value, torch.Tensor)
            data = as_bytes(value)
            assert len(data) == size, name
            for at in range(0, size, _PIECE_BYTES):
                put(data[at : at + _PIECE_BYTES])
    return entry


@contextlib.contextmanager
def _summed(path: Location) -> Iterator[tuple[Callable[[memoryview], None], dict[str, Any]]]:
    """Context with a function that writes into a new file, and the file's manifest entry, which is filled at the end."""
    entry = dict[str, Any]()
    with create(path) if isinstance(path, Path) else path.open("wb") as file, Sums(threads()) as sums:

        def put(data: memoryview) -> None:
            file.write(data)
            sums.add(data)

        yield put, entry
        file.flush()
        if isinstance(path, Path):
            os.fsync(file.fileno())
        entry |= sums.entry()


def assemble(path: Path, sources: Iterable[Source], metadata: dict[str, str] | None = None) -> None:
    """Like `write`, without checksums; the system copies values that are given as a Span."""
    sources = list(sources)
    text, _ = _header(sources, metadata)
    with create(path) as file:
        _write_all(file, memoryview(text))
        for _, _, _, values in sources:
            value = values()
            if isinstance(value, Span):
                file.flush()
                _send(file, value)
            else:
                _write_all(file, as_bytes(value))
        file.flush()
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
                raise CheckpointCorruptError(f"{span.path} is cut off.", path=str(span.path))
            done += sent


def _header(sources: list[Source], metadata: dict[str, str] | None) -> tuple[bytes, list[int]]:
    """The bytes before the data, and each tensor's size."""
    sizes = []
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, dtype, shape, _ in sources:
        dims = list(shape)
        size = dtype.itemsize * math.prod(dims)
        known = headers.NAMES.get(str(dtype))
        entry = {"dtype": known or "U8", "shape": dims if known else [size]}
        header[name] = {**entry, "data_offsets": [position, position + size]}
        position += size
        sizes.append(size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        strict.check_size(text)
    except strict.Wrong as error:
        raise CheckpointError(f"the names and states of a file are too many: {error}. Use arrays.") from None
    return struct.pack("<Q", len(text)) + text, sizes


def write_text(path: Location, text: str) -> dict[str, Any]:
    """Write a text file; a local one is synced to disk. Returns its manifest entry."""
    with _summed(path) as (put, entry):
        put(memoryview(text.encode()))
    return entry


class TensorFile:
    """A mapped tensor file: tensors are views of it, and only pages that are accessed are read. The file is never changed.

    Args:
        entry: its manifest entry, size and checksums; None for a file of another program.
        verify: compare the whole file with its checksums; for small files.
    Raises:
        CheckpointCorruptError: it is no tensor file, or not the one in the manifest.
    """

    def __init__(self, path: Path, entry: dict[str, Any] | None = None, *, verify: bool = False) -> None:
        self.path = path
        with open_file(path) as (file, size):
            if entry is not None and size != entry["size"]:
                raise CheckpointCorruptError(
                    f"{path} must have {entry['size']} bytes, got {size}: it was cut off, or grew.", path=str(path)
                )
            try:
                self.header = headers.read(file, size, headers.FOREIGN_BYTES if entry is None else strict.JSON_BYTES)
            except Wrong as error:
                raise CheckpointCorruptError(f"{path} is not a tensor file: {error}.", path=str(path)) from None
            # Copy on write: torch takes no read-only memory.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        if verify and entry is not None and checksums(self._map) != entry["crc32"]:
            raise CheckpointCorruptError(f"{path} is not what was written: its checksum differs.", path=str(path))

    def tensor(self, name: str, dtype: torch.dtype | None = None, shape: list[int] | None = None) -> torch.Tensor:
        """A tensor by name. Give dtype and shape if it may have been written as bytes.

        Raises:
            CheckpointCorruptError: it is missing, or has another dtype or shape.
        """
        entry = self._entry(name, dtype, shape)
        held = dtype_of(entry.dtype)
        if entry.begin == entry.end:
            flat = torch.empty(0, dtype=held)
        else:
            count = (entry.end - entry.begin) // held.itemsize
            flat = torch.frombuffer(self._map, dtype=held, count=count, offset=self.header.start + entry.begin)
        if dtype is not None and shape is not None:
            return flat.view(dtype).reshape(shape)
        return flat.reshape(entry.shape)

    def read_part(
        self,
        name: str,
        begins: Sequence[int],
        lengths: Sequence[int],
        into: torch.Tensor,
        dtype: torch.dtype | None = None,
        shape: list[int] | None = None,
        viewed: Sequence[int] | None = None,
    ) -> None:
        """Fill `into` with a part of the tensor `name`, and read only that part; dtype and shape as in `tensor`.

        Args:
            viewed: another shape of the same elements, to which `begins` and `lengths` refer.
        """
        entry = self._entry(name, dtype, shape)
        kind, dims = (dtype, shape) if dtype is not None and shape is not None else (dtype_of(entry.dtype), viewed or entry.shape)
        assert math.prod(dims) * kind.itemsize == entry.end - entry.begin, name
        try:
            Stored(self._file, self.header.start + entry.begin, kind, dims).read_part(begins, lengths, into)
        except Wrong as error:
            raise CheckpointCorruptError(
                f"{self.path} was cut off while {name!r} was read: {error}.", path=str(self.path)
            ) from None

    def span(self, name: str, dtype: torch.dtype | None = None, shape: list[int] | None = None) -> Span:
        """Where a tensor's bytes are in the file; arguments as in `tensor`."""
        entry = self._entry(name, dtype, shape)
        return Span(self.path, self.header.start + entry.begin, entry.end - entry.begin)

    def _entry(self, name: str, dtype: torch.dtype | None, shape: list[int] | None) -> Entry:
        entry = self.header.entries.get(name)
        if entry is None or (dtype is not None and shape is not None and not entry.holds(str(dtype), shape)):
            raise CheckpointCorruptError(f"{self.path} does not hold {name!r} as it was written.", path=str(self.path))
        return entry

    def forget(self) -> None:
        """Release the memory of what was read so far; later accesses read it again."""
        self._map.madvise(mmap.MADV_DONTNEED)
