"""What a recording of `deferred` wrote down: the calls that made or changed tensors, and how to compute a tensor from them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from echelon.contracts.errors import EchelonError
from echelon.parallel.deferred_calls import as_bytes, leaves, mapped, mark, reach, tensors_in

__all__ = ["Call", "Tape", "Value", "origins"]


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

    def compute(self) -> torch.Tensor:
        """The tensor, in host memory. Uses the memory of what it depends on, as a rule only itself.

        What nothing set is nan, if it is of a floating type.
        """
        return self.within(self.tape.replay(self.storage))

    def within(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if self.storage not in storages:  # made before the recording began
            elements = self.offset + reach(self.size, self.stride)
            storages[self.storage] = torch.UntypedStorage(elements * self.dtype.itemsize)
            mark(torch.empty(0, dtype=self.dtype).set_(storages[self.storage]))
        return torch.empty(0, dtype=self.dtype).set_(storages[self.storage], self.offset, self.size, self.stride)


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


# By storage: the tape that a meta tensor belongs to, and its number there. Views, parameters and `.data` share storages.
origins: WeakKeyDictionary[torch.UntypedStorage, tuple[Tape, int]] = WeakKeyDictionary()


class Tape:
    """
    Attributes:
        calls: in order.
        writers: by storage, which of them made or changed it.
        sources: tapes of earlier recordings, whose tensors were changed in this one.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.writers: dict[int, list[int]] = {}
        self.sources: list[Tape] = []

    @torch.no_grad()
    def replay(self, storage: int) -> dict[int, torch.UntypedStorage]:
        """Compute a storage: it, and what it depends on, by number."""
        storages: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            return leaf.within(storages) if leaf.tape is self else leaf.compute()

        default = torch.get_default_dtype()
        try:
            for call in self._needed(storage):
                torch.set_default_dtype(call.dtype)
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

    def digest(self, start: int = 0) -> int:
        """A checksum of what was called with which numbers, whatever the generators gave."""
        for call in self.calls:
            start = zlib.crc32(getattr(call.func, "__name__", "").encode(), start)
            for leaf in leaves((call.args, call.kwargs)):
                start = zlib.crc32(as_bytes(leaf), start)
        return start

    def _needed(self, storage: int) -> list[Call]:
        """The calls that a storage's final content depends on: its writers, and before each, those of what it reads."""
        needed: set[int] = set()
        until = {storage: len(self.calls)}
        waiting = [storage]
        while waiting:
            here = waiting.pop()
            for index in self.writers[here]:
                if index >= until[here] or index in needed:
                    continue
                needed.add(index)
                for read in self.calls[index].reads:
                    if until.get(read, -1) < index:
                        until[read] = index
                        waiting.append(read)
        return [self.calls[i] for i in sorted(needed)]
