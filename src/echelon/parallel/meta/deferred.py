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
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from echelon.common.arguments import flags
from echelon.common.errors import LayoutError
from echelon.parallel.meta.tape import (
    DEFAULT,
    HERE,
    META,
    Call,
    Tape,
    Value,
    asks_for_meta,
    changes_real,
    is_meta,
    leaves,
    mapped,
    not_away,
    on_cpu,
    on_meta_device,
    origins,
    reach,
    refuse_loading,
    tensors_in,
    written_to,
)
from echelon.parallel.patching import for_now
from echelon.world import agree

__all__ = ["Recording", "on_meta", "recording"]


@contextlib.contextmanager
def on_meta(*, on_device: bool = False, restores: bool = False) -> Iterator[None]:
    """Build modules without memory for their parameters: `with ech.on_meta(): model = Model()`.

    Pass the model to a layout: each rank then computes its own shards, one parameter at a time, with the values of a plain build,
    bit for bit. Code that changes values after construction, such as a loop of initialisers or `model.double()`, must be inside
    the block as well. It takes as long as a plain build, and the memory of one parameter.

    Args:
        on_device: do not draw random numbers here, but later on each rank's device, where it takes only moments. The values
            differ from those of a plain build (with the same distributions), and are the same on any number of ranks with one
            kind of device. Random numbers after the block differ as well.
        restores: no effect. Use `on_device` if a restore follows and the values of a plain build take long.
    Raises:
        UsageError: a `from_pretrained` inside the block builds on the meta device itself, and would load the whole model.
    """
    flags(on_device=on_device, restores=restores, kind=LayoutError)
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
