"""The reference of a user's own loop: it runs the loop's code in plain PyTorch, by turns with the reference.

Both the reference and the script's `for` decide what comes next. So the reference works in a thread of its own, and at any
moment one of the two runs while the other waits. The script's code, and all state of its thread, stays in the main thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.common.errors import ProveError
from echelon.loop.auto.several import Turn
from echelon.loop.own.batch_window import OwnWindow
from echelon.loop.own.loop_unit import LoopUnit
from echelon.parallel.prepared import NO_CONTEXT
from echelon.parallel.recipe.precision import Precision
from echelon.prover.records import RankRecord, StopLoop
from echelon.prover.reference import How, Pass, Reference, Shake
from echelon.prover.references import AutoReference, OwnReference, SeveralReference
from echelon.prover.values import UnitKind, balance, forget_loads, switch_off_dropout
from echelon.world.device import in_thread

__all__ = ["LockstepLoop", "LoopReference", "Plain", "PlainWindow", "reference_of"]

_LOOKS = 3  # how often a loop may look at its data before it trains


@dataclass
class Plain:
    """How to train on a micro-batch.

    Args:
        share: of the global batch's mean; the loss is multiplied by it.
        is_last: the optimizer steps after it.
        is_first: it is the first of its update.
        computes: the precision in which the window computes; None is float32.
        scale: a factor in `share`, by which the gradients are divided again before the step.
    """

    share: float
    is_last: bool
    is_first: bool
    computes: Precision | None = None
    scale: float = 1.0
    loss: torch.Tensor | None = None
    norm: float | None = None
    weight: float | None = None  # of the batch, as the loop gives it


class PlainWindow(OwnWindow):
    """A window in plain PyTorch: `backward` is `loss.backward()`, and a step is the optimizer's step."""

    def __enter__(self) -> OwnWindow:
        session, unit, plain = self._session, self._session.unit, self._plain
        session.enter(self)
        self.is_open, self.update, self.is_last = True, unit.window.updates, plain.is_last
        # A number: the tensor may be a variable of the script, whose value is put back after a pass that was only tried.
        plain.weight = float(unit.weight(session.batch) if self._weight is None else self._weight)
        if plain.computes is not None:
            self._contexts = (plain.computes.autocast(unit.device),)
            self._contexts[0].__enter__()
        return self

    @property
    def _plain(self) -> Plain:
        plain: Plain = self._session.unit.reference.plain
        return plain

    def _end_several(self) -> None:
        """There is nothing to sum up."""

    def backward(self, loss: torch.Tensor, *, retain_graph: bool | None = None) -> None:
        plain, unit = self._plain, self._session.unit
        with NO_CONTEXT if plain.computes is None else torch.autocast(unit.device.type, enabled=False):
            (loss * plain.share).backward(retain_graph=retain_graph)
        if plain.is_last and plain.scale != 1:
            for parameter in unit.module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= plain.scale
        self.loss = plain.loss = loss.detach() + (0 if plain.loss is None else plain.loss)
        self.went_back, self._session.accumulates = True, unit.several is None

    def log(self, name: str, value: Any, weight: Any = None, *, reduce: str = "mean") -> None:
        """Nobody reads it."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, of: Any = None) -> torch.Tensor | None:
        if not self.is_last:
            return None
        norm = torch.nn.utils.clip_grad_norm_(self._clipped(of), max_norm, norm_type)
        self._plain.norm = float(norm)
        return norm

    def clip_grad_value_(self, max_value: float, *, of: Any = None) -> None:
        if self.is_last:
            torch.nn.utils.clip_grad_value_(self._clipped(of), max_value)

    def _clipped(self, of: Any) -> Any:
        unit = self._session.unit
        return unit.module.parameters() if unit.several is None else unit.several.asked(of).parameters

    def keep(self, turn: Turn) -> None:
        turn.put_aside()

    def step(self, turn: Turn | None, original: Callable[..., Any]) -> None:
        self.stepped = self.updated = True
        if turn is not None:
            turn.take_back()
        (self._session.unit.optimizer if turn is None else turn.optimizer).step()  # which prove may have replaced


class LockstepLoop:
    """Runs the script's loop and the reference by turns.

    Args:
        work: the reference's part, which calls `give` and `end_epoch`; when it returns, the script ends.
    Attributes:
        given: how many batches the loop got.
        plain: how to train on the present batch.
    """

    window = PlainWindow
    plain: Plain

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self.given = work, 0
        self._to_loop: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._to_work: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left = False  # the loop broke off an epoch

    # --- in the loop

    def batches(self) -> Iterator[Any]:
        """The batches of one epoch."""
        if self._thread is None:
            self._thread = threading.Thread(target=in_thread(self._run), name="echelon-reference", daemon=True)
            self._thread.start()
        elif not self._left:
            self._to_work.put(None)
        while True:
            kind, value = self._to_loop.get()
            if kind == "batch":
                self._left = False
                try:
                    yield value
                except GeneratorExit:  # a `break`, after the step
                    self._left = True
                    raise
                finally:
                    self._to_work.put(None)
            elif kind == "epoch" and self._left:
                self._left = False  # the loop has ended this epoch already
                self._to_work.put(None)
            elif kind == "epoch":
                return
            else:
                raise value

    # --- in the thread of the reference

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._to_loop.put(("error", error))
        else:
            self._to_loop.put(("end", StopLoop()))

    def give(self, batch: Any) -> None:
        """Have the loop train on a batch, and wait until it has."""
        self.given += 1
        self._to_loop.put(("batch", batch))
        self._to_work.get()

    def again(self, batch: Any) -> None:
        """Give a batch once more, in a new iteration: the loop only looked at it."""
        if not self._left:
            self.end_epoch()
        self.give(batch)

    def end_epoch(self) -> None:
        """Have the loop do what it does between two epochs."""
        self._to_loop.put(("epoch", None))
        self._to_work.get()


class LoopReference(AutoReference):
    """The loop's own code on the original model and optimizer: `window.backward` is `loss.backward()`.

    Args:
        turns: gives the loop its batches.
    """

    unit: LoopUnit  # type: ignore[assignment]  # no AutoUnit: what it computes is in the loop

    def __init__(self, turns: LockstepLoop, *args: Any) -> None:
        super().__init__(*args)
        self.turns = turns
        self._trains = False  # False while only a gradient is wanted
        self._has_begun = False  # the loop has taken a window

    def begin(self, *, write: bool = True) -> None:
        if not self.keeps_dropout:
            switch_off_dropout(self.unit)  # so that batches can be joined: one batch an update, for loops that count
        Reference.begin(self, write=write)
        self.watch = self.watch_optimizers()

    def epoch_ended(self) -> None:
        self.turns.end_epoch()

    def update(self, k: int) -> dict[str, Any]:
        self.enter_epoch(self.updates[k][0].epoch)
        self.step_begins()
        self._trains = True
        forget_loads(self.unit)
        loss = self.backward_of_all(k)
        self._trains = False
        gradients, self.rates = self.watch.take(), self.watch.rates
        if gradients is None:
            raise ProveError(
                f"the loop took no optimizer step on the batch of update {k} in one process, but it did on the ranks."
            )
        balance(self.unit)
        self.step_done(loss)
        return {"loss": loss, "norm": self.turns.plain.norm, "gradients": gradients}

    def backward(self, passes: Sequence[Pass]) -> float:
        mean, computes = 0.0, self.computes if self.computes.dtype is not None else None
        for i, each in enumerate(passes, 1):
            self.put_back(each)
            is_last, is_first = self._trains and i == len(passes), self._trains and i == 1
            self.turns.plain = plain = Plain(each.share * self.scale, is_last, is_first, computes, self.scale)
            batch = self.as_given(each.data)
            with self.same_parameters(each):
                self.turns.give(batch)
                for _ in range(_LOOKS):
                    if self._has_begun or plain.loss is not None:
                        break
                    self.turns.again(batch)
            self._has_begun = True
            if plain.loss is None:
                raise ProveError("the loop took no window of a batch in one process, but it did on the ranks.")
            self.note_draws(each)
            mean += float(plain.loss) * each.share
        if not self._trains:
            if self.unit.several is not None:  # gradients put aside where optimizers would have stepped
                self.module.zero_grad()
                for turn in self.unit.several.turns:
                    turn.take_back()
            self.unscale()
        return mean


def reference_of(unit: Any, records: list[RankRecord], folder: Path, dtype: torch.dtype, how: How, shake: Shake) -> Reference:
    """The reference for this kind of unit."""
    kind = UnitKind.of(unit)
    if kind.is_loop:
        return LoopReference(unit.reference, unit, records, folder, dtype, how, shake)
    made = {UnitKind.LOSS: AutoReference, UnitKind.LOSSES: SeveralReference, UnitKind.STEP: OwnReference}[kind]
    return made(unit, records, folder, dtype, how, shake)
