"""Averages of the weights along training: an exponential moving average (EMA), or a plain one (SWA).

The averages are sharded like the parameters and keyed by name, so that their checkpoint can be restored under another layout and
number of ranks. torch's own functions update them, on this rank's shards, without communication.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.swa_utils import SWALR, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from echelon.common.arguments import Given
from echelon.common.errors import LoopError
from echelon.parallel.names import plain_buffers
from echelon.parallel.prepared import Prepared
from echelon.parallel.shards import local

__all__ = ["AveragedWeights", "SWALRParams", "SWAParams", "swa_scheduler"]

_given = Given(LoopError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SWALRParams:
    """The learning rate while averaging: torch's SWALR.

    Args:
        anneal_steps_or_epochs: number of updates, or epochs, as `lr_interval` says, in which the rate goes to `swa_lrs`.
        anneal_strategy: "linear" or "cos".
        swa_lrs: final rate, or a list of one for each parameter group.
    """

    anneal_steps_or_epochs: int
    anneal_strategy: Literal["linear", "cos"] = "linear"
    swa_lrs: Sequence[float] | float = 0.05

    def __post_init__(self) -> None:
        _whole(self, "anneal_steps_or_epochs", at_least=0)
        _given.require(self.anneal_strategy in ("linear", "cos"), "anneal_strategy", "'linear' or 'cos'", self.anneal_strategy)
        rates = self.swa_lrs if isinstance(self.swa_lrs, (list, tuple)) else [self.swa_lrs]
        for rate in rates:
            _given.number("swa_lrs", rate, "a rate of at least 0, or a list of these", lambda found: 0 <= found < math.inf)


@dataclass(frozen=True)
class SWAParams:
    """Which weights are averaged, and how. The names are TorchTNT's, but the numbers always count updates of the parameters,
    whatever `UnitOptions(lr_interval=...)` says of the learning rate. For epochs, multiply by the updates per epoch.

    Args:
        warmup_steps_or_epochs: number of updates that are not averaged. The average starts as a copy of the next one's weights.
        step_or_epoch_update_freq: average the weights once every this many updates.
        use_buffers: average buffers such as running statistics, too; False copies the module's buffers. Integer buffers, such as
            a count of batches, are always copied.
        averaging_method: "ema" gives older weights less and less influence, "swa" gives all weights the same.
        ema_decay: the weight of the average against the newest weights; only for "ema".
        use_lit: begin with a small decay, (1 + n) / (10 + n) at the n-th averaging; only for "ema".
        swalr_params: learning rate once averaging has begun, in place of the scheduler.
        use_in_evaluation: evaluate, test and predict with the averages. TorchTNT has no such option: its units call `swa_model`.
    Source: Polyak and Juditsky 1992; Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization".
    """

    warmup_steps_or_epochs: int
    step_or_epoch_update_freq: int
    use_buffers: bool = True
    averaging_method: Literal["ema", "swa"] = "ema"
    ema_decay: float = 0.999
    use_lit: bool = False
    swalr_params: SWALRParams | None = None
    use_in_evaluation: bool = False

    def __post_init__(self) -> None:
        _given.flags_of(self)
        _whole(self, "warmup_steps_or_epochs", at_least=0)
        _whole(self, "step_or_epoch_update_freq", at_least=1)
        _given.require(self.averaging_method in ("ema", "swa"), "averaging_method", "'ema' or 'swa'", self.averaging_method)
        _given.number("ema_decay", self.ema_decay, "between 0 and 1", lambda decay: 0 <= decay <= 1)
        _given.require(
            isinstance(self.swalr_params, SWALRParams | None), "swalr_params", "SWALRParams(...) or None", self.swalr_params
        )
        grows = self.use_lit and self.averaging_method != "ema"
        _given.require(not grows, "averaging_method", "'ema' if use_lit is set", self.averaging_method)


def _whole(params: SWAParams | SWALRParams, name: str, *, at_least: int) -> None:
    object.__setattr__(params, name, _given.whole(name, getattr(params, name), at_least=at_least))


class AveragedWeights:
    """The averages of a module's parameters and buffers. Call it like the module to compute with the averages.

    Attributes:
        n_averaged: how often the weights have been averaged.
        passed: updates since the beginning.
    """

    keyed_by_name = True

    def __init__(self, prepared: Prepared[Any], params: SWAParams) -> None:
        self._prepared, self.params = prepared, params
        self.n_averaged = self.passed = 0
        self.applied_now = False
        prepared.parameters_written()  # raises now if the layout could not swap weights and averages later
        # Looked up once: sharded parameters have their names only while they are not gathered.
        self._parameters = {f"parameters.{n}": p for n, p in prepared.named_parameters()}
        self._groups = _by_kind({n: p for n, p in self._parameters.items() if _can_be_averaged(p)})
        self._averages = {n: t.detach().clone() for n, t in {**self._parameters, **_buffers_of(prepared)}.items()}
        self._exchanged: list[str] = []

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The module's buffers as they are now: modules may replace one. Buffers made or grown later are not averaged."""
        found, averages = _buffers_of(self._prepared), self._averages
        return {n: b for n, b in found.items() if n in averages and averages[n].shape == b.shape}

    @property
    def begun(self) -> bool:
        """Whether the warm-up is over."""
        return self.passed > self.params.warmup_steps_or_epochs

    def step(self) -> None:
        """After an update: average the weights if that is due."""
        since = self.passed - self.params.warmup_steps_or_epochs
        self.passed += 1
        if since >= 0 and since % self.params.step_or_epoch_update_freq == 0:
            self.update()

    def warn_if_unused(self) -> None:
        """At the end of training, warn if nothing was averaged."""
        if self.passed and not self.begun:
            logger.warning(
                "training ended after %s updates, before the averages of the weights began: "
                "SWAParams(warmup_steps_or_epochs=%s) counts updates. swa_model holds the initial weights.",
                self.passed,
                self.params.warmup_steps_or_epochs,
            )

    @torch.no_grad()
    def update(self) -> None:
        """Add the module's current weights to the averages."""
        count, params, buffers = self.n_averaged, self.params, self._buffers()
        self.n_averaged += 1
        sources = {**self._parameters, **buffers}
        going_on = {n: b for n, b in buffers.items() if _can_be_averaged(b)} if params.use_buffers else {}
        groups = [*self._groups, *_by_kind(going_on)] if count else []
        averaged = {name for names in groups for name in names}
        for name in sources.keys() - averaged:
            local(self._averages[name]).copy_(local(sources[name]))
        if params.averaging_method == "swa":
            bring_forward = get_swa_multi_avg_fn()
        else:
            lit = (2 + count) / (11 + count) if params.use_lit else 1.0  # n is count + 1
            bring_forward = get_ema_multi_avg_fn(min(params.ema_decay, lit))
        for names in groups:
            bring_forward([local(self._averages[n]) for n in names], [local(sources[n]) for n in names], count)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the module's weights are the averages; before the first average, its own weights.

        Not for training. If the layout shards, every rank must enter it.
        """
        if self.n_averaged == 0 or self.applied_now:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # Swaps values, not tensors: compiled graphs and others refer to the parameters' memory. Buffers that an evaluation has
        # made stay.
        sources = {**self._parameters, **self._buffers()}
        names = self._exchanged if self.applied_now else sources
        self._exchanged = [n for n in names if n in sources]
        for name in self._exchanged:
            own, average = local(sources[name]), local(self._averages[name])
            kept = own.clone()
            own.copy_(average)
            average.copy_(kept)
        self.applied_now = not self.applied_now
        self._prepared.parameters_written()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs with the averages as weights, without gradients."""
        with self.applied():
            return self._prepared.module(*args, **kwargs)

    @property
    def of_first_rank(self) -> list[str]:
        """Names of averages of buffers. Each rank averages its own buffers; a checkpoint keeps rank 0's."""
        return [name for name in self._averages if name.startswith("buffers.")]

    def state_dict(self) -> dict[str, Any]:
        """
        Raises:
            UsageError: the module's weights are the averages at the moment; a checkpoint would take them for the weights.
        """
        if self.applied_now:
            raise LoopError(
                "a checkpoint cannot be saved during an evaluation with averaged weights. Save after it, for example in "
                "on_eval_end."
            )
        return {**self._averages, "n_averaged": self.n_averaged, "passed": self.passed}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, average in self._averages.items():
            if state_dict[name] is not average:  # restoring a checkpoint reads into the tensors of state_dict()
                local(average).copy_(local(state_dict[name]))
        self.n_averaged, self.passed = state_dict["n_averaged"], state_dict["passed"]


def _buffers_of(prepared: Prepared[Any]) -> dict[str, torch.Tensor]:
    return {f"buffers.{n}": b for n, b in plain_buffers(prepared.module)}


def _can_be_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _by_kind(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Group names by device and dtype, as torch's foreach functions need."""
    kinds: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(name)
    return list(kinds.values())


def swa_scheduler(optimizer: torch.optim.Optimizer, params: SWALRParams) -> SWALR:
    """Make torch's SWALR before the warm-up is over, without changing the learning rates until then."""
    rates: Any = params.swa_lrs if isinstance(params.swa_lrs, (int, float)) else list(params.swa_lrs)
    before = [group["lr"] for group in optimizer.param_groups]
    made = SWALR(optimizer, rates, params.anneal_steps_or_epochs, params.anneal_strategy)
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = lr  # SWALR sets its own rates at once if there is nothing to anneal
    return made
