"""The reference: the user's loss and optimizer in plain PyTorch, one process, one forward pass over each global batch.

Nothing of echelon's loop, window, loader or layouts runs here. The reference is computed once in the precision of the comparison.
Further runs, each in a process of its own, measure what rounding alone does to each tensor; the tolerance follows from that.
A further run is one of

    wide      in float64;
    shaken    in the same precision, with every parameter moved by one rounding before every update, each sample in directions
              of its own: for scripts that cannot run in float64 or draw other random numbers there, and in float64 itself.
              Moving the inputs of a sum by roundings has the effect of rounding its terms (backward error analysis: Higham
              2002, section 3.1). Batches are not moved: a label or a mask in a batch of floats is an exact value.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.callback import Callback
from echelon.loop.modes import begin_training
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.shards import local
from echelon.prover.micro import Micro, digest
from echelon.prover.objects import Objects
from echelon.prover.operators import ConstantDraws
from echelon.prover.pass_state import KeptState, Sources
from echelon.prover.records import RankRecord, micros_in_order
from echelon.prover.values import (
    Values,
    as_real,
    modules_of,
    named_values,
    parameters_of,
    whole,
    whole_parameters,
    widen,
)

__all__ = ["AGAIN", "How", "Pass", "Reference", "Shake"]


How = Literal["right", "wide", "shaken"]

AGAIN = "again"  # the prefix of the folders of further runs, in the reference's folder


@dataclass(frozen=True)
class Shake:
    """How "shaken" moves parameters.

    Args:
        sample: the number of the sample.
        rounding: the relative size of a move, at least one rounding of the parameter's type. None: of the comparison's type.
    """

    sample: int = 0
    rounding: float | None = None


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass.

    Args:
        share: of the global batch's mean.
        streams: RNG states to put back before it. state: kept state to put back before it.
        beside: the next pass is another rank's at the same time.
    """

    data: Any
    share: float = 1.0
    streams: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    beside: bool = False

    @classmethod
    def of(cls, micro: Micro, share: float = 1.0) -> Pass:
        """A rank's pass, as it was recorded."""
        return cls(micro.data, share, micro.streams, micro.state)


class Reference(ABC):
    """Trains one unit on recorded micro-batches.

    Args:
        unit: as the script made it, on one process, with nothing made parallel.
        records: of all ranks of the row on whose data it trains.
        folder: where the values of each update go.
        dtype: it computes in this; float64 if `how` is "wide".
        how, shake: see above.
    """

    def __init__(self, unit: Any, records: list[RankRecord], folder: Path, dtype: torch.dtype, how: How, shake: Shake) -> None:
        self.unit, self.records, self.how, self.shake = unit, records, how, shake
        self.folder = folder if how == "right" else folder / f"{AGAIN}-{how}-{shake.sample}"
        objects = Objects(unit)
        self.sources, self.kept = Sources(objects), KeptState(objects)
        self.dtype = torch.float64 if how == "wide" else dtype
        self.updates = micros_in_order(records)
        self.device = unit.device if isinstance(unit, OptimizedUnit) else torch.device("cpu")
        self.joined = True
        self.held: set[str] = set()
        self.rates: list[list[float]] = []  # as in RankRecord
        self.draws: list[int] = []  # checksums of the RNG states after every forward pass that drew
        self.state = State(entry_point=EntryPoint.TRAIN, train_state=PhaseState(dataloader=[]))
        self._epoch: int | None = None
        self.loader: Any = None  # the script's
        self.callbacks: Sequence[Callback] = ()  # the script's own: losses may read what they set
        self.failed_hooks: list[str] = []  # these are not called again
        self.by_sample: ConstantDraws | None = None  # where draws are constant
        self.constant_draws = False  # so that passes that drew can be joined
        self.restores: frozenset[str] = frozenset()  # paths of kept state that are put back as the ranks had them
        self.keeps_dropout = False  # also in units whose dropout is switched off in comparisons
        gathers = records[0].gathers if records else None
        # A sharded module can compute in another type than its parameters'; plain PyTorch has autocast for that.
        self.computes = Precision.of(gathers) if gathers else unit.computes if isinstance(unit, OptimizedUnit) else Precision()
        self.scale = 1.0  # of the loss in backward passes, as fp16 needs it

    @property
    def drew(self) -> bool:
        """Whether the forward passes are repeated with the ranks' RNGs."""
        return any(m.streams for u in self.updates for m in u)

    # --- implemented by each kind of unit

    @abstractmethod
    def update(self, k: int) -> dict[str, Any]:
        """Train on the global batch of update k; returns loss, norm and gradients."""

    @abstractmethod
    def epoch_ended(self) -> None:
        """Called at the end of an epoch, before the unit's own hook."""

    @abstractmethod
    def try_pass(self, passes: Sequence[Pass]) -> tuple[float, Values]:
        """Mean loss and gradients; call it only within `taken_back`."""

    # --- training

    def run(self) -> dict[str, Any]:
        """Write the values of every update."""
        self.begin()
        for k in range(len(self.updates)):
            if self.how == "shaken" and k:
                self._shake(k)
            values = self.update(k)
            torch.save({**values, **self._state_of_unit()}, self.folder / f"update-{k:03d}.pt")
        facts = ("joined", "drew", "held", "rates", "draws", "failed_hooks")
        drawn = self.by_sample or ConstantDraws()
        return {name: getattr(self, name) for name in facts} | {"kinds": drawn.kinds, "shapes": drawn.shapes}

    def run_until(self, k: int) -> None:
        """Train on all updates before k, and write nothing."""
        self.begin(write=False)
        for before in range(k):
            self.update(before)

    def begin(self, *, write: bool = True) -> None:
        """Bring the unit to where training begins, with the initial values of this run."""
        if write:
            self.folder.mkdir(exist_ok=True)
        for root in () if self.unit.keeps_modes else self.unit.tracked_modules().values():
            begin_training(root)  # as the loop does, also for a teacher
        for _, module in modules_of(self.unit):
            begin_training(module)
            if self.dtype is torch.float64:
                widen(module)
        if self.how == "wide":
            self._copy_initial(torch.load(self.folder.parent / "initial.pt", weights_only=True))
        elif self.how == "shaken":
            self._shake(0)
        if write:
            torch.save(self._state_of_unit(), self.folder / "initial.pt")
        self.unit.on_train_start(self.state)

    def enter_epoch(self, epoch: int) -> None:
        """Call the unit's own hooks around epochs, which advance schedules and unfreeze layers."""
        unit = self.unit
        if epoch == self._epoch:
            return
        if self._epoch is not None:
            unit.train_progress.num_epochs_completed = epoch
            unit.train_progress.num_steps_completed_in_epoch = unit.train_progress.num_updates_completed_in_epoch = 0
            self.epoch_ended()
            unit.on_train_epoch_end(self.state)
        else:
            for callback in self.callbacks:
                callback.on_train_start(self.state, unit)
        self._epoch = epoch
        unit.on_train_epoch_start(self.state)
        for callback in self.callbacks:
            callback.on_train_epoch_start(self.state, unit)

    def step_begins(self) -> None:
        self._tell("on_train_step_start")

    def step_done(self, loss: float | None) -> None:
        self.unit.train_progress.increment_step(updated=True)
        if isinstance(self.unit, OptimizedUnit):
            self.unit.window.updates += 1  # a loop reads it, and a LightningModule as its global_step
        assert self.state.train_state is not None
        self.state.train_state.step_output = loss if loss is None else torch.tensor(loss), None
        self._tell("on_train_step_end")

    def _tell(self, hook: str) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, hook)(self.state, self.unit)
            except Exception as error:  # a hook may need what only a whole loop has
                self.callbacks = [each for each in self.callbacks if each is not callback]
                self._note_failure(f"{type(callback).__name__}.{hook}", error)

    def _note_failure(self, hook: str, error: Exception) -> None:
        self.failed_hooks.append(f"{hook} ({type(error).__name__}: {str(error).partition(chr(10))[0]})")

    def _copy_initial(self, values: dict[str, Values]) -> None:
        with torch.no_grad():
            for name, parameter in parameters_of(self.unit):
                parameter.copy_(values["parameters"][name])
            for name, buffer in named_values(self.unit).items():
                buffer.copy_(values["buffers"][name])

    def _shake(self, k: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.shake.sample + k)
        rounding = self.shake.rounding or torch.finfo(self.dtype).eps
        with torch.no_grad():
            for _, parameter in parameters_of(self.unit):
                shard = local(parameter)
                if shard.is_floating_point():
                    signs = torch.randint(0, 2, shard.shape, generator=generator).to(shard) * 2 - 1
                    shard.mul_(1 + signs * max(rounding, torch.finfo(shard.dtype).eps))

    def tried(self, *passes: Pass) -> tuple[float, Values]:
        """Mean loss and gradients of passes, which are then undone."""
        with self.taken_back():
            return self.try_pass(passes)

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """Context that puts back parameters, buffers, gradients, optimizer states, RNG states and kept state at its end."""
        before = {n: (t.detach().clone(), None if t.grad is None else t.grad.clone()) for n, t in self._tensors()}
        kept, streams = self.kept.values(), self.sources.states()
        optimizers = self.stepping()
        states = copy.deepcopy([o.state_dict() for o in optimizers])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self._tensors():
                    tensor.copy_(before[name][0])
                    tensor.grad = before[name][1]
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
            self.kept.restore(kept)
            self.sources.restore(streams)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from parameters_of(self.unit)
        yield from named_values(self.unit).items()

    def stepping(self) -> list[torch.optim.Optimizer]:
        """The optimizers that a tried pass may step."""
        return []

    def put_back(self, before: Pass) -> None:
        """Put back the state with which a pass begins."""
        self.draws_for(before.data)
        self.sources.restore(before.streams)
        self.kept.restore(before.state)

    @contextlib.contextmanager
    def same_parameters(self, each: Pass) -> Iterator[None]:
        """Context that puts parameters back if another rank's pass at the same time follows: a pass may add noise to them."""
        before = [p.detach().clone() for _, p in parameters_of(self.unit)] if each.beside else []
        yield
        with torch.no_grad():
            for (_, parameter), value in zip(parameters_of(self.unit), before, strict=False):
                if not torch.equal(parameter, value):
                    parameter.copy_(value)

    def draws_for(self, data: Any) -> None:
        if self.by_sample is not None:
            self.by_sample.begin(data)

    def note_draws(self, done: Pass) -> None:
        if done.streams:
            after = self.sources.states()
            self.draws.append(digest({name: after.get(name) for name in done.streams}))

    # --- values

    def gradients(self) -> Values:
        return as_real({n: whole(p.grad) for n, p in parameters_of(self.unit) if p.grad is not None})

    def _state_of_unit(self) -> dict[str, Values]:
        return {
            "parameters": whole_parameters(self.unit),
            "buffers": {n: whole(b) for n, b in named_values(self.unit).items()},
        }
