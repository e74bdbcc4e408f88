"""The accumulation window: the micro-batches of one optimizer update, and their weight over all ranks.

Rule of truth 2. With weights w and mean losses l over all micro-batches i of all ranks, the gradient of an update is

    g  =  sum_i w_i grad(l_i)  /  W,      W = sum_i w_i

whatever the sizes: short last windows, uneven micro-batches, ranks with different counts, padding of weight zero. W is known
only when the window ends, after the backward passes. So each backward pass starts with the gradient w_i * R / W0, where
W0 is the W of the last update (the same number on every rank; at first, an estimate that the ranks agree on) and R the
factor that undoes the layout's averaging. At the end the gradients are multiplied by W0 / W. Usually W0 equals W, and
nothing is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from echelon.common.errors import LoopError, RanksDisagreeError, UsageError
from echelon.loop.progress import Progress
from echelon.loop.records.logged import NOBODY
from echelon.loop.samples import weighted
from echelon.parallel.guards.guard import Guard
from echelon.world import agree

__all__ = ["Window"]


# A rank in doubt sends this in place of its loss. The sum tells whether all ranks are in doubt.
_IN_DOUBT = 2.0**60
_ALL_BATCHES = (
    "Let all ranks `continue` and `break` at the same batches: decide by a value that all ranks share, such as `ech.all_mean`."
)
# If this many first updates of a run all weigh nothing, the run will never train anything.
_NONE_IN = 10


class Window:
    """Counts and weighs the micro-batches of an update. Its state is saved: W0 decides how a sum is rounded.

    Args:
        size: micro-batches per update.
        fixed: W0 stays 1, for updates whose every bit must not depend on the number of ranks.
    Attributes:
        may_be_empty: a rank that trains alone (local SGD) may have only padding in a window; its gradients are then zeros.
        group: the ranks to sum over, in host memory; None for a single process.
        count: micro-batches so far in this window.
        updates: updates so far in the run.
        reference: W0.
        latest_loss: this rank's mean loss of the latest micro-batch, without its graph.
        told: the sum of the ranks' signatures of logged numbers, then the number of ranks; None if the ranks sent no message.
        guards: the module's guards; their signatures travel with the window's message.
        is_nothing: the latest update's global batch weighs nothing, on all ranks. Always False for a weight on the device, since
            reading it would wait.
        empty: number of updates of the run whose global batch weighed nothing.
        passed_over: batches that the user's loop has skipped since the ranks last compared their batches.
        own_loss: this rank's part of the latest update's loss: the mean of its one micro-batch, or the weighted sum of several.
    """

    def __init__(self, size: int, *, fixed: bool = False) -> None:
        self.size = self._saved_size = size
        self.fixed = fixed
        self.may_be_empty = self.is_nothing = False
        self.group: dist.ProcessGroup | None = None
        self.count = self.updates = self.empty = self.passed_over = 0
        self.reference: float | None = None
        self.latest_loss: Any = None
        self.own_loss: Any = None
        self.told: list[float] | None = None
        self.guards: Sequence[Guard] = ()
        self._weight: Any = 0
        self._always: list[float] = []  # sums of the guards' signatures
        self._news: list[float] = []
        self._loss: Any = None  # mean loss of the only micro-batch so far, or the weighted sum of several
        self._is_sum = False
        self._reduction: _Reduction | None = None

    def open(self, is_last_batch: bool) -> bool:
        """Count one more micro-batch; True if it is the window's last."""
        self.count += 1
        for guard in self.guards:
            guard.begin_pass(first=self.count == 1)
        return is_last_batch or self.count >= self.size

    def estimate(self, weights: Sequence[float]) -> None:
        """Estimate W0 from every rank's first weight, before the first backward pass of a run."""
        self.reference = 1.0 if self.fixed else (sum(weights) * self.size) or 1.0

    def discard(self) -> None:
        """Forget the micro-batches of an unfinished window."""
        self.count, self._weight, self._loss, self._is_sum = 0, 0, None, False
        for guard in self.guards:
            guard.discard()

    def rescale(self, progress: Progress) -> None:
        """After a restore, recount the steps in progress if the number of micro-batches per update has changed."""
        old, self._saved_size = self._saved_size, self.size
        if old != self.size:
            progress.rescale(self.size, old)

    def add(self, loss: torch.Tensor, weight: float | torch.Tensor) -> None:
        """Add a micro-batch's weight and its mean loss, without its graph."""
        self.latest_loss = loss
        for guard in self.guards:
            guard.end_pass()
        if self._loss is None:
            self._loss, self._weight = loss, weight
        else:
            self._loss = self._weighted_sum() + weighted(loss, weight)
            self._weight = self._weight + weight
            self._is_sum = True

    def start_reduction(self, wants_stop: bool, logged: Sequence[float] = NOBODY) -> None:
        """Start the sum over the ranks; the backward pass runs meanwhile. Collective, in the same order on every rank.

        Args:
            logged: signature of the numbers that this rank has logged.
        Raises:
            RanksDisagreeError: this rank has skipped a batch, or changed something that a guard watches, and others have not.
                Only a rank in doubt waits for the others here.
        """
        doubting = [guard for guard in self.guards if guard.in_doubt]
        in_doubt = bool(doubting) or self.passed_over > 0
        always, news = self._signatures()
        has_more = wants_stop or any(logged) or any(guard.has_news for guard in self.guards)
        own_word = _IN_DOUBT if in_doubt else None
        more = (*news, *logged)
        self._reduction = _Reduction(self._weight, self._weighted_sum(), wants_stop, more, has_more, always, self.group, own_word)
        if in_doubt:
            if not self._reduction.all_told(_IN_DOUBT):
                raise self._differs("the others trained on") if self.passed_over else doubting[0].differs_from_some()
            self._compare_batches(f"in update {self.updates}")
            for guard in self.guards:
                guard.compare()

    def _signatures(self) -> tuple[list[float], list[float]]:
        """The signatures of all guards: those in every message, and the others."""
        always: list[float] = []
        news: list[float] = []
        for guard in self.guards:
            (always if guard.is_always_told else news).extend(guard.signature())
        return always, news

    def settle_batches(self, *, left: bool) -> None:
        """At the end of an epoch, compare skipped batches. Collective for ranks that skipped a batch or `left` early. They
        send the message of a window, because other ranks may be in a window.

        Raises:
            RanksDisagreeError: other ranks have trained on more batches.
        """
        if self.group is not None and (left or self.passed_over):
            none = [0.0] * sum(guard.numbers for guard in self.guards if guard.is_always_told)
            reduction = _Reduction(0.0, torch.zeros((), dtype=torch.float64), False, (), False, none, self.group, _IN_DOUBT)
            if not reduction.all_told(_IN_DOUBT):
                raise self._differs("the others go on with" if left else "the others trained on")
            self._compare_batches(f"at the end of an epoch, after update {self.updates}")
        self.passed_over = 0

    def _compare_batches(self, where: str) -> None:
        passed, self.passed_over = self.passed_over, 0
        agree.same_on_all("the batches that they train on", f"{passed} skipped {where}", _ALL_BATCHES)

    def _differs(self, what: str) -> RanksDisagreeError:
        did = f"skipped {self.passed_over} of the batches that" if self.passed_over else "left the loop over the batches, which"
        return RanksDisagreeError(f"rank {agree.rank()} {did} {what}, after update {self.updates}. {_ALL_BATCHES}")

    def _weighted_sum(self) -> torch.Tensor:
        """The weighted sum of losses, in float64 for the sum over many ranks."""
        total: torch.Tensor = self._loss if self._is_sum else weighted(self._loss.double(), self._weight)
        return total

    def close(self) -> tuple[Any, Any, bool]:
        """End the window: (global weight, global mean loss, whether a rank wants to stop).

        Weight and loss are floats if the host knows them, else 0-dim tensors on the device. If the weight is 0, the loss is 0.

        Raises:
            UsageError: on all ranks: the weight is below 0, or it was 0 in each of the run's first updates (`_NONE_IN`).
        """
        weight, loss, stop = self._weight, self._loss, False
        self.own_loss, self.told, self._always, self._news = loss, None, [], []
        if self._reduction is not None:
            weight, loss, stop = self._reduction.wait()
            self._always, self._news, self.told = self._reduction.always, self._reduction.more, [*NOBODY, 1.0]
            if self._news:
                self.told = self._news[-len(self.told) :]
            self._is_sum, self._reduction = True, None
        if self._is_sum:
            loss = loss / weight if isinstance(weight, torch.Tensor) or weight else loss
            self._is_sum = False
        if isinstance(weight, torch.Tensor):
            loss = torch.where(weight == 0, torch.zeros_like(loss), loss)
        if self.may_be_empty:  # the gradients are zeros then, so any other weight will do
            usual = self.reference or 1.0
            weight = torch.where(weight > 0, weight, usual) if isinstance(weight, torch.Tensor) else weight or usual
        self.count, self._loss = 0, None
        self.updates += 1
        self.is_nothing = not isinstance(weight, torch.Tensor) and weight <= 0
        if self.is_nothing:
            self.empty, loss = self.empty + 1, 0.0
            if weight < 0 or self.empty == self.updates == _NONE_IN:
                raise self.weightless(weight)
        return weight, loss, stop

    def check_guards(self) -> None:
        """Check the guards' summed signatures, after `close`. Collective if a rank had news.

        Raises:
            RanksDisagreeError: on all ranks.
        """
        ranks = round(self.told[-1]) if self.told else 1
        always, news = iter(self._always), iter(self._news)
        for guard in self.guards:
            sums = list(islice(always if guard.is_always_told else news, guard.numbers))
            guard.check(sums, ranks, self.updates - 1)

    def weightless(self, weight: float = 0) -> UsageError:
        """The error for a global batch whose weight is 0 or below."""
        every = f", as in all {self.updates} so far" if self.updates == self.empty > 1 else ""
        return LoopError(
            f"the weight of the global batch must be above 0, got {weight:g} in update {self.updates - 1}{every}. It counts "
            "samples or tokens; at least one rank must have some. Check what `weight` counts: are all labels -100, or does the "
            "collate_fn drop all samples?"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self.reference, "updates": self.updates, "size": self.size, "empty": self.empty}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reference, self.updates = state_dict["reference"], state_dict["updates"]
        self._saved_size, self.empty = state_dict["size"], state_dict.get("empty", 0)


class _Reduction:
    """The running sum of a window over the ranks: one small message on a CPU; on a GPU, a second one for values on the device.

    The second message goes out after the backward pass. If it went out before, the all-gathers of the backward pass, which share
    its communicator, would wait for the loss, and so for the end of the forward pass on every rank.

    A rank with more to tell (a stop request, logged numbers, a guard's news) sends NaN as its weight. All ranks then sum again,
    with these fields. They are not in every message because gloo sends each element of a short message round its ring separately:
    a third element in each update would cost half as much again.
    """

    def __init__(
        self,
        weight: Any,
        loss: torch.Tensor,
        wants_stop: bool,
        more: Sequence[float],
        has_more: bool,
        always: Sequence[float],
        group: dist.ProcessGroup | None,
        instead: float | None,
    ) -> None:
        self._on_device = not loss.is_cpu
        self._weight_on_device = self._on_device and isinstance(weight, torch.Tensor)
        self._mine = [
            0.0 if self._weight_on_device else float(weight),
            0.0 if self._on_device else float(loss),
            float(wants_stop),
            *more,
            1.0,
        ]
        sent = [self._mine[0], self._mine[1]] if instead is None else [math.nan, instead]
        self._host = torch.tensor([math.nan if has_more else sent[0], sent[1], *always], dtype=torch.float64)
        self.always: list[float] = []  # sums of the fields that are in every message
        self.more: list[float] = []  # sums of the other fields, then the number of ranks, if a rank had more to tell
        self._works = [dist.all_reduce(self._host, group=group, async_op=True)]
        self._loss, self._weight, self._group = loss, weight, group

    def all_told(self, instead: float) -> bool:
        """Whether every rank has sent `instead` in place of its loss. Waits for the message."""
        assert self._works[0] is not None
        self._works[0].wait()
        return float(self._host[1]) == instead * dist.get_world_size(self._group)

    def wait(self) -> tuple[Any, Any, bool]:
        if self._on_device:
            rest = [self._loss, self._weight] if self._weight_on_device else [self._loss.double()]
            self._device = torch.stack([t.reshape(()) for t in rest])
            self._works.append(dist.all_reduce(self._device, async_op=True))
        for work in self._works:
            assert work is not None
            work.wait()
        (weight, loss, *self.always), stop = self._host.tolist(), 0.0
        if math.isnan(weight):
            full = torch.tensor(self._mine, dtype=torch.float64)
            dist.all_reduce(full, group=self._group)
            weight, loss, stop, *self.more = full.tolist()
        if self._on_device:
            return (self._device[1] if self._weight_on_device else weight), self._device[0], stop > 0
        return weight, loss, stop > 0
