"""Build a model without memory, and compute any of its tensors later, one at a time.

`with on_meta():` makes tensors on the meta device and records every function that would have given them values. Random functions
also draw, into scratch memory: so the generator advances exactly as in a plain build, and its state before each draw is known. To
compute a tensor, the functions that it depends on are replayed in order, with these states.

A recorded tensor reports its device as "cpu", as in a plain build, because libraries skip their initialisation on the meta
device. If values are needed at once (by `item()`, a mask as an index, a write into a tensor that is not on meta), they are
computed.

Built on the public `torch.overrides.TorchFunctionMode`, which sees all calls from Python code, including those of torch's layers.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from echelon.common.arguments import flags
from echelon.common.errors import EchelonError, LayoutError
from echelon.parallel.patching import for_now
from echelon.world import agree
from echelon.world.tensor_bytes import flat_bytes

__all__ = ["Recording", "Value", "is_meta", "leaves", "mapped", "on_meta", "recording", "tensors_in"]


@contextlib.contextmanager
def on_meta(*, on_device: bool = False) -> Iterator[None]:
    """Build modules without memory for their parameters: `with ech.on_meta(): model = Model()`.

    Pass the model to a layout: each rank then computes its own shards, one parameter at a time, with the values of a plain build,
    bit for bit. Code that changes values after construction, such as a loop of initialisers or `model.double()`, must be inside
    the block as well. It takes as long as a plain build, and the memory of one parameter.

    Args:
        on_device: do not draw random numbers here, but later on each rank's device, where it takes only moments. The values
            differ from those of a plain build (with the same distributions), and are the same on any number of ranks with one
            kind of device. Random numbers after the block differ as well. Use it if a restore follows and the values of a
            plain build take long.
    Raises:
        UsageError: a `from_pretrained` inside the block builds on the meta device itself, and would load the whole model.
    """
    flags(on_device=on_device, kind=LayoutError)
    with recording(on_device=on_device):
        yield


@contextlib.contextmanager
def recording(*, on_device: bool = False) -> Iterator[None]:
    """Context in which tensors are made on the meta device and the calls that give them values are recorded.

    Inside another recording it does nothing.
    """
    if _inside.now:
        yield
        return
    with for_now(_inside, now=True), Recording(Tape(on_device=on_device)), DEFAULT:
        yield


class _Inside(threading.local):
    now = False


_inside = _Inside()


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__
_READS = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__format__"),
    *("__contains__", "is_nonzero", "equal", "allclose"),
}
_NO_VALUES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_DRAWS = {
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial"),
    *("poisson", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"),
    *("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "trunc_normal_", "binomial", "rrelu", "rrelu_"),
}


# Functions that overwrite their target completely. Layers draw in their constructors, and models then often draw again.
_OVERWRITE = {"normal_", "uniform_", "zero_", "fill_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_"}


class Recording(TorchFunctionMode):
    """Records the calls that make or change meta tensors while it is entered.

    Attributes:
        tape: the recorded calls.
    """

    def __init__(self, tape: Tape | None = None) -> None:
        super().__init__()
        self.tape = tape or Tape()
        self._scratch = torch.UntypedStorage(0)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._scratch = torch.UntypedStorage(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in (_DEVICE, _IS_META, _IS_CPU, torch.device, torch.Tensor.data_ptr):
            return self._where(func, args, kwargs)
        if asks_for_meta(kwargs.get("device")):  # explicitly on meta: not recorded, as in a plain build
            refuse_loading()
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        metas = [t for t in tensors if is_meta(t)]
        if metas and (name in _READS or (len(metas) < len(tensors) and changes_real(func, name, args, kwargs))):
            return self._at_once(func, args, kwargs)
        if name in ("to", "cpu") and metas and metas[0] is args[0]:  # it is on the CPU already, as in a plain build
            if name == "cpu":
                return args[0]
            args, kwargs = mapped(not_away, args), mapped(not_away, kwargs)
        if metas and len(metas) < len(tensors):
            args, kwargs = mapped(self._lifted, args), mapped(self._lifted, kwargs)
        written = written_to(name, args, kwargs)
        # The meta device has no generators.
        given = {k: on_meta_device(v) for k, v in kwargs.items() if not isinstance(v, torch.Generator)}
        try:
            result = func(*mapped(on_meta_device, args), **mapped(on_meta_device, given))
        except RuntimeError as error:
            if not metas:
                raise
            if not written:  # the result's shape depends on values
                return self._at_once(func, args, kwargs)
            if not isinstance(error, NotImplementedError):
                raise
            result = None if name == "__setitem__" else written[0]
        if name == "__deepcopy__":  # recorded as a clone: the memo belongs to the caller
            func, args, kwargs = torch.clone, args[:1], {}
        if metas or any(is_meta(t) for t in tensors_in(result)):
            self._note(func, name, args, kwargs, result, written)
        elif not tensors and any(leaf is HERE for leaf in leaves((args, kwargs))):  # Module.to parses its arguments this way
            result = mapped(lambda leaf: HERE if isinstance(leaf, torch.device) and leaf == META else leaf, result)
        return result

    def _where(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer questions about devices and addresses; for recorded tensors as in a plain build."""
        if func is torch.device:
            return args[0] if len(args) == 1 and args[0] is HERE else func(*args, **kwargs)
        tensor = args[0]
        if not is_meta(tensor) or tensor.untyped_storage() not in origins:
            return func(*args, **kwargs)
        if func == torch.Tensor.data_ptr:  # on meta all addresses are 0, as if all tensors were tied
            return ((self._number(tensor) + 1) << 40) + int(tensor.storage_offset()) * tensor.dtype.itemsize
        return HERE if func == _DEVICE else func == _IS_CPU

    @torch.no_grad()
    def _at_once(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function with values: its result or the result's shape depends on them, or it changes a real tensor."""
        return func(*mapped(on_cpu, self._computed(args)), **mapped(on_cpu, self._computed(kwargs)))

    def _lifted(self, leaf: Any) -> Any:
        """A recorded tensor with the current value of a real one."""
        if not isinstance(leaf, torch.Tensor) or is_meta(leaf):
            return leaf
        lifted = leaf.detach().to(META)
        self._begin(lifted, leaf.detach().clone(), is_set=True)
        return lifted

    def _note(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any, written: list[torch.Tensor]) -> None:
        reads = {self._number(t) for t in tensors_in((args, kwargs)) if is_meta(t)}
        outputs = list(tensors_in(result))
        made = {i: t for i, t in enumerate(outputs) if is_meta(t) and t.untyped_storage() not in origins}
        if not made and not written:
            return  # a view, or a query
        generator = kwargs.get("generator") or torch.default_generator
        state, stream = None, None
        if name in _DRAWS and self.tape.on_device:
            stream = len(self.tape.calls)
        elif name in _DRAWS:
            state = generator.get_state()
            self._draw(func, args, kwargs, written)
        begins = {i: self._number(t) for i, t in made.items()}
        for storage in {*begins.values(), *(self._number(t) for t in written)}:
            self.tape.writers[storage].append(len(self.tape.calls))
        sets = bool(written) or name not in _NO_VALUES
        recorded = (self._values(args), self._values(kwargs))
        dtype = torch.get_default_dtype()
        once = len(list(tensors_in((args, kwargs)))) == 1
        whole = {self._number(t) for t in written if once and name in _OVERWRITE and t.untyped_storage().nbytes() == t.nbytes}
        call = Call(func, *recorded, frozenset(reads), begins, sets, dtype, generator, state, stream, frozenset(whole))
        self.tape.calls.append(call)

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        origin = origins.get(storage)
        if origin is None:
            origins[storage] = (self.tape, len(self.tape.writers))
            self.tape.writers[len(self.tape.writers)] = []
        elif origin[0] is not self.tape:  # made by another recording: it begins here with the value it had there
            elements = storage.nbytes() // tensor.dtype.itemsize
            before = Value(*origin, tensor.dtype, (elements,), (1,), 0)
            del origins[storage]
            self._begin(tensor, before, is_set=before.is_set)
            self.tape.sources.append(origin[0])
        return origins[storage][1]

    def _begin(self, tensor: torch.Tensor, value: torch.Tensor | Value, *, is_set: bool) -> None:
        """Record that a tensor's storage begins with a value."""
        number = self._number(tensor)
        self.tape.writers[number].append(len(self.tape.calls))
        made = Call(
            torch.clone, (value,), {}, frozenset(), {0: number}, is_set, torch.get_default_dtype(), torch.default_generator, None
        )
        self.tape.calls.append(made)

    def _values(self, tree: Any) -> Any:
        """Replace meta tensors by `Value`s, other tensors and arrays by copies, and the recording's device by "cpu"."""

        def kept(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return Value.of(leaf) if is_meta(leaf) else leaf.detach().clone()
            return leaf.copy() if isinstance(leaf, np.ndarray) else on_cpu(leaf)

        return mapped(kept, tree)

    def _computed(self, tree: Any) -> Any:
        def value(leaf: Any) -> Any:
            if not is_meta(leaf):
                return leaf
            known = Value.of(leaf)
            return known.compute() if known is not None else leaf

        return mapped(value, tree)

    @torch.no_grad()
    def _draw(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> None:
        """Advance the generator as a plain build would: call the same function on scratch memory.

        The scratch memory is kept for the next call: freeing and allocating it again would fragment the heap.
        """
        if agree.is_alone():  # the values will not be used
            return
        targets = {id(t) for t in written}

        def stand_in(leaf: Any) -> Any:
            if id(leaf) in targets:
                size = reach(leaf.size(), leaf.stride()) * leaf.dtype.itemsize
                if self._scratch.nbytes() < size:
                    self._scratch = torch.UntypedStorage(size)
                return torch.empty(0, dtype=leaf.dtype).set_(self._scratch, 0, leaf.size(), leaf.stride())
            return self._computed(leaf) if isinstance(leaf, torch.Tensor) else on_cpu(leaf)

        func(*mapped(stand_in, args), **mapped(stand_in, kwargs))


# The tape of a recording: the calls that made or changed tensors, and how to compute a tensor from them.


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


# The device of a call's result, the tensors that the call changes, and its arguments.

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
