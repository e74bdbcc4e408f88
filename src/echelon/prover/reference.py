"""The reference: the user's loss and optimizer in plain PyTorch, one process, one forward pass over each global batch.

Nothing of echelon's loop, window, loader or layouts runs here. It is computed once in the precision of the comparison, and
again, each time in a process of its own, to learn what rounding alone does to each tensor, which is what the tolerance is made
of. Again is one of

    wide      in float64;
    shaken    in the same precision, every parameter moved by one rounding before every update, each sample in directions of its
              own: for what cannot run in float64, or draws other random numbers there, and in float64 itself. To move the
              inputs of a sum by roundings does to it what rounding its terms does (backward error analysis: Higham 2002,
              section 3.1). Batches are not moved: a label or a mask in a batch of floats is an exact value.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from echelon.common.errors import ProveError
from echelon.loop.auto.auto import AutoUnit, TrainStepResults
from echelon.loop.auto.optimized_unit import OptimizedUnit
from echelon.loop.auto.update import Update
from echelon.loop.callback import Callback
from echelon.loop.modes import begin_training
from echelon.loop.state import EntryPoint, PhaseState, State
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.shards import local
from echelon.prover.constant_draws import ConstantDraws
from echelon.prover.generators import Sources
from echelon.prover.gradients import GradientWatch, rates_of
from echelon.prover.kept_state import KeptState, agreeing, unlike
from echelon.prover.micro import Micro, NotJoinable, digest, joined, widened
from echelon.prover.objects import Objects
from echelon.prover.values import (
    as_real,
    balance,
    forget_loads,
    loss_in,
    modules_of,
    named_values,
    number_in,
    parameters_of,
    switch_off_dropout,
    whole,
    whole_parameters,
    widen,
)

__all__ = ["AGAIN", "AutoReference", "How", "OwnReference", "Pass", "Reference", "Shake", "by_index", "micros_in_order"]

Values = dict[str, torch.Tensor]
How = Literal["right", "wide", "shaken"]

AGAIN = "again"  # how the folders in the reference's begin that hold the values of the other times


def micros_in_order(records: list[dict[str, Any]]) -> list[list[Micro]]:
    """The micro-batches of each update over all ranks: micro-batch by micro-batch, then rank by rank, without silent ones."""
    updates = min((len(r["updates"]) for r in records), default=0)
    return [[micro for same in by_index(records, k) for micro in same if micro.weight > 0] for k in range(updates)]


def by_index(records: list[dict[str, Any]], k: int) -> list[list[Micro]]:
    """Of update k: for each micro-batch, those of all ranks."""
    of_ranks = [r["updates"][k] for r in records]
    return [[r[m] for r in of_ranks if m < len(r)] for m in range(max(map(len, of_ranks)))]


@dataclass(frozen=True)
class Shake:
    """How "shaken" moves parameters.

    Args:
        sample: which of several.
        rounding: relative; at least one of the parameter's own type. None: of the comparison's type.
    """

    sample: int = 0
    rounding: float | None = None


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass.

    Args:
        share: of the global batch's mean.
        streams: RNG states before it. state: what the unit keeps from earlier passes, as far as it is to be put back.
        beside: another rank's pass at the same time comes next.
    """

    data: Any
    share: float = 1.0
    streams: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    beside: bool = False

    @classmethod
    def of(cls, micro: Micro, share: float = 1.0) -> Pass:
        """That of a rank, as it was."""
        return cls(micro.data, share, micro.streams, micro.state)


class Reference(ABC):
    """Trains one unit on recorded micro-batches.

    Args:
        unit: as the script made it, on one process, with nothing made parallel.
        records: of all ranks of the row whose data it is.
        folder: where the values of each update go.
        dtype: it computes in this; float64 if `how` is "wide".
        how, shake: see above.
    """

    def __init__(
        self, unit: Any, records: list[dict[str, Any]], folder: Path, dtype: torch.dtype, how: How, shake: Shake
    ) -> None:
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
        self.callbacks: Sequence[Callback] = ()  # the script's own: what they set before training and epochs, losses may read
        self.failed_hooks: list[str] = []  # that are not called again
        self.by_sample: ConstantDraws | None = None  # where draws are constant
        self.constant_draws = False  # so that passes that drew can be joined
        self.restores: frozenset[str] = frozenset()  # of the state that the unit keeps, what is put back as the ranks had it
        self.keeps_dropout = False  # of units whose dropout is switched off in comparisons
        gathers = records[0]["gathers"] if records else None
        # Autocast is what plain PyTorch has for a sharded module that computes in another type than its parameters'.
        self.computes = Precision.of(gathers) if gathers else unit.computes if isinstance(unit, OptimizedUnit) else Precision()
        self.scale = 1.0  # of the loss in backward passes, as fp16 needs it

    @property
    def drew(self) -> bool:
        """Whether the forward passes are repeated with the ranks' RNGs."""
        return any(m.streams for u in self.updates for m in u)

    # --- what kinds of units differ in

    @abstractmethod
    def update(self, k: int) -> dict[str, Any]:
        """Train on the global batch of update k; returns loss, norm and gradients."""

    @abstractmethod
    def epoch_ended(self) -> None:
        """Before the unit hears of it."""

    @abstractmethod
    def try_pass(self, passes: Sequence[Pass]) -> tuple[float, Values]:
        """Mean loss and gradients; only to be called where it is taken back."""

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
        """Train on what comes before update k, and write nothing."""
        self.begin(write=False)
        for before in range(k):
            self.update(before)

    def begin(self, *, write: bool = True) -> None:
        """Bring the unit to where training begins, with the initial values that are meant."""
        if write:
            self.folder.mkdir(exist_ok=True)
        for root in () if self.unit.keeps_modes else self.unit.tracked_modules().values():
            begin_training(root)  # as the loop does, a teacher's as well
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
        """The unit's own hooks around epochs, in which schedules are advanced and layers are unfrozen."""
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
            self.unit.window.updates += 1  # which a loop, and a LightningModule as its global_step, read
        assert self.state.train_state is not None
        self.state.train_state.step_output = loss if loss is None else torch.tensor(loss), None
        self._tell("on_train_step_end")

    def _tell(self, hook: str) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, hook)(self.state, self.unit)
            except Exception as error:  # it may want what only a whole loop has
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
                mine = local(parameter)
                if mine.is_floating_point():
                    signs = torch.randint(0, 2, mine.shape, generator=generator).to(mine) * 2 - 1
                    mine.mul_(1 + signs * max(rounding, torch.finfo(mine.dtype).eps))

    def tried(self, *passes: Pass) -> tuple[float, Values]:
        """Mean loss and gradients of passes of which nothing is left."""
        with self.taken_back():
            return self.try_pass(passes)

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """Parameters, buffers, gradients, states of optimizers, RNGs and what the unit keeps are as before in the end."""
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
        """What a pass begins with."""
        self.draws_for(before.data)
        self.sources.restore(before.streams)
        self.kept.restore(before.state)

    @contextlib.contextmanager
    def same_parameters(self, each: Pass) -> Iterator[None]:
        """For all ranks at one time, whatever the script's own code does to parameters in each, such as adding noise."""
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


class AutoReference(Reference):
    """An AutoUnit: its loss and its optimizer, and a training loop as everybody writes it."""

    unit: AutoUnit[Any]
    hears = True  # of the ends of steps

    def begin(self, *, write: bool = True) -> None:
        super().begin(write=write)
        unit = self.unit
        self.module = unit.prepared.unwrapped
        if self.records[0]["dropouts"]:  # ranks that share samples draw by themselves
            switch_off_dropout(unit)
        self.optimizer, self.scheduler = unit.configure_optimizers_and_lr_scheduler(self.module)
        unit.optimizer, unit.lr_scheduler = self.optimizer, self.scheduler  # the unit's hooks may look at them
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        self.held = {n for n, p in parameters_of(unit) if id(p) in held}

    def epoch_ended(self) -> None:
        if self.unit.lr_interval == "epoch":
            self._step_scheduler()

    def _step_scheduler(self) -> None:
        if type(self.unit).step_lr_scheduler is not AutoUnit.step_lr_scheduler:
            self.unit.step_lr_scheduler()
        elif self.scheduler is not None and not isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step()  # a plateau is seen in evaluations, of which there are none here

    def update(self, k: int) -> dict[str, Any]:
        self.enter_epoch(self.updates[k][0].epoch)
        self.step_begins()
        forget_loads(self.unit)
        if type(self.unit).zero_grad is not AutoUnit.zero_grad:  # it may have hooks, or clear gradients in the next pass
            self.unit.zero_grad(self.state)
        loss = self.backward_of_all(k)
        if (after_backward := getattr(self.unit._update, "after_backward", None)) is not None:
            after_backward(self.unit)
        norm = self._clip()
        gradients = self.gradients()
        self.rates.append(rates_of(self.optimizer))
        self._step_optimizer()
        self.optimizer.zero_grad()
        balance(self.unit)
        if self.unit.lr_interval == "update":
            self._step_scheduler()
        self._step_ended(k, loss, norm)
        self.step_done(loss)
        return {"loss": loss, "norm": norm, "gradients": gradients}

    def _step_ended(self, k: int, loss: float, norm: float | None) -> None:
        """The unit's own hook, in which a teacher may learn, or rates be set."""
        unit = self.unit
        if not self.hears or type(unit).on_train_step_end is AutoUnit.on_train_step_end:
            return
        found = TrainStepResults(torch.tensor(loss), None if norm is None else torch.tensor(norm), None)
        try:
            unit.on_train_step_end(self.state, self.as_given(self.updates[k][-1].data), k, found)
        except Exception as error:  # it may want what only a whole loop has
            self.hears = False
            self._note_failure(f"{type(unit).__name__}.on_train_step_end", error)

    def backward_of_all(self, k: int) -> float:
        """The gradient of the whole global batch, in one pass if that can be; returns its mean loss."""
        micros = self.updates[k]
        self.scale = self.records[0]["scales"][k] if self.how != "wide" and self.records[0]["scales"] else 1.0
        if self.joined and (self.constant_draws or not self.drew):
            try:
                return self.backward(self._joined_passes(k))
            except NotJoinable:
                self.joined = False
            except Exception:  # such as lists of images, or too much for the memory of one process
                if len(micros) == 1:
                    raise
                self.joined = False
                self.module.zero_grad()
        total = sum(m.weight for m in micros)
        at_once = [[m for m in same if m.weight > 0] for same in by_index(self.records, k)]
        return self.backward(
            [
                Pass(m.data, m.weight / total, m.streams, self._own(m.state), beside=m is not same[-1])
                for same in at_once
                for m in same
            ]
        )

    def _joined_passes(self, k: int) -> list[Pass]:
        """One pass; where the unit keeps state from one micro-batch to the next, one for each micro-batch of all ranks."""
        micros = self.updates[k]
        groups = [micros]
        if any(self.restores & unlike(a.state, b.state) for r in self.records for a, b in pairwise(r["updates"][k])):
            groups = [[m for m in same if m.weight > 0] for same in by_index(self.records, k)]
        total = sum(m.weight for m in micros)
        return [
            Pass(
                joined(same),
                sum(m.weight for m in same) / total,
                same[0].streams,
                self._own(agreeing(m.state for m in same)),
            )
            for same in groups
            if same
        ]

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {path: value for path, value in state.items() if path in self.restores}

    def backward(self, passes: Sequence[Pass]) -> float:
        """Add up the gradients; returns the mean loss."""
        mean, before_backward = 0.0, getattr(self.unit._update, "before_backward", None)
        for each in passes:
            self.put_back(each)
            with self.same_parameters(each):
                with self.computes.autocast(self.device):
                    loss = self.loss_of(each.data)
                self.note_draws(each)
                if before_backward is not None:
                    before_backward(self.unit, loss)
                (loss * (each.share * self.scale)).backward()
            mean += float(loss.detach()) * each.share
        self.unscale()
        return mean

    def unscale(self) -> None:
        """The gradients as without the scale, a power of 2."""
        for parameter in self.module.parameters() if self.scale != 1 else ():
            if parameter.grad is not None:
                parameter.grad /= self.scale

    def try_pass(self, passes: Sequence[Pass]) -> tuple[float, Values]:
        return self.backward(passes), self.gradients()

    def as_given(self, data: Any) -> Any:
        """A batch as the unit gets it."""
        return widened(data, self.dtype, self.device)

    def loss_of(self, data: Any) -> torch.Tensor:
        return self.unit.compute_loss(self.state, self.as_given(data))[0]

    def _step_optimizer(self) -> None:
        unit = self.unit
        if unit.kind_of_update.step_optimizer is not Update.step_optimizer and unit.grad_scaler is None:
            unit._update.step_optimizer(unit)
        else:
            self.optimizer.step()

    def _clip(self) -> float | None:
        norm, unit = None, self.unit
        if unit.kind_of_update.clip is not Update.clip:
            unit._update.clip(unit)
            return None
        if unit.clip_grad_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), unit.clip_grad_norm))
        if unit.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(self.module.parameters(), unit.clip_grad_value)
        return norm


class OwnReference(Reference):
    """A unit's own `train_step`, given micro-batches joined over the ranks: it accumulates and steps as it likes."""

    @property
    def drew(self) -> bool:
        return False  # dropout is off

    def begin(self, *, write: bool = True) -> None:
        if not self.keeps_dropout:
            switch_off_dropout(self.unit)
        super().begin(write=write)
        self.watch = GradientWatch(self.unit)

    def epoch_ended(self) -> None:
        """Its hook does all there is to do."""

    def update(self, k: int) -> dict[str, Any]:
        losses = []
        for same in by_index(self.records, k):
            self.enter_epoch(same[0].epoch)
            self.step_begins()
            loss = self.step(self.whole_batch(same))
            self.unit.on_train_step_end(self.state)
            self.step_done(loss)
            losses.append((loss, sum(m.weight for m in same)))
        known = [(loss, weight) for loss, weight in losses if loss is not None]
        mean = sum(loss * weight for loss, weight in known) / sum(w for _, w in known) if known else None
        gradients = self.watch.take() or {}
        self.held, self.rates = self.watch.held, self.watch.rates
        return {"loss": mean, "norm": None, "gradients": gradients}

    def stepping(self) -> list[torch.optim.Optimizer]:
        return list(self.unit.tracked_optimizers().values())

    def try_pass(self, passes: Sequence[Pass]) -> tuple[float, Values]:
        losses = []
        for each in passes:
            self.put_back(each)
            losses.append(self.step(each.data))
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if known else float("nan"), as_real(self.watch.take() or {})

    def step(self, batch: Any) -> float | None:
        self.draws_for(batch)
        with self.computes.autocast(self.device):
            return number_in(loss_in(self.unit.train_step(self.state, widened(batch, self.dtype, self.device))))

    def whole_batch(self, micros: list[Micro]) -> Any:
        try:
            return joined(micros)
        except NotJoinable as why:
            raise ProveError(
                f"{type(self.unit).__name__} steps by itself, and the micro-batches of the ranks cannot be joined into the one "
                f"batch that a single process would get ({why})."
            ) from why
