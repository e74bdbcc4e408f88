"""A module with its optimizers: what AutoUnit and the unit behind a loop of one's own share. `Update` works on it."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import LoopError
from echelon.contracts.overrides import overrides
from echelon.data.base import BaseLoader, loaders_of
from echelon.data.loader import Loader
from echelon.loop.auto.averaged import AveragedWeights, swa_scheduler
from echelon.loop.auto.bitwise import BitEqual
from echelon.loop.auto.optimizer_checks import check_holds
from echelon.loop.auto.prepared_unit import PreparedUnit
from echelon.loop.auto.several import Several, configured
from echelon.loop.auto.unit_options import AutoOptions, BuiltAtFirstUse
from echelon.loop.auto.update import Update
from echelon.loop.records.monitored import is_own_loop
from echelon.loop.samples import samples_of, tell_of_doubts
from echelon.loop.unit import TrainedUnit
from echelon.loop.window import Window
from echelon.parallel.gradients import clip
from echelon.parallel.gradients.fused import fuse
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.state.partition import parameters_of
from echelon.world import agree, rng

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["OptimizedUnit"]

logger = logging.getLogger(__name__)


class OptimizedUnit(PreparedUnit, TrainedUnit):
    """The module with its optimizers, its window and what else is saved; `Update` works on it."""

    # What `weight` counts; names the throughput in metrics.jsonl: "<weight_unit>_per_s".
    weight_unit = "samples"
    # With deterministic="bitwise": micro-batches of a global batch over all ranks, a power of two that the ranks divide.
    bitwise_parts = 4

    peak_flops: float | None = None  # FLOP/s of this device; None looks its name up

    optimizer: torch.optim.Optimizer = BuiltAtFirstUse()  # type: ignore[assignment]  # None where there are several
    lr_scheduler: Any = BuiltAtFirstUse()
    several: Several | None = None
    lr_interval: Literal["update", "epoch"]
    may_lack = ("grad_scaler", "_bitwise")
    kind_of_update: type[Update] = Update
    expects_mean = True  # False where a loss trains as in the library that it was written for, whatever it is
    samples_given: int | None = None  # that the loader put into the batch under way, where it says so
    _told_of_doubts = False  # about the samples of a batch

    def build_from(self, module: nn.Module, options: AutoOptions) -> None:
        """Make the module parallel, and all that belongs to it (`rebuild.BUILT`). Collective. Progress stays as it is."""
        self._prepare(module, options)
        self._options = options
        self.training, self.lr_interval = options.training, options.lr_interval
        parts = overrides().parts or (self.bitwise_parts if options.deterministic == "bitwise" else None)
        self._bitwise = BitEqual(parts, self.prepared) if parts and self.training else None
        accumulation = self._bitwise.accumulation if self._bitwise is not None else overrides().accumulation
        accumulation = accumulation or options.accumulate
        self._takes_loaders = accumulation is None
        self.gradient_accumulation_steps = steps = accumulation or 1
        self.window = Window(steps, fixed=self._bitwise is not None)
        self._update = self.kind_of_update(self, self._bitwise, options.stop_after_nonfinite_losses)
        self.clip_grad_norm, self.clip_grad_value = options.clip_grad_norm, options.clip_grad_value
        self.retain_graph = options.retain_graph
        self.zero_grad_at_train_step_start = options.zero_grad_first
        self.grad_scaler = self.computes.scaler(self.device, self.prepared) if self.training else None
        self.swa_params = averaged = options.averaging
        self.swa_model = AveragedWeights(self.prepared, averaged) if averaged is not None and self.training else None
        self.swa_scheduler: Any = None
        self._times = 1  # micro-batches for each that was said
        self._plateau = False  # whether the scheduler advances with evaluations
        self._left: tuple[Any, list[nn.Parameter]] = (None, [])  # parameters that this optimizer, or all of several, lacks

    @property
    def auto_options(self) -> AutoOptions:
        """What `build_from` was given, as it is now: `unit.clip_grad_norm = 1.0` counts."""
        return replace(
            self._options,
            lr_interval=self.lr_interval,
            precision=self.computes,
            accumulate=None if self._takes_loaders else self.gradient_accumulation_steps,
            detect_anomaly=self.detect_anomaly,
            clip_grad_norm=self.clip_grad_norm,
            clip_grad_value=self.clip_grad_value,
            averaging=self.swa_params,
            training=self.training,
            prefetch=self.enable_prefetch,
            zero_grad_first=self.zero_grad_at_train_step_start,
        )

    def configure(self) -> None:
        """Build optimizer and scheduler if they are not built yet."""
        if not self.training or self.several is not None or self.__dict__.get("optimizer") is not None:
            return  # None is what TorchTNT scripts may have set
        if self.has_several:
            self.several = configured(self, own_schedule=self.has_own_schedule())
            return
        made = self.prepared.optimizer(self.configure_optimizers_and_lr_scheduler)
        _check_made(type(self).__name__, made)
        check_holds(self, made[0])
        fuse(made[0])
        self.optimizer, self.lr_scheduler = made
        plateau = isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._plateau = plateau and not self.has_own_schedule()
        if self.swa_params is not None and self.swa_params.swalr_params is not None:
            self.swa_scheduler = swa_scheduler(self.optimizer, self.swa_params.swalr_params)

    def has_own_schedule(self) -> bool:
        """Whether the user's own code advances the schedule."""
        return True

    @abstractmethod
    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """The optimizer over the parameters of `module`, which has its final form, and a scheduler or None.

        Called once, when it is first needed, after your class's whole constructor. Adam and AdamW are fused on a GPU by default.
        """

    def configure_optimizers_and_lr_schedulers(
        self, module: torch.nn.Module
    ) -> Mapping[str, torch.optim.Optimizer | tuple[torch.optim.Optimizer, Any]]:
        """The optimizers by name, each over parameters of its own, or pairs of one and its scheduler or None.

        They become attributes, `optimizer_NAME` and `lr_scheduler_NAME`.
        """
        raise NotImplementedError

    def weight(self, data: Any) -> float | torch.Tensor:
        """What a micro-batch counts in the mean over the global batch: its samples, as many as the loader put into it, or as can
        be read in it; it is said once where that is not clear. A language model counts tokens, where their number differs:
        `return echelon.count_tokens(data, next_token=True)`.

        A number if it is known on the host; a 0-dim tensor on the device is summed up there without waiting.
        """
        samples, doubts = samples_of(data, self.samples_given)
        if doubts is not None and not self._told_of_doubts:
            self._told_of_doubts = True
            tell_of_doubts("the loop" if is_own_loop(self) else type(self).__name__, data, samples, doubts, self.samples_given)
        share = self.prepared.batches.share
        return samples if isinstance(share, float) and share == 1 else samples * share

    def flops(self, data: Any) -> float | None:
        """FLOPs of a micro-batch, with cp of this rank's part of it, forward and backward, for `mfu` in metrics.jsonl.

        Without what is computed again. None takes the formula for a language model (`records/utilization.py`), and leaves
        `mfu` out for another and in a pipeline. Yours must tell it from shapes, as nothing here may wait for a device.
        """
        return None

    def zero_grad(self, state: State) -> None:
        """Drop all gradients."""
        if self.several is None:
            clip.clear(self.optimizer)
        else:
            self.several.clear()
        stepping = self.several or self.optimizer
        if self._left[0] is not stepping:
            held = {id(p) for optimizer in self.tracked_optimizers().values() for p in parameters_of(optimizer)}
            self._left = stepping, [p for p in self.prepared.module.parameters() if id(p) not in held]
        for parameter in self._left[1]:  # whose gradients would add up, and count in the norm
            parameter.grad = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The one, or all of several."""
        return [self.optimizer] if self.several is None else [turn.optimizer for turn in self.several.turns]

    @property
    def divided(self) -> int:
        """Into how many micro-batches a batch is divided that was one loss's before."""
        size = self.data_rank_and_size
        return (1 if size is None else size[1]) * self.window.size

    # --- what the loops call

    def app_state(self) -> dict[str, Any]:
        self.configure()
        return super().app_state()

    @property
    def at_boundary(self) -> bool:
        return self.window.count == 0

    def steps_until(self, updates: int) -> int:
        return max(0, updates * self.window.size - self.window.count)

    @property
    def agrees_on_updates(self) -> bool:
        """Whether `latest_update` is the same on all ranks."""
        return self._update.joined

    @property
    def latest_update(self) -> tuple[Any, Any]:
        """Loss over the global batch, and gradient norm if it is clipped."""
        return self._update.latest

    def phase_started(self, state: State, phase: str) -> None:
        _check_own_names(self)
        if phase == "train":
            self._begin_training(state)

    def _begin_training(self, state: State) -> None:
        update = self._update
        update.join(self)
        together, has_layout = update.joined or not agree.is_joined(), self._options.layout is not None
        _check_trainable(self, together=together, has_layout=has_layout)
        self.configure()
        update.begin(self)
        loader: Any = getattr(state.train_state, "dataloader", None)
        if self._bitwise is None:
            rng.separate(self.prepared.data.rank)  # of bit-equal training, streams belong to samples and not to ranks
        accumulation = self.settle_accumulation(loader)
        self.window.size = accumulation * self._times
        self.window.rescale(self.train_progress)
        if self._bitwise is None and not self._divides_batches_of(loader):
            _tell_of_memory(by_unit=isinstance(loader, Loader))

    @property
    def steps_by_itself(self) -> bool:
        return False

    def may_divide_batches(self) -> bool:
        """Whether each of its micro-batches may become several, where fewer ranks run than were planned (`--ranks MIN:MAX`): so
        a step takes no more memory than planned.
        """
        return False

    def settle_accumulation(self, loader: Any) -> int:
        """Agree with a training loader on the micro-batches of an update, before anything counts them. With fewer ranks than were
        planned there are more: what is returned is their number as it was said.

        Raises:
            UsageError: both were told, and not the same.
        """
        of_unit, self._times = None if self._takes_loaders else self.gradient_accumulation_steps, 1
        for part in loaders_of(loader):
            if isinstance(part, BaseLoader) and self._bitwise is not None:
                part.split(self._bitwise.accumulation, shares=self._bitwise.parts)
            elif isinstance(part, BaseLoader):
                part.take_accumulation(of_unit)
        if self._takes_loaders:
            self.gradient_accumulation_steps = getattr(loader, "accumulation", None) or 1
        if self._bitwise is None and _planned() > 1 and self._divides_batches_of(loader):
            _, ranks = loader.options.dp or self.data_rank_and_size or (0, 1)
            self._times = _parts_of(loader.global_batch // (ranks * self.gradient_accumulation_steps))
            loader.take_accumulation(of_unit, self._times)
        return self.gradient_accumulation_steps

    def _divides_batches_of(self, loader: Any) -> bool:
        return isinstance(loader, Loader) and self.may_divide_batches()

    def optimizer_grew(self) -> None:
        """While it trains, somebody has given the optimizer more parameters, on all ranks alike. Collective."""
        self._update.optimizer_grew(self)

    def epoch_closed(self, state: State, phase: str) -> None:
        state.logged.weight = 0 if self.prepared.data.is_replica else 1  # of no micro-batch
        if phase == "train":
            self._update.end_epoch(self, state)

    def phase_ended(self, state: State, phase: str) -> None:
        complete = not state.should_stop or state.stopped_by_script  # the same on all ranks; else it resumes later
        self._update.end(self, complete=complete)

    def restored(self) -> None:
        """After a checkpoint: steps are micro-batches, of which an update has another number if the accumulation changed."""
        if not self._takes_loaders:  # else once the loader is known
            self.window.rescale(self.train_progress)
        self._update.finite.forget()


# --- with fewer ranks than planned (`echelon run --ranks 2:4`)


def _planned() -> float:
    """How many ranks were planned for each that runs."""
    return (overrides().planned_ranks or 1) / (dist.get_world_size() if agree.is_joined() else 1)


def _parts_of(samples: int) -> int:
    """Into how many a micro-batch of so many samples is divided, alike: each is as large as was planned, or smaller."""
    return next((n for n in range(math.ceil(_planned()), samples) if samples % n == 0), samples)


def _tell_of_memory(*, by_unit: bool) -> None:
    if (times := _planned()) > 1 and agree.is_rank0():
        logger.warning(
            "fewer of the %s planned ranks run, and micro-batches are computed whole, since %s: each takes %.3g times the memory",
            overrides().planned_ranks,
            "the unit has a step of its own, or several optimizers" if by_unit else "the loader is no echelon.Loader",
            times,
        )


# --- what is refused before it trains


def _check_made(unit: str, made: Any) -> None:
    """What `configure_optimizers_and_lr_scheduler` returned, if it is another form, such as Lightning's."""
    is_pair = isinstance(made, tuple) and len(made) == 2
    optimizer, scheduler = made if is_pair else (made, None)
    can_step = scheduler is None or callable(getattr(scheduler, "step", None))
    if not is_pair or not can_step or isinstance(optimizer, (list, tuple)):
        shown = f"a pair of {type(optimizer).__name__} and {type(scheduler).__name__}" if is_pair else f"a {type(made).__name__}"
        raise LoopError(
            f"{unit}.configure_optimizers_and_lr_scheduler must return the pair (optimizer, scheduler or None), got {shown}. "
            "When a scheduler steps is said by options=echelon.UnitOptions(lr_interval=...); several optimizers, by name, are "
            "returned by configure_optimizers_and_lr_schedulers."
        )


def _check_own_names(unit: Any) -> None:
    """Attributes of a subclass that hide AutoUnit's would fail later, in words that explain nothing."""
    for name, kind in (("window", Window), ("prepared", Prepared), ("computes", Precision)):
        if not isinstance(getattr(unit, name), kind):
            raise LoopError(f"{type(unit).__name__}.{name} hides an attribute of AutoUnit. Give yours another name.")
    if not callable(unit.weight):
        raise LoopError(f"{type(unit).__name__}.weight hides a method of AutoUnit. Give your attribute another name.")


def _check_trainable(unit: Any, *, together: bool, has_layout: bool) -> None:
    """
    Args:
        together: the ranks train one model, or there is one rank only.
    """
    if not together and not has_layout:
        raise LoopError(
            "layout must be given for several ranks; without one each would train its own model. Pass layout='ddp' or "
            "'fsdp', or a module that you wrapped yourself; layout='noop' if each rank is to train its own model."
        )
