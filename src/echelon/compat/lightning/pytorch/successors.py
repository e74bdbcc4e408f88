"""Lightning's names that are not here: they can be imported, and using one is an error that says what follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.compat.names import Missing

__all__ = [
    "ALIASES",
    "CALLBACKS",
    "FABRIC",
    "LOGGERS",
    "MODULES",
    "NAMES",
    "STRATEGIES",
    "TRAINER",
    "UTILITIES",
    "missing",
    "missing_of_trainer",
]

NAMES = {
    "Fabric": "echelon.init_from_env() and echelon.prepare_module, or a TrainUnit",
}
_BAR = "the progress that `echelon run` and Trainer show; Trainer(enable_progress_bar=False) is understood"
CALLBACKS = {
    "BackboneFinetuning": "requires_grad_ in on_train_epoch_start, with the optimizer holding all parameters from the start",
    "BaseFinetuning": "requires_grad_ in on_train_epoch_start, with the optimizer holding all parameters from the start",
    "BasePredictionWriter": "what trainer.predict returns, or on_predict_batch_end",
    "BatchSizeFinder": "a batch size that fits; there is no search for one",
    "DeviceStatsMonitor": "the memory and utilization in metrics.jsonl",
    "GradientAccumulationScheduler": "Trainer(accumulate_grad_batches=...)",
    "LearningRateFinder": "a learning rate of your own; there is no search for one",
    "ModelPruning": "torch.nn.utils.prune, in hooks of your own",
    "ModelSummary": "echelon.compat.torchtnt.utils.module_summary",
    "OnExceptionCheckpoint": "ModelCheckpoint(every_n_train_steps=...)",
    "ProgressBar": _BAR,
    "RichModelSummary": "echelon.compat.torchtnt.utils.module_summary",
    "RichProgressBar": _BAR,
    "StochasticWeightAveraging": "AutoUnit(swa_params=SWAParams(...))",
    "TQDMProgressBar": _BAR,
    "ThroughputMonitor": "the throughput in metrics.jsonl",
    "Timer": "`echelon run --stop-after 55m`",
    "WeightAveraging": "AutoUnit(swa_params=SWAParams(...))",
    "EMAWeightAveraging": "AutoUnit(swa_params=SWAParams(...))",
}
_UNION = "echelon.Mixture, or torch.utils.data.StackDataset"
_SUMMARY = "echelon.compat.torchtnt.utils.module_summary"
_PROFILER = "echelon.loop.callbacks.PyTorchProfiler among the Trainer's callbacks; `echelon report` shows where time goes"
_LOOPS = "hooks of a Callback, and trainer.current_epoch, trainer.global_step"
UTILITIES = {
    "CombinedLoader": _UNION,
    "measure_flops": "echelon.compat.torchtnt.utils.flops.FlopTensorDispatchMode",
}
_OPTIONS = "Trainer(strategy=...) by name, or one of echelon's, such as FSDPStrategy(...)"
STRATEGIES = {
    "DeepSpeedStrategy": "strategy 'zero1', 'zero2' or 'zero3'",
    "ModelParallelStrategy": "echelon.TPStrategy(plan, size=...)",
    "ParallelStrategy": _OPTIONS,
    "SingleDeviceStrategy": "Trainer(devices=1)",
    "Strategy": _OPTIONS,
}
LOGGERS = {
    "LitLogger": "a subclass of Logger that calls litlogger",
    "CometLogger": "a subclass of Logger that calls comet_ml",
    "MLFlowLogger": "a subclass of Logger that calls mlflow",
    "NeptuneLogger": "a subclass of Logger that calls neptune",
    "WandbLogger": "a subclass of Logger that calls wandb",
}

# Modules of which nothing is here.
_SEARCH = "a learning rate and a batch size of your own; there is no search for them"
_FABRIC = NAMES["Fabric"]
_SMALL = "a small LightningModule of your own"
_ACCELERATORS = "Trainer(accelerator='cpu') or 'gpu', and torch.cuda"
_PLUGINS = "Trainer(precision=...), and the options of a strategy"
MODULES = {
    "accelerators": _ACCELERATORS,
    "callbacks.progress": _BAR,
    "callbacks.progress.progress_bar": _BAR,
    "callbacks.progress.rich_progress": _BAR,
    "callbacks.progress.tqdm_progress": _BAR,
    "cli": "argparse: `echelon run train.py --lr 0.1` passes a script's own arguments on",
    "demos": _SMALL,
    "demos.boring_classes": _SMALL,
    "loops": _LOOPS,
    "plugins": _PLUGINS,
    "plugins.environments": "nothing: torchrun's, Slurm's and Open MPI's variables are read by themselves",
    "plugins.io": "nothing: checkpoints are folders, written whole",
    "plugins.precision": _PLUGINS,
    "profilers": _PROFILER,
    "tuner": _SEARCH,
    "tuner.tuning": _SEARCH,
    "utilities.combined_loader": _UNION,
    "utilities.model_summary": _SUMMARY,
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
ALIASES = {
    "callbacks.callback": "callbacks",
    "callbacks.lambda_function": "callbacks",
    "callbacks.lr_monitor": "callbacks",
    "core": "",
    "core.datamodule": "",
    "core.module": "",
    "loggers.csv_logs": "loggers",
    "loggers.logger": "loggers",
    "loggers.tensorboard": "loggers",
}
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


def missing(module: str, name: str, successors: Mapping[str, str]) -> Any:
    """For a module's `__getattr__`."""
    if name in successors:
        return Missing(f"lightning.{name} is not part of echelon.compat. Instead: {successors[name]}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
