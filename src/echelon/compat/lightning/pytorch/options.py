"""What Lightning's users write to a Trainer, in echelon's words; with a hint where the spelling is an old one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from echelon.contracts.errors import UsageError
from echelon.parallel import STRATEGIES
from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.strategy import Strategy

__all__ = ["batches", "check_others", "devices_of", "limits", "precision_of", "strategy_of", "without_strategy"]

logger = logging.getLogger(__name__)

_STRATEGIES = {
    "ddp_spawn": "ddp",
    "ddp_fork": "ddp",
    "ddp_notebook": "ddp",
    "ddp_sharded": "zero2",
    "fsdp_native": "fsdp",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_3": "zero3",
    "single_device": "noop",
}
_PRECISIONS = {
    **dict.fromkeys(("32", "32-true"), "fp32"),
    **dict.fromkeys(("16", "16-mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
}
# Lightning's, which change what is shown or how fast it runs, and not what is trained.
_WITHOUT_EFFECT = {
    "barebones",
    "benchmark",
    "enable_model_summary",
    "enable_progress_bar",
    "inference_mode",
    "log_every_n_steps",
    "logger",
    "num_sanity_val_steps",
    "profiler",
    "progress_bar_refresh_rate",
    "use_distributed_sampler",
    "weights_summary",
}
# Lightning's others, and where what they mean is to be had.
_ELSEWHERE = {
    "auto_lr_find": "there is no search for a learning rate",
    "auto_scale_batch_size": "there is no search for a batch size",
    "checkpoint_callback": "write enable_checkpointing",
    "detect_anomaly": "it is the unit's: AutoUnit(detect_anomaly=True)",
    "deterministic": "it is the unit's: AutoUnit(deterministic='bitwise'), or `echelon run --bitwise`",
    "max_time": "it is the launcher's: `echelon run --stop-after 55m`",
    "min_epochs": "nothing stops training early unless a callback does",
    "min_steps": "nothing stops training early unless a callback does",
    "num_processes": "write devices",
    "overfit_batches": "write limit_train_batches, with a loader that does not shuffle",
    "plugins": "what the strategy does are its options, such as FSDPStrategy(...)",
    "reload_dataloaders_every_n_epochs": "a loader is iterated again in every epoch",
    "resume_from_checkpoint": "write fit(..., ckpt_path=...)",
    "stochastic_weight_avg": "it is the unit's: AutoUnit(swa_params=SWAParams(...))",
    "sync_batchnorm": "it is the strategy's: strategy=DDPStrategy(sync_batchnorm=True)",
    "terminate_on_nan": "it is the unit's: AutoUnit(detect_anomaly=True)",
    "track_grad_norm": "AutoUnit(clip_grad_norm=inf) measures it",
    "weights_save_path": "write default_root_dir",
}


def check_others(others: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: an option that is not known, and may have meant something.
    """
    unknown = sorted(set(others) - _WITHOUT_EFFECT)
    if unknown and unknown[0] in _ELSEWHERE:
        raise UsageError(f"Trainer({unknown[0]}={others[unknown[0]]!r}): {_ELSEWHERE[unknown[0]]}.")
    if unknown:
        raise UsageError(
            f"Trainer({unknown[0]}={others[unknown[0]]!r}): not known here. What concerns the unit, such as swa_params, is its "
            "constructor's; what concerns the loop is fit()'s, or a callback."
        )
    if others:
        logger.warning("Trainer(%s=...): has no effect here", "=..., ".join(sorted(others)))


def without_strategy(accelerator: Any, strategy: Any) -> tuple[Any, Any]:
    """(accelerator, strategy) where the accelerator is one of Lightning's older strategies, such as "ddp_spawn"."""
    if accelerator not in _STRATEGIES:
        return accelerator, strategy
    if strategy != "auto":
        raise UsageError(f"accelerator {accelerator!r} is a strategy, and strategy {strategy!r} is given too. Give one.")
    logger.warning("Trainer(accelerator=%r) is an old spelling: write strategy=%r", accelerator, accelerator)
    return "auto", accelerator


def strategy_of(given: Strategy | str | None) -> Strategy | str | None:
    """Lightning's names of strategies that have another one here."""
    if given is None or isinstance(given, Strategy) or given in STRATEGIES or given == "auto":
        return given
    name = str(given)
    for suffix in ("_find_unused_parameters_true", "_find_unused_parameters_false"):
        if name.endswith(suffix) and name.startswith("ddp"):
            return DDPStrategy(find_unused_parameters=suffix.endswith("true"))
    if name in _STRATEGIES:
        if not name.startswith("ddp_") or name == "ddp_sharded":
            logger.warning("strategy %r: here it is %r", name, _STRATEGIES[name])
        return _STRATEGIES[name]
    return given  # which the Trainer refuses, and says what there is


def precision_of(given: Any) -> Any:
    """
    Raises:
        UsageError: parameters in half or double precision, which are the module's own business.
    """
    if isinstance(given, (int, str)) and not isinstance(given, bool):
        name = str(given)
        if name in ("64", "64-true", "16-true", "bf16-true"):
            kind = {"64": "torch.float64", "16": "torch.float16", "bf": "torch.bfloat16"}[name[:2]]
            raise UsageError(f"precision {given!r}: build the module in that type, module.to({kind}), and leave precision out.")
        return _PRECISIONS.get(name, given)
    return given


def devices_of(given: Any) -> Any:
    """Lightning's -1 is all, "2" is two and "0,2" are these."""
    if given in (-1, "-1"):
        return "auto"
    if not isinstance(given, str) or given == "auto":
        return given
    parts = [part.strip() for part in given.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        return given  # which the Trainer refuses
    numbers = [int(part) for part in parts]
    return numbers if "," in given else (numbers[0] if numbers else "auto")


def batches(name: str, given: Any) -> int | None:
    """A number of batches; None and Lightning's 1.0 are all of them.

    Raises:
        UsageError: a part of an epoch, or no number.
    """
    if given is None or (isinstance(given, float) and given == 1.0):
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise UsageError(f"{name} {given!r}: a whole number of batches, or None for all.")
    return given


def limits(fast_dev_run: bool | int, **given: Any) -> dict[str, int | None]:
    """Batches of an epoch, by phase."""
    if isinstance(fast_dev_run, int) and fast_dev_run >= 0:
        checked = {name: batches(f"limit_{name}_batches", value) for name, value in given.items()}
        return dict.fromkeys(given, int(fast_dev_run)) if fast_dev_run else checked
    raise UsageError(f"fast_dev_run {fast_dev_run!r}: True, or a number of batches.")
