"""`transformers.Trainer`: its arguments, its callbacks and its names, over echelon's unit, loop and checkpoints."""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset
from transformers import trainer_callback, trainer_pt_utils, trainer_utils
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import SAFE_WEIGHTS_NAME

from echelon.checkpoint import commit
from echelon.checkpoint.location import location, make_folder
from echelon.common.errors import UsageError, require
from echelon.compat.trainer.rank import length_of, planned, shared
from echelon.compat.transformers import batches
from echelon.compat.transformers.absent import Accelerator, check_overrides
from echelon.compat.transformers.evaluation import Evaluating
from echelon.compat.transformers.flow import Flow, History
from echelon.compat.transformers.losses import Losses
from echelon.compat.transformers.saving import Saver, newest, ranks_that_share, resume, was_cut_short
from echelon.compat.transformers.training_args import TrainingArguments
from echelon.compat.transformers.unit import Optimizing, TrainerUnit
from echelon.contracts.run_dir import RunDir
from echelon.loop.callback import Callback
from echelon.loop.checkpointing.options import RestoreOptions
from echelon.loop.checkpointing.save_pretrained import save_pretrained, save_whole
from echelon.loop.progress import Progress
from echelon.loop.run import train
from echelon.loop.window import Window
from echelon.parallel.shards import is_split
from echelon.world import agree
from echelon.world.init import World, rank_info

__all__ = ["Trainer"]

theirs = transformers.Trainer
_HAVE_TOKENS = (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
logger = logging.getLogger(__name__)


class Trainer(Losses, Optimizing, Evaluating):
    """
    Args:
        model: called with a batch as keywords; returns an output with `.loss`, or a tuple that begins with the loss.
        args: a TrainingArguments of `echelon.compat.transformers`.
        train_dataset, eval_dataset: map-style, or iterable with `max_steps`; several eval_datasets as a dict.
        data_collator: list of samples -> batch, a dict of tensors.
        processing_class: a tokenizer or processor; pads batches, and is saved beside the model. `tokenizer` is its older name.
        compute_metrics: EvalPrediction, over all ranks -> dict of numbers; called on every rank.
        callbacks: transformers' callbacks, as classes or objects, and echelon's.
        optimizers: an optimizer over the model's parameters and a schedule, or None for each. With a strategy that splits
            parameters, give `optimizer_cls_and_kwargs`, or override `create_optimizer`.
        model_init, compute_loss_func, optimizer_cls_and_kwargs, preprocess_logits_for_metrics: as transformers describes them.
    Raises:
        UsageError: an argument is not supported, or a subclass overrides a method that nothing here calls.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], Any] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        check_overrides(type(self), Trainer)
        if args is None:
            args = TrainingArguments(output_dir="trainer_output")
        what = "a TrainingArguments of echelon.compat.transformers"
        require(isinstance(args, TrainingArguments), "args", what, type(args).__name__, "Import both from there.")
        if (model is None) == (model_init is None):
            raise UsageError("Trainer needs a model or a model_init, and not both.")
        self.args, self.model_init = args, model_init
        transformers.set_seed(args.seed)
        self.model = model if model is not None else self.call_model_init()
        self.processing_class = processing_class if processing_class is not None else tokenizer
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.data_collator = data_collator or batches.default_collator(self.processing_class)
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.look_at_model()
        self._check_datasets()
        if args.should_save:
            make_folder(location(args.output_dir, "output_dir"))  # scripts write into it, also if nothing else does
        self._own_callbacks = [c for c in callbacks or [] if isinstance(c, Callback)]
        self._begin_callbacks([c for c in callbacks or [] if not isinstance(c, Callback)])
        self._unit: TrainerUnit | None = None
        self._outputs = None

    def _check_datasets(self) -> None:
        args: Any = self.args
        own = type(self).get_eval_dataloader is not Trainer.get_eval_dataloader
        if args.eval_strategy != "no" and self.eval_dataset is None and not own:
            raise UsageError(
                f"You have set `args.eval_strategy` to {args.eval_strategy.value} but you didn't pass an `eval_dataset`. "
                "Either set `args.eval_strategy` to `no` or pass an `eval_dataset`."
            )

    def _begin_callbacks(self, given: list[Any]) -> None:
        args = self.args
        defaults = [trainer_callback.DefaultFlowCallback, *get_reporting_integration_callbacks(args.report_to)]
        self.callback_handler = trainer_callback.CallbackHandler(
            [*defaults, *given], self.model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        self.add_callback(trainer_callback.PrinterCallback if args.disable_tqdm else trainer_callback.ProgressCallback)
        self.control = trainer_callback.TrainerControl()
        self.state = self._fresh_state()
        self.history = History(self)
        self.control = self.callback_handler.on_init_end(args, self.state, self.control)

    def _fresh_state(self) -> Any:
        return trainer_callback.TrainerState(
            is_local_process_zero=self.is_local_process_zero(), is_world_process_zero=self.is_world_process_zero()
        )

    # --- training

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:
        """Train, and log, evaluate and save as the arguments say. Every rank calls it. A `model_init` is called again.

        Args:
            resume_from_checkpoint: a folder `checkpoint-N`, or True for the newest in `output_dir`. Without this argument, the
                newest is still restored if the launcher has restarted the job, if the run that saved it was stopped by a signal,
                or if that run had the same command and was killed.
            trial: of a hyperparameter search, which is not part of echelon.compat.
            ignore_keys_for_eval: the `ignore_keys` of its evaluations.
        Returns:
            transformers' TrainOutput: updates, mean loss, metrics.
        Raises:
            SystemExit: with code 75, after a signal asked the run to stop. The run is saved first, if it saves at all.
        """
        if trial is not None:
            raise UsageError(
                "Trainer.train(trial=...) is not part of echelon.compat. Instead: a script started with other arguments."
            )
        self._begin_again()
        which = resume_from_checkpoint or self._goes_on()
        self._ranks_of_batch = self._ranks_that_saved(which)
        loader, unit = self._loader(), self.unit()
        updates, epochs = self._limits(loader)
        if unit.__dict__.get("optimizer") is not None and unit.lr_scheduler is None:
            unit.lr_scheduler = self.create_scheduler(self.max_updates, unit.optimizer)  # before a checkpoint is read into it
        if which:
            resume(which, self.args.output_dir, unit, loader)
        self.state.global_step = began = unit.train_progress.num_updates_completed
        start = time.time()
        flow = Flow(self, loader, self._saver(), start=start, ignore_keys=ignore_keys_for_eval)
        self._refer(unit, loader)
        train(unit, loader, max_updates=updates, max_epochs=epochs, callbacks=[*self._own_callbacks, flow])
        return self._finish(unit, began, start)

    def _goes_on(self) -> bool:
        """Whether to continue an interrupted run although the script does not ask for it. Collective."""
        path = newest(self.args.output_dir)
        if path is None:
            return False
        if _is_started_again():
            return True
        goes_on = not (self.args.overwrite_output_dir or self.__dict__.get("_has_trained")) and was_cut_short(path)
        if goes_on and agree.is_rank0():
            logger.warning(
                "the run that saved %s was interrupted, and goes on from there. To begin anew, give another output_dir, "
                "overwrite_output_dir=True or `echelon run --restart`",
                path,
            )
        return goes_on

    def _ranks_that_saved(self, which: str | bool) -> int:
        """How many ranks with different samples a global batch is computed for; fewer ranks keep the old one. Collective."""
        args, ranks = self.args, self.data_ranks()
        path = (newest(args.output_dir) if which is True else location(str(which))) if which else None
        accumulation = args.gradient_accumulation_steps
        if path is None:
            return max(ranks, planned(ranks))
        return ranks_that_share(path, args.per_device_train_batch_size * accumulation, ranks, accumulation)

    def unit(self) -> TrainerUnit:
        """The unit that is trained. The first call builds it, with the strategy applied, and is collective."""
        if self._unit is None:
            self._unit = TrainerUnit(self, **self.args.unit_options(self.model))
            self.model_wrapped = self._unit.module
            if type(self)._save is not Trainer._save and any(is_split(p) for p in self.model.parameters()):
                raise UsageError(
                    f"{type(self).__name__} overrides _save, which rank 0 calls alone, and strategy {self.args.strategy!r} "
                    'splits parameters between ranks. Override save_model, which every rank calls, or give strategy="zero1".'
                )
        return self._unit

    def _begin_again(self) -> None:
        """A second `train` starts from the current weights, with the same optimizer and a new schedule, as in transformers.

        A schedule that the script has given or made goes on. With a `model_init` all begins anew.
        """
        self.state = self._fresh_state()
        self.history.reset()
        if self.model_init is not None:
            transformers.set_seed(self.args.seed)
            self.model, self._unit = self.call_model_init(), None
            self.optimizer = self.lr_scheduler = None
            self.look_at_model()
        if self.__dict__.pop("_created_lr_scheduler", False):  # by `create_scheduler`, for another number of updates
            self.lr_scheduler = None
        unit = self._unit
        if unit is not None:
            unit.take(self.args)
        if unit is not None and unit.train_progress.num_steps_completed:
            unit.train_progress, unit.window = Progress(), Window(unit.gradient_accumulation_steps)
            unit.lr_scheduler = self.lr_scheduler
        if unit is not None:
            transformers.set_seed(self.args.seed)
        if isinstance(self.processing_class, _HAVE_TOKENS) and hasattr(self.model, "config"):
            trainer_utils.align_special_tokens(self.model, self.processing_class)

    def _loader(self) -> Any:
        loader = self.get_train_dataloader()
        ranks, accumulation, batch = self._ranks_of_batch, self.args.gradient_accumulation_steps, None
        if isinstance(loader, DataLoader) and ranks > self.data_ranks():
            batch = (loader.batch_size or 1) * ranks * accumulation
        return shared(loader, self.data_ranks(), accumulation, global_batch=batch)

    def _limits(self, loader: Any) -> tuple[int | None, int | None]:
        """(max_updates, max_epochs), one of which is None. Also sets the limits that callbacks see in the state."""
        args, state, length = self.args, self.state, length_of(loader)
        accumulation = self.unit().gradient_accumulation_steps
        per_epoch = -(-length // accumulation) if length else None
        if args.max_steps <= 0 and per_epoch is None:
            raise UsageError("args.max_steps must be set to a positive value if the train_dataset has no length.")
        by_epochs = args.max_steps <= 0
        state.max_steps = math.ceil(args.num_train_epochs * per_epoch) if by_epochs and per_epoch else args.max_steps
        state.num_train_epochs = math.ceil(state.max_steps / per_epoch) if per_epoch else sys.maxsize
        state.train_batch_size = args.train_batch_size
        state.compute_steps(args, state.max_steps)
        self.max_updates = state.max_steps
        if by_epochs and float(args.num_train_epochs).is_integer():
            return None, int(args.num_train_epochs)
        return state.max_steps, None

    def _saver(self) -> Saver | None:
        if self.args.save_strategy == "no":
            return None
        again = self.__dict__.get("_has_trained", False)  # then the checkpoints there are this trainer's own
        self._has_trained = True
        return self.new_saver(restart=self.args.overwrite_output_dir or again)

    def new_saver(self, **options: bool) -> Saver:
        adapters = batches.without_adapters(self.model) is not self.model
        return Saver(self.args.output_dir, self.args.save_total_limit, only_trained=adapters, **options)

    def _refer(self, unit: TrainerUnit, loader: Any) -> None:
        """Build the optimizer and schedule, and give them, the model and the loader to the callbacks."""
        unit.configure()
        self.optimizer, self.lr_scheduler = unit.optimizer, unit.lr_scheduler
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler, handler.train_dataloader = (
            self.model,
            unit.optimizer,
            unit.lr_scheduler,
            loader,
        )

    def _finish(self, unit: TrainerUnit, began: int, start: float) -> Any:
        args, state, history = self.args, self.state, self.history
        updates = unit.train_progress.num_updates_completed
        loss = (history.total + float(history.loss)) / max(updates, 1)
        samples = args.train_batch_size * self._ranks_of_batch * args.gradient_accumulation_steps * (updates - began)
        metrics = trainer_utils.speed_metrics("train", start, num_samples=samples, num_steps=updates - began)
        metrics["train_loss"] = loss
        self.log(metrics)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            options = RestoreOptions.weights_only()
            Saver.restore(state.best_model_checkpoint, unit, restore_options=options)
        self.control = self.callback_handler.on_train_end(args, state, self.control)
        return trainer_utils.TrainOutput(updates, loss, metrics)

    # --- data

    def data_ranks(self) -> int:
        _, size = self.unit().data_rank_and_size or (0, World.current().size)
        return size

    def get_train_dataloader(self) -> Any:
        if self.train_dataset is None:
            raise UsageError("Trainer: training requires a train_dataset.")
        return self._loader_of(self.train_dataset, trains=True, sampler=self._own_sampler())

    def _own_sampler(self) -> Any:
        if isinstance(self.train_dataset, IterableDataset):
            return None
        own = self._get_train_sampler
        sampler = own(self.train_dataset) if inspect.signature(own).parameters else own()  # transformers 4 gave it nothing
        return None if isinstance(sampler, (batches.InTurn, batches.Shuffled)) else sampler

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of all ranks' samples. A subclass returns a sampler of its own; what this method returns is echelon's order
        in the Trainer's own loader, and torch's in a DataLoader that a script makes.
        """
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        if not hasattr(dataset, "__len__"):
            return None
        kind = batches.InTurn if self.args.train_sampling_strategy == "sequential" else batches.Shuffled
        return kind(dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        dataset = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        dataset = dataset if dataset is not None else self.eval_dataset
        if dataset is None:
            raise UsageError("Trainer: evaluation requires an eval_dataset.")
        return self._loader_of(dataset, trains=False)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._loader_of(test_dataset, trains=False)

    def _loader_of(self, dataset: Any, *, trains: bool, sampler: Any = None) -> Any:
        columns = batches.columns_of(self.model, self.label_names) if self.args.remove_unused_columns else None
        ranks = self.__dict__.get("_ranks_of_batch", 0) if trains else 0
        ranks = ranks or self.data_ranks()
        return batches.loader_of(dataset, self.data_collator, columns, self.args, ranks, trains=trains, sampler=sampler)

    # --- the rest

    @property
    def accelerator(self) -> Accelerator:
        return Accelerator(self)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model for `from_pretrained`, whatever the strategy, and the processing class. Every rank calls it."""
        folder = output_dir if output_dir is not None else self.args.output_dir
        if type(self)._save is not Trainer._save:
            commit.on_rank0(lambda: self._save(folder), location(folder))
            return
        if hasattr(type(self.model), "save_pretrained"):
            save_pretrained(self.unit(), folder)
        else:
            save_whole(self.unit(), folder, _as_safetensors)
        self._save_processing_class(folder)

    def _save_processing_class(self, folder: str) -> None:
        processes = self.processing_class
        processes = processes if processes is not None else getattr(self.data_collator, "tokenizer", None)
        saves = getattr(processes, "save_pretrained", None)
        if saves is not None and agree.is_rank0():
            saves(folder)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save on rank 0 alone, as scripts do with `trainer.model.state_dict()`. `save_model` calls an override of it on rank 0.

        Raises:
            UsageError: parameters are split between ranks.
        """
        folder = output_dir if output_dir is not None else self.args.output_dir
        state = state_dict if state_dict is not None else self.model.state_dict()
        split = next((name for name, value in state.items() if is_split(value)), None)
        if split is not None:
            raise UsageError(f"trainer._save: {split} is split between ranks. Instead: trainer.save_model(folder) on every rank.")
        self.model.save_pretrained(folder, state_dict=state)
        self._save_processing_class(folder)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Show and remember numbers; override it to do more with them."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    log_metrics, save_metrics, save_state = (
        trainer_pt_utils.log_metrics,
        trainer_pt_utils.save_metrics,
        trainer_pt_utils.save_state,
    )
    call_model_init = theirs.call_model_init
    metrics_format = staticmethod(trainer_pt_utils.metrics_format)
    is_world_process_zero, is_local_process_zero = theirs.is_world_process_zero, theirs.is_local_process_zero
    pop_callback, remove_callback = theirs.pop_callback, theirs.remove_callback

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """Only warn, since scripts call this after training: a model card is a file of the script's own."""
        _tell_of_nothing("create_model_card", "no model card was written: it is a file of your own beside the model")

    def push_to_hub(self, *args: Any, **options: Any) -> None:
        """Only warn, since scripts call this after training."""
        _tell_of_nothing("push_to_hub", "nothing was uploaded. Call save_model(folder), and upload that folder")

    # Scripts ask for these before they save. `save_model` writes whole weights under every strategy.
    is_fsdp_enabled = is_deepspeed_enabled = False

    def add_callback(self, callback: Any) -> None:
        if isinstance(callback, Callback):
            self._own_callbacks.append(callback)
        else:
            self.callback_handler.add_callback(callback)


def __getattr__(name: str) -> Any:
    """Other names of `transformers.trainer`, such as TRAINING_ARGS_NAME."""
    return getattr(transformers.trainer, name)


def _as_safetensors(module: torch.nn.Module, folder: Path, *, state_dict: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file({name: value.clone() for name, value in state_dict.items()}, folder / SAFE_WEIGHTS_NAME, {"format": "pt"})


def _tell_of_nothing(name: str, what: str) -> None:
    if agree.is_rank0():
        logger.warning("Trainer.%s has no effect: %s", name, what)


def _is_started_again() -> bool:
    """Whether the launcher has restarted this run after it failed, was preempted or was stopped."""
    run = RunDir.current()
    return (
        rank_info().restart_count > 0
        or (run is not None and run.attempt > 0)
        or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    )
