"""Build a model without memory for it, and compute any of its tensors later, each by itself.

`with on_meta():` makes tensors on the meta device and writes down every function that would have given them values. Random ones
also draw, into memory that is freed at once: so the generator moves exactly as in a plain build, and its state before each
draw is known. A tensor's value is the replay of the functions that it depends on, in order, with these states.

Built on the public `torch.overrides.TorchFunctionMode`, which sees what Python code calls; torch's own layers included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from echelon.contracts.errors import EchelonError

__all__ = ["Recording", "Value", "on_meta"]


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Build modules without memory for their parameters: `with ech.on_meta(): model = Model()`.

    Pass the model to a strategy: each rank then computes its own shards, one parameter at a time, with the values that a plain
    build gives here, to the bit. Whatever changes values after construction, a loop of initialisers or `model.double()`,
    belongs inside the block too. It takes as long as a plain build, and the memory of one parameter.
    """
    with Recording(), torch.device("meta"):
        yield


@dataclass(frozen=True)
class Value:
    """A tensor of a recording: where in which storage it lies."""

    recording: Recording
    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Value | None:
        """None if the tensor was not made under a recording."""
        origin = _origins.get(tensor.untyped_storage())
        if origin is None:
            return None
        return cls(*origin, tensor.dtype, tuple(tensor.size()), tuple(map(int, tensor.stride())), int(tensor.storage_offset()))

    @property
    def is_set(self) -> bool:
        """Whether anything gave it a value: `torch.empty` does not."""
        return any(self.recording.calls[i].sets for i in self.recording.writers[self.storage])

    def compute(self) -> torch.Tensor:
        """The tensor, in host memory. Uses the memory of what it depends on, as a rule only itself."""
        return self.within(self.recording.replay(self.storage))

    def within(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if self.storage not in storages:  # made before the recording began
            elements = self.offset + _reach(self.size, self.stride)
            storages[self.storage] = torch.UntypedStorage(elements * self.dtype.itemsize)
        return torch.empty(0, dtype=self.dtype).set_(storages[self.storage], self.offset, self.size, self.stride)


@dataclass
class _Call:
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


# By storage: the recording that a meta tensor belongs to, and its number there. Views, parameters and `.data` share storages.
_origins: WeakKeyDictionary[torch.UntypedStorage, tuple[Recording, int]] = WeakKeyDictionary()

_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "equal", "allclose"}
_NO_VALUES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial"),
    *("poisson", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"),
    *("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_", "binomial", "rrelu", "rrelu_"),
}


class Recording(TorchFunctionMode):
    """Writes down what happens to meta tensors while it is entered.

    Attributes:
        calls: in order.
        writers: by storage, which of them made or changed it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.writers: dict[int, list[int]] = {}
        self._scratch = torch.UntypedStorage(0)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._scratch = torch.UntypedStorage(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            return False  # initialisers skip meta tensors; a plain build would have none
        name = getattr(func, "__name__", "")
        if name in _READS and any(_is_meta(t) for t in _tensors((args, kwargs))):
            with torch.no_grad():
                return func(*self._computed(args), **self._computed(kwargs))
        # The meta device has no generators.
        given = {k: v for k, v in kwargs.items() if not isinstance(v, torch.Generator)}
        written = _written(func, name, args, kwargs)
        result = func(*args, **given)
        if name == "__deepcopy__":  # its memo belongs to the caller
            func, args, kwargs = torch.clone, args[:1], {}
        if any(_is_meta(t) for t in _tensors((args, kwargs, result))):
            self._note(func, name, args, kwargs, result, written)
        return result

    def _note(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any, written: list[torch.Tensor]) -> None:
        reads = {self._number(t) for t in _tensors((args, kwargs)) if _is_meta(t)}
        outputs = list(_tensors(result))
        made = {i: t for i, t in enumerate(outputs) if _is_meta(t) and t.untyped_storage() not in _origins}
        if not made and not written:
            return  # a view, or a question
        generator = kwargs.get("generator") or torch.default_generator
        state = None
        if name in _DRAWS:
            state = generator.get_state()
            self._draw(func, args, kwargs, written)
        begins = {i: self._number(t) for i, t in made.items()}
        for storage in {*begins.values(), *(self._number(t) for t in written)}:
            self.writers[storage].append(len(self.calls))
        sets = bool(written) or name not in _NO_VALUES
        recorded = (self._values(args), self._values(kwargs))
        dtype = torch.get_default_dtype()
        self.calls.append(_Call(func, *recorded, frozenset(reads), begins, sets, dtype, generator, state))

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage not in _origins or _origins[storage][0] is not self:
            _origins[storage] = (self, len(self.writers))
            self.writers[len(self.writers)] = []
        return _origins[storage][1]

    def _values(self, tree: Any) -> Any:
        """Meta tensors as `Value`s, other tensors as they are now, and "cpu" for the meta device."""

        def kept(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return Value.of(leaf) if _is_meta(leaf) else leaf.detach().clone()
            return torch.device("cpu") if leaf == torch.device("meta") or leaf == "meta" else leaf

        return _mapped(kept, tree)

    def _computed(self, tree: Any) -> Any:
        def value(leaf: Any) -> Any:
            if not _is_meta(leaf):
                return leaf
            known = Value.of(leaf)
            return known.compute() if known is not None else leaf

        return _mapped(value, tree)

    @torch.no_grad()
    def _draw(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> None:
        """Move the generator as the plain build would: the same function, into memory that nobody reads.

        It is kept for the next: memory that is freed and asked for again leaves holes in the heap.
        """
        targets = {id(t) for t in written}

        def stand_in(leaf: Any) -> Any:
            if id(leaf) in targets:
                size = _reach(leaf.size(), leaf.stride()) * leaf.dtype.itemsize
                if self._scratch.nbytes() < size:
                    self._scratch = torch.UntypedStorage(size)
                return torch.empty(0, dtype=leaf.dtype).set_(self._scratch, 0, leaf.size(), leaf.stride())
            if isinstance(leaf, torch.Tensor):
                return self._computed(leaf)
            return torch.device("cpu") if leaf == torch.device("meta") or leaf == "meta" else leaf

        func(*_mapped(stand_in, args), **_mapped(stand_in, kwargs))

    # --- afterwards

    @torch.no_grad()
    def replay(self, storage: int) -> dict[int, torch.UntypedStorage]:
        """Compute a storage: it, and what it depends on, by number."""
        storages: dict[int, torch.UntypedStorage] = {}

        def real(leaf: Any) -> Any:
            return leaf.within(storages) if isinstance(leaf, Value) else leaf

        default = torch.get_default_dtype()
        try:
            for call in self._needed(storage):
                torch.set_default_dtype(call.dtype)
                before = call.generator.get_state()
                if call.state is not None:
                    call.generator.set_state(call.state)
                outputs = list(_tensors(call.func(*_mapped(real, call.args), **_mapped(real, call.kwargs))))
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

    def _needed(self, storage: int) -> list[_Call]:
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


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last in memory."""
    return 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _written(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The meta tensors that a function changes, by torch's conventions of naming."""
    changed: list[torch.Tensor] = list(_tensors(kwargs.get("out")))
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if in_place or name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__",)):
        first = args[0] if args else next((kwargs[k] for k in ("tensor", "input", "self") if k in kwargs), None)
        changed += list(_tensors(first))
    return [t for t in changed if _is_meta(t)]


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(change, leaf) for leaf in tree)
    if type(tree) is dict:
        return {key: _mapped(change, leaf) for key, leaf in tree.items()}
    return change(tree)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for leaf in tree:
            yield from _tensors(leaf)
    elif type(tree) is dict:
        for leaf in tree.values():
            yield from _tensors(leaf)
