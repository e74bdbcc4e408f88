"""What passes between stages: any nesting of tensors, as the author's modules return it, taken apart and put together again."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from echelon.world.device import map_tensors

__all__ = ["Form", "Unsendable", "form_of", "shape_of_batch"]

# What a nesting may hold besides tensors: it is sent as text.
_PLAIN = (bool, int, float, str, type(None))


class Unsendable(TypeError):
    """A nesting holds something that is neither a tensor nor a plain value."""


@dataclass(frozen=True)
class Leaf:
    """A tensor's kind.

    Args:
        grad: whether a gradient belongs to it.
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
        tree: its structure, as torch writes it.
        leaves: in its order, a tensor's kind, or a plain value.
    """

    tree: str
    leaves: tuple[Any, ...]

    @functools.cached_property
    def tensors(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Leaf)]

    @functools.cached_property
    def is_tensor(self) -> bool:
        """One tensor, in no nesting: the usual case, for which nothing is to be put together."""
        return len(self.tensors) == len(self.leaves) == 1 and bool(_structure(self.tree).is_leaf())

    def with_grads_of(self, other: Form) -> Form | None:
        """Of the same nesting: whether gradients belong to its tensors is as in that one."""
        if self.tree != other.tree or len(self.leaves) != len(other.leaves):
            return None
        made = []
        for mine, its in zip(self.leaves, other.leaves, strict=True):
            if isinstance(mine, Leaf) != isinstance(its, Leaf):
                return None
            made.append(replace(mine, grad=its.grad) if isinstance(mine, Leaf) else mine)
        return Form(self.tree, tuple(made))

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
    """Take a nesting apart.

    Args:
        lossy: what cannot be sent becomes None.
    Raises:
        Unsendable: the class of what is neither a tensor nor a plain value.
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
    """What of a batch decides what its passes do: first its structure, with the bools in it, which say what is to be done; then
    the shapes of its tensors.
    """
    flat, spec = pytree.tree_flatten(value)
    kinds: list[tuple[int, str]] = []
    shapes: list[tuple[int, ...]] = []

    def see(tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            kinds.append((tensor.dim(), str(tensor.dtype)))
            shapes.append(tuple(tensor.shape))
        return tensor

    map_tensors(value, see)  # also those in what torch takes for one leaf, such as a dataclass
    rest = (leaf for leaf in flat if not isinstance(leaf, torch.Tensor))
    plain = tuple([str(leaf) if isinstance(leaf, bool) else type(leaf).__name__ for leaf in rest])
    return (str(spec), tuple(kinds), plain), *shapes
