"""LightningModule: a network with its steps and its optimizers, trained by echelon's loop.

Steps are called through the wrapper that a strategy puts around the module, so that `self(x)` and `self.encoder(x)` in them see
gathered parameters, and gradients are reduced: see `steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn

from echelon.common.errors import UsageError
from echelon.compat.collect import gather_tensors
from echelon.compat.lightning.pytorch import saving
from echelon.compat.lightning.pytorch.hooks import LOGS, ModuleHooks
from echelon.compat.lightning.pytorch.hparams import HyperparametersMixin
from echelon.compat.lightning.pytorch.logged import How
from echelon.parallel.gradients import clip
from echelon.parallel.shards import is_split
from echelon.world import agree

__all__ = ["LightningModule"]


def _of_trainer(name: str, default: Any) -> Any:
    return property(lambda self: getattr(self._trainer, name) if self._trainer is not None else default)


class LightningModule(ModuleHooks, HyperparametersMixin, nn.Module):
    """A network, what a step computes, and its optimizers. Write `training_step` and `configure_optimizers`.

    Attributes:
        automatic_optimization: False if `training_step` calls `manual_backward` and the optimizers itself.
        example_input_array: an input for code that traces the module.
        strict_loading: whether checkpoints must have exactly this module's parameters.
    """

    # Of the class, as a subclass may set them in its body.
    automatic_optimization = True
    strict_loading = True
    example_input_array: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Any | None = None
        self._hook: str | None = None  # the hook that is running, for `log`
        self._within_step = False
        self._toggled: dict[nn.Parameter, bool] = {}  # requires_grad before `toggle_optimizer`
        self._wanted: set[nn.Parameter] | None = None  # what gets gradients since then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Within a step the strategy's hooks have run already; a second time they would free what is being used.
        return self.forward(*args, **kwargs) if self._within_step else super().__call__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None, "_toggled": {}, "_wanted": None}

    # --- what the user writes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward.")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """(batch, batch_idx) -> the mean loss, or a dict with "loss"."""
        raise NotImplementedError(f"{type(self).__name__} has no training_step.")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no validation_step.")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no test_step.")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self(args[0] if args else next(iter(kwargs.values())))

    def configure_optimizers(self) -> Any:
        """An optimizer, a list of them, a pair of lists of optimizers and schedulers, a dict or a list of dicts; or None."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers.")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step() if metric is None else scheduler.step(metric)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]) -> None:
        """Make an update. Forward and backward have run; the closure returns the loss."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    # --- the Trainer's values

    @property
    def trainer(self) -> Any:
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a Trainer.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def device(self) -> torch.device:
        if self._trainer is not None and self._trainer.root_device is not None:
            root: torch.device = self._trainer.root_device
            return root
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    current_epoch = _of_trainer("current_epoch", 0)  # epochs that are complete
    global_step = _of_trainer("global_step", 0)  # updates so far
    global_rank, local_rank = _of_trainer("global_rank", 0), _of_trainer("local_rank", 0)
    logger, loggers = _of_trainer("logger", None), _of_trainer("loggers", ())

    # --- logging

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number, a 0-dim tensor or a metric object.

        An epoch's value covers all ranks and all samples, whatever `sync_dist` says. A mean is weighted by `batch_size`, by
        default the rows of the batch.

        Args:
            on_step, on_epoch: log each step, and the epoch; by default a training step logs on_step, any other hook on_epoch.
            sync_dist: a step's value covers all ranks, too; they wait for one another.
            reduce_fx: "mean", "sum", "min" or "max" over an epoch and over ranks.
            rank_zero_only: log rank 0's value only.
            enable_graph, metric_attribute: have no effect.
        """
        if sync_dist_group is not None:
            raise UsageError("self.log: sync_dist_group is not supported. Values are those of all ranks.")
        session = self._trainer.session if self._trainer is not None else None
        if session is None:
            return
        if (places := LOGS.get(self._hook or "")) is None:
            raise UsageError(f"self.log({name!r}, ...) cannot be called in {self._hook or 'this place'}.")
        by_default, in_step = places
        how = How(
            on_step=by_default if on_step is None else on_step,
            on_epoch=not by_default if on_epoch is None else on_epoch,
            prog_bar=prog_bar,
            logger=logger is not False,
            reduce=How.reduction(reduce_fx),
            sync_dist=sync_dist,
            rank_zero_only=rank_zero_only,
        )
        if how.on_step and not in_step:
            raise UsageError(f"self.log({name!r}, on_step=True) in {self._hook}: there is no step.")
        if not how.on_step and not how.on_epoch:
            raise UsageError(f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing.")
        session.take(self._hook, name, value, how, batch_size, add_idx=add_dataloader_idx)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several values; options as in `log`."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if agree.is_rank0():
            print(*args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Every rank's tensor, (world size, ...), without gradients; also in a dict or a list of tensors."""
        if sync_grads:
            raise UsageError("self.all_gather(sync_grads=True): use torch.distributed.nn.functional.all_gather.")
        if isinstance(data, Mapping):
            return {name: self.all_gather(value, group) for name, value in data.items()}
        if isinstance(data, (list, tuple)):
            return type(data)(self.all_gather(value, group) for value in data)
        tensor = data if isinstance(data, torch.Tensor) else torch.tensor(data, device=self.device)
        gathered = gather_tensors(tensor, group)
        return torch.stack(gathered) if len(gathered) > 1 else gathered[0]

    # --- optimizers

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or a list of them."""
        session = self.trainer.session
        chosen = session.optimizers if use_pl_optimizer and session is not None else self.trainer.optimizers
        return chosen[0] if len(chosen) == 1 else list(chosen)

    def lr_schedulers(self) -> Any:
        """The scheduler, a list of them, or None."""
        schedulers = [each.scheduler for each in self.trainer.lr_scheduler_configs]
        return (schedulers[0] if len(schedulers) == 1 else schedulers) if schedulers else None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass and average the gradients over the ranks. Collective."""
        self.trainer.unit.backward_by_hand(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer's parameters, as if they were whole. Collective if they are sharded."""
        if gradient_clip_val is None:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if gradient_clip_algorithm == "value":
            clip.clip_by_value_(parameters, gradient_clip_val)
        else:
            clip.clip_by_norm_(parameters, gradient_clip_val, 2.0)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Only this optimizer's parameters get gradients, until `untoggle_optimizer`."""
        own_parameters = {p for group in optimizer.param_groups for p in group["params"]}
        for each in self.trainer.optimizers:
            for parameter in (p for group in each.param_groups for p in group["params"]):
                needed = self._toggled.setdefault(parameter, parameter.requires_grad)
                if not is_split(parameter):  # gradients of sharded parameters are put aside, see `manual`
                    parameter.requires_grad_(parameter in own_parameters and needed)
        self._wanted = own_parameters

    def untoggle_optimizer(self, optimizer: Any) -> None:
        for parameter, needed in self._toggled.items():
            parameter.requires_grad_(needed)
        self._toggled, self._wanted = {}, None

    def freeze(self) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        self.train()

    # --- files

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """The module as it was saved, built from the saved hyperparameters and `kwargs`. Not collective.

        Args:
            checkpoint_path: a checkpoint of `ModelCheckpoint` or `Trainer.save_checkpoint`, or a `.ckpt` file of Lightning's own,
                which is read without executing what is pickled in it.
        """
        if hparams_file is not None:
            raise UsageError("load_from_checkpoint(hparams_file=...) is not supported: give the arguments by name.")
        made: Self = saving.build(cls, Path(checkpoint_path), map_location, strict, kwargs)
        return made

    def to_onnx(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError("LightningModule.to_onnx is not part of echelon.compat. Use torch.onnx.export(module, ...).")

    def to_torchscript(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError("LightningModule.to_torchscript is not part of echelon.compat. Use torch.export.export(module, ...).")
