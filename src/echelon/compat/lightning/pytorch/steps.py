"""What both kinds of units share: how batches get to the device, and how steps are called.

A step is called through the wrapper that a strategy put around the module, and with the arguments that it takes.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch.datamodule import LightningDataModule
from echelon.compat.lightning.pytorch.hooks import ModuleHooks, overridden
from echelon.compat.lightning.pytorch.optimizers import Schedules
from echelon.compat.lightning.pytorch.saving import Kept
from echelon.loop.auto.uncounted import attributes_kept, forgetting
from echelon.loop.samples import rows
from echelon.loop.state import ActivePhase, State, step_under_way
from echelon.parallel.over_ranks import without_samples
from echelon.parallel.patching import for_now, replace
from echelon.parallel.shards import is_split
from echelon.world.device import copy_data_to_device

__all__ = ["ModuleSteps", "gather_when_alone"]


class ModuleSteps:
    """A module's steps with their hooks, for a unit. It comes before the loop's unit class among the bases.

    Attributes:
        batch: the latest batch, for the hook after its step.
    """

    module: Any
    device: Any
    autocast: Any
    train_progress: Any
    eval_progress: Any
    test_progress: Any
    predict_progress: Any

    def attach(self, session: Any) -> None:
        self.session, self.lightning = session, Kept(session)
        self.schedules = Schedules([], session.module.lr_scheduler_step)
        owners = (session.datamodule, LightningDataModule), (session.module, ModuleHooks)
        self._transfers = [
            next((getattr(owner, name) for owner, base in owners if overridden(name, owner, base)), None)
            for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        ]
        self.batch: Any = None
        self._places: dict[str, int] = {}  # by a step's name, how many arguments it takes

    @property
    def lightning_module(self) -> Any:
        return self.session.module

    @property
    def is_in_epoch(self) -> bool:
        """Whether a restored run would go on with this epoch, or with the evaluation at its end."""
        return bool(self.train_progress.num_steps_completed_in_epoch or self.train_progress.evaluation_due)

    def tracked_metrics(self) -> dict[str, Any]:
        """Metrics of torchmetrics in the module, whose state_dict leaves them out.

        Not those that are reset when the next epoch or evaluation begins: a restored run has logged nothing that it resets.
        """
        ended = [results for phase, results in self.session.results.items() if phase != "train" or not self.is_in_epoch]
        left_out = {id(metric) for results in ended for metric in results.metrics()}  # by identity: == makes another metric
        found = [(name, part) for name, part in self.lightning_module.named_modules() if hasattr(part, "metric_state")]
        kept = {name: part for name, part in found if hasattr(part, "update_count") and id(part) not in left_out}
        return {"metrics": nn.ModuleDict({name.replace(".", "%2E"): part for name, part in kept.items()})} if kept else {}

    def move_data_to_device(self, state: State, data: Any, non_blocking: bool) -> Any:
        phase = {ActivePhase.EVALUATE: "validation"}.get(state.active_phase, str(state.active_phase))
        chain, (before, move, after) = self.session.chains.get(phase), self._transfers
        index = chain.reading if chain is not None else 0
        batch = before(data, index) if before else data
        if move:
            batch = move(batch, self.device, index)
        else:
            batch = copy_data_to_device(batch, self.device, non_blocking=non_blocking or self.device.type == "cuda")
        return after(batch, index) if after else batch

    def placement(self, phase: str) -> tuple[Any, Any]:
        on_host = self.device.type == "cpu" and not any(self._transfers)
        return (None, None) if on_host else (self.move_data_to_device, getattr(self, "_copies", None))

    def send_buffers(self) -> None:
        """Called before an evaluation step; ManualUnit has DDP send its buffers in the next pass."""

    def eval_step(self, state: State, data: Any) -> Any:
        return self._evaluate_batch("validation", state.eval_state, self.eval_progress, data)

    def test_step(self, state: State, data: Any) -> Any:
        return self._evaluate_batch("test", state.test_state, self.test_progress, data)

    def predict_step(self, state: State, data: Any) -> Any:
        return self._evaluate_batch("predict", state.predict_state, self.predict_progress, data)

    def _arguments(self, name: str, step: Any, batch: Any, batch_idx: int, dataloader_idx: int | None) -> tuple[Any, ...]:
        """The arguments for a step among (batch, batch_idx, dataloader_idx); the last only if there are several loaders."""
        if name not in self._places:
            self._places[name] = _places(step)
        if dataloader_idx is None:
            return (batch, batch_idx)[: self._places[name]]
        if self._places[name] < 3:
            raise UsageError(f"there are several dataloaders: {name} must take (batch, batch_idx, dataloader_idx=0).")
        return batch, batch_idx, dataloader_idx

    def _evaluate_batch(self, phase: str, phase_state: Any, progress: Any, batch: Any) -> Any:
        session, module = self.session, self.lightning_module
        self.send_buffers()
        chain = session.chains[phase]
        batch_idx, index = chain.place(progress.num_steps_completed_in_epoch)
        dataloader_idx = index if len(chain.loaders) > 1 else None
        step = getattr(module, f"{phase}_step")
        taken = self._arguments(f"{phase}_step", step, batch, batch_idx, dataloader_idx)
        if step_under_way(phase_state).is_padding:  # a rank with fewer batches only takes part in collectives
            with self.autocast(), session.hook(f"{phase}_step"), forgetting([module]), without_samples(), self._without_trace():
                return _through(self.module, module, step, *taken)
        session.results[phase].begin_batch(lambda: rows(batch, step_under_way(phase_state).samples), dataloader_idx)
        place = (batch, batch_idx) if dataloader_idx is None else (batch, batch_idx, dataloader_idx)
        session.call(f"on_{phase}_batch_start", *place)
        with self.autocast(), session.hook(f"{phase}_step"):
            output = _through(self.module, module, step, *taken)
        session.call(f"on_{phase}_batch_end", output, *place)
        session.end_evaluation_batch(phase)
        return output

    def call_training_step(self, state: State, progress: Any, batch: Any, *, counts: bool = True) -> Any:
        """Call `on_train_batch_start` and `training_step`.

        Args:
            counts: False for a batch that stands in where the rank has no samples.
        """
        session, module = self.session, self.lightning_module
        batch_idx, samples = progress.num_steps_completed_in_epoch, step_under_way(state.train_state).samples
        session.results["train"].begin_batch(lambda: rows(batch, samples) if counts else 0, None)
        session.call("on_train_batch_start", batch, batch_idx)
        taken = self._arguments("training_step", module.training_step, batch, batch_idx, None)
        with session.hook("training_step"), nullcontext() if counts else self._without_trace():
            return _through(self.module, module, module.training_step, *taken)

    @contextmanager
    def _without_trace(self) -> Iterator[None]:
        """Context of a step on a stand-in batch: what it logs, and collects in attributes of the module, is dropped."""
        with for_now(self.session, silent=True), attributes_kept(self.lightning_module, vars(nn.Module())):
            yield


def _through(wrapper: nn.Module, module: Any, step: Callable[..., Any], *args: Any) -> Any:
    """Run `step(*args)` as the forward pass of `wrapper`, which wraps `module` or is `module`.

    A DistributedDataParallel then reduces the gradients of the step's backward pass, whichever layers the step has called; a
    sharded module is gathered. The batch does not go through the wrapper, which would cast it as it casts activations.
    """
    if wrapper is module and not isinstance(module, FSDPModule):
        return step(*args)
    undo: list[Callable[[], None]] = []
    undo.append(replace(module, "forward", "lightning", partial(_forward_is_a_step, undo, module, step, args)))
    try:
        return wrapper()
    finally:
        undo[0]()


def _forward_is_a_step(undo: list[Callable[[], None]], module: Any, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    undo[0]()
    vars(module)["_within_step"] = isinstance(module, FSDPModule)
    try:
        return step(*args)
    finally:
        vars(module)["_within_step"] = False


def _places(step: Callable[..., Any]) -> int:
    """How many of (batch, batch_idx, dataloader_idx) a step takes by position."""
    parameters = inspect.signature(step).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return 3
    return sum(p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters)


def gather_when_alone(module: nn.Module) -> list[Any]:
    """Let scripts call a part of a sharded module by itself, such as `module.encoder(x)` after `fit`. Such calls are collective.

    Returns:
        handles that undo it.
    """
    return [
        part.register_forward_pre_hook(partial(_gather, weakref.ref(owner)))
        for owner in module.modules()
        if isinstance(owner, FSDPModule)
        for part in _parts_of(owner)
    ]


def _parts_of(owner: nn.Module) -> Iterator[nn.Module]:
    """Submodules that are gathered with `owner` and have parameters of their own."""
    for child in owner.children():
        if not isinstance(child, FSDPModule):
            if next(child.parameters(recurse=False), None) is not None:
                yield child
            yield from _parts_of(child)


def _gather(owner: weakref.ref[Any], part: nn.Module, *_: Any) -> None:
    if any(is_split(p) for p in part.parameters(recurse=False)) and (unit := owner()) is not None:
        unit.unshard()
