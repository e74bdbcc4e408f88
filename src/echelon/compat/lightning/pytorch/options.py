"""Lightning's options of a Trainer, translated to echelon's; with a hint for old spellings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from echelon.common.errors import UsageError
from echelon.compat.lightning.pytorch.absent import PROFILER

__all__ = [
    "check_for_units",
    "checked_limits",
    "devices_of",
    "interval",
    "precision_of",
    "sorted_out",
]

logger = logging.getLogger(__name__)

_PRECISIONS = {
    **dict.fromkeys(("32", "32-true"), "fp32"),
    **dict.fromkeys(("16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
}
# Lightning's options that change what is shown or how fast it runs, not what is trained; for those that ask for something that is
# absent here, what there is instead.
_WITHOUT_EFFECT: dict[str, str] = {
    **dict.fromkeys(("enable_autolog_hparams", "enable_model_summary", "enable_progress_bar", "inference_mode"), ""),
    **dict.fromkeys(("progress_bar_refresh_rate", "weights_summary"), ""),
    "barebones": "logger=False, enable_checkpointing=False",
    "model_registry": "the folder of a ModelCheckpoint",
    "profiler": PROFILER,
}
_OLDER = {"replace_sampler_ddp": "use_distributed_sampler"}
# Options for a LightningModule: Lightning's default, and where an AutoUnit has it. None: nothing that a unit has.
_OF_MODULES: dict[str, tuple[Any, str | None]] = {
    "benchmark": (None, "write torch.backends.cudnn.benchmark = True"),
    "deterministic": (None, "it is the unit's: AutoUnit(deterministic='bitwise'), or `echelon run --bitwise`"),
    "log_every_n_steps": (50, None),
    "logger": (None, "a unit logs by state.log, or by a logger of echelon.loggers"),
    "min_epochs": (None, "nothing stops training early unless a callback does"),
    "min_steps": (None, "nothing stops training early unless a callback does"),
    "num_sanity_val_steps": (2, None),
    "overfit_batches": (0.0, "write limit_train_batches, with a loader that does not shuffle"),
    "sync_batchnorm": (False, "it is the strategy's: strategy=DDPStrategy(sync_batchnorm=True)"),
    "use_distributed_sampler": (True, "give an echelon.Loader, or a DataLoader with a DistributedSampler"),
}
# Lightning's other options, and what to use instead.
_ELSEWHERE = {
    "auto_lr_find": "there is no search for a learning rate",
    "auto_scale_batch_size": "it is the launcher's: `echelon run --find-batch`, which keeps the global batch",
    "checkpoint_callback": "write enable_checkpointing",
    "max_time": "it is the launcher's: `echelon run --stop-after 55m`",
    "num_processes": "write devices",
    "reload_dataloaders_every_n_epochs": "a loader is iterated again in every epoch",
    "resume_from_checkpoint": "write fit(..., ckpt_path=...)",
    "stochastic_weight_avg": "it is the unit's: AutoUnit(options=UnitOptions(averaging=SWAParams(...)))",
    "terminate_on_nan": "it is the unit's: AutoUnit(detect_anomaly=True)",
    "track_grad_norm": "AutoUnit(clip_grad_norm=inf) measures it",
    "weights_save_path": "write default_root_dir",
}


def sorted_out(others: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(options for runs of a LightningModule; those without effect that ask for something, with what there is instead).

    Raises:
        UsageError: an option is unknown, or is set elsewhere.
    """
    of_modules, asked = {name: default for name, (default, _) in _OF_MODULES.items()}, dict[str, str]()
    for given, value in others.items():
        name = _OLDER.get(given, given)
        if name in _OF_MODULES:
            by_default = value is None or (name == "logger" and value is True)
            of_modules[name] = _OF_MODULES[name][0] if by_default else value
        elif name in _WITHOUT_EFFECT:
            asked |= {f"{name}={value!r}": _WITHOUT_EFFECT[name]} if value and _WITHOUT_EFFECT[name] else {}
        elif name not in _ELSEWHERE:
            raise UsageError(
                f"Trainer({name}={value!r}): not known here. What concerns the unit, such as ema, is its "
                "constructor's; what concerns the loop is fit()'s, or a callback."
            )
        elif value:  # 0, None and False are what Lightning has without it
            raise UsageError(f"Trainer({name}={value!r}): {_ELSEWHERE[name]}.")
    if of_modules["deterministic"] not in (None, True, False, "warn"):
        raise UsageError(f"deterministic {of_modules['deterministic']!r}: True, False or 'warn'.")
    return of_modules, asked


def check_for_units(of_modules: Mapping[str, Any], limits: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: an option is set elsewhere for an AutoUnit, or not supported for it.
    """
    for name, (default, where) in _OF_MODULES.items():
        value = of_modules[name]
        if where is not None and value != default and (value or default):
            raise UsageError(f"Trainer({name}={value!r}): {where}.")
    for name, limit in limits.items():
        if isinstance(limit, float) and limit != 1.0:
            raise UsageError(f"{name} {limit!r}: a whole number of batches, or None for all.")


def precision_of(given: Any) -> Any:
    """
    Raises:
        UsageError: parameters in half or double precision: the module itself must be built so.
    """
    if isinstance(given, (int, str)) and not isinstance(given, bool):
        name = str(given)
        if name in ("64", "64-true", "16-true", "bf16-true"):
            kind = {"64": "torch.float64", "16": "torch.float16", "bf": "torch.bfloat16"}[name[:2]]
            raise UsageError(f"precision {given!r}: build the module in that type, module.to({kind}), and leave precision out.")
        return _PRECISIONS.get(name, given)
    return given


def devices_of(given: Any) -> Any:
    """Lightning's forms: -1 is all devices, "2" is two, "0,2" are devices 0 and 2."""
    if given in (-1, "-1"):
        return "auto"
    if not isinstance(given, str) or given == "auto":
        return given
    parts = [part.strip() for part in given.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        return given  # the Trainer refuses it
    numbers = [int(part) for part in parts]
    return numbers if "," in given else (numbers[0] if numbers else "auto")


def interval(given: Any) -> float | int:
    """`val_check_interval`: a number of batches, or as a float a part of an epoch.

    Raises:
        UsageError: it is neither.
    """
    batches = _batches("val_check_interval", given)
    if batches == 0:
        raise UsageError(f"val_check_interval {given!r}: 1 batch or more; for no evaluation give limit_val_batches=0.")
    return batches


def _batches(name: str, given: Any) -> float | int:
    """A number of batches; or as a float a part of them, by default all, 1.0."""
    given = 1.0 if given is None else given
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given < 0 or (isinstance(given, float) and given > 1):
        raise UsageError(f"{name} {given!r}: a whole number of batches, a part of them such as 0.1, or None for all.")
    return given


def checked_limits(fast_dev_run: bool | int, given: Mapping[str, Any]) -> dict[str, float | int]:
    """Batches of an epoch, by phase."""
    if isinstance(fast_dev_run, int) and fast_dev_run >= 0:
        checked = {name: _batches(f"limit_{name}_batches", value) for name, value in given.items()}
        return dict.fromkeys(given, int(fast_dev_run)) if fast_dev_run else checked
    raise UsageError(f"fast_dev_run {fast_dev_run!r}: True, or a number of batches.")
