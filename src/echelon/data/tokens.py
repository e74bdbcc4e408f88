"""Files of tokens, mapped into memory: tokens cost nothing until they are read, and workers share the pages.

Format of `TokenWriter`'s files, all numbers little-endian:

    64 bytes   b"ECHTOK1\n", the dtype (b"<u2" or b"<u4", padded to 8), tokens, documents: u64 each; zeros
    tokens     one after the other
    offsets    from the next multiple of 8 on: i64, documents + 1 of them: where each document begins; the last is the end

Raw files without a header, such as those of nanoGPT and Megatron-LM, are read too.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.common.arguments import is_list, is_path, several
from echelon.common.errors import DataError, DatasetError, require
from echelon.common.files import open_file

__all__ = ["TokenWriter", "Tokens", "write_tokens"]

_MAGIC = b"ECHTOK1\n"
_HEADER = struct.Struct("<8s8sQQ32x")
_MEGATRON = b"MMIDIDX\x00\x00"
_TYPES = {f"<u{size}".encode().ljust(8, b"\0"): np.dtype(f"<u{size}") for size in (2, 4)}
# Megatron-LM's codes for dtypes of tokens. Source: megatron/core/datasets/indexed_dataset.py.
_MEGATRON_TYPES = {1: "u1", 4: "<i4", 5: "<i8", 8: "<u2"}


class Tokens:
    """Tokens, and where their documents begin.

    Args:
        path: a file of `TokenWriter`; or, with `dtype`, a raw file; or Megatron's `NAME.bin` with `NAME.idx` beside it.
        dtype: dtype of a raw file, such as "uint16". A raw file is one document unless `documents` is given.
        documents: for a raw file: the offsets at which documents begin, then the end; in rising order.
    Attributes:
        data: the tokens, (N,), read-only.
        offsets: int64, (documents + 1,).
    Raises:
        UsageError: there is no such file, or the dtype of its tokens is unknown.
        DataError: the file is shorter or longer than its header says, or of another kind.
    """

    data: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]

    def __init__(self, path: str | Path, dtype: npt.DTypeLike | None = None, *, documents: npt.ArrayLike | None = None) -> None:
        require(is_path(path), "path", "a file", path, kind=DatasetError)
        self.path = Path(path)
        require(self.path.is_file(), "path", "a file", str(self.path), kind=DatasetError)
        self._reopen = (Tokens, (self.path, dtype), {"documents": documents})
        index = self.path.with_suffix(".idx")
        with self.path.open("rb") as file:
            header = file.read(_HEADER.size)
        if header[:8] == _MAGIC and dtype is None:
            self._open(header)
        elif dtype is not None:
            self._open_raw(np.dtype(dtype), documents)
        elif index.is_file():
            self._open_megatron(index)
        else:
            raise DatasetError(
                f"the dtype of the tokens in {self.path} is unknown: it has no header, and there is no {index.name} beside it. "
                'Give it, as in Tokens(path, "uint16").'
            )

    @classmethod
    def of(cls, documents: Iterable[npt.ArrayLike]) -> Tokens:
        """Tokens in memory, from documents."""
        what = "Tokens, or a list of documents, each a flat list of whole numbers"
        parts = [np.asarray(document) for document in several("documents", documents, what, kind=DatasetError)]
        for part in parts:
            require(part.ndim == 1 and (part.dtype.kind in "ui" or not part.size), "documents", what, part, kind=DatasetError)
        made = cls.__new__(cls)
        made.path = Path("(memory)")
        made.data = np.concatenate(parts) if parts else np.empty(0, np.uint16)
        made.offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return made

    def __len__(self) -> int:
        return len(self.data)

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    def document(self, index: int) -> npt.NDArray[Any]:
        """The tokens of one document.

        Raises:
            DataError: by the file's offsets, the document begins or ends outside the tokens.
        """
        if not -self.documents <= index < self.documents:
            raise IndexError(f"document {index} is out of range for {self.documents} documents")
        first, last = self.offsets[index % self.documents : index % self.documents + 2].tolist()
        if not 0 <= first <= last <= len(self.data):
            raise self.changed()
        return self.data[first:last]

    def changed(self) -> DataError:
        """The error for a file whose documents are not in rising order."""
        return DataError(
            f"{self.path} has documents that do not begin one after the other, from 0 to {len(self)}: it was changed.",
            path=str(self.path),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Let a worker that is not forked open the file again: pickling the mapping would copy all its contents."""
        return vars(self) if not hasattr(self, "_reopen") else {"_reopen": self._reopen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_reopen" in state:
            kind, args, kwargs = state["_reopen"]
            state = vars(kind(*args, **kwargs))
        self.__dict__.update(state)

    def _open(self, header: bytes) -> None:
        if len(header) < _HEADER.size:
            raise DataError(f"{self.path} has {len(header)} bytes, less than its header: it was cut short.", path=str(self.path))
        _, name, tokens, documents = _HEADER.unpack(header)
        dtype = _TYPES.get(name)
        if dtype is None:  # np.dtype(name) is never called: it could name objects, whose bytes are addresses
            raise DataError(
                f"the dtype in the header of {self.path} must be uint16 or uint32, got {name!r}.", path=str(self.path)
            )
        begin = _offsets_at(tokens, dtype)
        expected, size = begin + 8 * (documents + 1), self.path.stat().st_size
        if size != expected:
            raise DataError(
                f"{self.path} must have {expected} bytes by its header, got {size}: it was cut short or changed.",
                path=str(self.path),
            )
        self.data = _mapped(self.path, dtype, _HEADER.size, tokens)
        self.offsets = _mapped(self.path, np.dtype("<i8"), begin, documents + 1)
        if self.offsets[0] != 0 or self.offsets[-1] != tokens:  # the offsets in between are checked when they are used
            raise self.changed()

    def _open_raw(self, dtype: np.dtype[Any], documents: npt.ArrayLike | None) -> None:
        size = self.path.stat().st_size
        if dtype.kind not in "ui" or size % dtype.itemsize:
            raise DataError(f"{self.path} must hold a whole number of {dtype} tokens, got {size} bytes.", path=str(self.path))
        self.data = _mapped(self.path, dtype, 0, size // dtype.itemsize)
        offsets = np.asarray([0, len(self.data)] if documents is None else documents, dtype=np.int64)
        if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] or offsets[-1] != len(self.data) or (np.diff(offsets) < 0).any():
            raise DatasetError(
                f"documents of {self.path} must be offsets that rise from 0 to {len(self.data)}, its number of tokens."
            )
        self.offsets = offsets

    def _open_megatron(self, index: Path) -> None:
        """Open Megatron's files. Documents must be stored one after the other, as its own tools write them."""
        raw = index.read_bytes()
        try:
            version, code, sequences, ends = struct.unpack_from("<QBQQ", raw, len(_MEGATRON))
            begin = len(_MEGATRON) + 25
            lengths = np.frombuffer(raw, "<i4", sequences, begin)
            bounds = np.frombuffer(raw, "<i8", ends, begin + 12 * sequences)
            dtype = np.dtype(_MEGATRON_TYPES[code])
        except (struct.error, ValueError, KeyError, OverflowError) as error:
            raise DataError(f"{index} is not an index of Megatron-LM: {error!r}.", path=str(index)) from error
        if raw[: len(_MEGATRON)] != _MEGATRON or version != 1:
            raise DataError(f"{index} is not an index of Megatron-LM, version 1.", path=str(index))
        if (lengths < 0).any() or (bounds < 0).any() or (bounds > sequences).any():
            raise DataError(f"{index} has documents of negative length, or beyond its {sequences} sequences.", path=str(index))
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        size = self.path.stat().st_size
        if offsets[-1] * dtype.itemsize != size:
            raise DataError(
                f"{self.path} must have {offsets[-1] * dtype.itemsize} bytes by {index.name}, got {size}.", path=str(self.path)
            )
        self.data = _mapped(self.path, dtype, 0, int(offsets[-1]))
        self.offsets = offsets[np.unique([0, *bounds.tolist(), sequences])]


class TokenWriter:
    """Writes a file of tokens, document by document. The file gets its name when it is complete.

        with TokenWriter("train.bin", "uint16") as writer:
            writer.add(tokens)

    Args:
        dtype: "uint16" for vocabularies up to 65,536, else "uint32".
    """

    def __init__(self, path: str | Path, dtype: npt.DTypeLike = "uint16") -> None:
        require(is_path(path), "path", "a file", path, kind=DatasetError)
        try:
            self.path, self.dtype = Path(path), np.dtype(dtype).newbyteorder("<")
        except TypeError:
            raise DatasetError(f"dtype must be uint16 or uint32, got {dtype!r}.") from None
        if self.dtype.str not in ("<u2", "<u4"):
            raise DatasetError(f"dtype must be uint16 or uint32, got {np.dtype(dtype)}.")
        self._staged = self.path.with_name(self.path.name + ".partial")
        self._staged.unlink(missing_ok=True)  # left by a killed writer, or a link to somewhere else
        self._file = open(open_file(self._staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb")
        self._file.write(bytes(_HEADER.size))
        self._ends = [0]

    def add(self, document: npt.ArrayLike) -> None:
        """
        Raises:
            UsageError: a token does not fit into the dtype, or the document is not a flat list of whole numbers.
        """
        tokens = np.asarray(document)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "ui"):
            raise DatasetError(
                f"document must be a flat list of whole numbers, got shape {tokens.shape} and dtype {tokens.dtype}."
            )
        if tokens.size and (tokens.min() < 0 or tokens.max() > np.iinfo(self.dtype).max):
            raise DatasetError(
                f"the tokens of document {len(self._ends) - 1} must fit into {self.dtype}, got {tokens.min()} to {tokens.max()}."
            )
        self._file.write(tokens.astype(self.dtype).tobytes())
        self._ends.append(self._ends[-1] + len(tokens))

    def close(self) -> None:
        """Complete the file and give it its name."""
        tokens = self._ends[-1]
        self._file.write(bytes(_offsets_at(tokens, self.dtype) - _HEADER.size - tokens * self.dtype.itemsize))
        self._file.write(np.asarray(self._ends, dtype="<i8").tobytes())
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, self.dtype.str.encode(), tokens, len(self._ends) - 1))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._staged.replace(self.path)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()
            self._staged.unlink()


def write_tokens(path: str | Path, documents: Iterable[npt.ArrayLike], dtype: npt.DTypeLike = "uint16") -> Tokens:
    """Write documents to a file and open it."""
    require(
        is_list(documents), "documents", "a list of documents, each a flat list of whole numbers", documents, kind=DatasetError
    )
    with TokenWriter(path, dtype) as writer:
        for document in documents:
            writer.add(document)
    return Tokens(path)


def _offsets_at(tokens: int, dtype: np.dtype[Any]) -> int:
    return -(-(_HEADER.size + tokens * dtype.itemsize) // 8) * 8


def _mapped(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any]:
    if not count:
        return np.empty(0, dtype)  # an empty range cannot be mapped
    # A plain array, because every slice of a memmap object costs microseconds.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))
