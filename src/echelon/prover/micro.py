"""Micro-batches: how a run records them for the judge, how they are cut into samples, and how they are joined."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from echelon.common.errors import ProveError
from echelon.loop.samples import are_images, samples_of
from echelon.world.device import map_tensors, mapping_of
from echelon.world.tensor_bytes import flat_bytes

__all__ = [
    "Micro",
    "NotDivisible",
    "NotJoinable",
    "Samples",
    "checksums",
    "digest",
    "join",
    "joined",
    "leaves",
    "on_host",
    "plain",
    "widened",
    "widths_of",
]


@dataclass
class Micro:
    """A micro-batch as one rank worked on it.

    Args:
        plain: the batch on the host, in builtin containers: other processes cannot load the classes that a script defines.
        packed: the batch itself, pickled, with numbers in place of its tensors. tensors: its tensors.
        weight: 0 for padding, and on a rank whose samples another rank records.
        loss: its mean loss; None if the unit does not tell.
        samples: how many it has. rows: their checksums.
        streams: by name (`pass_state.py`), the states before its forward pass of the RNGs from which the pass drew.
        epoch: of the loader.
        state: what the unit kept from earlier passes (`pass_state.py`), before this one; only paths that ever changed.
        given: how many samples the loader put into it, if the loader tells.
    """

    plain: Any
    packed: bytes
    tensors: list[torch.Tensor]
    weight: float
    loss: float | None
    streams: dict[str, Any]
    epoch: int
    samples: int
    rows: list[int]
    state: dict[str, Any] = field(default_factory=dict)
    given: int | None = None

    @classmethod
    def of(
        cls,
        data: Any,
        given: int | None,
        weight: float,
        loss: float | None,
        streams: dict[str, Any],
        epoch: int,
        state: dict[str, Any] | None = None,
    ) -> Micro:
        """Record a batch, with copies of its tensors on the host.

        Raises:
            UsageError: the batch cannot be pickled.
        """
        data, file = on_host(data), io.BytesIO()
        packer = _Packer(file)
        try:
            packer.dump(data)
        except Exception as error:  # any type can raise anything when it is pickled
            raise ProveError(
                f"a batch of type {type(data).__name__} cannot be taken to the process that repeats it ({error}): define its "
                "classes at the top level of a module."
            ) from error
        samples, rows = count_of(data, given), checksums(data, given)
        return cls(plain(data), file.getvalue(), packer.tensors, weight, loss, streams, epoch, samples, rows, state or {}, given)

    @property
    def data(self) -> Any:
        """A copy of the batch, in a process that knows its classes."""
        unpacker = _Unpacker(io.BytesIO(self.packed))
        unpacker.tensors = [tensor.clone() for tensor in self.tensors]
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
    """The batch for comparison: tensors and builtin values in dicts and lists; a checksum in place of any other object."""
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
    file = io.BytesIO()
    packer = _Packer(file)  # takes tensors out: torch pickles them with the address of their memory
    packer.dump(data)
    return {type(data).__qualname__: zlib.crc32(file.getvalue()), "tensors": [plain(tensor) for tensor in packer.tensors]}


def widths_of(data: Any) -> Iterator[torch.Size]:
    """The shapes of the tensors of a batch from `plain`, each without its first dimension, the samples.

    A nested tensor has none, as its samples have lengths of their own.
    """
    return (each.shape[1:] for each in leaves(data) if isinstance(each, torch.Tensor) and not each.is_nested)


def leaves(data: Any) -> Iterator[Any]:
    """The values in the containers of a batch from `plain`."""
    if isinstance(data, (list, dict)):
        for each in data.values() if isinstance(data, dict) else data:
            yield from leaves(each)
    else:
        yield data


class NotJoinable(Exception):
    """Batches cannot be joined: their parts have different types, or are padded to different widths."""


class NotDivisible(NotJoinable):
    """A batch cannot be cut into samples."""


class Samples:
    """The samples of a batch: along the first dimension of its tensors, and one in each item of its lists of samples.

    Args:
        given: how many the loader put into it, if it tells; otherwise the number is read as in the loop (`loop/samples.py`).

    Raises:
        NotDivisible: a part of the batch has another number.
    """

    def __init__(self, data: Any, given: int | None = None) -> None:
        self._data = data
        self.count = count_of(data, given)
        if not _columns(data, self.count):
            raise NotDivisible(f"not every part of a batch has {self.count} samples")

    def part(self, begin: int, end: int) -> Any:
        """The samples from `begin` to before `end`, in the same containers."""
        return self._cut(self._data, begin, end)

    def checksums(self) -> list[int]:
        return [digest(self.part(i, i + 1)) for i in range(self.count)]

    def _cut(self, data: Any, begin: int, end: int) -> Any:
        if isinstance(data, (torch.Tensor, np.ndarray)):
            return data[begin:end] if data.ndim else data
        if _is_list_of_samples(data, self.count):
            return type(data)(data[begin:end])
        inside = _inside(data)
        return data if inside is None else _rebuilt(data, [self._cut(each, begin, end) for each in inside])


def count_of(data: Any, given: int | None = None) -> int:
    """The number of samples of a batch: a number that fits all its parts is preferred to one that is given or read."""
    read = samples_of(data, given)[0]
    likely = (given, read, len(data) if isinstance(data, list) else None)
    return next((count for count in likely if count and _columns(data, count)), read)


def _columns(data: Any, samples: int) -> int | None:
    """How many parts of a batch have `samples` samples; None if one has another number, or cannot be cut."""
    if isinstance(data, torch.Tensor) and data.is_nested:
        return None
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return None if data.ndim and data.shape[0] != samples else min(data.ndim, 1)
    if _is_list_of_samples(data, samples):
        return 1
    columns = [_columns(each, samples) for each in _inside(data) or ()]
    return None if None in columns else sum(each or 0 for each in columns)


def _is_list_of_samples(data: Any, samples: int) -> bool:
    """Whether each item is a sample, rather than a field of all samples."""
    if type(data) not in (list, tuple) or len(data) != samples:
        return False
    return are_images(data) or not all(_columns(each, samples) for each in data)


def _inside(data: Any) -> list[Any] | None:
    """The values in a container; None if `data` is no container."""
    if isinstance(data, Mapping):
        return list(data.values())
    if isinstance(data, (list, tuple)):
        return list(data)
    if is_dataclass(data) and not isinstance(data, type):
        return [getattr(data, f.name) for f in fields(data)]
    return None


def _rebuilt(data: Any, inside: list[Any]) -> Any:
    """A container of the same kind with other values."""
    if isinstance(data, Mapping):
        return mapping_of(data, dict(zip(data, inside, strict=True)))
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*inside)
    if isinstance(data, (list, tuple)):
        return type(data)(inside)
    return type(data)(**{f.name: value for f, value in zip(fields(data), inside, strict=True)})


def join(batches: list[Any], counts: list[int]) -> Any:
    """Batches of one structure as one: tensors along their first dimension, lists of samples one after another.

    Args:
        counts: the samples of each.

    Raises:
        NotJoinable: they do not fit together, or not every part of a batch has its samples.
    """
    if len(batches) == 1:
        return batches[0]
    if any(_columns(batch, count) is None for batch, count in zip(batches, counts, strict=True)):
        raise NotJoinable("parts of a batch with other numbers of samples")
    return _joined(batches, counts)


def joined(micros: Sequence[Micro]) -> Any:
    """The batches of these micro-batches as one: see `join`."""
    return join([m.data for m in micros], [m.samples for m in micros])


def _joined(batches: list[Any], counts: list[int]) -> Any:
    first = batches[0]
    if any(type(b) is not type(first) for b in batches):
        raise NotJoinable(f"a {type(first).__name__} and something else")
    if isinstance(first, (torch.Tensor, np.ndarray)):
        if first.ndim == 0:
            if any(not _equal(b, first) for b in batches):
                raise NotJoinable("scalars that differ")
            return first
        if any(b.shape[1:] != first.shape[1:] for b in batches):
            raise NotJoinable(f"shapes {sorted({tuple(b.shape[1:]) for b in batches})}")
        return torch.cat(batches) if isinstance(first, torch.Tensor) else np.concatenate(batches)
    numbers = list(zip(batches, counts, strict=True))
    # With a single sample, a list of samples looks like a list of one field.
    if any(_is_list_of_samples(b, count) for b, count in numbers) and all(len(b) == count for b, count in numbers):
        return type(first)(each for b in batches for each in b)
    inside = _inside(first)
    if inside is None:
        if any(b is not first and not _equal(b, first) for b in batches):
            raise NotJoinable(f"values {first!r} and others")
        return first
    if isinstance(first, Mapping) and any(b.keys() != first.keys() for b in batches):
        raise NotJoinable("other keys")
    if any(len(_inside(b) or ()) != len(inside) for b in batches):
        raise NotJoinable("other lengths")
    columns = zip(*([b[k] for k in first] if isinstance(first, Mapping) else _inside(b) or () for b in batches), strict=True)
    return _rebuilt(first, [_joined(list(parts), counts) for parts in columns])


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # any type can raise anything when it is compared
        return False


def _mapped(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return map_tensors(data, lambda value: change(value) if isinstance(value, torch.Tensor) else value)


def checksums(batch: Any, given: int | None = None) -> list[int]:
    """The checksum of each sample of a batch; of the whole batch, if it cannot be cut into samples."""
    try:
        return Samples(batch, given).checksums()
    except NotDivisible:
        return [digest(batch)]


def on_host(data: Any) -> Any:
    """A detached copy of a batch in host memory."""
    return _mapped(data, lambda t: t.detach().cpu().clone())


def widened(data: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """A batch on `device`, with its floating-point tensors in `dtype`, and complex ones in the matching complex type."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        wide = dtype if tensor.is_floating_point() else dtype.to_complex() if tensor.is_complex() else None
        return tensor.to(device=device, dtype=wide)

    return _mapped(data, change)


def digest(data: Any) -> int:
    """A checksum of all that a batch holds: tensors by their bytes, other values by their representation."""
    return _folded(plain(data), 0)


def _folded(data: Any, value: int) -> int:
    if isinstance(data, torch.Tensor) and data.is_nested:
        return _folded(list(data.detach().unbind()), value)
    if isinstance(data, torch.Tensor):
        data = data if data.layout is torch.strided else data.detach().to_dense()
        raw = flat_bytes(data.cpu())
        return zlib.crc32(raw.numpy().data, zlib.crc32(repr((tuple(data.shape), data.dtype)).encode(), value))
    if isinstance(data, dict):
        for key, item in data.items():
            value = _folded(item, zlib.crc32(repr(key).encode(), value))
        return value
    if isinstance(data, list):
        for item in data:
            value = _folded(item, zlib.crc32(b",", value))
        return value
    return zlib.crc32(repr(data).encode(), value)
