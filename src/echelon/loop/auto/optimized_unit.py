"""A module with its optimizers: the base of AutoUnit and of the unit behind a user's own loop. `Update` works on it."""

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
from echelon.data.base import BaseLoader
from echelon.data.chain import loaders_of
from echelon.data.loader import Loader
from echelon.loop.auto.averaged import AveragedWeights, swa_scheduler
from echelon.loop.auto.optimizer_checks import check_holds
from echelon.loop.auto.prepared_unit import PreparedUnit
from echelon.loop.auto.several import Several, configured
from echelon.loop.auto.unit_options import AutoOptions, BuiltAtFirstUse
from echelon.loop.auto.update import Update
from echelon.loop.records.monitored import is_own_loop
from echelon.loop.samples import samples_of, tell_of_doubts
from echelon.loop.unit import TrainedUnit
from echelon.loop.window import Window
from echelon.parallel.ddp.sync_batchnorm import synchronised_in
from echelon.parallel.gradients import clip
from echelon.parallel.gradients.fixed_order import GradientTree, is_power_of_two
from echelon.parallel.gradients.fused import fuse
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.state.partition import parameters_of
from echelon.world import agree, rng
from echelon.world.device import same_kernels

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = ["BitEqual", "OptimizedUnit"]

logger = logging.getLogger(__name__)


class OptimizedUnit(PreparedUnit, TrainedUnit):
    """The module with its optimizers, its window and the rest of the saved state; `Update` works on it."""

    # What `weight` counts; names the throughput in metrics.jsonl: "<weight_unit>_per_s".
    weight_unit = "samples"
    # With deterministic="bitwise": parts of a global batch over all ranks, a power of two divisible by the number of ranks.
    bitwise_parts = 4

    peak_flops: float | None = None  # FLOP/s of this device; None looks the device's name up

    optimizer: torch.optim.Optimizer = BuiltAtFirstUse()  # type: ignore[assignment]  # None with several optimizers
    lr_scheduler: Any = BuiltAtFirstUse()
    several: Several | None = None
    lr_interval: Literal["update", "epoch"]
    may_lack = ("grad_scaler", "_bitwise")
    kind_of_update: type[Update] = Update
    expects_mean = True  # False if the loss follows the conventions of the library that it was written for
    samples_given: int | None = None  # samples that the loader put into the current batch, if the loader says so
    _told_of_doubts = False  # the warning about the number of samples in a batch was given

    def build_from(self, module: nn.Module, options: AutoOptions) -> None:
        """Make the module parallel and build all that depends on it. Collective. Progress stays as it is."""
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
        self._times = 1  # micro-batches run for each planned one; above 1 if fewer ranks run than planned
        self._plateau = False  # whether the scheduler advances with evaluations
        # The optimizer, or the several, and the module's parameters that it or they do not hold.
        self._left: tuple[Any, list[nn.Parameter]] = (None, [])

    @property
    def auto_options(self) -> AutoOptions:
        """The options given to `build_from`, with later assignments such as `unit.clip_grad_norm = 1.0`."""
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
            return  # TorchTNT scripts may have set it to None: then it is still built
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
        """Whether the user's code advances the schedule."""
        return True

    @abstractmethod
    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """Return an optimizer over the parameters of `module`, which is parallel by now, and a scheduler or None.

        Called once, at first use, after your class's whole constructor. Adam and AdamW are fused on a GPU by default.
        """

    def configure_optimizers_and_lr_schedulers(
        self, module: torch.nn.Module
    ) -> Mapping[str, torch.optim.Optimizer | tuple[torch.optim.Optimizer, Any]]:
        """Return the optimizers by name, or pairs (optimizer, scheduler or None). Each holds different parameters.

        They become the attributes `optimizer_NAME` and `lr_scheduler_NAME`.
        """
        raise NotImplementedError

    def weight(self, data: Any) -> float | torch.Tensor:
        """Return the weight of a micro-batch in the mean over the global batch. By default: its number of samples, as the loader
        gave it, or else as read from the batch; a warning is given once if the number is unclear. For a language model whose
        batches differ in tokens, count those: `return echelon.count_tokens(data, next_token=True)`.

        Return a number if the host knows it, or a 0-dim tensor on the device, which is summed there without waiting.
        """
        samples, doubts = samples_of(data, self.samples_given)
        if doubts is not None and not self._told_of_doubts:
            self._told_of_doubts = True
            tell_of_doubts("the loop" if is_own_loop(self) else type(self).__name__, data, samples, doubts, self.samples_given)
        share = self.prepared.batches.share
        return samples if isinstance(share, float) and share == 1 else samples * share

    def flops(self, data: Any) -> float | None:
        """Return the FLOPs of a micro-batch, forward and backward, for `mfu` in metrics.jsonl; with cp, of this rank's part.

        Leave out recomputed activations. None takes the formula for a language model (`records/utilization.py`); for other
        models and in a pipeline there is then no `mfu`. Compute it from shapes: this method must not wait for a device.
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
        for parameter in self._left[1]:  # their gradients would accumulate and count in the norm
            parameter.grad = None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers, also if there is only one."""
        return [self.optimizer] if self.several is None else [turn.optimizer for turn in self.several.turns]

    @property
    def divided(self) -> int:
        """Number of micro-batches in a global batch, over all ranks. In a script for one process it was one batch, one loss."""
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
        """Loss over the global batch, and the gradient norm if gradients are clipped."""
        return self._update.latest

    def phase_started(self, state: State, phase: str) -> None:
        _check_own_names(self)
        if phase == "train":
            self._begin_training(state)

    def _begin_training(self, state: State) -> None:
        update = self._update
        update.join(self)
        if agree.is_joined() and not update.joined and self._options.layout is None:
            raise LoopError(
                "layout must be given for several ranks; without it, each rank would train its own model. Pass layout='ddp' or "
                "'fsdp', or a module that you wrapped yourself; layout='noop' if each rank is to train its own model."
            )
        self.configure()
        update.begin(self)
        loader: Any = getattr(state.train_state, "dataloader", None)
        if self._bitwise is None:
            rng.separate(self.prepared.data.rank)  # in bit-equal training, random numbers belong to samples, not to ranks
        accumulation = self.settle_accumulation(loader)
        self.window.size = accumulation * self._times
        self.window.rescale(self.train_progress)
        if self._bitwise is None and not self._divides_batches_of(loader):
            _tell_of_memory(by_unit=isinstance(loader, Loader))

    @property
    def steps_by_itself(self) -> bool:
        return False

    def may_divide_batches(self) -> bool:
        """Whether a micro-batch may be split into several if fewer ranks run than planned (`--ranks MIN:MAX`), so that a step
        takes no more memory than planned.
        """
        return False

    def settle_accumulation(self, loader: Any) -> int:
        """Agree with the training loader on the micro-batches per update, before anything counts them. Returns the planned
        number; if fewer ranks run than planned, the loader makes more micro-batches.

        Raises:
            UsageError: unit and loader were given different numbers.
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
        """The user has added parameters to the optimizer during training, the same on all ranks. Collective."""
        self._update.optimizer_grew(self)

    def epoch_closed(self, state: State, phase: str) -> None:
        state.logged.weight = 0 if self.prepared.data.is_replica else 1  # what is logged from here on is of no micro-batch
        if phase == "train":
            self._update.end_epoch(self, state)

    def phase_ended(self, state: State, phase: str) -> None:
        complete = not state.should_stop or state.stopped_by_script  # the same on all ranks; an incomplete run resumes later
        self._update.end(self, complete=complete)

    def restored(self) -> None:
        """After a restore: recount the steps in progress if an update now has another number of micro-batches."""
        if not self._takes_loaders:  # else `_begin_training` does it, which knows the loader
            self.window.rescale(self.train_progress)
        self._update.finite.forget()


# --- bit-equal training on any number of ranks: the loop's side of `parallel/gradients/fixed_order`
#
# Besides the order of sums, four things must not depend on the number of ranks: the size of a micro-batch (kernels add in an
# order that depends on shapes), the number of threads, the random numbers of a sample, and the factor that undoes weights.


class BitEqual:
    """Splits every global batch into `parts`, whatever the number of ranks, and adds their gradients in one order.

    Args:
        parts: a power of two divisible by the number of data-parallel ranks.
        prepared: from now on it reduces after every micro-batch, in the fixed order.
    Raises:
        UsageError: the parts cannot be divided by the ranks, the layout has no fixed order, or the module a SyncBatchNorm.
    """

    def __init__(self, parts: int, prepared: Prepared[torch.nn.Module]) -> None:
        if not is_power_of_two(parts) or parts % prepared.data.size:
            raise LoopError(
                f"--parts must be a power of two divisible by the number of ranks ({prepared.data.size}), got {parts}. "
                f"Use 1, 2, 4, ... ranks, up to {parts}, or more parts: --parts N."
            )
        if synchronised_in(prepared.module):
            raise LoopError(
                "bit-equal training must have no SyncBatchNorm, whose statistics are over one part of the global batch of each "
                "rank, so they depend on the number of ranks. Use BatchNorm, with the statistics of each part."
            )
        prepared.fix_order()
        same_kernels(parts)
        self.parts, self.accumulation = parts, parts // prepared.data.size
        self._prepared = prepared
        self._parameters = [p for p in prepared.module.parameters() if p.requires_grad]
        self._tree = GradientTree()
        self._seed: int | None = None
        self._others = ""  # digest of the RNG states of numpy and Python

    def begin(self, update: int, index: int) -> None:
        """Set the random numbers of a part, before micro-batch `index` of an update."""
        if self._seed is None:
            self._seed = torch.initial_seed()  # the script has seeded all ranks
        self._others = self._others or agree.from_rank0(rng.digest)
        part = update * self.parts + index * self._prepared.data.size + self._prepared.data.rank
        rng.at(self._seed, self._others, part)

    def add(self, *, last: bool) -> None:
        """Add a micro-batch's gradients to the sum, after its backward pass. With the `last`, the sum becomes the gradients."""
        self._tree.add(self._parameters, last=last)

    def discard(self) -> None:
        """Forget an unfinished window."""
        self._tree.clear()

    def state_dict(self) -> dict[str, Any]:
        """The seeds at the beginning; the RNG states have moved on since."""
        return {"seed": self._seed, "others": self._others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed, self._others = state["seed"], state.get("others", "")


# --- fewer ranks than planned (`echelon run --ranks 2:4`)


def _planned() -> float:
    """Planned ranks per running rank."""
    return (overrides().planned_ranks or 1) / (dist.get_world_size() if agree.is_joined() else 1)


def _parts_of(samples: int) -> int:
    """Number of equal parts into which a micro-batch of `samples` samples is split: each is at most as large as planned."""
    return next((n for n in range(math.ceil(_planned()), samples) if samples % n == 0), samples)


def _tell_of_memory(*, by_unit: bool) -> None:
    if (times := _planned()) > 1 and agree.is_rank0():
        logger.warning(
            "fewer than the %s planned ranks run, and micro-batches are not split, because %s: each takes %.3g times the memory",
            overrides().planned_ranks,
            "the unit overrides its step or has several optimizers" if by_unit else "the loader is not an echelon.Loader",
            times,
        )


# --- refusals before training


def _check_made(unit: str, made: Any) -> None:
    """Refuse a return value of `configure_optimizers_and_lr_scheduler` in another form, such as Lightning's."""
    is_pair = isinstance(made, tuple) and len(made) == 2
    optimizer, scheduler = made if is_pair else (made, None)
    can_step = scheduler is None or callable(getattr(scheduler, "step", None))
    if not is_pair or not can_step or isinstance(optimizer, (list, tuple)):
        shown = f"a pair of {type(optimizer).__name__} and {type(scheduler).__name__}" if is_pair else f"a {type(made).__name__}"
        raise LoopError(
            f"{unit}.configure_optimizers_and_lr_scheduler must return the pair (optimizer, scheduler or None), got {shown}. "
            "Set when the scheduler steps with options=echelon.UnitOptions(lr_interval=...). Return several optimizers, by name, "
            "from configure_optimizers_and_lr_schedulers."
        )


def _check_own_names(unit: Any) -> None:
    """Refuse attributes of a subclass that hide AutoUnit's: they would fail later, with an unclear error."""
    for name, kind in (("window", Window), ("prepared", Prepared), ("computes", Precision)):
        if not isinstance(getattr(unit, name), kind):
            raise LoopError(f"{type(unit).__name__}.{name} hides an attribute of AutoUnit. Give yours another name.")
    if not callable(unit.weight):
        raise LoopError(f"{type(unit).__name__}.weight hides a method of AutoUnit. Give your attribute another name.")
