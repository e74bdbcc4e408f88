"""The values that a plan knows: whole numbers, a few random numbers, and values computed from these alone.

Shapes depend on them: a router's counts decide how many tokens go to an expert, a mask how many elements are selected. So an
operator on whole numbers also runs on their values. Those of the data are real. If unknown numbers decide a choice (`topk`,
`argmax`, `sort`, `multinomial`), all candidates are chosen equally often: experts have an even load. Other ranks are assumed to
have the same values as this one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from echelon.parallel.meta.deferred import tensors_in

__all__ = ["SHAPED_BY_WHOLE", "Values", "changed_by"]

aten, c10d = torch.ops.aten, torch.ops.c10d

_KNOWN = "_echelon_whole_numbers"  # an attribute of tensors
# The most elements for which values are computed: more would take too long. Floats are followed because some kernels take counts
# only as floats. New floats, filled or drawn, are limited to the few on which a script decides, such as which layers are dropped.
_MOST, _MOST_FLOATS, _MOST_NEW = 2**26, 2**22, 2**14
# Operators that choose -> the place of the indices in the output, the place of the dim in the arguments, the dim's default.
_CHOICES: dict[Any, tuple[int, int, int | None]] = {
    aten.topk.default: (1, 2, -1),
    aten.sort.default: (1, 1, -1),
    aten.sort.stable: (1, 2, -1),
    aten.argsort.default: (0, 1, -1),
    aten.argsort.stable: (0, 2, -1),
    aten.argmax.default: (0, 1, None),
    aten.argmin.default: (0, 1, None),
    aten.max.dim: (1, 1, None),
    aten.min.dim: (1, 1, None),
    aten.multinomial.default: (0, 4, -1),
}
# The output shapes of these depend only on whole numbers, whatever their float arguments are.
SHAPED_BY_WHOLE = {
    aten._pack_padded_sequence.default,
    aten._ctc_loss.default,
    aten._ctc_loss.Tensor,
    aten.bincount.default,
}
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
# These use only the shape of their tensor argument.
_LIKE = {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.rand_like}
_LIKE |= {aten.randn_like, aten.randint_like, aten.empty_like, aten.new_empty}
_REPLACED = {aten.set_, aten.resize_, aten.resize_as_}  # afterwards the tensor's values are unknown


class Values:
    """The known values of tensors without memory.

    Args:
        is_fake: whether a tensor has no memory.
        place_of: from a collective's arguments: this rank's place in the group, and the group's size.
        computing: makes a context in which operators compute on real tensors.
    """

    def __init__(
        self,
        is_fake: Callable[[Any], bool],
        place_of: Callable[[Any, Any], tuple[int, int]],
        computing: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._is_fake, self._place_of, self._computing = is_fake, place_of, computing
        self._lost: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's values; None if unknown."""
        if not self._is_fake(tensor):
            return tensor if type(tensor) is torch.Tensor and not _is_float(tensor) else None
        value: torch.Tensor | None = getattr(tensor, _KNOWN, None)
        return None if value is None or value.untyped_storage() in self._lost else value

    def take(self, tensor: torch.Tensor, real: torch.Tensor | None) -> None:
        """Set the values of a tensor without memory; None makes them unknown. A few floats, such as a window, are known."""
        value = self.of(real) if real is not None else None
        if value is None and type(real) is torch.Tensor and not self._is_fake(real) and real.numel() <= _MOST_NEW:
            value = real
        if value is not None:
            setattr(tensor, _KNOWN, value)
        elif hasattr(tensor, _KNOWN):
            delattr(tensor, _KNOWN)

    def given_by(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The operator's output for known values of its arguments, which it also changes in place; None if unknown."""
        unknown = [tensor for tensor in tensors_in((args, kwargs)) if self.of(tensor) is None]
        by_whole = op in SHAPED_BY_WHOLE or op.overloadpacket in _LIKE
        if (unknown and not by_whole) or not all(map(_is_float, unknown)) or op.overloadpacket in _REPLACED:
            return None
        try:
            with self._computing():
                args, kwargs = tree_map_only(torch.Tensor, self._known_or_one, (args, kwargs))
                return op(*args, **kwargs)
        except Exception:  # evenly chosen numbers may not suit the script: the output is then unknown
            return None

    def _changes_known(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator that returns nothing could change the known values of all its arguments, as it now has."""
        if any(self.of(tensor) is None for tensor in tensors_in((args, kwargs))):
            return False
        with contextlib.suppress(Exception), self._computing():
            args, kwargs = tree_map_only(torch.Tensor, self.of, (args, kwargs))
            op(*args, **kwargs)
            return True
        return False

    def _known_or_one(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self.of(tensor)
        return value if value is not None else torch.ones((), dtype=tensor.dtype).expand(tensor.shape)

    def follow(self, op: Any, made: Any, args: Any, kwargs: Any) -> None:
        """Update the known values after an operator: those of its outputs, and of arguments that it changed."""
        if op.namespace in ("c10d", "_c10d_functional"):
            with self._computing():
                self._exchange(op, args)
            return
        given = None
        first = next(tensors_in((args, kwargs)), None)
        is_new = first is None or op.overloadpacket in _LIKE
        if first is None or is_new or self.of(first) is not None:  # a cheap test first: this runs for every operator
            # Operators on lists return nothing: an optimizer counts its steps by `_foreach_add_`.
            in_lists = not op._schema.returns
            results = changed_by(op, args, kwargs) if in_lists else list(tensors_in(made))
            floats = _MOST_NEW if is_new else _MOST_FLOATS
            if results and all(each.numel() <= (floats if _is_float(each) else _MOST) for each in results):
                if in_lists and self._changes_known(op, args, kwargs):
                    return
                given = self.given_by(op, args, kwargs)
        if op is aten.lift_fresh.default and not self._is_fake(args[0]) and args[0].numel() <= _MOST_NEW:
            given = args[0]  # a number in the script, also a float: torch.tensor(0.5), mask[at] = 0.5
        if given is not None and op.overloadpacket in _EMPTY:
            given = None if _is_float(given) else given.fill_(1)  # 1, as for unknown values: another rank may fill it
        if given is not None:
            self.keep(made, given)
        elif op in _CHOICES:
            with self._computing():
                self._choose(op, list(tensors_in(made)), args, kwargs)
        else:
            if op._schema.is_mutable:
                self._lose(changed_by(op, args, kwargs))
            for tensor in tensors_in(made):  # forget values from a step inside the operator, such as `empty`
                self.take(tensor, None)

    @contextlib.contextmanager
    def unchanged(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context in which the tensors are written with the values that they have."""
        known = [(tensor, value) for tensor in tensors if (value := self.of(tensor)) is not None]
        yield
        for tensor, value in known:
            self._lost.discard(value.untyped_storage())
            setattr(tensor, _KNOWN, value)

    def keep(self, made: Any, values: Any) -> None:
        for tensor, value in zip(tree_leaves(made), tree_leaves(values), strict=True):
            if isinstance(tensor, torch.Tensor) and self._is_fake(tensor) and self.of(tensor) is not value:
                setattr(tensor, _KNOWN, value)

    def _lose(self, changed: Any) -> None:
        """Make the values of changed arguments unknown."""
        for tensor in tensors_in(changed):
            if self._is_fake(tensor) and (value := self.of(tensor)) is not None:
                self._lost.add(value.untyped_storage())

    def _choose(self, op: Any, results: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        place, at, default = _CHOICES[op]
        indices, chosen_of = results[place], args[0]
        dim = args[at] if at < len(args) else kwargs.get("dim", default)
        number = chosen_of.shape[dim] if dim is not None else 1
        dim = dim if dim is not None and indices.dim() == chosen_of.dim() else -1
        last = indices.movedim(dim, -1).shape if indices.dim() else indices.shape
        evenly = torch.arange(math.prod(last)) % max(1, number)
        value = torch.empty_strided(indices.shape, indices.stride(), dtype=indices.dtype)  # views need the same strides
        setattr(indices, _KNOWN, value.copy_(evenly.view(last).movedim(-1, dim) if indices.dim() else evenly.view(())))

    def _exchange(self, op: Any, args: Any) -> None:
        """Update the values that a collective writes, as if all ranks sent the same; those of other collectives are unknown."""
        # torch does not tell a sum from a maximum here. Shapes depend on maxima, which are the same on all ranks.
        if op in (c10d.allreduce_.default, c10d.broadcast_.default):
            return
        if op is c10d._allgather_base_.default and (value := self.of(args[1])) is not None:
            ranks = self._place_of(op, args)[1]
            self._put(args[0], value.flatten().repeat(ranks).view(args[0].shape))
        elif op is c10d.allgather_.default and (value := self.of(args[1][0])) is not None:
            for tensor in tensors_in(args[0]):
                self._put(tensor, value.clone())
        elif op is c10d.alltoall_base_.default and not any(args[3:5]) and (value := self.of(args[1])) is not None:
            rank, ranks = self._place_of(op, args)
            self._put(args[0], value.flatten().chunk(ranks)[rank].repeat(ranks).view(args[0].shape))
        elif op._schema.is_mutable or op.namespace == "c10d":  # c10d's schemas do not show that they fill their first arguments
            self._lose(args[0] if op is not c10d.send.default else ())

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if (before := self.of(tensor)) is not None:
            before.copy_(value)
        elif self._is_fake(tensor):
            setattr(tensor, _KNOWN, value)


@functools.cache
def _changed(op: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The places and the names of the arguments that an operator changes."""
    written = [(at, each) for at, each in enumerate(op._schema.arguments) if each.alias_info and each.alias_info.is_write]
    return tuple(at for at, each in written if not each.kwarg_only), tuple(each.name for _, each in written)


def changed_by(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator changes."""
    places, words = _changed(op)
    return list(tensors_in([*(args[at] for at in places if at < len(args)), *(kwargs[word] for word in words if word in kwargs)]))


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
