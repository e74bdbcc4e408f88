"""The tape of a recording (`deferred`): the calls that made or changed tensors, and how to compute a tensor from them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from echelon.common.errors import EchelonError, LayoutError
from echelon.world.tensor_bytes import flat_bytes

__all__ = [
    "DEFAULT",
    "HERE",
    "META",
    "Call",
    "Tape",
    "Value",
    "asks_for_meta",
    "changes_real",
    "is_meta",
    "leaves",
    "mapped",
    "not_away",
    "on_cpu",
    "on_meta_device",
    "origins",
    "reach",
    "refuse_loading",
    "tensors_in",
    "written_to",
]


@dataclass(frozen=True)
class Value:
    """A recorded tensor: its tape and storage, and its layout in the storage."""

    tape: Tape
    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Value | None:
        """The value of a tensor; None if it was not made under a recording."""
        origin = origins.get(tensor.untyped_storage())
        if origin is None:
            return None
        return cls(*origin, tensor.dtype, tuple(tensor.size()), tuple(map(int, tensor.stride())), int(tensor.storage_offset()))

    @property
    def is_set(self) -> bool:
        """Whether any call gave it a value; `torch.empty` does not."""
        return any(self.tape.calls[i].sets for i in self.tape.writers[self.storage])

    @property
    def may_be_unset(self) -> bool:
        """Whether its storage began without values, so that a nan may mean that none was set."""
        first = self.tape.writers[self.storage][:1]
        return not first or not self.tape.calls[first[0]].sets or self.tape.calls[first[0]].made.get(0) != self.storage

    def needs(self) -> set[tuple[Tape, int]]:
        """The storages that it is computed from, including its own: tapes with numbers of storages."""
        needed = {(self.tape, self.storage)}
        for call in self.tape.needed(self.storage):
            needed |= {(self.tape, read) for read in call.reads}
            for leaf in leaves((call.args, call.kwargs)):
                if isinstance(leaf, Value) and leaf.tape is not self.tape:
                    needed |= leaf.needs()
        return needed

    def compute(self, device: torch.device | None = None) -> torch.Tensor:
        """Compute the tensor. This needs memory for the tensors it depends on, usually only itself.

        Elements that no call has set are nan if the dtype is floating.

        Args:
            device: where to compute a recording made with `on_device`; others are computed on the CPU.
        """
        place = device if device is not None and self.tape.on_device else torch.device("cpu")
        return self.within(self.tape.replay(self.storage, place), place)

    def within(self, storages: dict[int, torch.UntypedStorage], device: torch.device) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=device)
        if self.storage not in storages:  # made before the recording began
            elements = self.offset + reach(self.size, self.stride)
            storages[self.storage] = torch.UntypedStorage(elements * self.dtype.itemsize, device=device)
            mark(torch.empty(0, dtype=self.dtype, device=device).set_(storages[self.storage]))
        return empty.set_(storages[self.storage], self.offset, self.size, self.stride)


@dataclass
class Call:
    """A function that made or changed tensors, with `Value`s in place of tensors."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    reads: frozenset[int]
    made: dict[int, int]  # by number of an output, the new storage that it began
    sets: bool
    dtype: torch.dtype  # the default dtype during the call
    generator: torch.Generator
    state: torch.Tensor | None  # the generator's state before the call, if it draws
    stream: int | None = None  # the number of its random stream on a device, in place of a state
    overwrites: frozenset[int] = frozenset()  # storages whose previous content is lost completely


# By storage of a meta tensor: its tape, and its number there. Views, parameters and `.data` share storages.
origins: WeakKeyDictionary[torch.UntypedStorage, tuple[Tape, int]] = WeakKeyDictionary()


class Tape:
    """The recorded calls of one recording.

    Attributes:
        calls: all calls, in order.
        writers: by storage, the numbers of the calls that made or changed it.
        sources: tapes of earlier recordings whose tensors this one used.
        on_device: values may be computed on any device, with random streams of their own.
        seed: the seed of these streams.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self.seed = int(torch.randint(2**62, ())) if on_device else 0
        self.calls: list[Call] = []
        self.writers: dict[int, list[int]] = {}
        self.sources: list[Tape] = []

    @torch.no_grad()
    def replay(self, storage: int, device: torch.device) -> dict[int, torch.UntypedStorage]:
        """Compute a storage. Returns it and the storages that it depends on, by number."""
        storages: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf if device.type == "cpu" else on_device(leaf, device)
            return leaf.within(storages, device) if leaf.tape is self else leaf.compute(device).to(device)

        default = torch.get_default_dtype()
        try:
            for call in self.needed(storage):
                torch.set_default_dtype(call.dtype)
                if call.stream is not None:
                    outputs = self._drawn(call, mapped(real, call.args), mapped(real, call.kwargs), device)
                    for output, number in call.made.items():
                        storages[number] = outputs[output].untyped_storage()
                    continue
                before = call.generator.get_state()
                if call.state is not None:
                    call.generator.set_state(call.state)
                outputs = list(tensors_in(call.func(*mapped(real, call.args), **mapped(real, call.kwargs))))
                if not call.sets:
                    mark(*outputs)
                if call.state is not None:
                    call.generator.set_state(before)
                elif not torch.equal(before, call.generator.get_state()):
                    name = torch.overrides.resolve_name(call.func) or call.func
                    raise EchelonError(
                        f"{name} draws random numbers, but on_meta does not know it as a function that draws. "
                        "Build the model without on_meta, and report this error."
                    )
                for output, number in call.made.items():
                    storages[number] = outputs[output].untyped_storage()
        finally:
            torch.set_default_dtype(default)
        return storages

    def _drawn(self, call: Call, args: Any, kwargs: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
        """Run a call that draws, from its own stream. The device's generator is restored."""
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((self.seed + (call.stream or 0)) % 2**63)
            return list(tensors_in(call.func(*args, **{k: v for k, v in kwargs.items() if k != "generator"})))

    def digest(self, start: int = 0) -> int:
        """A checksum of the functions called and their arguments, independent of the generators' states."""
        for call in self.calls:
            start = zlib.crc32(getattr(call.func, "__name__", "").encode(), start)
            for leaf in leaves((call.args, call.kwargs)):
                start = zlib.crc32(as_bytes(leaf), start)
        return start

    def needed(self, storage: int) -> list[Call]:
        """The calls that a storage's final content depends on, in order.

        These are the call that made it, its writers since it was last overwritten, and for each of these calls the same for the
        storages it reads, as they were before the call.
        """
        needed: set[int] = set()
        waiting = [(storage, len(self.calls))]
        seen = set(waiting)
        while waiting:
            content, until = waiting.pop()
            writers = [index for index in self.writers[content] if index < until]
            last = next((i for i in reversed(writers) if content in self.calls[i].overwrites), 0)
            for index in writers:
                if index < last and index != writers[0]:
                    continue
                needed.add(index)
                call = self.calls[index]
                new = {(read, index) for read in call.reads - call.overwrites} - seen
                seen |= new
                waiting += new
        return [self.calls[i] for i in sorted(needed)]


# Helpers for `deferred`: the device of a call's result, the tensors that the call changes, and its arguments.

# The default device inside a recording. It differs from an explicit "cpu" or "meta".
DEFAULT = torch.device("cpu", 0)
META, _CPU = torch.device("meta"), torch.device("cpu")
# The device that recorded tensors report. Recognised by identity: a tensor made with `device=recorded.device` is recorded, too.
HERE = torch.device("cpu")

_SETTERS = {vars(kind)[name].__set__ for kind in torch.Tensor.__mro__ for name in ("data", "grad") if name in vars(kind)}


def reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from a tensor's first to its last in memory."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def mark(*tensors: torch.Tensor) -> None:
    """Fill tensors without values with nan, so that these are noticed."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))


def _is_default(leaf: Any) -> bool:
    return leaf is HERE or (isinstance(leaf, torch.device) and leaf == DEFAULT)


def on_meta_device(leaf: Any) -> Any:
    return META if _is_default(leaf) else leaf


def on_cpu(leaf: Any) -> Any:
    return _CPU if _is_default(leaf) else leaf


def on_device(leaf: Any, device: torch.device) -> Any:
    """Replace an argument that is on the CPU, or names it, by the same on another device."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device)
    is_cpu = isinstance(leaf, torch.device) and leaf.type == "cpu"
    return device if is_cpu or (isinstance(leaf, str) and leaf in ("cpu", "cpu:0")) else leaf


def not_away(leaf: Any) -> Any:
    """The recording's device in place of the CPU."""
    is_cpu = isinstance(leaf, torch.device) and leaf.type == "cpu"
    return HERE if is_cpu or (isinstance(leaf, str) and leaf in ("cpu", "cpu:0")) else leaf


def asks_for_meta(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "meta") or (isinstance(device, str) and device == "meta")


def refuse_loading() -> None:
    """Refuse `from_pretrained`: it builds on meta itself, and then loads the whole model on every rank.

    Raises:
        UsageError: a caller is `from_pretrained`.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "from_pretrained":
            raise LayoutError(
                "from_pretrained inside on_meta() would load the whole model on every rank. Call it outside, without on_meta; "
                "or, for a model too large for that, build it from its configuration inside (AutoModel.from_config(config)), and "
                "read the weights with DistributedCheckpointSaver.restore(FOLDER_OF_SAFETENSORS, unit): each rank reads its part."
            )
        frame = frame.f_back  # type: ignore[assignment]


def changes_real(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes into a tensor with values."""
    target = [args[0]] if func in _SETTERS else targets(name, args, kwargs)
    return any(not is_meta(t) for t in target)


def written_to(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The meta tensors that a function changes."""
    return [t for t in targets(name, args, kwargs) if is_meta(t)]


_NOT_IN_PLACE = {"__invert__", "__int__", "__index__", "__iter__"}


def targets(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function changes, according to torch's naming conventions."""
    changed: list[torch.Tensor] = list(tensors_in(kwargs.get("out")))
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if in_place or name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE):
        first = args[0] if args else next((kwargs[k] for k in ("tensor", "input", "self") if k in kwargs), None)
        changed += list(tensors_in(first))
    return changed


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(mapped(change, leaf) for leaf in tree)
    if type(tree) is dict:
        return {key: mapped(change, leaf) for key, leaf in tree.items()}
    return change(tree)


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from leaves(leaf)
    elif type(tree) is dict:
        for key, leaf in tree.items():
            yield key
            yield from leaves(leaf)
    else:
        yield tree


def as_bytes(leaf: Any) -> bytes:
    """The bytes of an argument that ranks compare."""
    if isinstance(leaf, torch.Tensor):
        return flat_bytes(leaf).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    if isinstance(leaf, (bool, int, float, complex, str, type(None), torch.dtype)):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()  # other representations differ between processes


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
