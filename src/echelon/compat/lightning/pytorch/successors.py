"""Lightning's names that are not here: they can be imported, and using one is an error that says what follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echelon.compat.names import Missing

__all__ = ["CALLBACKS", "LOGGERS", "NAMES", "missing"]

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
LOGGERS = {
    "CometLogger": "a subclass of Logger that calls comet_ml",
    "MLFlowLogger": "a subclass of Logger that calls mlflow",
    "NeptuneLogger": "a subclass of Logger that calls neptune",
    "WandbLogger": "a subclass of Logger that calls wandb",
}


def missing(module: str, name: str, successors: Mapping[str, str]) -> Any:
    """For a module's `__getattr__`."""
    if name in successors:
        return Missing(f"lightning.{name} is not part of echelon.compat. Instead: {successors[name]}.")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
