"""The author's own forward pass and the user's own loss, run for one stage.

Every rank has the whole module, but keeps only the parameters of its own stages. Every unit gets a gate: a subclass of the
unit's class. A call of the unit then depends on the stage that is being computed:

    unit of this stage        is computed
    unit of an earlier stage  returns its received outputs; outputs not received are absent tensors (`values.py`)
    unit of a later stage     ends the pass: an exception leaves the author's forward and the user's loss

So the author's code between the units (positions, masks, residual sums) runs in every stage, and needs no rewriting. Random
numbers drawn there are the same in all stages: see `Draws`. For writes in place see `passes.py`.
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
from echelon.parallel.pipeline.passes import Left, Run, write_again
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
    """A module that is cut into stages. This rank has some of them.

    Attributes:
        units: the units of all stages, in order.
        own: the stages of this rank.
        run: the forward pass under way.
    """

    def __init__(self, module: nn.Module, units: list[Unit], own: Iterable[int], device: torch.device) -> None:
        self.kind, self.units, self.own, self.device = type(module).__name__, units, sorted(own), device
        self.count = units[-1].stage + 1
        self.stage_of = {unit.name: unit.stage for unit in units}
        self.run: Run | None = None
        self.draws = Draws(device)
        self.kept: dict[str, dict[tuple[str, str], tuple[Any, ...]]] = {}  # by unit, the tensors it keeps as attributes
        self._taken: list[tuple[nn.Module, str]] = []  # parameters and buffers that other ranks have
        self._listed: list[tuple[nn.Module, str]] = []  # the floating-point parameters in `_taken`
        self._hidden: list[tuple[nn.Module, str, Any]] = []  # attributes that are absent in the pass under way

    def __deepcopy__(self, memo: Any) -> Cut:  # copies of the module share the cut
        return self

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """Context in which `parameters()` also lists the absent tensors that stand for other ranks' parameters."""
        for part, name in self._listed:
            vars(part)["_parameters"][name] = vars(part)[name].detach().requires_grad_()
        try:
            yield
        finally:
            for part, name in self._listed:
                del vars(part)["_parameters"][name]

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which this rank has all stages, with uninitialised parameters. For a world whose other ranks do not exist
        (`echelon plan`) and so cannot report what their stages return.
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
        """Replace a parameter or buffer of another rank by `stand_in`."""
        if name in vars(part)["_parameters"] and stand_in.dtype.is_floating_point:
            self._listed.append((part, name))
        self._taken.append((part, name))
        delattr(part, name)
        vars(part)[name] = stand_in

    def stand_in(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The absent tensor for a parameter or buffer of another rank."""
        return Absent.of(tensor.shape, tensor.dtype, self.device, Sources(weights={name}, is_weight=True), self)

    # --- called by absent tensors

    @property
    def within(self) -> bool:
        """Whether a unit of the stage is being computed. It needs the values of all its inputs."""
        return self.run is not None and self.run.within > 0

    def needs(self, sources: Sources, writes: bool = False) -> None:
        """Handle a request for the values of an absent tensor. Returns if zeros will do, because the pass will not count.

        Args:
            sources: what the absent tensor is computed from.
            writes: the request is a write into the tensor, not a read.

        Raises:
            Needed: the pass must begin again, with these sources.
            UsageError: it cannot.
        """
        run = self.run
        if writes and run is not None:
            run.fails(
                PipelineError(
                    f"{self.kind} writes into a parameter of another stage than stage {run.stage}: "
                    f"{sorted(sources.weights)[0]}. Let each module write only into its own parameters, within its forward."
                )
            )
        elif run is None:
            what = ", ".join(sorted(sources.weights or {call.rpartition(":")[0] for call in sources.calls})[:4])
            raise PipelineError(
                f"a tensor computed from {what} of {self.kind}, which lies in another stage, is read outside of a pass through "
                "the stages: this rank does not have its values. Read it on the rank that has it, or export the weights."
            )
        elif sources.weights:
            name = min(sources.weights)
            run.fails(
                PipelineError(
                    f"stage {run.stage} of {self.kind} uses a parameter of another stage outside of its module, or an attribute "
                    f"of a module of another stage: {name}. Cut so that both are in one stage, tie it to a parameter of a module "
                    "that is called in this stage, or return it with the module's outputs. For a penalty on all parameters use "
                    "the optimizer's weight_decay."
                )
            )
        else:
            run.needs(sources)

    def meet(self, gate: Gate, run: Run) -> Any:
        """Return the outputs of a unit of another stage; end the pass if that stage is a later one."""
        if gate.stage > run.stage:
            run.leaving()
            raise Left
        call = run.call_of(gate.name)
        if gate.name in self.kept:
            self._hide_kept(gate.name)
        if call in run.received:
            return run.hand_out(call)
        form = run.forms.get(call)
        if form is None and run.calls[""] > 1:
            raise PipelineError(
                f"compute_loss must call {self.kind} once, got another call: a pipeline sends one batch through its stages per "
                "loss. Join the inputs, for example by torch.cat, or let forward take them all."
            )
        if form is None and run.knows_all:
            raise PipelineError(
                f"{self.kind}.{gate.name} was not called in the first passes with a batch like this, but is called in this one, "
                f"and stage {run.stage} does not receive its outputs. A pipeline sends the same tensors in every pass: let "
                "forward call the same modules whatever it draws and counts, or make the choice depend on a bool attribute of "
                "the module, which a pipeline watches."
            )
        if form is None:
            raise PipelineError(
                f"{self.kind}.{gate.name} is in stage {gate.stage}, but is called in stage {run.stage}, after {run.latest}: its "
                "outputs depend on a later stage than its own. Put it into the stage that calls it: stages= as a list of names "
                "for each stage."
            )
        leaves = [Absent.of(leaf.shape, leaf.dtype, self.device, Sources({call}), self) for leaf in form.tensors]
        return form.filled(leaves)

    def _hide_kept(self, name: str) -> None:
        """Hide the attributes in which a unit of an earlier stage keeps values of its forward pass.

        On this rank they have the values of another micro-batch, or none.
        """
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
        """Restore the hidden attributes at the end of a pass."""
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
    """A unit whose gate runs before its forward and its hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gate: Gate = vars(self)["_pipeline_gate"]
        run = gate.cut.run
        if run is not None and run.learns and not torch.is_grad_enabled() and _is_reentrant():
            raise PipelineError(
                f"torch.utils.checkpoint must have use_reentrant=False around {gate.cut.kind}.{gate.name} in a pipeline: the "
                "reentrant backward pass would recompute modules of other stages. Or use recompute='blocks'."
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
    """The whole module. Its call ends where the stage ends, and an exception then leaves the user's loss as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cut: Cut = vars(self)["_pipeline_gate"]
        run = cut.run
        if run is None:
            raise _outside(cut, None)
        run.is_whole = True
        run.calls[""] += 1
        value = super().__call__(*args, **kwargs)  # its hooks, such as fully_shard's, see the tensors that leave the stage
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
            needed = None  # the author's frames end here, and with them their contexts of torch.utils.checkpoint
        except Needed as error:
            needed = error.sources
        run = cut.run
        assert run is not None
        run.has_left, run.needed = True, needed
        return run.outgoing(run) if needed is None else []


def _is_reentrant() -> bool:
    """Whether this call is inside the forward pass of a reentrant checkpoint, whose backward pass calls it again."""
    code, frame = CheckpointFunction.forward.__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _outside(cut: Cut, name: str | None) -> UsageError:
    what = f"{cut.kind}.{name}" if name else cut.kind
    return PipelineError(
        f"{what} is split over {cut.count} stages of a pipeline, and must be called in compute_loss, or by AutoUnit's own steps: "
        "in a predict_step of yours write super().predict_step(state, inputs) in the place of self.module(inputs); compute "
        "metrics of a loss in on_eval_step_end. To generate text, export the weights and load them in one process."
    )


@functools.cache
def _with_gate(kind: Any, gate: Any) -> type[nn.Module]:
    """The class `kind` with a gate. It keeps the name and signature: messages, lists of classes, `inspect.signature` use them."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    if "forward" in vars(gate):

        @functools.wraps(kind.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return gate.forward(self, *args, **kwargs)

        named["forward"] = forward
    return type(kind.__name__, (gate, kind), named)


def cut(module: nn.Module, units: list[Unit], own: Iterable[int], device: torch.device) -> Cut:
    """Give gates to all units, and remove the parameters and buffers of other ranks' stages from the module. In place.

    A parameter that a stage of this rank uses stays under all of its names, so several ranks have a tied parameter.
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
    if "forward" in vars(module):  # replaced on the instance, as torch.compile does: the gate's forward wraps it
        vars(module)["_pipeline_forward"] = take_out(module, "forward")
    replace_class(module, "pipeline", _with_gate(type(module), _GatedRoot))  # type: ignore[arg-type]
    return made


def kept_by(module: nn.Module, units: list[Unit], own: Collection[int]) -> set[int]:
    """The ids of the tensors that a rank keeps: those of its own units, and those in no unit, such as the root's parameters."""
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
# `compute_loss` and the author's forward run once in each stage. Outside of the units they draw the same numbers in every stage:
# a diffusion model's noise is an input of the first stage and the target in the last. A unit is computed in one stage only. It
# draws from a stream of its own and leaves the outer stream unchanged, so the stages that skip the unit draw the same numbers
# after it.


class Draws:
    """The random streams of passes through the stages.

    Args:
        device: what the stages compute on.
    Attributes:
        samples: which samples, and which part of them, the ranks of this pipeline compute. Other pipelines draw other numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.samples = self._common = 0

    def number(self) -> int:
        """A number from which the RNG state of passes can be seeded.

        Every rank draws it, so that all have drawn equally often. They then use the number of one rank, because a rank may have
        drawn more than the others, as for a picture in its log.
        """
        with rng.kept(self._device) as state:
            position = 0 if state is None else rng.position(state)
        torch.rand((), device="cpu")
        return position

    @contextlib.contextmanager
    def passes(self, number: int) -> Iterator[None]:
        """Context that restores the RNG state after passes.

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
        """Seed the RNGs for one pass, the same in all stages."""
        seed = rng.mix(self._common, micro_batch)
        rng.begin(seed, self._device)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    @contextlib.contextmanager
    def of_unit(self, number: int) -> Iterator[None]:
        """Context of a unit's call, with a stream of its own.

        Its seed follows from the outer RNG state, which `torch.utils.checkpoint` restores before it recomputes, and from the
        unit's number, so that equal units get different dropout masks.
        """
        with rng.kept(self._device) as outside:
            if outside is not None:
                rng.begin(rng.mix(rng.position(outside), number), self._device)
            yield
