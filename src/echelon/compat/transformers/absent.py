"""What transformers has and compat lacks: arguments, methods of a Trainer and of its accelerator, each with the remedy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import transformers
from torch.utils.data import DataLoader

from echelon.common import errors
from echelon.common.errors import UsageError
from echelon.world import agree

__all__ = ["Accelerator", "NotHereError", "Part", "check_arguments", "check_overrides"]

logger = logging.getLogger(__name__)

_UNDERSTOOD = {
    *("output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "max_steps"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm", "label_smoothing_factor"),
    *("bf16", "fp16", "tf32", "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_cache"),
    *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "log_level", "log_level_replica"),
    *("disable_tqdm", "report_to", "run_name", "project", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
    *("prediction_loss_only", "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end"),
    *("metric_for_best_model", "greater_is_better", "seed", "data_seed", "use_cpu", "dataloader_drop_last"),
    *("dataloader_num_workers", "dataloader_pin_memory", "remove_unused_columns", "label_names"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    *("ddp_timeout", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank"),
    *("predict_with_generate", "generation_max_length", "generation_num_beams", "generation_config"),
    *("strategy", "deepspeed", "warmup_ratio", "evaluation_strategy", "no_cuda", "overwrite_output_dir"),
}
_WITHOUT_EFFECT = {
    *("dataloader_persistent_workers", "dataloader_prefetch_factor", "eval_accumulation_steps", "eval_use_gather_object"),
    *("length_column_name", "logging_dir", "logging_nan_inf_filter", "restore_callback_states_from_checkpoint"),
    *("save_on_each_node", "save_safetensors", "skip_memory_metrics", "torch_empty_cache_steps", "trackio_bucket_id"),
    *("trackio_space_id", "trackio_static_space_id", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision"),
    *("hub_strategy", "hub_token", "push_to_hub"),
}
_SHARDED = 'strategy="fsdp", or an FSDPStrategy(...)'
# Refused arguments, and what to write instead.
_ARGUMENTS = {
    "accelerator_config": "the batch sizes here are of each rank, and the seed decides the order; leave it out",
    "auto_find_batch_size": "give per_device_train_batch_size",
    "average_tokens_across_devices": "every label counts alike on all ranks; leave it out",
    "batch_eval_metrics": "compute_metrics gets everything at once; for large outputs give preprocess_logits_for_metrics",
    "bf16_full_eval": "with bf16=True evaluations are computed under autocast",
    "dataloader_in_order": "batches come in order; leave it out",
    "dataloader_multiprocessing_context": "leave it out",
    "debug": "AutoUnit(detect_anomaly=True) in a unit of your own, or torch.autograd.set_detect_anomaly",
    "enable_jit_checkpoint": "at SIGTERM a run that saves is saved anyway, and `echelon run` goes on from there",
    "eval_do_concat_batches": "predictions come as one array",
    "fp16_full_eval": "with fp16=True evaluations are computed under autocast",
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "full_determinism": "`echelon run --bitwise`, and torch.use_deterministic_algorithms(True)",
    "group_by_length": "a dataset that is sorted, with train_sampling_strategy='sequential'",
    "ignore_data_skip": "a resumed run finds its place in the data at once; leave it out",
    "include_for_metrics": "compute_metrics gets predictions and labels",
    "include_num_input_tokens_seen": "metrics.jsonl of a run folder has tokens per second",
    "liger_kernel_config": "apply the kernels to the model before the Trainer, or echelon.nn.linear_cross_entropy",
    "neftune_noise_alpha": "a forward hook of your own on the model's input embeddings",
    "optim_target_modules": "override create_optimizer",
    "parallelism_config": "strategy=, with one of echelon's strategies",
    "save_only_model": "trainer.save_model(folder) writes the model alone",
    "sortish_sampler": "a sampler of your own, in _get_train_sampler",
    "train_sampling_strategy": "'random' or 'sequential'; another order is a sampler's, in get_train_dataloader",
    "use_liger_kernel": "apply the kernels to the model before the Trainer, or echelon.nn.linear_cross_entropy",
}
_TRAINER = {
    "training_step": "override compute_loss; what comes before and after an update is a callback's",
    "prediction_step": "override compute_loss, with label_names that each batch has, and give preprocess_logits_for_metrics",
    "get_batch_samples": "override weight(inputs), which says what a batch counts",
    "hyperparameter_search": "a script that is started with other arguments, by `echelon submit` or `echelon run`",
    "_save_checkpoint": "a callback's on_save",
    "_prepare_inputs": "compute_loss gets batches on the device; change them there, on the way to the model",
    "_prepare_input": "compute_loss gets batches on the device",
    "_get_eval_sampler": "a DataLoader of your own, from get_eval_dataloader",
    "floating_point_ops": "metrics.jsonl of a run folder has mfu",
    "is_in_train": "a callback's hooks",
}
_ACCELERATOR = {
    "prepare": "the trainer prepares its model and optimizer; leave it out",
    "backward": "override compute_loss; the trainer does the rest",
    "gather": "echelon.gather, with gradients; compute_metrics sees the predictions of all ranks",
    "gather_for_metrics": "compute_metrics sees the predictions of all ranks",
    "reduce": "echelon.all_mean",
    "save_state": "TrainingArguments(save_strategy=...), or a callback that sets control.should_save",
    "load_state": "train(resume_from_checkpoint=...)",
    "get_state_dict": "trainer.save_model(folder), called on every rank",
    "save_model": "trainer.save_model(folder), called on every rank",
    "clip_grad_norm_": "TrainingArguments(max_grad_norm=...)",
    "log": "trainer.log(...)",
}
_UNCHANGED = "`echelon run` starts the script unchanged, with transformers' own Trainer"
_ALSO_FINE: Mapping[str, tuple[Any, ...]] = {
    "fsdp": ("", [], False),
    "fsdp_config": ({},),
    "include_num_input_tokens_seen": (False,),  # what HfArgumentParser makes of the default
    "train_sampling_strategy": ("random", "sequential"),
    "debug": ([], None),  # what HfArgumentParser makes of the default
}


def check_arguments(args: Any) -> None:
    """
    Raises:
        UsageError: an argument is not supported. Arguments without effect only log a warning.
    """
    ineffective = []
    for field in fields(args):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        name, value = field.name, getattr(args, field.name)
        if name in _UNDERSTOOD or value is default or value == default or value in _ALSO_FINE.get(name, ()):
            continue
        if name == "accelerator_config" and not isinstance(value, (dict, str)) and value == type(value)():
            continue  # the converted default, which `dataclasses.replace` passes again
        if name in _WITHOUT_EFFECT:
            ineffective.append(name)
            continue
        instead = _ARGUMENTS.get(name, f"not known here; {_UNCHANGED}")
        raise UsageError(f"TrainingArguments({name}={value!r}) is not part of echelon.compat. Instead: {instead}.")
    if ineffective:
        logger.warning("TrainingArguments: %s has no effect here", ", ".join(sorted(ineffective)))


class NotHereError(errors.NotHereError, AttributeError):
    """An attribute of transformers' Trainer that this one does not have."""


class Part:
    """Base of a Trainer's parts. An attribute that only transformers' Trainer has is an error that names the remedy."""

    def __getattr__(self, name: str) -> Any:
        if name in _TRAINER or (hasattr(transformers.Trainer, name) and not name.startswith("__")):
            raise NotHereError(f"Trainer.{name} is not part of echelon.compat. Instead: {_TRAINER.get(name, _UNCHANGED)}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_ASKED: dict[str, Callable[[Any], Any]] = {
    "process_index": lambda args: args.process_index,
    "local_process_index": lambda args: args.local_process_index,
    "num_processes": lambda args: args.world_size,
    "device": lambda args: args.device,
    "is_main_process": lambda args: args.process_index == 0,
    "is_local_main_process": lambda args: args.local_process_index == 0,
    "is_last_process": lambda args: args.process_index == args.world_size - 1,
}


class Accelerator:
    """What scripts use of `trainer.accelerator` around training: ranks, the device, waiting for other ranks.

    Args:
        trainer: the Trainer that it belongs to.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _ASKED:
            return _ASKED[name](self._trainer.args)
        if name.startswith("__"):
            raise AttributeError(name)
        instead = _ACCELERATOR.get(name, "trainer.unit(), and echelon.world.agree for what ranks tell one another")
        raise NotHereError(f"Trainer.accelerator.{name} is not part of echelon.compat. Instead: {instead}.")

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """DataLoaders, unchanged, as overrides of `get_train_dataloader` ask for it. The trainer divides them between ranks."""
        if not objects or not all(isinstance(each, DataLoader) for each in objects):
            return self.__getattr__("prepare")
        return objects[0] if len(objects) == 1 else objects

    def print(self, *args: Any, **options: Any) -> None:
        """Print on each node's first rank, as Accelerate does."""
        if self.is_local_main_process:
            print(*args, **options)

    def wait_for_everyone(self) -> None:
        agree.any_rank(False)

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The module without wrappers. Parameters that are split between ranks stay split."""
        unit = self._trainer.unit()
        return unit.prepared.unwrapped if model is unit.module else model

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        return (None,) * len(objects)

    def end_training(self) -> None:
        """Do nothing: the trainer's callbacks own the trackers and have ended them."""


def check_overrides(kind: type, base: type) -> None:
    """
    Raises:
        UsageError: a subclass overrides a method of transformers' Trainer that nothing here calls.
    """
    for each in kind.__mro__[: kind.__mro__.index(base)]:
        for name in vars(each):
            theirs: Any = getattr(transformers.Trainer, name, None)
            if not callable(theirs) or name.startswith("__") or hasattr(base, name):
                continue
            raise UsageError(
                f"{each.__name__} overrides {name}, which nothing in echelon.compat calls. Instead: "
                f"{_TRAINER.get(name, _UNCHANGED)}."
            )
