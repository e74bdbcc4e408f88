"""What Lightning's users write to a Trainer, in this library's words; with a hint where the spelling is an old one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.contracts.errors import UsageError
from echelon.contracts.rank import RankInfo
from echelon.parallel import STRATEGIES
from echelon.parallel.ddp import DDPStrategy
from echelon.parallel.strategy import Strategy

__all__ = ["check_others", "devices_of", "is_launched", "precision_of", "strategy_of", "updates_to_steps", "without_gpus_alias"]

logger = logging.getLogger(__name__)

_ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
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
    "detect_anomaly",
    "enable_model_summary",
    "enable_progress_bar",
    "fast_dev_run",
    "inference_mode",
    "log_every_n_steps",
    "logger",
    "num_sanity_val_steps",
    "profiler",
    "progress_bar_refresh_rate",
    "use_distributed_sampler",
    "weights_summary",
} - {"fast_dev_run", "detect_anomaly"}


def check_others(others: Mapping[str, Any]) -> None:
    """
    Raises:
        UsageError: an option that is not known, and may have meant something.
    """
    unknown = sorted(set(others) - _WITHOUT_EFFECT)
    if unknown:
        raise UsageError(
            f"Trainer({unknown[0]}={others[unknown[0]]!r}): not known here. What concerns the unit, such as swa_params, is its "
            "constructor's; what concerns the loop is fit()'s, or a callback."
        )
    if others:
        logger.warning("Trainer(%s=...): has no effect here", "=..., ".join(sorted(others)))


def without_gpus_alias(accelerator: Any, strategy: Any, devices: Any, gpus: Any) -> tuple[Any, Any, Any]:
    """Lightning's spelling before 1.7, `Trainer(gpus=2, accelerator="ddp")`: the same as (accelerator, strategy, devices)."""
    if isinstance(accelerator, str) and accelerator not in _ACCELERATORS:
        if accelerator not in STRATEGIES and accelerator not in _STRATEGIES:
            raise UsageError(f"accelerator {accelerator!r}: known are {', '.join(map(repr, _ACCELERATORS))}.")
        if strategy != "auto":
            raise UsageError(f"accelerator {accelerator!r} is a strategy, and strategy {strategy!r} is given too. Give one.")
        logger.warning("Trainer(accelerator=%r) is an old spelling: write strategy=%r", accelerator, accelerator)
        accelerator, strategy = "auto", accelerator
    if gpus is not None:
        if devices != "auto":
            raise UsageError(f"gpus={gpus!r} and devices={devices!r}: give devices alone.")
        logger.warning("Trainer(gpus=%r) is an old spelling: write devices=%r", gpus, gpus)
        none = gpus in (0, "0", [])
        accelerator, devices = ("cpu", 1) if none else (accelerator, gpus)
    return accelerator, strategy, devices


def strategy_of(given: Strategy | str | None) -> Strategy | str | None:
    """ "auto" stays; None is no strategy.

    Raises:
        UsageError: an unknown name.
    """
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
    raise UsageError(
        f"strategy {given!r}: known are 'auto', {', '.join(map(repr, STRATEGIES))}, or a Strategy such as DDPStrategy(...)."
    )


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


def devices_of(devices: Any, accelerator: str) -> tuple[int, list[int] | None]:
    """(how many ranks, or 0 for one per GPU or else one; which devices).

    Raises:
        UsageError: neither a number nor a list of devices.
    """
    if isinstance(devices, str) and devices not in ("auto", ""):
        parts = [part for part in devices.split(",") if part.strip()]
        try:
            numbers = [int(part) for part in parts]
        except ValueError:
            numbers = []
        devices = numbers if "," in devices else (numbers[0] if numbers else None)
    if devices in ("auto", -1):
        return 0, None
    if isinstance(devices, Sequence) and not isinstance(devices, str) and devices and accelerator != "cpu":
        if len(set(devices)) < len(devices) or not all(isinstance(d, int) and d >= 0 for d in devices):
            raise UsageError(f"devices {devices!r}: different numbers of devices, such as [0, 2].")
        return len(devices), list(devices)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise UsageError(f"devices {devices!r}: a number of ranks, a list of GPUs such as [0, 2], or 'auto'.")
    return devices, None


def is_launched() -> bool:
    """Whether ranks run already, and this process is one of them."""
    return "RANK" in os.environ or RankInfo.from_env().world_size > 1


def updates_to_steps(updates: int, accumulation: int, loader: Any) -> int:
    """Micro-batches until so many updates are done; an epoch's last update may have fewer than the others."""
    try:
        epoch = len(loader)
    except TypeError:
        return updates * accumulation
    per_epoch = -(-epoch // accumulation)
    if not per_epoch:
        return updates * accumulation
    epochs, rest = divmod(updates, per_epoch)
    return epochs * epoch + min(rest * accumulation, epoch)


def visible(numbers: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for these of the devices that are visible now."""
    now = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    if now and max(numbers) >= len(now):
        raise UsageError(f"devices {list(numbers)}: CUDA_VISIBLE_DEVICES={','.join(now)} leaves {len(now)}.")
    return ",".join(now[n] if now else str(n) for n in numbers)


def has_gpus() -> int:
    """Counted without starting CUDA."""
    return len([p for p in Path("/dev").glob("nvidia*") if p.name.removeprefix("nvidia").isdigit()])
