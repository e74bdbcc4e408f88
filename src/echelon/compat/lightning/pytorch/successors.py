"""Lightning's names that are not here: they can be imported, and using one is an error that says what follows."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from echelon.compat.names import Missing

__all__ = [
    "ALIASES",
    "ARGPARSE",
    "CALLBACKS",
    "DISPLAYS",
    "ENVIRONMENTS",
    "FABRIC",
    "HOMES",
    "HOOKS",
    "LOGGERS",
    "MODULES",
    "NAMES",
    "STRATEGIES",
    "TRAINER",
    "UTILITIES",
    "complete",
    "instead",
    "missing",
    "missing_of_trainer",
]

NAMES = {
    "Fabric": "echelon.init_from_env() and echelon.layouts.prepare_module, or a TrainUnit",
}
_BAR = "the progress that `echelon run` and Trainer show; Trainer(enable_progress_bar=False) is understood"
_SPIKES = "EarlyStopping(check_finite=True); a run of losses that are inf or nan ends by itself"
_SUMMARY = "get_module_summary of echelon.compat.torchtnt.utils.module_summary"
_USE = "memory, utilization and throughput in metrics.jsonl, and `echelon report`"
# Callbacks that only show something, and what echelon shows in their place: they are taken without effect.
DISPLAYS = {
    **dict.fromkeys(("ProgressBar", "RichProgressBar", "RichProgressBarTheme", "TQDMProgressBar"), _BAR),
    **dict.fromkeys(("ModelSummary", "RichModelSummary"), _SUMMARY),
    **dict.fromkeys(("DeviceStatsMonitor", "GPUStatsMonitor", "ThroughputMonitor", "XLAStatsMonitor"), _USE),
}
# Of `plugins=`, taken without effect too: their variables are read by themselves.
ENVIRONMENTS = ("LightningEnvironment", "MPIEnvironment", "SLURMEnvironment", "TorchElasticEnvironment")
CALLBACKS = {
    "BackboneFinetuning": "requires_grad_ in on_train_epoch_start, with the optimizer holding all parameters from the start",
    "BaseFinetuning": "requires_grad_ in on_train_epoch_start, with the optimizer holding all parameters from the start",
    "BasePredictionWriter": "what trainer.predict returns, or on_predict_batch_end",
    "BatchSizeFinder": "`echelon run --find-batch`, which keeps the global batch",
    "GradientAccumulationScheduler": "Trainer(accumulate_grad_batches=...)",
    "LearningRateFinder": "a learning rate of your own; there is no search for one",
    "ModelPruning": "torch.nn.utils.prune, in hooks of your own",
    "OnExceptionCheckpoint": "ModelCheckpoint(every_n_train_steps=...)",
    "SpikeDetection": _SPIKES,
    "StochasticWeightAveraging": "AutoUnit(options=UnitOptions(averaging=SWAParams(...)))",
    "Timer": "`echelon run --stop-after 55m`",
    "WeightAveraging": "AutoUnit(options=UnitOptions(averaging=SWAParams(...)))",
    "EMAWeightAveraging": "AutoUnit(options=UnitOptions(averaging=SWAParams(...)))",
}
_UNION = "echelon.Mixture, or torch.utils.data.StackDataset"
_PROFILER = "echelon.callbacks.PyTorchProfiler among the Trainer's callbacks; `echelon report` shows where time goes"
_LOOPS = "hooks of a Callback, and trainer.current_epoch, trainer.global_step"
UTILITIES = {
    "CombinedLoader": _UNION,
    "measure_flops": "echelon.compat.torchtnt.utils.flops.FlopTensorDispatchMode",
}
_OPTIONS = "Trainer(strategy=...) by name, or one of echelon's, such as FSDPStrategy(...)"
_OTHER_DEVICES = "CPUs and CUDA, which are all that there is"
STRATEGIES = {
    **dict.fromkeys(
        ("HPUParallelStrategy", "SingleDeviceXLAStrategy", "SingleHPUStrategy", "SingleTPUStrategy", "XLAStrategy"),
        _OTHER_DEVICES,
    ),
    "DeepSpeedStrategy": "strategy 'zero1', 'zero2' or 'zero3'",
    "ModelParallelStrategy": "echelon.TPStrategy(plan, size=...)",
    "ParallelStrategy": _OPTIONS,
    "SingleDeviceStrategy": "Trainer(devices=1)",
    "Strategy": _OPTIONS,
}
LOGGERS = {
    "LitLogger": "a subclass of Logger that calls litlogger",
    "CometLogger": "a subclass of Logger that calls comet_ml",
    "NeptuneLogger": "a subclass of Logger that calls neptune",
}

# Names of modules that are here, beside those above. What is Lightning's own machinery has no counterpart of the same shape.
_INSIDE = "nothing: it is a part of Lightning's own inside. docs/migrating.md has what programs use"
_HPARAMS = "save_hyperparameters and hparams; torch.load or yaml read files of Lightning's"
OTHERS = {
    **dict.fromkeys(
        ("CheckpointHooks", "DataHooks", "ModelHooks"), "LightningModule and LightningDataModule, which have these hooks"
    ),
    **dict.fromkeys(("DummyExperiment", "DummyLogger", "ExperimentWriter", "merge_dicts"), "a subclass of Logger"),
    **dict.fromkeys(("FabricCSVLogger", "FabricLogger", "FabricTensorBoardLogger"), "CSVLogger, TensorBoardLogger or Logger"),
    **dict.fromkeys(
        ("CUDAAccelerator", "MPSAccelerator", "XLAAccelerator"), "Trainer(accelerator='cpu') or 'gpu', and torch.cuda"
    ),
    **dict.fromkeys(("load_hparams_from_tags_csv", "load_hparams_from_yaml", "parse_class_init_keys"), _HPARAMS),
    **dict.fromkeys(("save_hparams_to_tags_csv", "save_hparams_to_yaml", "update_hparams"), _HPARAMS),
    **dict.fromkeys(("pl_load", "pl_legacy_patch"), "LightningModule.load_from_checkpoint, or torch.load"),
    **dict.fromkeys(("find_shared_parameters", "set_shared_parameters"), "nothing: tied parameters stay tied"),
    **dict.fromkeys(("collect_init_args", "get_init_args", "clean_namespace"), _HPARAMS),
    **dict.fromkeys(("lightning_getattr", "lightning_setattr", "lightning_hasattr"), "getattr on the module and its hparams"),
    "EarlyStoppingReason": "EarlyStopping.stopped_epoch, which is 0 if it has not stopped",
    **dict.fromkeys(("Accelerator", "ClusterEnvironment", "prepare_for_backward", "reset_seed"), _INSIDE),
    **dict.fromkeys(("Optimizable", "convert_tensors_to_scalars", "do_nothing_closure", "recursive_detach"), _INSIDE),
    **dict.fromkeys(("BType", "extract_batch_size", "has_iterable_dataset", "has_len_all_ranks", "sized_len"), _INSIDE),
    **dict.fromkeys(("is_cuda_out_of_memory", "is_cudnn_snafu", "is_out_of_cpu_memory"), "is_oom_error"),
    **dict.fromkeys(("CHECKPOINT_PAST_HPARAMS_KEYS", "convert", "download_model_from_registry"), _INSIDE),
    **dict.fromkeys(("FSDPPrecision", "Precision"), "Trainer(precision=...)"),
    "CheckpointIO": "nothing: checkpoints are folders, written whole",
    "Profiler": _PROFILER,
    "get_torchvision_model": "torchvision.models.get_model",
    "save_hyperparameters": "self.save_hyperparameters()",
    "SIGTERMException": "trainer.received_sigterm, and the end of the run with exit code 75",
    "convert_to_tensors": "torch.as_tensor",
    "get_filesystem": "fsspec",
    "is_param_in_hook_signature": "inspect.signature",
    "is_shared_filesystem": "a folder that all nodes see, which checkpoints need",
    "suggested_max_num_workers": "os.cpu_count(), or the cores that `echelon run --bind cores` leaves a rank",
}

# Modules of which nothing is here.
_SEARCH = "a learning rate of your own; `echelon run --find-batch` finds the largest micro-batch of your global batch"
_FABRIC = NAMES["Fabric"]
_SMALL = "a small LightningModule of your own"
_ACCELERATORS = "Trainer(accelerator='cpu') or 'gpu', and torch.cuda"
_FOLDERS = "nothing: checkpoints are folders, written whole"
_CLI = "argparse: `echelon run train.py --lr 0.1` passes a script's own arguments on"
_PLUGINS = "Trainer(precision=...), and the options of a strategy"
_CALLBACK_MODULES = {
    "batch_size_finder": "BatchSizeFinder",
    "finetuning": "BaseFinetuning",
    "gradient_accumulation_scheduler": "GradientAccumulationScheduler",
    "lr_finder": "LearningRateFinder",
    "on_exception_checkpoint": "OnExceptionCheckpoint",
    "prediction_writer": "BasePredictionWriter",
    "pruning": "ModelPruning",
    "spike": "SpikeDetection",
    "stochastic_weight_avg": "StochasticWeightAveraging",
    "timer": "Timer",
    "weight_averaging": "WeightAveraging",
}
_LOGGER_MODULES = {
    "comet": "CometLogger",
    "litlogger": "LitLogger",
    "neptune": "NeptuneLogger",
}
_LOOP_MODULES = (
    "evaluation_loop fetchers fit_loop loop optimization optimization.automatic optimization.closure optimization.manual "
    "prediction_loop progress training_epoch_loop utilities"
)
_TRAINER_MODULES = (
    "call configuration_validator connectors connectors.accelerator_connector connectors.callback_connector "
    "connectors.checkpoint_connector connectors.data_connector connectors.logger_connector "
    "connectors.logger_connector.fx_validator connectors.logger_connector.logger_connector "
    "connectors.logger_connector.result connectors.signal_connector setup"
)
_PRECISION_MODULES = "amp bitsandbytes deepspeed double fsdp half precision transformer_engine xla"
_STRATEGY_MODULES = (
    "deepspeed launchers launchers.launcher launchers.multiprocessing launchers.subprocess_script launchers.xla model_parallel "
    "parallel single_device single_xla strategy xla"
)
_UTILITY_MODULES = (
    "argparse compile consolidate_checkpoint deepspeed migration migration.migration migration.utils model_registry "
    "signature_utils testing upgrade_checkpoint"
)
MODULES = {
    "accelerators": _ACCELERATORS,
    **{f"accelerators.{name}": _ACCELERATORS for name in ("accelerator", "cpu", "cuda", "mps", "xla")},
    **{f"callbacks.{module}": CALLBACKS[name] for module, name in _CALLBACK_MODULES.items()},
    **{f"callbacks.{name}": _USE for name in ("device_stats_monitor", "throughput_monitor")},
    **{f"callbacks.{name}": _SUMMARY for name in ("model_summary", "rich_model_summary")},
    "callbacks.progress": _BAR,
    "callbacks.progress.base": _BAR,
    "callbacks.progress.progress_bar": _BAR,
    "callbacks.progress.rich_progress": _BAR,
    "callbacks.progress.tqdm_progress": _BAR,
    "cli": _CLI,
    "demos": _SMALL,
    **{f"demos.{name}": _SMALL for name in ("boring_classes", "lstm", "mnist_datamodule", "transformer")},
    **{f"loggers.{name}": _INSIDE for name in ("mlflow", "wandb")},
    **{f"loggers.{module}": LOGGERS[name] for module, name in _LOGGER_MODULES.items()},
    "loggers.utilities": _INSIDE,
    "loops": _LOOPS,
    **{f"loops.{name}": _LOOPS for name in _LOOP_MODULES.split()},
    "overrides": _INSIDE,
    "overrides.distributed": _INSIDE,
    "plugins": _PLUGINS,
    "plugins.environments": "nothing: torchrun's, Slurm's and Open MPI's variables are read by themselves",
    "plugins.training_type": _PLUGINS,
    "plugins.io": _FOLDERS,
    **{f"plugins.io.{name}": _FOLDERS for name in ("async_plugin", "checkpoint_plugin", "torch_plugin", "wrapper", "xla_plugin")},
    "plugins.layer_sync": _PLUGINS,
    "plugins.precision": _PLUGINS,
    **{f"plugins.precision.{name}": _PLUGINS for name in _PRECISION_MODULES.split()},
    "profilers": _PROFILER,
    **{f"profilers.{name}": _PROFILER for name in ("advanced", "base", "profiler", "pytorch", "simple", "xla")},
    "serve": _INSIDE,
    **{f"serve.{name}": _INSIDE for name in ("servable_module", "servable_module_validator")},
    **{f"strategies.{name}": _OPTIONS for name in _STRATEGY_MODULES.split()},
    **{f"trainer.{name}": _INSIDE for name in _TRAINER_MODULES.split()},
    "tuner": _SEARCH,
    **{f"tuner.{name}": _SEARCH for name in ("batch_size_scaling", "lr_finder", "tuning")},
    **{f"utilities.{name}": _INSIDE for name in _UTILITY_MODULES.split()},
    "lite": _FABRIC,
    "metrics": "torchmetrics",
    "utilities.cli": _CLI,
    "utilities.combined_loader": _UNION,
    "utilities.model_summary": _SUMMARY,
    **{f"utilities.model_summary.{name}": _SUMMARY for name in ("model_summary", "model_summary_deepspeed")},
}
FABRIC = {
    "fabric": _FABRIC,
    "fabric.accelerators": _ACCELERATORS,
    "fabric.plugins": _PLUGINS,
    "fabric.strategies": _OPTIONS,
    "fabric.utilities": _FABRIC,
    "fabric.utilities.types": _FABRIC,
}
# Modules that are one of here under another name.
_OF_UTILITIES = ("data", "enums", "grads", "imports", "memory", "model_helpers", "parameter_tying", "parsing", "seed", "warnings")
_OLDER = ("apply_func", "cloud_io", "distributed", "xla_device")  # below `utilities` before 2.0
ALIASES = {
    "callbacks.callback": "callbacks",
    "callbacks.checkpoint": "callbacks",
    "callbacks.lambda_function": "callbacks",
    "callbacks.lr_monitor": "callbacks",
    "core": "",
    "core.datamodule": "",
    "core.hooks": "",
    "core.lightning": "",
    "core.mixins": "hparams",
    "core.mixins.hparams_mixin": "hparams",
    "core.module": "",
    "core.optimizer": "optimizers",
    "core.saving": "",
    "loggers.base": "loggers",
    "loggers.csv_logs": "loggers",
    "loggers.logger": "loggers",
    "loggers.tensorboard": "loggers",
    "strategies.ddp": "strategies",
    "strategies.fsdp": "strategies",
    "trainer.states": "asked",
    "trainer.trainer": "trainer",
    **{f"utilities.{name}": "utilities" for name in (*_OF_UTILITIES, *_OLDER)},
}
_KEPT = "a list of self, to which the steps append"
# Hooks of Lightning 1, of modules and callbacks.
HOOKS = {
    "training_epoch_end": f"on_train_epoch_end, and {_KEPT}",
    "validation_epoch_end": f"on_validation_epoch_end, and {_KEPT}",
    "test_epoch_end": f"on_test_epoch_end, and {_KEPT}",
    **{f"{phase}_step_end": f"the end of {phase}_step" for phase in ("training", "validation", "test")},
    **{f"on_batch_{end}": f"on_train_batch_{end}" for end in ("start", "end")},
    **{f"on_epoch_{end}": f"on_train_epoch_{end}, and on_validation_epoch_{end} if it is meant" for end in ("start", "end")},
    **dict.fromkeys(("on_pretrain_routine_start", "on_pretrain_routine_end"), "on_fit_start"),
    **dict.fromkeys(("on_before_accelerator_backend_setup", "on_init_start", "on_init_end"), "setup"),
    "configure_sharded_model": "configure_model",
    "on_keyboard_interrupt": "on_exception",
}
ARGPARSE = Missing(
    "add_argparse_args and from_argparse_args of Lightning 1 are not part of echelon.compat. Instead: parser.add_argument for "
    "the options that you use, and Trainer(max_epochs=args.max_epochs, ...)."
)
# Attributes of a Trainer.
TRAINER = {
    "fit_loop": _LOOPS,
    "predict_loop": _LOOPS,
    "test_loop": _LOOPS,
    "validate_loop": _LOOPS,
    "init_module": "configure_model, which builds layers where they are trained",
    "precision_plugin": "trainer.precision",
    "profiler": _PROFILER,
    "progress_bar_callback": _BAR,
    "scaler": "nothing: the unit has it, and its state is saved",
    "tune": _SEARCH,
    "tuner": _SEARCH,
}


def missing_of_trainer(name: str) -> AttributeError:
    """What a Trainer raises for an attribute."""
    if name in TRAINER:
        return AttributeError(f"Trainer.{name} is not part of echelon.compat. Instead: {TRAINER[name]}.")
    return AttributeError(f"'Trainer' object has no attribute {name!r}")


def instead(module: str, name: str = "") -> str | None:
    """What to take in place of a name of any module, or of a module, below `lightning`; None: it is in no table."""
    modules = FABRIC | {f"pytorch.{each}": told for each, told in MODULES.items()}
    told = _named(name) if name else modules.get(module)
    return f"{told}." if told is not None else None


def _named(name: str) -> str | None:
    tables = (OTHERS, CALLBACKS, LOGGERS, STRATEGIES, UTILITIES, NAMES)
    return next((table[name] for table in tables if name in table), None)


def missing(module: str, name: str, successors: Mapping[str, str]) -> Any:
    """For a module's `__getattr__`: what another module here has, as many of Lightning's import each other's names; or what says
    by which other thing it is replaced.
    """
    for home in HOMES:
        if name in getattr(sys.modules.get(f"{__package__}{home}"), "__all__", ()):
            return getattr(sys.modules[f"{__package__}{home}"], name)
    if (told := successors.get(name) or _named(name)) is not None:
        return Missing(f"lightning.{name} is not part of echelon.compat. Instead: {told}.")
    if name.startswith("_") and name.endswith("_AVAILABLE"):  # such as _TORCHVISION_AVAILABLE
        return importlib.util.find_spec(name.strip("_").removesuffix("_AVAILABLE").lower()) is not None
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


HOMES = (
    "",
    ".callbacks",
    ".loggers",
    ".strategies",
    ".utilities",
    ".utilities.types",
    ".utilities.exceptions",
    ".asked",
    ".hparams",
    ".hooks",
    ".optimizers",
)


def complete(modules: Iterable[ModuleType]) -> None:
    """See to it that modules without a `__getattr__` of their own answer for Lightning's names as the others do."""
    for module in modules:
        vars(module).setdefault("__getattr__", partial(missing, module.__name__, successors={}))
