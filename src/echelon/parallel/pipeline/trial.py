"""Trial passes: one stage's part of the user's code, run to see what it does, of which nothing stays."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

from echelon.common.errors import PipelineError
from echelon.parallel.names import plain_buffers, plain_name
from echelon.parallel.pipeline.gates import Cut
from echelon.parallel.pipeline.passes import Left, Run
from echelon.parallel.pipeline.stages import Unit
from echelon.parallel.pipeline.values import Needed
from echelon.world import rng

__all__ = ["Escapes", "KeptByUnits", "Trials", "compute", "leaves", "same"]

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
        sums = {}
        for name, buffer in plain_buffers(self._module):
            if name in self._buffers and not name.startswith(inside) and not _equal(buffer, self._buffers[name]):
                sums[name] = str(complex(buffer.detach().to(torch.complex128).sum()))
        return sums

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


# What a stage computes and keeps beside its units' outputs: an attribute, an entry of a list, what a hook has caught.
#
# Later stages run on other ranks and would not see it, so a loss that adds it up would leave it out in silence. That something is
# kept is seen by the ends of autograd's graph, of which each trained parameter has one: it lives as long as a graph that it is
# in. What hooks catch may live no longer than the pass, as in a list of the function that calls the module. So they are given
# sums with a zero of its own, with which nothing else goes on, and it is looked at when the stage ends, before the pass does.

_MARK = "echelon"

# A thread that looks where this one is, such as world/thread_sampler.py, holds its frames for a moment, with all that is in them.
_PAUSES_S = (0.0, 0.01, 0.1, 0.5)


class Escapes:
    """Watches the units of a stage in one pass."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = list(units)
        self._marked: dict[str, list[torch.Tensor]] = {}
        self._shown: dict[str, list[torch.Tensor]] = {}
        self._caught: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the pass. Parameters are looked at when their unit is called: those of shards are whole then."""
        nodes: list[Node] = []  # as long as the pass lasts, so that its graph has these
        with ExitStack() as stack:
            for unit in self._units:
                hook = unit.module.register_forward_pre_hook(lambda module, args, unit=unit: self._begin(unit, nodes, stack))
                stack.callback(hook.remove)
            yield

    def stage_ends(self) -> None:
        """Before the frames of the pass end, and with them what is in their variables."""
        self._caught = _kept(self._shown)

    def _begin(self, unit: Unit, nodes: list[Node], stack: ExitStack) -> None:
        if unit.name in self._marked or not torch.is_grad_enabled():
            return
        self._mark(unit, nodes)
        shown = self._shown[unit.name] = []
        for part in unit.module.modules():
            if any(_is_foreign(hook) for hook in getattr(part, "_forward_hooks", {}).values()):
                show = _Shown(shown)
                stack.callback(part.register_forward_hook(show.instead, prepend=True).remove)
                stack.callback(part.register_forward_hook(show.again).remove)

    def _mark(self, unit: Unit, nodes: list[Node]) -> None:
        self._marked[unit.name] = []
        for parameter in unit.module.parameters():
            if not parameter.requires_grad or _is_marked(parameter):
                continue
            _metadata(parameter)[_MARK] = True
            if _is_marked(parameter):  # somebody holds the node itself, as for a hook: it outlives graphs
                _metadata(parameter).pop(_MARK, None)  # gone by now where another thread let go of it, such as a sampler's
                continue
            nodes.append(get_gradient_edge(parameter).node)
            _metadata(parameter)[_MARK] = True
            self._marked[unit.name].append(parameter)

    def found(self) -> list[str]:
        """The names of the units of which something is kept. When nobody holds the pass's own outputs any more."""
        return list(dict.fromkeys([*self._caught, *_kept(self._marked)]))


class KeptByUnits:
    """What units keep as attributes, without gradients: tensors, numbers, entries of lists. Other stages cannot read them."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = list(units)
        self._before = self._now()

    def _now(self) -> dict[tuple[str, str, str], Any]:
        return {
            (unit.name, path, name): value
            for unit in self._units
            for path, part in unit.module.named_modules()
            for name, value in vars(part).items()
            if isinstance(value, (torch.Tensor, int, float, list))
            for value in [list(value) if isinstance(value, list) else value]
        }

    def found(self) -> list[list[Any]]:
        """New ones: unit, module within it, name, shape and type; of a list how many entries are new."""
        kept: list[list[Any]] = []
        for at, value in self._now().items():
            before = self._before.get(at)
            if isinstance(value, list):
                known = {id(each) for each in before} if isinstance(before, list) else set()
                if new := sum(id(each) not in known for each in value):
                    kept.append([*at, [new], "list"])
            elif before is not value:
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                kept.append([*at, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")])
        return kept


class _Shown:
    """What a module's hooks are given instead of its outputs."""

    def __init__(self, zeros: list[torch.Tensor]) -> None:
        self._zeros = zeros
        self._calls: list[tuple[Any, Any, torch.Tensor]] = []

    def instead(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        zero = torch.zeros((), requires_grad=True)
        shown = pytree.tree_map_only(torch.Tensor, lambda t: t + zero if _is_tracked(t) else t, outputs)
        _metadata(zero)[_MARK] = True  # the sums hold the node
        self._calls.append((outputs, shown, zero))
        return shown

    def again(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        own, shown, zero = self._calls.pop()
        if outputs is not shown or not same(pytree.tree_leaves(own), pytree.tree_leaves(shown)):
            return None  # a hook has changed them, and the pass goes on with that
        self._zeros.append(zero)
        return own


def _is_foreign(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(("torch.", "echelon."))


def _is_tracked(t: torch.Tensor) -> bool:
    return t.requires_grad and not hasattr(t, "to_local")


def _kept(marked: dict[str, list[torch.Tensor]]) -> list[str]:
    """The names of those of which something lives."""

    def alive() -> list[str]:
        return [name for name, tensors in marked.items() if any(_is_marked(t) for t in tensors)]

    for pause_s in _PAUSES_S:
        if not alive():
            return []
        time.sleep(pause_s)
        gc.collect()  # what is held by a circle of references is not kept by anybody
    return alive()


def _is_marked(parameter: torch.Tensor) -> bool:
    return _MARK in _metadata(parameter)


def _metadata(parameter: torch.Tensor) -> Any:
    """Of the node at which its gradient arrives: it is made anew unless a graph, or somebody, holds it."""
    return get_gradient_edge(parameter).node.metadata
