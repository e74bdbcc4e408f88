"""The author's own forward pass and the user's own loss, run for one stage.

Every rank has the whole module, but keeps the parameters of its own stages only. Every unit is given a gate: a subclass of its
own class, whose call looks at the stage that is being computed.

    unit of this stage       is computed
    unit of an earlier one   gives what was received of it; what was not received is absent (`values.py`)
    unit of a later one      ends the pass: an exception leaves the author's forward and the user's loss

So what an author does between the units (positions, masks, residual sums) happens in each stage, and needs no rewriting. What is
drawn there is alike in all stages: see `Draws`. What is written in place: see `passes.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from echelon.common.errors import PipelineError, UsageError
from echelon.parallel.names import plain_name
from echelon.parallel.patching import replace_class, take_out
from echelon.parallel.pipeline.passes import Left, Run, Shapes, write_again
from echelon.parallel.pipeline.stages import Unit
from echelon.parallel.pipeline.values import Absent, Needed, Sources
from echelon.world import rng

__all__ = ["Cut", "cut", "kept_by"]

_NOTHING = object()


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
        self.run: Run | Shapes | None = None
        self.draws = Draws(device)
        self.kept: dict[str, dict[tuple[str, str], tuple[Any, ...]]] = {}  # by unit, tensors that it keeps as attributes
        self._taken: list[tuple[nn.Module, str]] = []  # parameters and buffers that other ranks have
        self._listed: list[tuple[nn.Module, str]] = []  # of these, the parameters that may be trained
        self._hidden: list[tuple[nn.Module, str, Any]] = []  # attributes that are absent in the pass under way

    def __deepcopy__(self, memo: Any) -> Cut:  # a copy of the module is cut alike
        return self

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """Context in which `parameters()` gives what stands for other ranks' parameters, too, and not this rank's alone."""
        for part, name in self._listed:
            vars(part)["_parameters"][name] = vars(part)[name].detach().requires_grad_()
        try:
            yield
        finally:
            for part, name in self._listed:
                del vars(part)["_parameters"][name]

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which this rank has all stages, with any values: for a world whose other ranks do not exist, where nobody
        else says what theirs give.
        """
        own, self.own = self.own, list(range(self.count))
        before = [vars(part)[name] for part, name in self._taken]
        for (part, name), absent in zip(self._taken, before, strict=True):
            made = torch.empty(absent.shape, dtype=absent.dtype, device=self.device)
            vars(part)[name] = made.requires_grad_(made.dtype.is_floating_point)
        try:
            yield
        finally:
            self.own = own
            for (part, name), absent in zip(self._taken, before, strict=True):
                vars(part)[name] = absent

    def take(self, part: nn.Module, name: str, stand_in: torch.Tensor) -> None:
        """Put it in the place of a parameter or buffer that another rank has."""
        if name in vars(part)["_parameters"] and stand_in.dtype.is_floating_point:
            self._listed.append((part, name))
        self._taken.append((part, name))
        delattr(part, name)
        vars(part)[name] = stand_in

    def stand_in(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """What takes the place of a parameter or buffer that another rank has."""
        return Absent.of(tensor.shape, tensor.dtype, self.device, Sources(weights={name}, is_weight=True), self)

    # --- asked by what is absent

    @property
    def within(self) -> bool:
        """Whether a unit of the stage is being computed: all that it takes is needed."""
        return self.run is not None and self.run.within > 0

    def may_write(self, tensor: torch.Tensor) -> bool:
        return isinstance(self.run, Shapes) and id(tensor) in self.run.buffers

    def needs(self, sources: Sources, writes: bool = False) -> None:
        """What is made of these is asked for its values. Returns if zeros will do, as the pass will not count.

        Args:
            writes: no values, but somebody writes into it.

        Raises:
            Needed: the pass begins anew, with these.
            UsageError: it cannot.
        """
        run = self.run
        if writes and isinstance(run, Run):
            run.fails(
                PipelineError(
                    f"{self.kind} writes into a parameter of another stage than stage {run.stage}, where it is not: "
                    f"{sorted(sources.weights)[0]}. Let each module write into its own, within its forward."
                )
            )
        elif run is None:
            what = ", ".join(sorted(sources.weights or {call.rpartition(":")[0] for call in sources.calls})[:4])
            raise PipelineError(
                f"something that is made of {what} of {self.kind}, which another stage has, is read outside of a pass through "
                "the stages: this rank has no values of it. Read it on the rank that has it, or export the weights."
            )
        elif sources.weights and isinstance(run, Run):
            name = min(sources.weights)
            run.fails(
                PipelineError(
                    f"stage {run.stage} of {self.kind} uses a parameter of another stage outside of its module, or what a module "
                    f"keeps there: {name}. Cut so that both are in one stage, tie it to a parameter of a module that is called "
                    "there, or return it with the module's outputs. A penalty on all parameters is the optimizer's: weight_decay."
                )
            )
        else:
            run.needs(sources)

    def meet(self, gate: Gate, run: Run) -> Any:
        """What a unit of another stage gives."""
        if gate.stage > run.stage:
            run.leaves()
            raise Left
        call = run.call_of(gate.name)
        if gate.name in self.kept:
            self._hide_kept(gate.name)
        if call in run.received:
            return run.hand_out(call)
        form = run.forms.get(call)
        if form is None and run.calls[""] > 1:
            raise PipelineError(
                f"compute_loss must call {self.kind} once, got another call: its stages pass one batch on after the other. Put "
                "the inputs together, as by torch.cat, or let forward take them all."
            )
        if form is None and run.knows_all:
            raise PipelineError(
                f"{self.kind}.{gate.name} was not called in the first passes with a batch like this, but is in this one, and "
                f"stage {run.stage} is not sent what it gives. A pipeline sends the same in every pass: let forward call the "
                "same modules whatever it draws and counts, or change an attribute of the module that is a bool, for which a "
                "pipeline looks."
            )
        if form is None:
            raise PipelineError(
                f"{self.kind}.{gate.name} is in stage {gate.stage}, but is called in stage {run.stage}, after {run.latest}: what "
                "it gives then depends on a later stage than its own. Put it into that stage: stages= as a list of names for "
                "each stage."
            )
        leaves = [Absent.of(leaf.shape, leaf.dtype, self.device, Sources({call}), self) for leaf in form.tensors]
        return form.filled(leaves)

    def _hide_kept(self, name: str) -> None:
        """What a unit of an earlier stage keeps as attributes has another micro-batch's values here, or none."""
        unit = next(unit.module for unit in self.units if unit.name == name)
        for (path, attribute), (shape, dtype) in self.kept[name].items():
            part, sources = unit.get_submodule(path), Sources(weights={f"{name}.{path}.{attribute}".replace("..", ".")})
            held = vars(part).get(attribute, _NOTHING)
            if dtype == "list":
                new = [Absent.of((), torch.get_default_dtype(), self.device, sources, self) for _ in range(*shape)]
                if isinstance(held, list):
                    held.extend(new)
                    self._hidden.append((part, attribute, [held, new]))
                continue
            self._hidden.append((part, attribute, held))
            vars(part)[attribute] = Absent.of(shape, getattr(torch, dtype), self.device, sources, self)

    def show_kept(self) -> None:
        """At the end of a pass."""
        while self._hidden:
            part, name, value = self._hidden.pop()
            if isinstance(value, list):
                held, new = value
                held[:] = [each for each in held if not any(each is absent for absent in new)]
            elif value is _NOTHING:
                vars(part).pop(name, None)
            else:
                vars(part)[name] = value


class _Gated(nn.Module):
    """A unit with a gate before it, and before its hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate: Gate = vars(self)["_pipeline_gate"]
        run = gate.cut.run
        if isinstance(run, Shapes):
            return run.computes(gate.name, super().__call__, args, kwargs)
        if run is not None and run.learns and not torch.is_grad_enabled() and _is_reentrant():
            raise PipelineError(
                f"torch.utils.checkpoint must have use_reentrant=False around {gate.cut.kind}.{gate.name} in a pipeline: its "
                "backward pass computes again what lies in other stages. Or take recompute='blocks'."
            )
        if run is not None and run.stage != gate.stage:
            return write_again(gate.cut.meet(gate, run), args, kwargs)
        if run is None and gate.stage not in gate.cut.own:
            raise _outside(gate.cut, gate.name)
        if run is None:
            with gate.cut.draws.of_unit(gate.number):
                return super().__call__(*args, **kwargs)
        args, kwargs = run.enters(args, kwargs)
        with gate.cut.draws.of_unit(gate.number):
            value = run.computes(run.call_of(gate.name), super().__call__, args, kwargs)
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
        if isinstance(run, Shapes):
            run.takes("", value)
            raise Left
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
            needed = None  # the frames that it holds end here, and with them the contexts of torch.utils.checkpoint in them
        except Needed as error:
            needed = error.sources
        run = cut.run
        assert isinstance(run, Run)
        run.has_left, run.needed = True, needed
        return run.outgoing(run) if needed is None else []


def _is_reentrant() -> bool:
    """Whether this is called in the forward pass of a checkpoint that calls it again in the backward pass."""
    code, frame = CheckpointFunction.forward.__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _outside(cut: Cut, name: str | None) -> UsageError:
    what = f"{cut.kind}.{name}" if name else cut.kind
    return PipelineError(
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
    kept = kept_by(module, units, own)
    emptied: dict[int, torch.Tensor] = {}
    for unit in foreign:
        for path, part in unit.module.named_modules():
            held = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            for name, tensor in held:
                if id(tensor) not in kept:
                    if id(tensor) not in emptied:
                        emptied[id(tensor)] = made.stand_in(tensor, plain_name(f"{unit.name}.{path}.{name}".replace("..", ".")))
                    made.take(part, name, emptied[id(tensor)])
    for number, unit in enumerate(units):
        vars(unit.module)["_pipeline_gate"] = Gate(made, unit.name, unit.stage, number)
        replace_class(unit.module, "pipeline", _with_gate(type(unit.module), _Gated))  # type: ignore[arg-type]
    vars(module)["_pipeline_gate"] = made
    if "forward" in vars(module):  # somebody has put another in its place, as torch.compile does: the gate's goes around it
        vars(module)["_pipeline_forward"] = take_out(module, "forward")
    replace_class(module, "pipeline", _with_gate(type(module), _GatedRoot))  # type: ignore[arg-type]
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


# Random numbers in a pipeline.
#
# `compute_loss` and the author's forward run once in each stage. What they draw outside of the units is the same in all of them:
# the noise that a model is to find goes into the first stage and is the target in the last. A unit lies in one stage, where it
# draws from a stream of its own, and leaves the one outside as it was: another stage, which passes the unit over, stands at the
# same place behind it.


class Draws:
    """The streams of passes through the stages.

    Args:
        device: what the stages compute on.
    Attributes:
        samples: which samples, and which part of them, the ranks of this pipeline compute; others draw something else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.samples = self._common = 0

    def number(self) -> int:
        """What passes may begin with. Every rank draws it, so that all have drawn as often, and takes the one of a single rank:
        one rank may have drawn more than its peers, as for a picture in its log.
        """
        with rng.kept(self._device) as state:
            position = 0 if state is None else rng.position(state)
        torch.rand((), device="cpu")
        return position

    @contextlib.contextmanager
    def passes(self, number: int) -> Iterator[None]:
        """Context of passes, which may leave all streams in any state.

        Args:
            number: the same on all ranks.
        """
        self._common = rng.mix(number, self.samples)
        python, numpys = random.getstate(), np.random.get_state()
        try:
            with rng.kept(self._device):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpys)

    def begin(self, micro_batch: int) -> None:
        """Of a pass: alike in all stages."""
        seed = rng.mix(self._common, micro_batch)
        rng.begin(seed, self._device)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    @contextlib.contextmanager
    def of_unit(self, number: int) -> Iterator[None]:
        """Context of a unit's call. What it draws follows from the state outside, which `torch.utils.checkpoint` puts back before
        it computes again, and from the unit's number: units of equal form do not drop alike.
        """
        with rng.kept(self._device) as outside:
            if outside is not None:
                rng.begin(rng.mix(rng.position(outside), number), self._device)
            yield
