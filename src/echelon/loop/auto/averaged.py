"""Averages of the weights along training: an exponential moving average (EMA), or a plain one (SWA).

The averages live like the parameters: split over the ranks where these are, and keyed by name, so that a checkpoint of them
can be restored under another layout and number of ranks. They are brought forward with torch's own functions, over this
rank's parts, without communication.
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
        anneal_steps_or_epochs: over how many updates, or epochs, as `lr_interval` says, the rate goes to `swa_lrs`.
        anneal_strategy: "linear" or "cos".
        swa_lrs: the rate in the end; a list has one for each parameter group.
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
    """Which weights are averaged, and how. The names are TorchTNT's; what is counted is always updates of the parameters,
    whatever `UnitOptions(lr_interval=...)` says of the learning rate. For epochs, multiply by the updates of one.

    Args:
        warmup_steps_or_epochs: how many updates pass before the first is averaged. The average begins as a copy of that one.
        step_or_epoch_update_freq: every how many updates one is averaged.
        use_buffers: average buffers such as running statistics, too; False keeps them as the module's are. Whole numbers, such as
            a count of batches, are always kept as they are.
        averaging_method: "ema" weighs older ones ever less, "swa" all alike.
        ema_decay: the weight of the average against the newest weights; only for "ema".
        use_lit: begin with a small decay, (1 + n) / (10 + n) at the n-th; only for "ema".
        swalr_params: another learning rate once averaging has begun, in the scheduler's place.
        use_in_evaluation: evaluate, test and predict with the averages. Not TorchTNT's: its units call `swa_model` themselves.
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
    """The averages of a module's parameters and buffers. Call it like the module to compute with them.

    Attributes:
        n_averaged: how many have been averaged.
        passed: updates since the beginning.
    """

    keyed_by_name = True

    def __init__(self, prepared: Prepared[Any], params: SWAParams) -> None:
        _given.require(isinstance(prepared, Prepared), "prepared", "what a layout made of a module", prepared)
        _given.require(isinstance(params, SWAParams), "params", "SWAParams(...)", params)
        self._prepared, self.params = prepared, params
        self.n_averaged = self.passed = 0
        self.applied_now = False
        prepared.parameters_written()  # refuses here what could not be exchanged later
        # Once: sharded parameters are found under their names only while they are not gathered.
        self._parameters = {f"parameters.{n}": p for n, p in prepared.named_parameters()}
        self._groups = _by_kind({n: p for n, p in self._parameters.items() if _can_be_averaged(p)})
        self._averages = {n: t.detach().clone() for n, t in {**self._parameters, **_buffers_of(prepared)}.items()}
        self._exchanged: list[str] = []

    def _buffers(self) -> dict[str, torch.Tensor]:
        """As they are now: modules may replace one. What a forward pass makes later, or lets grow, is the module's own."""
        found, averages = _buffers_of(self._prepared), self._averages
        return {n: b for n, b in found.items() if n in averages and averages[n].shape == b.shape}

    @property
    def begun(self) -> bool:
        """Whether the warm-up is over."""
        return self.passed > self.params.warmup_steps_or_epochs

    def step(self) -> None:
        """After an update: average if it is due."""
        since = self.passed - self.params.warmup_steps_or_epochs
        self.passed += 1
        if since >= 0 and since % self.params.step_or_epoch_update_freq == 0:
            self.update()

    def warn_if_unused(self) -> None:
        """At the end of training."""
        if self.passed and not self.begun:
            logger.warning(
                "training ends after %s updates, before the averages of the weights began: "
                "SWAParams(warmup_steps_or_epochs=%s) counts updates. swa_model holds the weights of the beginning.",
                self.passed,
                self.params.warmup_steps_or_epochs,
            )

    @torch.no_grad()
    def update(self) -> None:
        """Take the module's present weights into the averages."""
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
        """Context in which the module has the averages for weights; before the first average, its own.

        Not for training. Every rank enters it if the layout shards.
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
        # By value: others hold on to the parameters' memory, and so do compiled graphs. What an evaluation made stays.
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
        """The module's outputs with the averages for weights, without gradients."""
        with self.applied():
            return self._prepared.module(*args, **kwargs)

    @property
    def of_first_rank(self) -> list[str]:
        """Averages of buffers, which each rank makes of its own: rank 0's count."""
        return [name for name in self._averages if name.startswith("buffers.")]

    def state_dict(self) -> dict[str, Any]:
        """
        Raises:
            UsageError: the module has the averages for weights just now; a checkpoint would hold them for its own.
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
            if state_dict[name] is not average:  # a checkpoint is read in place
                local(average).copy_(local(state_dict[name]))
        self.n_averaged, self.passed = state_dict["n_averaged"], state_dict["passed"]


def _buffers_of(prepared: Prepared[Any]) -> dict[str, torch.Tensor]:
    return {f"buffers.{n}": b for n, b in plain_buffers(prepared.module)}


def _can_be_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _by_kind(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names in groups of one device and one type, as torch's functions over many tensors want them."""
    kinds: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.device, tensor.dtype), []).append(name)
    return list(kinds.values())


def swa_scheduler(optimizer: torch.optim.Optimizer, params: SWALRParams) -> SWALR:
    """torch's SWALR, made before the warm-up is over and without a say until then."""
    rates: Any = params.swa_lrs if isinstance(params.swa_lrs, (int, float)) else list(params.swa_lrs)
    before = [group["lr"] for group in optimizer.param_groups]
    made = SWALR(optimizer, rates, params.anneal_steps_or_epochs, params.anneal_strategy)
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = lr  # with nothing to anneal, SWALR sets its own at once
    return made
