"""Trial passes: one stage's part of the user's code, run to learn what it does, without lasting effects."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from echelon.common.errors import PipelineError
from echelon.parallel.names import plain_buffers, plain_name
from echelon.parallel.patching import Snapshot, for_now
from echelon.parallel.pipeline.gates import Cut
from echelon.parallel.pipeline.passes import Left, Run
from echelon.parallel.pipeline.stages import Unit
from echelon.parallel.pipeline.values import Needed
from echelon.world import rng
from echelon.world.thread_sampler import FRAMES

__all__ = ["Escapes", "KeptByUnits", "Trials", "compute", "leaves", "same"]


def compute(cut: Cut, run: Run, act: Callable[[], Any]) -> Any:
    """Run the user's code for one stage. Returns the value of `act` on the last stage, else None.

    Raises:
        Needed: the pass needs values it did not receive, and can begin again.
        UsageError: the code does not call the module itself, or the stage does not call the next one.
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
    """Restores RNG state, buffers and plain attributes, so that passes can be repeated and undone."""

    def __init__(self, module: nn.Module, cut: Cut) -> None:
        self._module, self._cut = module, cut
        self._before: Snapshot | None = None  # of the passes that are to be undone

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Context whose passes leave RNG state, buffers and plain attributes unchanged."""
        before = Snapshot(self._module)
        try:
            with rng.unchanged(), for_now(self, _before=before):
                yield
        finally:
            before.restore()

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Context of one pass, which begins with the same RNG state and buffers as the others."""
        assert self._before is not None
        self._before.restore_buffers()
        with rng.unchanged():
            yield

    def counts(self) -> dict[str, Any]:
        """The numeric attributes of modules outside of the units."""
        inside = tuple(f"{unit.name}." for unit in self._cut.units)
        names = {unit.name for unit in self._cut.units}
        return {
            f"{path}.{name}".lstrip("."): value
            for path, part in self._module.named_modules()
            if plain_name(path) not in names and not plain_name(path).startswith(inside)
            for name, value in vars(part).items()
            if not isinstance(value, bool) and isinstance(value, (int, float))
        }

    def changed(self) -> dict[str, str]:
        """Buffers in no unit that this stage has changed, with the sum of their new values as text."""
        inside = tuple(f"{unit.name}." for unit in self._cut.units)
        sums, before = {}, self._before.buffers if self._before is not None else {}
        for name, buffer in plain_buffers(self._module):
            if name in before and not name.startswith(inside) and not _equal(buffer, before[name]):
                sums[name] = str(complex(buffer.detach().to(torch.complex128).sum()))
        return sums

    def refuse_lost(self, changed: dict[str, list[str]]) -> None:
        """Refuse changes of buffers and numbers outside of the units that a pipeline would lose.

        Args:
            changed: by name, what the stages that changed it made of it.
        Raises:
            UsageError: not all stages have changed it in the same way; each rank has its own.
        """
        for name, made in changed.items():
            if len(made) < self._cut.count or len(set(made)) > 1:
                raise PipelineError(
                    f"{self._cut.kind}.{name}, which lies in no stage, is changed in {len(made)} of {self._cut.count} stages, "
                    "not equally in all: a pipeline would lose the change. Register a buffer in a module that lies in one stage, "
                    "or freeze it; count passes at the start of forward, or in on_train_step_end."
                )


def leaves(run: Run, value: Any) -> list[Any]:
    flat = pytree.tree_leaves([list(run.gave.values()), value])
    return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]


def same(a: list[Any], b: list[Any]) -> bool:
    tensors = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor)] if len(a) == len(b) else []
    return len(a) == len(b) and all(_equal(x, y) for x, y in tensors)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the tensors are equal, up to rounding on a GPU, whose kernels may round differently in each run."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device.type == "cpu" or not a.dtype.is_floating_point:
        return bool(((a == b) | (a != a) & (b != b)).all())
    return torch.allclose(a, b, rtol=1e-2, atol=1e-5, equal_nan=True)


# Tensors that a stage computes and keeps beside its units' outputs: in an attribute, an entry of a list, or caught by a hook.
#
# Later stages run on other ranks and do not see such tensors, so a loss that adds them up would silently omit them. A kept tensor
# keeps its autograd graph alive, and with it the AccumulateGrad node of each trained parameter in the graph. The check marks
# these nodes and looks which marks still exist after the pass. Tensors caught by hooks may not outlive the pass, as in a list of
# the function that calls the module. So hooks get views of the outputs, made for this purpose. Nothing else uses these, and their
# nodes are checked when the stage ends, before the pass ends.

_MARK = "echelon"


class Escapes:
    """Finds the units of a stage whose tensors outlive one pass."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = list(units)
        self._marked: dict[str, list[_Ref]] = {}
        self._shown: dict[str, list[_Ref]] = {}
        self._caught: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of the pass. It marks a unit's parameters when the unit is called: sharded parameters are gathered then."""
        nodes: list[Any] = []  # held during the pass, so that its graph has the marked nodes
        with ExitStack() as stack:
            for unit in self._units:
                hook = unit.module.register_forward_pre_hook(lambda module, args, unit=unit: self._begin(unit, nodes, stack))
                stack.callback(hook.remove)
            yield

    def stage_ends(self) -> None:
        """Look for tensors caught by hooks, before the frames of the pass end and release their variables."""
        self._caught = _kept(self._shown)

    def _begin(self, unit: Unit, nodes: list[Any], stack: ExitStack) -> None:
        if unit.name in self._marked or not torch.is_grad_enabled():
            return
        self._mark(unit, nodes)
        shown = self._shown[unit.name] = []
        for part in unit.module.modules():
            if any(_is_foreign(hook) for hook in getattr(part, "_forward_hooks", {}).values()):
                show = _Shown(shown)
                stack.callback(part.register_forward_hook(show.instead, prepend=True).remove)
                stack.callback(part.register_forward_hook(show.again).remove)

    def _mark(self, unit: Unit, nodes: list[Any]) -> None:
        self._marked[unit.name] = []
        for parameter in unit.module.parameters():
            if not parameter.requires_grad or _MARK in _node(parameter).metadata:
                continue
            if _marked(_node(parameter))() is not None:  # it is held without a graph, as for a hook: it proves nothing
                _node(parameter).metadata.pop(_MARK, None)
                continue
            nodes.append(_node(parameter))
            self._marked[unit.name].append(_marked(nodes[-1]))

    def found(self) -> list[str]:
        """The names of the units whose tensors are kept. Call it after the pass's own outputs are released."""
        return list(dict.fromkeys([*self._caught, *_kept(self._marked)]))


class KeptByUnits:
    """Finds the attributes that units set in a pass: tensors, numbers, entries of lists. Other stages cannot read them.

    Tensors with gradients are refused before, by `Escapes`.
    """

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
        """New values: unit, module within it, attribute, shape and dtype; for a list the number of new entries and "list"."""
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
    """Gives a module's hooks views of the outputs, in place of the outputs."""

    def __init__(self, marks: list[_Ref]) -> None:
        self._marks = marks
        self._calls: list[tuple[Any, Any, list[_Ref]]] = []

    def instead(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        marks: list[_Ref] = []

        def view(t: torch.Tensor) -> torch.Tensor:
            made = t if hasattr(t, "to_local") else t.view_as(t)
            if made is not t and made.grad_fn is not None:
                marks.append(_marked(made.grad_fn))
            return made

        shown = pytree.tree_map_only(torch.Tensor, view, outputs)
        self._calls.append((outputs, shown, marks))
        return shown

    def again(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        own, shown, marks = self._calls.pop()
        if outputs is not shown:
            return None  # a hook has changed the outputs: the pass goes on with the changed ones
        self._marks += marks
        return own


def _is_foreign(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(("torch.", "echelon."))


class _Mark:
    """Exists as long as the node in whose metadata it is."""


_Ref = weakref.ref[_Mark]


def _node(parameter: torch.Tensor) -> Any:
    """The parameter's AccumulateGrad node. torch makes a new one unless a graph or a reference holds it."""
    return get_gradient_edge(parameter).node


def _marked(node: Any) -> _Ref:
    """Put a mark into a node. The metadata end with the node, which lives as long as a graph or a reference holds it."""
    node.metadata[_MARK] = mark = _Mark()
    return weakref.ref(mark)


def _kept(marked: dict[str, list[_Ref]]) -> list[str]:
    """The names with a mark that still exists."""

    def alive() -> list[str]:
        return [name for name, marks in marked.items() if any(mark() is not None for mark in marks)]

    with FRAMES:  # no sampler of this thread holds frames of the pass, and their variables
        if not alive():
            return []
    gc.collect()  # tensors held only by reference cycles, as those of a function that calls itself, do not count as kept
    torch.clear_autocast_cache()  # nor do the weights' casts: an autocast context around an evaluation holds them to its end
    return alive()
