"""The values that pass between stages: any nesting of tensors that modules return, flattened to send it and rebuilt."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from echelon.parallel.meta.deferred import mapped, tensors_in
from echelon.world.device import map_tensors

__all__ = ["Absent", "Form", "Needed", "Sources", "Unsendable", "absent_in", "form_of", "in_place_of_absent", "shape_of_batch"]

# The plain values that a nesting may hold besides tensors. They are sent as text.
_PLAIN = (bool, int, float, str, type(None))


class Unsendable(TypeError):
    """A nesting holds something that is neither a tensor nor a plain value."""


@dataclass(frozen=True)
class Leaf:
    """The shape and dtype of a tensor, and whether it has a gradient.

    Args:
        grad: whether a gradient is sent back for it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Leaf:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


_structure = functools.lru_cache(maxsize=1024)(pytree.treespec_loads)  # a form is filled for each micro-batch


@dataclass(frozen=True)
class Form:
    """A nesting without its tensors.

    Args:
        tree: its structure, as `pytree.treespec_dumps` writes it.
        leaves: in the order of `tree`, a `Leaf` for each tensor, or a plain value.
    """

    tree: str
    leaves: tuple[Any, ...]

    @functools.cached_property
    def tensors(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Leaf)]

    @functools.cached_property
    def is_tensor(self) -> bool:
        """Whether the value is one tensor in no nesting: the usual case, which needs no rebuilding."""
        return len(self.tensors) == len(self.leaves) == 1 and bool(_structure(self.tree).is_leaf())

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self.is_tensor:
            return tensors[0]
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Leaf) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, _structure(self.tree))

    def to_json(self) -> Any:
        packed = [
            ["t", list(leaf.shape), str(leaf.dtype).removeprefix("torch."), leaf.grad] if isinstance(leaf, Leaf) else ["v", leaf]
            for leaf in self.leaves
        ]
        return [self.tree, packed]

    @classmethod
    def from_json(cls, value: Any) -> Form:
        tree, packed = value
        leaves = [Leaf(tuple(p[1]), getattr(torch, p[2]), p[3]) if p[0] == "t" else p[1] for p in packed]
        return cls(tree, tuple(leaves))


def form_of(value: Any, *, lossy: bool = False) -> tuple[Form, list[torch.Tensor]]:
    """Flatten a nesting into its form and its tensors.

    Args:
        lossy: replace values that cannot be sent by None.
    Raises:
        Unsendable: names the class of a value that is neither a tensor nor a plain value.
    """
    flat, spec = pytree.tree_flatten(value)
    kinds: list[Any] = []
    tensors = []
    for leaf in flat:
        if isinstance(leaf, torch.Tensor):
            kinds.append(Leaf.of(leaf))
            tensors.append(leaf)
        elif isinstance(leaf, _PLAIN) and not (isinstance(leaf, float) and not math.isfinite(leaf)):
            kinds.append(leaf)
        elif lossy:
            kinds.append(None)
        else:
            raise Unsendable(type(leaf).__name__)
    return Form(pytree.treespec_dumps(spec), tuple(kinds)), tensors


def shape_of_batch(value: Any) -> tuple[Any, ...]:
    """The key under which a batch's passes are cached: its structure first, with its bools, which may choose the path of the
    pass; then the shapes of its tensors.
    """
    flat, spec = pytree.tree_flatten(value)
    kinds: list[tuple[int, str]] = []
    shapes: list[tuple[int, ...]] = []

    def see(tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            kinds.append((tensor.dim(), str(tensor.dtype)))
            shapes.append(tuple(tensor.shape))
        return tensor

    map_tensors(value, see)  # also tensors inside a pytree leaf, such as a dataclass
    rest = (leaf for leaf in flat if not isinstance(leaf, torch.Tensor))
    plain = tuple([str(leaf) if isinstance(leaf, bool) else type(leaf).__name__ for leaf in rest])
    return (str(spec), tuple(kinds), plain), *shapes


# Absent tensors stand in a stage for tensors that another rank has. They have shape, dtype and device, but no values.
#
# The author's code between the units runs in every stage, also on values that were not sent there. Its results from absent
# tensors are absent as well, and record from which calls and parameters they are computed. So a stage needs from earlier stages
# the inputs of its own units and of the loss, and the tensors whose values the code reads: by `if`, `item()`, an index, or a
# write into a tensor with values.


class Needed(BaseException):
    """A pass needs values it did not receive. A BaseException, so that an author's `except Exception` does not catch it.

    Args:
        sources: what the needed tensor is computed from.
    """

    def __init__(self, sources: Sources) -> None:
        super().__init__(sources)
        self.sources = sources


@dataclass
class Sources:
    """What an absent tensor is computed from: calls of units ("blocks.3:1" is the first of blocks.3), parameters and buffers.

    Args:
        is_weight: the tensor is a parameter or buffer itself, or a view of one.
    """

    calls: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    is_weight: bool = False

    def add(self, others: Iterable[Sources]) -> Sources:
        for other in others:
            self.calls |= other.calls
            self.weights |= other.weights
        return self


@dataclass(frozen=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


_MOST_SHAPES = 8192
_shapes_of: dict[Any, Any] = {}  # by operation and the kinds of its arguments, the kinds of its results

# Operations whose result does not depend on the values of their tensor arguments.
_MADE_ALIKE = (
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
)


class Absent(torch.Tensor):
    """A tensor that another rank has, without values.

    Attributes:
        sources: what it is computed from. Its views share the object.
        place: the `Cut`, whose `needs` is called when values are needed.
    """

    sources: Sources
    place: Any

    @staticmethod
    def of(size: Iterable[int], dtype: torch.dtype, device: torch.device, sources: Sources, place: Any) -> Absent:
        return _made(_Shape(tuple(size), _dense(size), dtype), device, sources, place)

    # Results of operations on an absent tensor need not be of this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        absent = [each for each in tensors_in((args, kwargs)) if isinstance(each, Absent)]
        place, sources = absent[0].place, [each.sources for each in absent]
        name = func._schema.name.removeprefix("aten::")
        if name in _MADE_ALIKE:
            return func(*in_place_of_absent(args, torch.empty), **in_place_of_absent(kwargs, torch.empty))
        if not place.within and all(isinstance(each, Absent) for each in _written(func, args, kwargs)):
            if torch.Tag.nondeterministic_seeded in func.tags and not _draws(func, args, kwargs):
                results = None
            else:
                results = _results(func, args, kwargs)
            if results is not None:
                return _as_absent(func, results, args, kwargs, absent)
        place.needs(Sources().add(sources))
        return func(*in_place_of_absent(args, torch.zeros), **in_place_of_absent(kwargs, torch.zeros))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.dtype} of shape {tuple(self.shape)}, on another rank>"

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        return self._zeros().numpy()

    def tolist(self) -> Any:
        return self._zeros().tolist()

    def __array__(self, *given: Any, **named: Any) -> Any:
        return self._zeros().__array__(*given, **named)

    def _zeros(self) -> torch.Tensor:
        self.place.needs(self.sources)
        return torch.zeros(self.shape, dtype=self.dtype)


def absent_in(value: Any) -> list[Absent]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Absent)]


def in_place_of_absent(value: Any, make: Callable[..., torch.Tensor] = torch.zeros) -> Any:
    """The same nesting, with the results of `make` (zeros) in place of absent tensors."""

    def real(leaf: Absent) -> torch.Tensor:
        return make(leaf.shape, dtype=leaf.dtype, device=leaf.device)

    return pytree.tree_map_only(Absent, real, value)


def _dense(size: Iterable[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(tuple(size)):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


def _made(shape: _Shape, device: torch.device, sources: Sources, place: Any) -> Absent:
    made: Absent = torch.Tensor._make_wrapper_subclass(Absent, shape.size, strides=shape.stride, dtype=shape.dtype, device=device)
    made.sources, made.place = sources, place
    return made


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    if not func._schema.is_mutable:
        return []
    written: list[torch.Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            written += tensors_in(value)
    return written


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Draw as often as the stage that has the values, so that later draws are the same. False if zeros are not valid inputs."""
    try:
        func(*in_place_of_absent(args), **in_place_of_absent(kwargs))
    except Exception:  # for example zeros as probabilities
        return False
    return True


def _results(func: Any, args: Any, kwargs: Any) -> Any:
    """The shapes and dtypes of an operation's results; None if they depend on values."""
    key: Any = (func, _key(args), _key(kwargs))
    try:
        if key in _shapes_of:
            return _shapes_of[key]
    except TypeError:  # an unhashable argument
        key = None
    try:
        made = func(*mapped(_on_meta, args), **mapped(_on_meta, kwargs))
        results = pytree.tree_map_only(torch.Tensor, lambda t: _Shape(tuple(t.shape), t.stride(), t.dtype), made)
    except Exception:
        results = None
    if key is not None:
        if len(_shapes_of) >= _MOST_SHAPES:
            _shapes_of.clear()
        _shapes_of[key] = results
    return results


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_key(each) for each in value])
    if isinstance(value, dict):
        return tuple([(name, _key(each)) for name, each in value.items()])
    return type(value), value  # the type distinguishes 1, 1.0 and True


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _as_absent(func: Any, results: Any, args: Any, kwargs: Any, absent: list[Absent]) -> Any:
    place = absent[0].place
    devices = [kwargs.get("device"), *(each.device for each in absent if each.dim()), absent[0].device]
    device = torch.device(next(each for each in devices if each is not None))
    returns = func._schema.returns
    written = [each for each in _written(func, args, kwargs) if isinstance(each, Absent)]
    if written:
        for each in written:
            if each.sources.is_weight:
                place.needs(each.sources, writes=True)
            each.sources.add([other.sources for other in absent])
        if len(returns) == 1 and returns[0].alias_info is not None and isinstance(results, _Shape):
            return written[0]
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    sources = absent[0].sources if is_view else Sources().add([each.sources for each in absent])
    return pytree.tree_map_only(_Shape, lambda shape: _made(shape, device, sources, place), results)
