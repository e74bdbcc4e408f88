"""A configuration of DeepSpeed that says no more than a stage of ZeRO is a strategy; any other is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.common.errors import UsageError

__all__ = ["strategy_of"]

# How fast it is or what is printed, and not what is trained.
_FREE = {"steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
_OFFLOADS = ("offload_optimizer", "offload_param")


def strategy_of(given: Any, args: Any) -> str | None:
    """
    Args:
        given: the configuration, or its file.
        args: TrainingArguments, with which its values must agree, unless they are "auto".
    Raises:
        UsageError: on every rank: it asks for something else, or cannot be read.
    """
    if not given:
        return None
    try:
        config = dict(given) if isinstance(given, Mapping) else json.loads(Path(given).read_text())
        zero = dict(config.pop("zero_optimization", {}))
        stage = zero.get("stage", 0)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _refused(f"deepspeed must be a configuration of DeepSpeed or a file of JSON, got {given!r} ({error})") from None
    if args.strategy is not None:
        raise _refused(f"strategy={args.strategy!r} is given, too")
    if stage not in (0, 1, 2, 3):
        raise _refused(f"zero_optimization.stage is {stage!r}")
    for name in _OFFLOADS:
        if (zero.get(name) or {}).get("device", "none") != "none":
            raise _refused(f"it has zero_optimization.{name}", "strategy=FSDPStrategy(cpu_offload=True), or leave it out")
    rate = args.gradient_accumulation_steps
    same = {
        "gradient_accumulation_steps": rate,
        "gradient_clipping": args.max_grad_norm,
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "train_batch_size": args.per_device_train_batch_size * rate * args.world_size,
    }
    on = {"fp16": args.fp16, "bf16": args.bf16, "bfloat16": args.bf16}
    for name, value in config.items():
        if name in same:
            fits = value in ("auto", same[name])
        elif name in on:
            fits = value.get("enabled", False) in ("auto", on[name])
        elif name == "optimizer":
            fits = value.get("type") in ("Adam", "AdamW") and set(value.get("params", {}).values()) <= {"auto"}
        else:
            fits = name in _FREE
        if not fits:
            told = f", where the arguments have {(same | on)[name]!r}" if name in same | on else ""
            raise _refused(f"it has {name}={value!r}{told}")
    return ("ddp", "zero1", "zero2", "zero3")[stage]


def _refused(why: str, instead: str = 'strategy="zero1", "zero2" or "zero3", and the other values as arguments') -> UsageError:
    return UsageError(f"TrainingArguments(deepspeed=...): {why}. Instead: {instead}.")
