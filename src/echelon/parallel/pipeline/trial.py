"""Trial passes: one stage's part of the user's code, run to see what it does, of which nothing stays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from echelon.common.errors import PipelineError
from echelon.parallel.names import plain_buffers, plain_name
from echelon.parallel.pipeline.absent import Needed
from echelon.parallel.pipeline.gates import Cut
from echelon.parallel.pipeline.passes import Left, Run
from echelon.world import rng

__all__ = ["Trials", "compute", "leaves", "same"]

_PLAIN = (bool, int, float, str, torch.Tensor, type(None))


def compute(cut: Cut, run: Run, act: Callable[[], Any]) -> Any:
    """The user's code for one stage: what `act` returns on the last one, else None.

    Raises:
        Needed: it needs what it was not given, and can begin anew.
        UsageError: it does not call the module itself, or a stage not the next one.
    """
    cut.run, run.kind = run, cut.kind
    left = False
    try:
        value = run.ends(act())
    except Left:
        left, value = True, None
    finally:
        cut.run = None
        cut.show_kept()
    if run.needed is not None:
        raise Needed(run.needed)
    if not run.is_whole:
        raise PipelineError(
            f"compute_loss calls a submodule of {cut.kind} directly, and {cut.kind} is split over {cut.count} stages: it must "
            "call the module itself."
        )
    if not left and run.stage < cut.count - 1:
        after = next(unit.name for unit in cut.units if unit.stage > run.stage)
        raise PipelineError(
            f"the forward pass of {cut.kind} ended in stage {run.stage} of {cut.count} without a call of {after}, where the next "
            "stage begins."
        )
    return value


class Trials:
    """What lets passes be repeated: RNG state and buffers as they were."""

    def __init__(self, module: nn.Module, cut: Cut) -> None:
        self._module, self._cut = module, cut
        self._buffers: dict[str, torch.Tensor] = {}
        self._parts: list[tuple[nn.Module, dict[str, torch.Tensor], dict[str, Any]]] = []

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Nothing stays of the passes within."""
        states = rng.states()
        self._buffers = {name: b.detach().clone() for name, b in plain_buffers(self._module)}
        counts = [(part, name, value) for part in self._module.modules() for name, value in _plain_values(part)]
        self._parts = [
            (part, held, {name: value for name, value in vars(part).items() if isinstance(value, _PLAIN)})
            for part in self._module.modules()
            if (held := dict(part.named_buffers(recurse=False)))
        ]
        try:
            yield
        finally:
            rng.put_back(states)
            self._put_back()
            for part, name, value in counts:
                if name in vars(part) and vars(part)[name] is not value:
                    vars(part)[name] = value
            self._buffers, self._parts = {}, []

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Each pass draws what the others drew, and begins with the same buffers."""
        self._put_back()
        states = rng.states()
        try:
            yield
        finally:
            rng.put_back(states)

    def _put_back(self) -> None:
        for part, held, attributes in self._parts:
            now = dict(part.named_buffers(recurse=False))
            # Whoever has registered another buffer, as rotary embeddings for a longer sequence, has noted that in an attribute.
            if any(now.get(name) is not buffer for name, buffer in held.items()):
                for name, value in {**attributes, **held}.items():
                    setattr(part, name, value)
        with torch.no_grad():
            for name, buffer in plain_buffers(self._module):
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])

    def counts(self) -> dict[str, Any]:
        """The numbers that are attributes of modules outside of the units."""
        inside = tuple(f"{unit.name}." for unit in self._cut.units)
        names = {unit.name for unit in self._cut.units}
        return {
            f"{path}.{name}".lstrip("."): value
            for path, part in self._module.named_modules()
            if plain_name(path) not in names and not plain_name(path).startswith(inside)
            for name, value in _plain_values(part)
            if not isinstance(value, bool) and isinstance(value, (int, float))
        }

    def changed(self) -> dict[str, str]:
        """Buffers that lie in no unit and were changed by this stage, with what they are now."""
        inside = tuple(f"{unit.name}." for unit in self._cut.units)
        found = {}
        for name, buffer in plain_buffers(self._module):
            if name in self._buffers and not name.startswith(inside) and not _equal(buffer, self._buffers[name]):
                found[name] = str(complex(buffer.detach().to(torch.complex128).sum()))
        return found

    def refuse_lost(self, changed: dict[str, list[str]]) -> None:
        """
        Args:
            changed: what `changed` gave in each stage where it gave something.
        Raises:
            UsageError: not all stages have changed a buffer alike, of which each has a copy.
        """
        for name, sums in changed.items():
            if len(sums) < self._cut.count or len(set(sums)) > 1:
                raise PipelineError(
                    f"the buffer {self._cut.kind}.{name} is changed in {len(sums)} of {self._cut.count} stages, not in all "
                    "alike: a pipeline would lose that. Register it in a module that lies in one stage, or freeze it."
                )


def _plain_values(part: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(part).items() if value is None or isinstance(value, (bool, int, float, str)))


def leaves(run: Run, value: Any) -> list[Any]:
    flat = pytree.tree_leaves([list(run.gave.values()), value])
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]


def same(a: list[Any], b: list[Any]) -> bool:
    tensors = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor)] if len(a) == len(b) else []
    return len(a) == len(b) and all(_equal(x, y) for x, y in tensors)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Kernels of a GPU may round otherwise in each run."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device.type == "cpu" or not a.dtype.is_floating_point:
        return bool(((a == b) | (a != a) & (b != b)).all())
    return torch.allclose(a, b, rtol=1e-2, atol=1e-5, equal_nan=True)
