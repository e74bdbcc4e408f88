"""What a recording of `deferred` wrote down: the calls that made or changed tensors, and how to compute a tensor from them."""

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
    """A recorded tensor: where in which storage it lies."""

    tape: Tape
    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Value | None:
        """None if the tensor was not made under a recording."""
        origin = origins.get(tensor.untyped_storage())
        if origin is None:
            return None
        return cls(*origin, tensor.dtype, tuple(tensor.size()), tuple(map(int, tensor.stride())), int(tensor.storage_offset()))

    @property
    def is_set(self) -> bool:
        """Whether anything gave it a value: `torch.empty` does not."""
        return any(self.tape.calls[i].sets for i in self.tape.writers[self.storage])

    @property
    def may_be_unset(self) -> bool:
        """Whether it began without values, so that a nan may stand for none."""
        first = self.tape.writers[self.storage][:1]
        return not first or not self.tape.calls[first[0]].sets or self.tape.calls[first[0]].made.get(0) != self.storage

    def needs(self) -> set[tuple[Tape, int]]:
        """What it is computed from, itself included: tapes, and numbers of storages on them."""
        needed = {(self.tape, self.storage)}
        for call in self.tape.needed(self.storage):
            needed |= {(self.tape, read) for read in call.reads}
            for leaf in leaves((call.args, call.kwargs)):
                if isinstance(leaf, Value) and leaf.tape is not self.tape:
                    needed |= leaf.needs()
        return needed

    def compute(self, device: torch.device | None = None) -> torch.Tensor:
        """The tensor. Uses the memory of what it depends on, as a rule only itself.

        What nothing set is nan, if it is of a floating type.

        Args:
            device: where, if the recording may be computed elsewhere than in host memory.
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
    made: dict[int, int]  # which of its outputs began which storage
    sets: bool
    dtype: torch.dtype  # the default one
    generator: torch.Generator
    state: torch.Tensor | None  # of the generator before it, if it draws
    stream: int | None = None  # in place of a state: which stream of random numbers it has on a device
    overwrites: frozenset[int] = frozenset()  # of which nothing stays that was there before


# By storage: the tape that a meta tensor belongs to, and its number there. Views, parameters and `.data` share storages.
origins: WeakKeyDictionary[torch.UntypedStorage, tuple[Tape, int]] = WeakKeyDictionary()


class Tape:
    """
    Attributes:
        calls: in order.
        writers: by storage, which of them made or changed it.
        sources: tapes of earlier recordings, whose tensors were changed in this one.
        on_device: values may be computed on any device, from random numbers of their own.
        seed: of these.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self.seed = int(torch.randint(2**62, ())) if on_device else 0
        self.calls: list[Call] = []
        self.writers: dict[int, list[int]] = {}
        self.sources: list[Tape] = []

    @torch.no_grad()
    def replay(self, storage: int, device: torch.device) -> dict[int, torch.UntypedStorage]:
        """Compute a storage: it, and what it depends on, by number."""
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
                        f"{name} draws random numbers, and on_meta did not know that it does. "
                        "Build the model on a device, and please report it."
                    )
                for output, number in call.made.items():
                    storages[number] = outputs[output].untyped_storage()
        finally:
            torch.set_default_dtype(default)
        return storages

    def _drawn(self, call: Call, args: Any, kwargs: dict[str, Any], device: torch.device) -> list[torch.Tensor]:
        """A call that draws, from its own stream; the device's generator is as it was before."""
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((self.seed + (call.stream or 0)) % 2**63)
            return list(tensors_in(call.func(*args, **{k: v for k, v in kwargs.items() if k != "generator"})))

    def digest(self, start: int = 0) -> int:
        """A checksum of what was called with which numbers, whatever the generators gave."""
        for call in self.calls:
            start = zlib.crc32(getattr(call.func, "__name__", "").encode(), start)
            for leaf in leaves((call.args, call.kwargs)):
                start = zlib.crc32(as_bytes(leaf), start)
        return start

    def needed(self, storage: int) -> list[Call]:
        """The calls that a storage's final content depends on: its writers since it was last overwritten, the one that made it,
        and before each, those of what it reads.
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


# What `deferred` asks of a function that is called: where its result would lie, what it changes, which tensors it is given.

# What `torch.device` gives to functions that were told no device: tells them from those that were told "cpu" or "meta".
DEFAULT = torch.device("cpu", 0)
META, _CPU = torch.device("meta"), torch.device("cpu")
# What recorded tensors say of themselves. Known again by identity: who makes a tensor "where that one is" makes a recorded one.
HERE = torch.device("cpu")

_SETTERS = {vars(kind)[name].__set__ for kind in torch.Tensor.__mro__ for name in ("data", "grad") if name in vars(kind)}


def reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last in memory."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def mark(*tensors: torch.Tensor) -> None:
    """nan for what nothing has set yet, so that it cannot pass for a value."""
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
    """What a call was told of the CPU, on another device: the place itself, and tensors that lie there."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device)
    is_cpu = isinstance(leaf, torch.device) and leaf.type == "cpu"
    return device if is_cpu or (isinstance(leaf, str) and leaf in ("cpu", "cpu:0")) else leaf


def not_away(leaf: Any) -> Any:
    """This place instead of the CPU."""
    is_cpu = isinstance(leaf, torch.device) and leaf.type == "cpu"
    return HERE if is_cpu or (isinstance(leaf, str) and leaf in ("cpu", "cpu:0")) else leaf


def asks_for_meta(device: Any) -> bool:
    return (isinstance(device, torch.device) and device.type == "meta") or (isinstance(device, str) and device == "meta")


def refuse_loading() -> None:
    """`from_pretrained` makes a model on meta of its own, then puts in loaded values: a whole model on every rank.

    Raises:
        UsageError: the caller is within one.
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
    """Whether a function puts something into a tensor that has values already."""
    target = [args[0]] if func in _SETTERS else targets(name, args, kwargs)
    return any(not is_meta(t) for t in target)


def written_to(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The meta tensors that a function changes."""
    return [t for t in targets(name, args, kwargs) if is_meta(t)]


_NOT_IN_PLACE = {"__invert__", "__int__", "__index__", "__iter__"}


def targets(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a function changes, by torch's conventions of naming."""
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
    """What ranks compare of an argument."""
    if isinstance(leaf, torch.Tensor):
        return flat_bytes(leaf).numpy().tobytes()
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes()
    if isinstance(leaf, (bool, int, float, complex, str, type(None), torch.dtype)):
        return repr(leaf).encode()
    return type(leaf).__name__.encode()  # nothing that says more is the same in two processes


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
