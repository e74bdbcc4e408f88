"""Several optimizers in one update, each with gradients of its own.

    backward(loss)       any number of passes in a micro-batch; each adds to the gradients of all parameters that it reaches
    keep(turn)           an optimizer's step before the window's last micro-batch: sets its gradients aside
    settle(turn)         its step in the last micro-batch: the ranks meet, its gradients become those of the global batch
    end_micro_batch()    the window takes in the weight and the sum of the losses
    meet_at_end()        the window's end: the ranks have stepped the same optimizers

An optimizer's gradients are those that its parameters had at its step in each micro-batch of the window. Gradients that the loss
of another optimizer left there, and that were cleared before the next pass, are not among them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LoopError, LossError, RanksDisagreeError, UsageError
from echelon.loop.auto.finite import check_loss
from echelon.loop.auto.optimizer_checks import are_alike, check_holds
from echelon.loop.samples import as_scalar, problem_with
from echelon.parallel.gradients import clip as gradients
from echelon.parallel.gradients.fused import fuse
from echelon.parallel.networks import Networks
from echelon.parallel.prepared import MicroBatch
from echelon.parallel.shards import is_split
from echelon.parallel.state.partition import parameters_of
from echelon.world import agree, clock
from echelon.world.clock import Part

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["Several", "Turn", "configured", "of_one", "sum_of_losses"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Turn:
    """An optimizer's part in an update.

    Attributes:
        number: its place among the optimizers, from 1.
        kept: sum of the gradients at its steps in earlier micro-batches.
        times_kept: number of these steps.
        settled: its gradients are those of the global batch.
        stepped: its step was called in the window's last micro-batch.
        updated: that step was not skipped.
        norm: norm of its gradients, if they are clipped.
    """

    name: str
    number: int
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    kept: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    times_kept: int = 0
    settled: bool = False
    stepped: bool = False
    updated: bool = False
    norm: torch.Tensor | None = None

    def __str__(self) -> str:
        return f"the {type(self.optimizer).__name__} {self.name!r}"

    @property
    def parameters(self) -> list[nn.Parameter]:
        return parameters_of(self.optimizer)

    def put_aside(self) -> None:
        for parameter in self.parameters:
            if (gradient := parameter.grad) is not None:
                before = self.kept.get(parameter)
                self.kept[parameter] = gradient if before is None else before.add_(gradient)
                parameter.grad = None

    def take_back(self) -> None:
        for parameter, kept in self.kept.items():
            parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)
        self.kept = {}

    def reset(self) -> None:
        self.kept, self.times_kept, self.settled, self.stepped, self.updated, self.norm = {}, 0, False, False, False, None


class Several:
    """The optimizers of a unit.

    Args:
        made: optimizers and schedulers, by name.
    """

    def __init__(self, unit: Any, made: Mapping[str, tuple[torch.optim.Optimizer, Any]]) -> None:
        self._unit = unit
        self.turns = [Turn(name, i, *each) for i, (name, each) in enumerate(made.items(), 1)]
        self._loss: Any = None  # sum of this micro-batch's losses
        self._earlier: float = 0  # weight of the window's earlier micro-batches on this rank
        self._weight: float = 0  # weight of this micro-batch
        self.total: float | None = None  # weight of the window's global batch, once the ranks have met
        # For each turn one parameter, by whose gradient a change by the script is noticed.
        self._witnesses: dict[Turn, nn.Parameter | None] = {}
        self._seen_versions: dict[Turn, int] = {}  # of the witness's gradient, after the latest pass
        self._told_of_change = False

    def check(self, names: Mapping[nn.Parameter, str]) -> None:
        """
        Raises:
            UsageError: two optimizers hold the same parameter, or one holds the parameters of a copy of a network.
        """
        whose: dict[nn.Parameter, str] = {}
        for turn in self.turns:
            for parameter in turn.parameters:
                if parameter in whose:
                    raise LoopError(
                        f"each parameter must be in one optimizer, got {names.get(parameter, 'one')} in {whose[parameter]} "
                        f"and in {turn}. Leave it to one of them; if several losses share it, as a trunk, to the first."
                    )
                whose[parameter] = str(turn)
        for part in self._unit.prepared.parts:
            left = [p for p in part.module.parameters() if p.requires_grad and p not in whose]
            for turn in self.turns:
                if left and are_alike(turn.parameters, left):
                    raise LoopError(
                        f"{turn} must hold parameters of the module, got {len(left)} of a copy or from before the module was "
                        "made parallel: no optimizer holds the module's parameters of the same shapes. Make the optimizer from "
                        "the module that the method is given."
                    )

    def of(self, optimizer: Any) -> Turn:
        return next(turn for turn in self.turns if turn.optimizer is optimizer)

    def asked(self, optimizer: Any) -> Turn:
        """
        Raises:
            UsageError: it is none of these optimizers. None stands for the optimizer if there is only one.
        """
        turns = [turn for turn in self.turns if turn.optimizer is optimizer or (optimizer is None and len(self.turns) == 1)]
        if not turns:
            raise LoopError(
                f"of must be one of the optimizers, because each optimizer's gradients are clipped separately, got a "
                f"{type(optimizer).__name__}. Write window.clip_grad_norm_(1.0, of=optimizer)."
            )
        return turns[0]

    def clear(self) -> None:
        for turn in self.turns:
            gradients.clear(turn.optimizer)

    # --- a micro-batch

    def begin(self, weight: float) -> None:
        if self._unit.window.count == 1:
            self.discard()
        self._loss, self._weight = None, weight

    def discard(self) -> None:
        """Drop what is left of the previous window, or of an unfinished one."""
        self._loss, self._earlier, self._weight, self.total = None, 0, 0, None
        for turn in self.turns:
            turn.reset()

    def backward(self, loss: torch.Tensor, micro_batch: MicroBatch[Any], *, retain_graph: bool | None = None) -> None:
        if (late := next((turn for turn in self.turns if turn.settled), None)) is not None:
            raise LoopError(
                f"window.backward must not come between clipping and step(), got it after the gradients of {late} were clipped. "
                "Call its step() first, or clip after the last backward pass."
            )
        detached, window = loss.detach(), self._unit.window
        self._loss = detached if self._loss is None else self._loss + detached
        assert window.reference is not None
        scale = float(micro_batch.weight) * self._unit.prepared.data.averaged_over / window.reference

        loss = self._unit.prepared.before_backward(loss, micro_batch)
        if scale == 0:
            gradients.pass_zeros(loss)
        loss.backward(gradient=None if scale == 1 else torch.full_like(loss, scale), retain_graph=retain_graph)
        if not self._told_of_change:
            self._look_at_gradients()

    def _look_at_gradients(self) -> None:
        for turn in self.turns:
            if (
                turn not in self._witnesses
                and (stale := next((p for p in turn.parameters if p.grad is not None), None)) is not None
            ):
                self._witnesses[turn] = None if is_split(stale) else stale  # gradients of shards are averaged in each pass
            if (witness := self._witnesses.get(turn)) is not None:
                self._seen_versions[turn] = gradients.times_changed(witness)

    def _tell_of_change(self, turn: Turn) -> None:
        """Warn once if the script has changed a gradient since the latest backward pass: the ranks have not averaged it yet."""
        witness, parts = self._witnesses.get(turn), self._unit.prepared.data.averaged_over * self._unit.window.size
        if parts == 1 or self._told_of_change or witness is None or witness.grad is None:
            return
        if gradients.times_changed(witness) != self._seen_versions[turn]:
            self._told_of_change = True
            logger.warning(
                "gradients of %s were changed before its step(), when they are those of this rank's batch alone: with several "
                "optimizers, step() averages over the ranks and over the batches of an update. In place of torch's functions, "
                "call window.clip_grad_norm_(..., of=optimizer) or window.clip_grad_value_, which average first",
                turn,
            )

    def keep(self, turn: Turn) -> None:
        """Set the gradients aside at an optimizer's step before the window's last micro-batch."""
        if turn.times_kept == self._unit.window.count:
            raise _twice(turn)
        self._tell_of_change(turn)
        turn.times_kept += 1
        turn.put_aside()

    def settle(self, turn: Turn) -> bool:
        """Make the gradients for an optimizer's step those of the global batch. Collective. False if the batch weighs nothing."""
        if turn.settled:
            return self.total != 0
        window, prepared = self._unit.window, self._unit.prepared
        assert isinstance(prepared, Networks) and window.reference is not None
        if window.count > 1 and turn.stepped:
            raise _twice(turn)
        if turn.times_kept != window.count - 1:
            raise LoopError(
                f"step() of {turn} must be called in each batch of an update, got it in {turn.times_kept + 1} of "
                f"{window.count}: it updates the parameters in the last batch, and keeps the gradients in the earlier ones. Do "
                "not call it under `if window.is_last`. To step in some updates only, decide by window.update, in a unit by "
                "train_progress.num_updates_completed."
            )
        self._tell_of_change(turn)
        self.total = self._meet(turn.number, f"step() of {turn}")
        turn.take_back()
        turn.settled = True
        held = turn.parameters
        prepared.average_(held)
        if self.total not in (0, window.reference):
            gradients.scale_(held, window.reference / self.total)
        return self.total != 0

    def step(self, turn: Turn, step: Any) -> None:
        updates = self.settle(turn)
        turn.settled, turn.stepped = False, True
        if not updates:
            return
        step()
        turn.updated = True
        self._unit.prepared.after_step(wants_stop=False)

    def clip(self, turn: Turn, max_norm: float, norm_type: float = 2.0) -> torch.Tensor | None:
        if not self.settle(turn):
            return None
        norm = gradients.clip_by_norm_(turn.parameters, max_norm, norm_type)
        turn.norm = norm
        return norm

    def clip_value(self, turn: Turn, max_value: float) -> None:
        if self.settle(turn):
            gradients.clip_by_value_(turn.parameters, max_value)

    # --- a micro-batch of a unit

    def named(self, names: Any) -> list[Turn]:
        """The turns of the optimizers that `compute_losses` has named with a loss.

        Raises:
            UsageError: no optimizer has this name.
        """
        wanted, known = (names,) if isinstance(names, str) else names, {turn.name: turn for turn in self.turns}
        if not isinstance(wanted, (tuple, list)) or not wanted or any(name not in known for name in wanted):
            raise LoopError(
                f"{type(self._unit).__name__}.compute_losses must yield the name of an optimizer, or a tuple of names, with each "
                f"loss, got {names!r:.100}; there are {', '.join(map(repr, known))}."
            )
        return [known[name] for name in wanted]

    def train(self, state: State, micro_batch: MicroBatch[Any]) -> Any:
        """Run each loss of `compute_losses` in its turn: the optimizers named with it step before the next loss is computed.

        Returns what `compute_losses` returned.
        """
        unit = self._unit
        passes, last = unit.compute_losses(state, micro_batch.data), micro_batch.is_last
        if not isinstance(passes, Iterator):
            raise LoopError(
                f"{type(unit).__name__}.compute_losses must yield a name and a loss, `yield 'critic', loss`, for each step in "
                f"order, got a returned {type(passes).__name__}."
            )
        while True:
            clock.enter(Part.FORWARD)
            try:
                with unit.autocast():
                    made = next(passes)
            except StopIteration as end:
                outputs = end.value
                break
            names, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, torch.tensor(0.0))
            turns = self.named(names)
            if (problem := problem_with((loss, None), unit.module)) is not None:
                raise LossError(f"{type(unit).__name__}.compute_losses yielded for {names!r} {problem}")
            loss = as_scalar(loss)
            if unit.detect_anomaly:
                check_loss(loss, micro_batch.weight, unit.train_progress.num_updates_completed)
            self.log(state, turns, loss)
            for turn in turns:
                gradients.clear(turn.optimizer)  # losses of other optimizers may have left gradients there
            clock.enter(Part.BACKWARD)
            try:
                self.backward(loss, micro_batch, retain_graph=unit.retain_graph)
            except RuntimeError as error:
                if "second time" in str(error) or "inplace operation" in str(error):
                    error.add_note(
                        f"{type(unit).__name__}.compute_losses: the loss of {names!r} shares part of its graph with an earlier "
                        "loss, whose optimizer has stepped. Compute that part again after the earlier yield, detach it, or yield "
                        "the sum of both losses with a tuple of both names."
                    )
                raise
            clock.enter(Part.OPTIMIZER)
            for turn in turns:
                if not last:
                    self.keep(turn)
                    continue
                if unit.clip_grad_norm is not None:
                    self.clip(turn, unit.clip_grad_norm)
                if unit.clip_grad_value is not None:
                    self.clip_value(turn, unit.clip_grad_value)
                self.step(turn, turn.optimizer.step)
        if self._loss is None:
            raise LoopError(f"{type(unit).__name__}.compute_losses must yield a loss in each batch, got none.")
        self.end_micro_batch(replica=unit.prepared.data.is_replica)
        return outputs

    def log(self, state: State, turns: Sequence[Turn], loss: torch.Tensor) -> None:
        """Log the loss of some of the optimizers; the loss of all is logged anyway."""
        if len(turns) < len(self.turns):
            state.log(f"loss_{'_'.join(turn.name for turn in turns)}", loss.detach())

    def advance(self, *, after_epoch: bool) -> None:
        """Advance the schedulers; after an update, only those of the optimizers that stepped in it."""
        for turn in self.turns:
            if turn.scheduler is not None and (after_epoch or turn.updated):
                turn.scheduler.step()

    # --- the end of a micro-batch and of its window

    def end_micro_batch(self, *, replica: bool) -> None:
        """Add the micro-batch's weight and the sum of its losses to the window."""
        weight = 0 if replica else self._weight
        self._unit.window.add(self._loss, weight)
        self._earlier += weight

    def meet_at_end(self) -> None:
        """End the window on all ranks, whichever optimizers have stepped on this one. Collective.

        Raises:
            UsageError: no optimizer has stepped, or one whose gradients were kept has not stepped.
        """
        missed = next((turn for turn in self.turns if turn.times_kept and not turn.stepped), None)
        stepped = any(turn.stepped for turn in self.turns)
        number = 0 if missed is None and stepped else len(self.turns) + 1
        self.total = self._meet(number, "the end of the window" if stepped else "the end of the window, without a step")
        if not stepped:
            raise LoopError(
                "an update must have the step() of an optimizer, got the end of its window without one. Call step() after "
                "window.backward(loss) and inside the window, on an optimizer that prepare() returned."
            )
        if missed is not None:
            raise LoopError(
                f"step() of {missed} must be called in the last batch of an update, too, got it in earlier batches only. Decide "
                "by window.update, which counts updates, and not by a count of batches."
            )

    def _meet(self, number: int, what: str) -> float:
        """The window's weight so far, over all ranks. RanksDisagreeError on all ranks if they are at different steps."""
        window, prepared = self._unit.window, self._unit.prepared
        own_weight = self._earlier + (0 if prepared.data.is_replica else self._weight)
        if window.group is None:
            return own_weight
        sums = torch.tensor([own_weight, number, number * number, 1.0], dtype=torch.float64)
        dist.all_reduce(sums, group=window.group)
        total, numbers, squares, ranks = sums.tolist()
        if ranks * squares != numbers * numbers:
            every = agree.gather(what)
            other = next(rank for rank, each in enumerate(every) if each != every[0])
            raise RanksDisagreeError(
                f"the ranks must step the same optimizers in the same order, got {every[0]} on rank 0 and {every[other]} on rank "
                f"{other} in update {window.updates}. Decide by a value that all ranks share, such as an averaged loss."
            )
        return float(total)

    def numbers(self) -> dict[str, Any]:
        """Learning rates and gradient norms of the update, for its record."""
        several = len(self.turns) > 1
        norms = {f"grad_norm_{turn.name}": turn.norm for turn in self.turns if turn.norm is not None}
        rates = {f"lr_{turn.name}": float(turn.optimizer.param_groups[0]["lr"]) for turn in self.turns if several}
        return {**rates, **norms}


def configured(unit: Any, *, own_schedule: bool) -> Several:
    """Build the optimizers of a unit's `configure_optimizers_and_lr_schedulers`, which become its attributes. Collective.

    Args:
        own_schedule: the user's code steps the schedulers.
    Raises:
        UsageError: the method returned something else, or an option needs a single optimizer.
    """
    for name, given in (
        ("precision='fp16'", unit.grad_scaler),
        ("SWAParams(swalr_params=...)", unit.swa_params and unit.swa_params.swalr_params),
    ):
        if given is not None:
            raise LoopError(f"{name} must not be given with several optimizers. Use one optimizer with parameter groups.")
    prepared = unit.prepared
    assert isinstance(prepared, Networks)
    made = prepared.optimizer(unit.configure_optimizers_and_lr_schedulers)
    if isinstance(made, dict):
        made = {name: (each, None) if isinstance(each, torch.optim.Optimizer) else each for name, each in made.items()}
    if not isinstance(made, dict) or not made or not all(_can_use(*each, own_schedule=own_schedule) for each in made.items()):
        raise LoopError(
            f"{type(unit).__name__}.configure_optimizers_and_lr_schedulers must return a dict of pairs by name, {{'critic': "
            f"(optimizer, scheduler or None), ...}}, got {made!r:.200}. To step a scheduler that follows a metric, override "
            "step_lr_scheduler."
        )
    several = Several(unit, made)
    several.check({p: name for name, p in prepared.named_parameters()})
    for turn in several.turns:
        check_holds(unit, turn.optimizer)
        prepared.divide(turn.optimizer)
        fuse(turn.optimizer)
        setattr(unit, f"optimizer_{turn.name}", turn.optimizer)
        if turn.scheduler is not None:
            setattr(unit, f"lr_scheduler_{turn.name}", turn.scheduler)
    return several


def _can_use(name: Any, pair: Any, *, own_schedule: bool) -> bool:
    """Whether a name and its optimizer, with a scheduler or None, can be a turn."""
    if not isinstance(name, str) or not f"_{name}".isidentifier() or not isinstance(pair, tuple) or len(pair) != 2:
        return False
    plateau = isinstance(pair[1], torch.optim.lr_scheduler.ReduceLROnPlateau) and not own_schedule
    return isinstance(pair[0], torch.optim.Optimizer) and not plateau and hasattr(pair[1] or pair[0], "step")


def _twice(turn: Turn) -> UsageError:
    return LoopError(
        f"step() of {turn} must be called once per batch if an update has several batches, got a second call. To step it several "
        "times per batch, train without accumulation."
    )


# The methods for one optimizer of an AutoUnit whose class defines only those for several.


def of_one(unit: Any, module: nn.Module) -> Any:
    raise LoopError(f"{type(unit).__name__} has several optimizers: call configure_optimizers_and_lr_schedulers instead.")


def sum_of_losses(unit: Any, state: State, data: Any) -> tuple[torch.Tensor, Any]:
    """`compute_loss` for evaluations, where no optimizer steps between the losses."""
    unit.configure()
    losses = []
    for names, loss in unit.compute_losses(state, data):
        unit.several.log(state, unit.several.named(names), loss)
        losses.append(loss)
    return torch.stack(losses).sum(), None
