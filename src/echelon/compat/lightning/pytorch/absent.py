"""Lightning's names that compat lacks: they can be imported, and using one is an error that says what to use instead."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from echelon.compat.names import Missing, nearest, refusing

__all__ = [
    "ALIASES",
    "ARGPARSE",
    "DISPLAYS",
    "ENVIRONMENTS",
    "FABRIC",
    "HOMES",
    "HOOKS",
    "MODULES",
    "NAMES",
    "PROFILER",
    "TRAINER",
    "Accepted",
    "absent",
    "accepted",
    "instead",
]

_FABRIC = "echelon.init_from_env() and echelon.layouts.prepare_module, or a TrainUnit"
_BAR = "the progress that `echelon run` and Trainer show; Trainer(enable_progress_bar=False) is understood"
_SPIKES = "EarlyStopping(check_finite=True); a run of losses that are inf or nan ends by itself"
_SUMMARY = "print(echelon.module_summary(module, x)), with an example input x"
_USE = "memory, utilization and throughput in metrics.jsonl, and `echelon report`"
# Callbacks that only show something, and what echelon shows instead. They are accepted without effect.
DISPLAYS = {
    **dict.fromkeys(("ProgressBar", "RichProgressBar", "RichProgressBarTheme", "TQDMProgressBar"), _BAR),
    **dict.fromkeys(("ModelSummary", "RichModelSummary"), _SUMMARY),
    **dict.fromkeys(("DeviceStatsMonitor", "GPUStatsMonitor", "ThroughputMonitor", "XLAStatsMonitor"), _USE),
}
# Values of `plugins=` that are accepted without effect: echelon reads the variables of these environments anyway.
ENVIRONMENTS = dict.fromkeys(
    ("LightningEnvironment", "MPIEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"),
    "the variables of torchrun, Slurm and Open MPI, which are read by themselves",
)
_UNION = "echelon.Mixture, or torch.utils.data.StackDataset"
PROFILER = "echelon.callbacks.PyTorchProfiler among the Trainer's callbacks; `echelon report` shows where time goes"
_LOOPS = "hooks of a Callback, and trainer.current_epoch, trainer.global_step"
_OPTIONS = "Trainer(strategy=...) by name, or one of echelon's, such as FSDPStrategy(...)"

_INSIDE = "nothing: it is a part of Lightning's own inside. docs/moving/lightning.md has what programs use"

# Absent names, in any module.
NAMES = {
    "Fabric": _FABRIC,
    # callbacks
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
    # strategies
    "DataParallelStrategy": "strategy 'ddp'",
    "DeepSpeedStrategy": "strategy 'zero1', 'zero2' or 'zero3'",
    "ModelParallelStrategy": "echelon.TPStrategy(plan, size=...)",
    "ParallelStrategy": _OPTIONS,
    "SingleDeviceStrategy": "Trainer(devices=1)",
    **dict.fromkeys(("Strategy", "StrategyRegistry"), _OPTIONS),
    # loggers
    "LitLogger": "a subclass of Logger that calls litlogger",
    "CometLogger": "a subclass of Logger that calls comet_ml",
    "NeptuneLogger": "a subclass of Logger that calls neptune",
    # the rest
    "CombinedLoader": _UNION,
    **dict.fromkeys(("DummyLogger", "LightningLoggerBase"), "a subclass of Logger"),
    "get_init_args": "save_hyperparameters and hparams",
    "Tqdm": "tqdm.auto.tqdm",
    "apply_to_collection": "torch.utils._pytree.tree_map_only, or lightning_utilities.core.apply_func",
    "disable_possible_user_warnings": 'warnings.filterwarnings("ignore", category=UserWarning)',
    "get_torchvision_model": "torchvision.models.get_model",
    "is_param_in_hook_signature": "inspect.signature",
}

# Modules that are absent, with all modules below them.
_SEARCH = "a learning rate of your own; `echelon run --find-batch` finds the largest micro-batch of your global batch"
_ACCELERATORS = "Trainer(accelerator='cpu') or 'gpu', and torch.cuda"
_CLI = "argparse: `echelon run train.py --lr 0.1` passes a script's own arguments on"
_PLUGINS = "Trainer(precision=...), and the options of a strategy"
MODULES = {
    "accelerators": _ACCELERATORS,
    "cli": _CLI,
    "demos": "a small LightningModule of your own",
    "lite": _FABRIC,
    "loops": _LOOPS,
    "metrics": "torchmetrics",
    "overrides": _INSIDE,
    "plugins": _PLUGINS,
    "plugins.environments": "nothing: torchrun's, Slurm's and Open MPI's variables are read by themselves",
    "plugins.io": "nothing: checkpoints are folders, written whole",
    "plugins.training_type": _PLUGINS,
    "profilers": PROFILER,
    "serve": _INSIDE,
    "trainer.connectors": _INSIDE,
    "tuner": _SEARCH,
    "utilities.argparse": "argparse",
    "utilities.cli": _CLI,
    "utilities.combined_loader": _UNION,
    "utilities.compile": "`self.net.compile()` in configure_model",
    "utilities.deepspeed": "strategy 'zero1', 'zero2' or 'zero3', whose checkpoints are read on any number of ranks",
    "utilities.model_summary": _SUMMARY,
}
FABRIC = {
    "fabric": _FABRIC,
    "fabric.accelerators": _ACCELERATORS,
    "fabric.plugins": _PLUGINS,
    "fabric.strategies": _OPTIONS,
}
# A module of compat -> the modules of Lightning that it stands for.
_SAME = {
    "": "core core.datamodule core.hooks core.lightning core.module core.saving",
    "callbacks": "batch_size_finder callback checkpoint device_stats_monitor early_stopping finetuning "
    "gradient_accumulation_scheduler lambda_function lr_finder lr_monitor model_checkpoint model_summary "
    "on_exception_checkpoint prediction_writer progress progress.base progress.progress_bar "
    "progress.rich_progress progress.tqdm_progress pruning rich_model_summary spike stochastic_weight_avg "
    "throughput_monitor timer weight_averaging",
    "hparams": "core.mixins core.mixins.hparams_mixin",
    "loggers": "base comet csv_logs litlogger logger mlflow neptune tensorboard wandb",
    "optimizers": "core.optimizer",
    "strategies": "ddp deepspeed fsdp model_parallel parallel single_device strategy",
    "trainer": "states trainer",
    "utilities": "apply_func cloud_io data distributed enums exceptions grads imports memory model_helpers parameter_tying "
    "parsing rank_zero seed signature_utils types warnings xla_device",
}
_PACKAGES = ("callbacks", "loggers", "strategies", "trainer", "utilities")
ALIASES = {f"{same}.{name}" if same in _PACKAGES else name: same for same, names in _SAME.items() for name in names.split()}
_KEPT = "a list of self, to which the steps append"
# Hooks of modules and callbacks that nothing calls: Lightning 1's, and those that set a module's mode, which the loop does.
HOOKS = {
    **{f"on_{phase}_model_eval": f"on_{phase}_start, in which it is in eval mode" for phase in ("validation", "test", "predict")},
    **{f"on_{phase}_model_train": "on_train_batch_start, before which it is in train mode" for phase in ("validation", "test")},
    "on_validation_model_zero_grad": "on_validation_start",
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
    "profiler": PROFILER,
    "progress_bar_callback": _BAR,
    "scaler": "nothing: the unit has it, and its state is saved",
    "strategy": "torch.distributed.barrier and broadcast_object_list, and trainer.world_size",
    "tune": _SEARCH,
    "tuner": _SEARCH,
}


class Accepted:
    """Accepts any arguments, without effect. Hooks of a subclass run.

    Attributes:
        in_place: what echelon has instead.
    """

    in_place = ""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__}.{name}: it has no effect here. Instead: {self.in_place}.")


def accepted(names: Mapping[str, str], module: str, *bases: type) -> dict[str, type]:
    """Classes of these names for a module: name -> what echelon has instead."""
    made = {"__module__": module, "__doc__": Accepted.__doc__}
    return {name: type(name, (Accepted, *bases), {**made, "in_place": text}) for name, text in names.items()}


def instead(module: str, name: str = "") -> str | None:
    """What to use instead of a name in any module below `lightning`, or instead of a module; None if it is in no table."""
    if name:
        remedy = NAMES.get(name)
    else:
        remedy = nearest(FABRIC | {f"pytorch.{each}": remedy for each, remedy in MODULES.items()}, module)
    return f"{remedy}." if remedy is not None else None


HOMES = (
    "",
    ".callbacks",
    ".loggers",
    ".strategies",
    ".utilities",
    ".states",
    ".hparams",
    ".hooks",
    ".optimizers",
)


_refusing = refusing({name: (f"lightning.{name}", f"{told}.") for name, told in NAMES.items()})


def absent(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module. It finds names of other modules, since many of Lightning's import each other's; any
    other name is absent, and says what to use instead.
    """
    refuse = _refusing(module)

    def getattr_(name: str) -> Any:
        for home in HOMES:
            if name in getattr(sys.modules.get(f"{__package__}{home}"), "__all__", ()):
                return getattr(sys.modules[f"{__package__}{home}"], name)
        if name.startswith("_") and name.endswith("_AVAILABLE"):  # such as _TORCHVISION_AVAILABLE
            return importlib.util.find_spec(name.strip("_").removesuffix("_AVAILABLE").lower()) is not None
        return refuse(name)

    return getattr_
