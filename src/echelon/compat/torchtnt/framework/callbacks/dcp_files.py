"""The files of torch.distributed.checkpoint, as TorchTNT's saver wrote them, read without running code from them.

`.metadata` is a pickle. It is unpickled into records of this file that do nothing: a name that is not on the list of those
that torch writes there ends the reading. Tensors and values are read by torch.load with `weights_only`.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from pathlib import PurePosixPath
from typing import Any

import torch

from echelon.checkpoint.header import SIZES
from echelon.checkpoint.location import Location, open_file, read_file
from echelon.checkpoint.plain import dtype_of
from echelon.checkpoint.tensors import Tensors
from echelon.common.errors import CheckpointCorruptError, CheckpointNotFoundError
from echelon.common.terminal import printable
from echelon.compat.torchtnt.framework.callbacks.pickle_bombs import check

__all__ = ["METADATA", "Saved"]

METADATA = ".metadata"
_MOST_BYTES = 256 << 20  # of the metadata
_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"  # up to torch 2.2
_RECORDS = {
    _METADATA: "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING",
    _OLDER: "TensorProperties MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath WindowsPath",  # where it was written
    "pathlib._local": "PosixPath WindowsPath",
}


class _Record:
    """What stands for an object of torch's: it holds what the object would hold, and has no behaviour."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.fields: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.fields, dict) or name not in self.fields:
            raise ValueError(f"a {type(self).__name__} has no {name}")
        return self.fields[name]


class _Unpickler(pickle.Unpickler):
    """Classes are made anew for each file, so that what a file does to one ends with it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._made: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and f"torch.{name}" in SIZES:
            return f"torch.{name}"
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if name not in _RECORDS.get(module, "").split():
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which has no place there")
        return self._made.setdefault(name, type(name, (_Record,), {}))


class Saved(Tensors):
    """A checkpoint that torch.distributed.checkpoint wrote.

    Attributes:
        paths: by key, where its value lies in the nested state.
        index: of the tensors, by key: type, shape, pieces.
    Raises:
        CheckpointNotFoundError: no metadata.
        CheckpointCorruptError: it is not what torch writes.
    """

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._written_as: dict[str, str] = {}
        self._begins = ("", {})
        try:
            data = read_file(folder / METADATA, _MOST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointNotFoundError(f"{folder} holds no checkpoint: it has no {METADATA}.", path=str(folder)) from None
        try:
            check(data)
            metadata = _Unpickler(data).load()
            self.paths: dict[str, tuple[Any, ...]] = {_text(k): _path(v) for k, v in _dict(metadata["planner_data"]).items()}
            entries = _dict(metadata["state_dict_metadata"])
            self._places = dict(_place(k, v) for k, v in _dict(metadata["storage_data"]).items())
            self.index = {_text(k): _entry(v) for k, v in entries.items() if type(v).__name__ == "TensorStorageMetadata"}
            self._values = [_text(k) for k, v in entries.items() if type(v).__name__ == "BytesStorageMetadata"]
            if len(self.index) + len(self._values) != len(entries) or set(entries) != set(self.paths):
                raise ValueError("its lists do not agree")
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            IndexError,
            OverflowError,
        ) as error:
            raise CheckpointCorruptError(
                f"{folder / METADATA} is not what torch writes: {printable(str(error))}.", path=str(folder / METADATA)
            ) from None

    def values(self) -> dict[str, Any]:
        """What is no tensor, by key."""
        return {key: self._read(*self._place_of(key, ())) for key in self._values}

    def piece(self, name: str, offsets: list[int], sizes: list[int], written_in: str) -> torch.Tensor:
        written_as = self._written_as.get(name, name)
        file, offset, length = self._place_of(written_as, tuple(offsets))
        tensor = self._read(file, offset, length)
        wanted = dtype_of(self.index[name]["dtype"])
        fits = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not fits or tensor.dtype != wanted or list(tensor.shape) != sizes or tensor.nbytes > length:
            raise CheckpointCorruptError(
                f"{self._folder / file} does not hold {printable(written_as)} as {METADATA} says.", path=str(self._folder / file)
            )
        found: torch.Tensor = tensor.detach()
        return found

    def fill(
        self, into: torch.Tensor, name: str, storage_offsets: torch.Size | None, begins: torch.Size, lengths: torch.Size
    ) -> None:
        piece = self.piece(name, *self._piece_at(name, storage_offsets))  # of an archive: it is read as a whole
        for dim, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            piece = piece.narrow(dim, begin, length)
        into.copy_(piece)

    def forget(self) -> None: ...

    def _place_of(self, key: str, offsets: tuple[int, ...]) -> tuple[str, int, int]:
        place = self._places.get((key, offsets))
        if place is None:
            raise CheckpointCorruptError(
                f"{self._folder / METADATA} does not say where {printable(key)} lies.", path=str(self._folder / METADATA)
            )
        return place

    def _read(self, file: str, offset: int, length: int) -> Any:
        path = self._folder / file
        try:
            with open_file(path) as (stream, size):
                if offset + length > size:
                    raise CheckpointCorruptError(f"{path} is cut off: {size} bytes instead of {offset + length}.", path=str(path))
                stream.seek(offset)
                return _load(stream.read(length))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointCorruptError(f"{path} is missing.", path=str(path)) from None
        except (
            *(pickle.UnpicklingError, EOFError, ValueError, RuntimeError, AttributeError, KeyError, TypeError, IndexError),
            *(zipfile.BadZipFile, zlib.error, NotImplementedError),
        ) as error:
            if isinstance(error, CheckpointCorruptError):
                raise
            why = printable(str(error).splitlines()[0] if str(error) else repr(error))
            raise CheckpointCorruptError(
                f"{path} holds more than tensors and plain values, or is damaged: {why}", path=str(path)
            ) from None


def _load(data: bytes) -> Any:
    """What torch.save wrote, always as a zip archive, whose pickle torch reads by itself, and hashes what it finds."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if entry.filename.rpartition("/")[2] == "data.pkl":
                if entry.file_size > len(data):  # torch.save compresses nothing
                    raise ValueError("its pickle is compressed")
                check(archive.read(entry))
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where a name should be")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where a dict should be")
    return value


def _path(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or not value or not all(isinstance(key, (str, int)) for key in value):
        raise ValueError("a path that is none")
    return value


def _sizes(value: Any) -> list[int]:
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and 0 <= n < 2**60 for n in value):
        raise ValueError("sizes that are none")
    return list(value)


def _entry(record: Any) -> dict[str, Any]:
    shape = _sizes(record["size"])
    fields = record["properties"].fields
    dtype = fields[0] if isinstance(fields, tuple) else fields["dtype"]
    if dtype not in SIZES:
        raise ValueError(f"a tensor of {dtype!r}")
    pieces: list[list[Any]] = []
    for chunk in record["chunks"]:
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        if not len(offsets) == len(sizes) == len(shape) or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise ValueError("a piece outside of its tensor")
        pieces.append([offsets, sizes, ""])
    if sum(math.prod(sizes) for _, sizes, _ in pieces) != math.prod(shape):
        raise ValueError("pieces that are no whole")
    return {"dtype": dtype, "shape": shape, "pieces": pieces}


def _place(index: Any, info: Any) -> tuple[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    file, offset, length = _text(info["relative_path"]), info["offset"], info["length"]
    if PurePosixPath(file).name != file or file.startswith(".") or "\0" in file:
        raise ValueError("a file outside of the folder")
    if info.fields.get("transform_descriptors"):
        raise ValueError("a file that is compressed")
    _sizes([offset, length])
    at = index.fields.get("offset")
    return (_text(index["fqn"]), tuple(_sizes(at)) if at is not None else ()), (file, offset, length)
