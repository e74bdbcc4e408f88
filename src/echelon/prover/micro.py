"""What a run leaves for the judge: values by parameter name, micro-batches as they were, and how they are put together."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from echelon.contracts.errors import UsageError

__all__ = ["Micro", "NotJoinable", "digest", "join", "on_host", "plain", "widened"]


@dataclass
class Micro:
    """A micro-batch as one rank worked on it.

    Args:
        plain: the batch on the host, in builtin containers: other processes cannot load the classes that a script defines.
        packed: the batch itself, pickled, with numbers in place of its tensors. tensors: those.
        weight: what it counts; 0 is padding, or a rank for which another one speaks.
        loss: its mean loss; None if the unit does not tell.
        streams: by name (`generators.py`), the states before its forward pass of the RNGs that the pass drew from.
        epoch: of the loader.
        state: what the unit kept from earlier passes (`kept_state.py`), before this one, as far as it ever changed.
    """

    plain: Any
    packed: bytes
    tensors: list[torch.Tensor]
    weight: float
    loss: float | None
    streams: dict[str, Any]
    epoch: int
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Any, weight: float, loss: float | None, streams: dict[str, Any], epoch: int, state: Any = None) -> Micro:
        """
        Raises:
            UsageError: the batch cannot be pickled.
        """
        data, file = on_host(data), io.BytesIO()
        packer = _Packer(file)
        try:
            packer.dump(data)
        except Exception as error:  # any type can raise anything when it is pickled
            raise UsageError(
                f"a batch of type {type(data).__name__} cannot be taken to the process that repeats it ({error}): define its "
                "classes at the top level of a module."
            ) from error
        return cls(plain(data), file.getvalue(), packer.tensors, weight, loss, streams, epoch, state or {})

    @property
    def data(self) -> Any:
        """The batch, in a process that knows its classes."""
        unpacker = _Unpacker(io.BytesIO(self.packed))
        unpacker.tensors = self.tensors
        return unpacker.load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    tensors: list[torch.Tensor]

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self.tensors[pid]


def plain(data: Any) -> Any:
    """The same batch for comparison: tensors in dicts, lists and tuples; of any other object a checksum."""
    if data is None or isinstance(data, (torch.Tensor, str, bytes, int, float)):
        return data
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data.copy()) if data.dtype.kind in "biuf" else data.tolist()
    if isinstance(data, Mapping):
        return {k if isinstance(k, (str, int)) else repr(k): plain(v) for k, v in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return dict(zip(data._fields, map(plain, data), strict=True))
    if isinstance(data, (tuple, list)):
        return [plain(v) for v in data]
    if is_dataclass(data) and not isinstance(data, type):
        return {f.name: plain(getattr(data, f.name)) for f in fields(data)}
    return f"{type(data).__qualname__} {zlib.crc32(pickle.dumps(data))}"


class NotJoinable(Exception):
    """Batches whose parts do not fit together: of other kinds, or padded to other widths."""


def join(batches: list[Any]) -> Any:
    """Batches of one structure as one: tensors along their first dimension.

    Raises:
        NotJoinable: they do not fit together, or a batch's tensors have other numbers of rows: something else is along their
            first dimension, such as the samples of a list of images.
    """
    if len(batches) == 1:
        return batches[0]
    for batch in batches:
        rows: set[int] = set()
        _mapped(batch, lambda t, rows=rows: rows.add(t.shape[0]) if t.dim() else None)
        if len(rows) > 1:
            raise NotJoinable(f"tensors with {sorted(rows)} rows in one batch")
    return _joined(batches)


def _joined(batches: list[Any]) -> Any:
    first = batches[0]
    if any(type(b) is not type(first) for b in batches):
        raise NotJoinable(f"a {type(first).__name__} and something else")
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            if any(not torch.equal(b, first) for b in batches):
                raise NotJoinable("scalars that differ")
            return first
        if any(b.shape[1:] != first.shape[1:] for b in batches):
            raise NotJoinable(f"shapes {sorted({tuple(b.shape[1:]) for b in batches})}")
        return torch.cat(batches)
    if isinstance(first, Mapping):
        if any(b.keys() != first.keys() for b in batches):
            raise NotJoinable("other keys")
        joined = {k: _joined([b[k] for b in batches]) for k in first}
        return type(first)(joined) if type(first) is not dict else joined  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_joined(list(parts)) for parts in zip(*batches, strict=True)))
    if isinstance(first, (tuple, list)):
        if first and not any(isinstance(v, (torch.Tensor, Mapping, tuple, list)) for v in first):
            return type(first)(v for b in batches for v in b)  # one value per sample, such as its text
        if any(len(b) != len(first) for b in batches):
            raise NotJoinable("other lengths")
        return type(first)(_joined(list(parts)) for parts in zip(*batches, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(**{f.name: _joined([getattr(b, f.name) for b in batches]) for f in fields(first)})
    if isinstance(first, np.ndarray):
        if not first.ndim or any(b.shape[1:] != first.shape[1:] for b in batches):
            raise NotJoinable("arrays of other shapes")
        return np.concatenate(batches)
    if any(b is not first and not _equal(b, first) for b in batches):
        raise NotJoinable(f"values {first!r} and others")
    return first


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # any type can raise anything when it is compared
        return False


def _mapped(data: Any, change: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        mapped = {k: _mapped(v, change) for k, v in data.items()}
        return type(data)(mapped) if type(data) is not dict else mapped  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_mapped(v, change) for v in data))
    if isinstance(data, (tuple, list)):
        return type(data)(_mapped(v, change) for v in data)
    if is_dataclass(data) and not isinstance(data, type):
        return type(data)(**{f.name: _mapped(getattr(data, f.name), change) for f in fields(data)})
    return data


def on_host(data: Any) -> Any:
    """A copy of a batch that does not change any more."""
    return _mapped(data, lambda t: t.detach().cpu().clone())


def widened(data: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """A batch with its floating-point tensors in `dtype`, complex ones in the complex type of these, on `device`."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        wide = dtype if tensor.is_floating_point() else dtype.to_complex() if tensor.is_complex() else None
        return tensor.to(device=device, dtype=wide)

    return _mapped(data, change)


def digest(data: Any) -> int:
    """A checksum of all that a batch holds: tensors by their bytes, other values by their representation."""
    return _folded(plain(data), 0)


def _folded(data: Any, value: int) -> int:
    if isinstance(data, torch.Tensor):
        raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return zlib.crc32(raw.numpy().tobytes(), zlib.crc32(repr((tuple(data.shape), data.dtype)).encode(), value))
    if isinstance(data, dict):
        for key, item in data.items():
            value = _folded(item, zlib.crc32(repr(key).encode(), value))
        return value
    if isinstance(data, list):
        for item in data:
            value = _folded(item, zlib.crc32(b",", value))
        return value
    return zlib.crc32(repr(data).encode(), value)
