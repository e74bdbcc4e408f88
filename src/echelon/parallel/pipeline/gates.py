"""The author's own forward pass and the user's own loss, run for one stage.

Every rank has the whole module, but keeps the parameters of its own stages only. Every unit is given a gate: a subclass of its
own class, whose call looks at the stage that is being computed.

    unit of this stage       is computed
    unit of an earlier one   gives what was received of it; if nothing that leaves the stage depends on it, nan without memory
    unit of a later one      ends the pass: an exception leaves the author's forward and the user's loss

So what an author does between the units (positions, masks, residual sums) happens in each stage, and needs no rewriting. What is
drawn there is alike in all stages: see `draws.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from echelon.contracts.errors import UsageError
from echelon.parallel.pipeline.draws import Draws
from echelon.parallel.pipeline.stages import Unit
from echelon.parallel.pipeline.values import Form, placeholder

__all__ = ["Cut", "Left", "Run", "cut", "kept_by", "reached"]


class Left(BaseException):
    """A stage's part of the forward pass has ended. No Exception: an author's `except Exception` must not stop it."""


@dataclass
class Run:
    """One forward pass of one stage.

    Args:
        received: by call ("blocks.3:1" is the first call of blocks.3), what earlier stages gave.
        forms: of all calls of units of earlier stages.
        fills: what stands in the place of what was not received: nan, or by call another number.
        solid: placeholders have memory of their own, and what is received is copied: the author's code writes into them.
        tracked: placeholders are leaves of autograd's graph.
    Attributes:
        gave: by call, what this stage's units have returned.
        stood_in: the placeholders that were asked for.
        has_left: whether a unit of a later stage was called.
        learns: whether gradients are wanted.
        is_whole: whether the module itself was called.
    """

    stage: int
    received: Mapping[str, Any] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    fills: Mapping[str, float] = field(default_factory=dict)
    solid: bool = False
    tracked: bool = False
    gave: dict[str, Any] = field(default_factory=dict)
    stood_in: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    has_left: bool = False
    learns: bool = field(default_factory=torch.is_grad_enabled)
    is_whole: bool = False
    leaving: Callable[[], None] = lambda: None
    outgoing: Callable[[Run], Any] = lambda run: None
    sent: Any = None
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    latest: str = "it began"

    def call_of(self, name: str) -> str:
        self.calls[name] = number = self.calls[name] + 1
        return f"{name}:{number}"


@dataclass(frozen=True)
class Gate:
    """A unit's place."""

    cut: Cut
    name: str
    stage: int
    number: int


class Cut:
    """A module that is cut into stages, of which this rank has some.

    Attributes:
        units: all of them, in order.
        own: the stages of this rank.
        run: the forward pass under way.
    """

    def __init__(self, module: nn.Module, units: list[Unit], own: Iterable[int], device: torch.device) -> None:
        self.kind, self.units, self.own, self.device = type(module).__name__, units, sorted(own), device
        self.count = units[-1].stage + 1
        self.stage_of = {unit.name: unit.stage for unit in units}
        self.run: Run | None = None
        self.draws = Draws(device)
        self._weights: list[torch.Tensor] = []  # one number each, which stands for all of a parameter
        self._taken: list[tuple[nn.Module, str]] = []  # parameters that other ranks have

    def __deepcopy__(self, memo: Any) -> Cut:  # a copy of the module is cut alike
        return self

    def fill_weights(self, value: float) -> None:
        """What the author's code reads of parameters that other ranks have."""
        for weight in self._weights:
            weight.fill_(value)

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """Context in which `parameters()` gives what stands for other ranks' parameters, too, and not this rank's alone."""
        for part, name in self._taken:
            vars(part)["_parameters"][name] = vars(part)[name].detach().requires_grad_()
        try:
            yield
        finally:
            for part, name in self._taken:
                del vars(part)["_parameters"][name]

    def take(self, part: nn.Module, name: str, stand_in: torch.Tensor) -> None:
        """Put it in the place of a parameter or buffer that another rank has."""
        if name in vars(part)["_parameters"] and stand_in.dtype.is_floating_point:
            self._taken.append((part, name))
        delattr(part, name)
        vars(part)[name] = stand_in

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What takes the place of a parameter or buffer that another rank has: its shape and type, in one number's memory."""
        can = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        base = torch.full((), float("nan") if can else 0, dtype=tensor.dtype, device=self.device)
        if can:
            self._weights.append(base)
        return base.expand(tensor.shape)

    def meet(self, gate: Gate, run: Run) -> Any:
        """What a unit of another stage gives."""
        if gate.stage > run.stage:
            run.leaving()
            raise Left
        call = run.call_of(gate.name)
        if call in run.received:
            value = run.received[call]
            return pytree.tree_map_only(torch.Tensor, torch.clone, value) if run.solid else value
        form = run.forms.get(call)
        if form is None and run.calls[""] > 1:
            raise UsageError(
                f"compute_loss must call {self.kind} once, got another call: its stages pass one batch on after the other. Put "
                "the inputs together, as by torch.cat, or let forward take them all."
            )
        if form is None:
            raise UsageError(
                f"{self.kind}.{gate.name} is in stage {gate.stage}, but is called in stage {run.stage}, after {run.latest}: what "
                "it gives then depends on a later stage than its own. Put it into that stage: stages= as a list of names for "
                "each stage."
            )
        fill = run.fills.get(call, float("nan"))
        tensors = [placeholder(leaf, self.device, fill, solid=run.solid, tracked=run.tracked) for leaf in form.tensors]
        run.stood_in[call] = tensors
        if run.solid and run.tracked:  # no leaves, which cannot be written into
            tensors = [t.clone() if t.requires_grad else t for t in tensors]
        return form.filled(tensors)


class _Gated(nn.Module):
    """A unit with a gate before it, and before its hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate: Gate = vars(self)["_pipeline_gate"]
        run = gate.cut.run
        if run is not None and run.learns and not torch.is_grad_enabled() and _is_reentrant():
            raise UsageError(
                f"torch.utils.checkpoint must have use_reentrant=False around {gate.cut.kind}.{gate.name} in a pipeline: its "
                "backward pass computes again what lies in other stages. Or take activation_checkpoint_params='blocks'."
            )
        if run is not None and run.stage != gate.stage:
            return gate.cut.meet(gate, run)
        if run is None and gate.stage not in gate.cut.own:
            raise _outside(gate.cut, gate.name)
        with gate.cut.draws.of_unit(gate.number):
            value = super().__call__(*args, **kwargs)
        if run is not None:
            run.gave[run.call_of(gate.name)] = value
            run.latest = gate.name
        return value


class _GatedRoot(nn.Module):
    """The whole module: its call ends where the stage does, and then leaves the user's loss, too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cut: Cut = vars(self)["_pipeline_gate"]
        run = cut.run
        if run is None:
            raise _outside(cut, None)
        run.is_whole = True
        run.calls[""] += 1
        value = super().__call__(*args, **kwargs)  # its hooks, such as fully_shard's, see what leaves the stage
        if run.has_left:
            run.sent = value
            raise Left
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cut: Cut = vars(self)["_pipeline_gate"]
        forward = vars(self).get("_pipeline_forward") or super().forward
        try:
            return forward(*args, **kwargs)
        except Left:
            pass  # the frames that it holds end here, and with them the contexts of torch.utils.checkpoint in them
        run = cut.run
        assert run is not None
        run.has_left = True
        return run.outgoing(run)


def _is_reentrant() -> bool:
    """Whether this is called in the forward pass of a checkpoint that calls it again in the backward pass."""
    code, frame = CheckpointFunction.forward.__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _outside(cut: Cut, name: str | None) -> UsageError:
    what = f"{cut.kind}.{name}" if name else cut.kind
    return UsageError(
        f"{what} is split over {cut.count} stages of a pipeline, and must be called in compute_loss, or by AutoUnit's own steps: "
        "in a predict_step of yours write super().predict_step(state, inputs) in the place of self.module(inputs), and what "
        "follows from a loss in on_eval_step_end. To generate text or the like, export the weights and load them in one process."
    )


@functools.cache
def _with_gate(kind: Any, gate: Any) -> type[nn.Module]:
    """Of the same name, and with the author's arguments: messages, lists of classes and `inspect.signature` go on to mean it."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if "forward" in vars(gate):

        @functools.wraps(kind.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return gate.forward(self, *args, **kwargs)

        named["forward"] = forward
    return type(kind.__name__, (gate, kind), named)


def cut(module: nn.Module, units: list[Unit], own: Iterable[int], device: torch.device) -> Cut:
    """Give gates to all units, and take from the module what other ranks' stages hold. In place.

    A parameter that is used in a stage of this rank stays under all of its names: a tied one is there on several ranks.
    """
    made = Cut(module, units, own, device)
    own = set(made.own)
    foreign = [unit for unit in units if unit.stage not in own]
    mine = kept_by(module, units, own)
    emptied: dict[int, torch.Tensor] = {}
    for unit in foreign:
        for part in unit.module.modules():
            held = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            for name, tensor in held:
                if id(tensor) not in mine:
                    if id(tensor) not in emptied:
                        emptied[id(tensor)] = made.stand_in(tensor)
                    made.take(part, name, emptied[id(tensor)])
    for number, unit in enumerate(units):
        vars(unit.module)["_pipeline_gate"] = Gate(made, unit.name, unit.stage, number)
        unit.module.__class__ = _with_gate(type(unit.module), _Gated)  # type: ignore[arg-type]
    vars(module)["_pipeline_gate"] = made
    if "forward" in vars(module):  # somebody has put another in its place, as torch.compile does: the gate's goes around it
        vars(module)["_pipeline_forward"] = vars(module).pop("forward")
    module.__class__ = _with_gate(type(module), _GatedRoot)  # type: ignore[arg-type]
    return made


def kept_by(module: nn.Module, units: list[Unit], own: Collection[int]) -> set[int]:
    """The ids of the tensors that a rank keeps: of its units, and of what lies in none, such as the module's own parameters."""
    inside = {part for unit in units for part in unit.module.modules()}
    ours = {part for unit in units if unit.stage in own for part in unit.module.modules()}
    return {
        id(t)
        for part in module.modules()
        if part in ours or part not in inside
        for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    }


def reached(outputs: Iterable[torch.Tensor], leaves: Mapping[str, list[torch.Tensor]]) -> set[str]:
    """The calls on whose placeholders some output depends, as autograd sees it."""
    ids = {id(leaf): call for call, tensors in leaves.items() for leaf in tensors if leaf.requires_grad}
    found, seen = set(), set()
    waiting = []
    for output in outputs:
        if id(output) in ids:
            found.add(ids[id(output)])
        waiting.append(output.grad_fn)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in ids:
            found.add(ids[id(variable)])
        waiting += [following for following, _ in node.next_functions]
    return found
