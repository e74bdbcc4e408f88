"""A LightningModule with `automatic_optimization = False`, which steps its optimizers itself, as a unit.

ddp      the whole module is wrapped, for equal initial values and buffers; gradients are averaged after each backward pass, since
         a step may have several, each through other parameters
sharded  each network among the module's attributes is sharded by itself, so that each pass gathers and reduces only its own
         parameters
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch.optimizers import LightningOptimizer, Schedules, configured
from echelon.compat.lightning.pytorch.steps import ModuleSteps
from echelon.contracts.overrides import overrides
from echelon.loop.own.cleared import Cleared
from echelon.loop.progress import Progress
from echelon.loop.state import State
from echelon.loop.unit import EvalUnit, PredictUnit, TestUnit, TrainUnit
from echelon.parallel.gradients.unreduced_params import AfterEachBackward
from echelon.parallel.layouts import resolve
from echelon.parallel.names import kind_of
from echelon.parallel.networks import networks_of, prepare_networks
from echelon.parallel.parallelize import for_own_steps, prepare_module
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.shards import is_split
from echelon.world import agree, rng
from echelon.world.init import World, init_from_env

__all__ = ["ManualUnit"]

_SHARDED = ("fsdp", "fsdp2", "hsdp", "zero2", "zero3")


class ManualUnit(ModuleSteps, TrainUnit[Any], EvalUnit[Any], TestUnit[Any], PredictUnit[Any]):
    """
    Args:
        layout, precision: as AutoUnit's.
    """

    may_stop, keeps_modes, weighs_padding_in_evaluation = False, True, True
    may_lack = ("lightning", "schedules")

    def __init__(self, session: Any, lightning_module: Any, *, layout: Any = None, precision: Any = None, **_: Any) -> None:
        super().__init__()
        self.device = init_from_env()
        self.eval_loss = None
        decided = overrides()
        self.computes = Precision.of(decided.precision or precision)
        if self.computes.dtype is torch.float16:
            raise UsageError(
                'precision "16-mixed" needs a gradient scaler, which automatic_optimization = False lacks. Use "bf16-mixed".'
            )
        chosen = resolve(layout)
        if decided.layout is not None:
            chosen = decided.layout(chosen) if callable(decided.layout) else resolve(decided.layout)
        name = chosen.name if chosen is not None else "none"
        if name not in ("none", "ddp", *_SHARDED):
            raise UsageError(f"strategy {name!r} with automatic_optimization = False: use 'ddp', 'fsdp', 'zero2' or 'zero3'.")
        self.module: nn.Module = lightning_module
        if name in _SHARDED:
            recipe = Recipe(precision=self.computes)
            if any(kind_of(network) is not None for _, network in networks_of(lightning_module)):  # by an earlier call
                layout = None
            made = prepare_networks(lightning_module, layout, self.device, recipe, overridden=decided.layout, apart=True)
            self._parts = made.parts
            for part in self._parts:
                for_own_steps(part)
        else:
            self.module = prepare_module(lightning_module, self.device, layout=layout, precision=self.computes)
            self._parts = [Prepared.of(self.module, World.current(self.device))]
        inside = {p for part in self._parts for p in part.module.parameters()} if not self._is_ddp else set()
        self._loose = [p for p in lightning_module.parameters() if p not in inside and (p.is_floating_point() or p.is_complex())]
        self.attach(session)
        self.optimizer_steps = Progress()
        self._averaging: AfterEachBackward | None = None  # of the parameters that the layout leaves to us, in training
        self._cleared: list[tuple[Cleared, torch.optim.Optimizer]] = []

    @property
    def _is_ddp(self) -> bool:
        return isinstance(self.module, DistributedDataParallel)

    # --- what the loop calls

    @property
    def forward_is_collective(self) -> bool:
        return any(part.forward_is_collective for part in self._parts)

    @property
    def data_rank_and_size(self) -> tuple[int, int] | None:
        return next((rank_and_size for part in self._parts if (rank_and_size := part.data.rank_and_size) is not None), None)

    def configure(self) -> None:
        """Build the optimizers, if there are none yet, as attributes that checkpoints save."""
        if self.session.optimizers:
            return
        made = self.lightning_module.configure_optimizers()
        optimizers, schedules = configured(made, automatic=False) if made is not None else ([], [])
        for i, optimizer in enumerate(optimizers):
            setattr(self, f"optimizer_{i}", optimizer)
        self.schedules = Schedules(schedules, self.lightning_module.lr_scheduler_step)
        module = self.lightning_module
        self.session.optimizers = [LightningOptimizer(optimizer, self._step, module) for optimizer in optimizers]
        for optimizer in optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"] if is_split(p)}
            networks = (part.module for part in self._parts)
            self._cleared += [
                (Cleared(network), optimizer) for network in networks if any(id(p) in held for p in network.parameters())
            ]

    def autocast(self) -> Any:
        return self.computes.autocast(self.device)

    def on_train_start(self, state: State) -> None:
        rng.separate(self._parts[0].data.rank)
        if self._loose and agree.is_joined():
            groups = self._parts[0].data.groups if self._parts else [None]
            # It does not listen: a pass that only asks for gradients, as a plot of rank 0's does, is a rank's own.
            self._averaging = AfterEachBackward(self.lightning_module, self._loose, groups, listens=False)

    def on_train_end(self, state: State) -> None:
        self.stop_averaging()

    def stop_averaging(self) -> None:
        """Leave the program's later backward passes, which a rank may make alone, as they are."""
        if self._averaging is not None:
            self._averaging.remove()

    def train_step(self, state: State, data: Any) -> Any:
        self.batch = data
        if self._averaging is not None:
            self._averaging.forget()
        self._watch_for_clearing()
        with self._passes(), self.autocast():
            return self.call_training_step(state, self.train_progress, data)

    def _watch_for_clearing(self) -> None:
        for cleared, optimizer in self._cleared:
            cleared.watch(optimizer)

    def _passes(self) -> AbstractContextManager[Any]:
        self.send_buffers()
        # The wrapper would wait for gradients of all parameters, once per step.
        return self.module.no_sync() if self._is_ddp else nullcontext()  # type: ignore[operator]

    def send_buffers(self) -> None:
        if self._is_ddp:
            vars(self.module)["require_forward_param_sync"] = True

    # --- for the Trainer

    @property
    def updates(self) -> int:
        return self.optimizer_steps.num_updates_completed

    def backward_by_hand(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        session, module = self.session, self.lightning_module
        session.call("on_before_backward", loss)
        for cleared, optimizer in self._cleared:
            cleared.follow(optimizer)
        if self._averaging is not None:
            self._averaging.before_backward(loss)
        aside = self._put_aside()
        with torch.autocast(self.device.type, enabled=False) if self.computes.dtype is not None else nullcontext():
            module.backward(loss, *args, **kwargs)
        for parameter, gradient in aside:
            parameter.grad = gradient
        self._watch_for_clearing()
        session.call("on_after_backward")

    def _put_aside(self) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
        """Sharded parameters of toggled-off optimizers, and their gradients: what this pass adds to these is dropped."""
        wanted = self.lightning_module._wanted
        if wanted is None:
            return []
        held = (p for each in self.session.optimizers for group in each.param_groups for p in group["params"])
        aside = [(p, p.grad) for p in held if p not in wanted and is_split(p)]
        for parameter, _ in aside:
            parameter.grad = None
        return aside

    def _step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        session = self.session
        wrapped = next((each for each in session.optimizers if each.optimizer is optimizer), optimizer)

        def passes() -> Any:
            made = closure() if closure is not None else None
            session.call("on_before_optimizer_step", wrapped)
            return made

        if closure is None:
            passes()
            made = optimizer.step(**options)
        else:
            made = optimizer.step(passes, **options)
        self.optimizer_steps.increment_step(updated=True)
        return made
