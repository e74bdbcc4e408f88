"""Older names of layouts with options: each makes the value that has taken its place, and says which."""

from __future__ import annotations

from typing import Any, TypeVar

from echelon.common.errors import LayoutError
from echelon.common.older_words import is_now
from echelon.parallel.composed import Layout
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.fsdp.fsdp import FSDPStrategy
from echelon.parallel.strategy import Strategy

__all__ = ["HSDPStrategy", "Parallel", "TPStrategy", "ZeROStrategy"]

L = TypeVar("L", bound=Strategy)


def Parallel(**options: Any) -> Layout:
    """`Layout(...)`."""
    return _told("Parallel", Layout(**options))


def TPStrategy(
    plan: Any = None, size: int | None = None, dp_replicate: int = 1, sequence_parallel: bool = False, fsdp: Any = None
) -> Layout:
    """`Layout(tp=size, ...)`; over all ranks without a size."""
    tp = -1 if size is None else size
    options: dict[str, Any] = {"plan": plan, "sequence_parallel": sequence_parallel, "fsdp": fsdp}
    return _told("TPStrategy", Layout(tp=tp, dp_replicate=dp_replicate, **options))


def HSDPStrategy(shard_size: int | None = None, replicate_size: int | None = None, **options: Any) -> Strategy:
    """`Layout(dp_replicate=..., dp_shard=..., fsdp=FSDPStrategy(...))`, or FSDPStrategy's own sizes."""
    if shard_size is None and replicate_size is None:
        return _told("HSDPStrategy", FSDPStrategy(sharding_strategy="HYBRID_SHARD", **options))
    copies = -1 if replicate_size is None else replicate_size
    fsdp = FSDPStrategy(**options)
    return _told("HSDPStrategy", Layout(dp_replicate=copies, dp_shard=shard_size, fsdp=fsdp))


def ZeROStrategy(stage: int = 1, cpu_offload: bool = False, options: Any = None) -> Strategy:
    """`DDPStrategy(shard_optimizer=True)` for stage 1, FSDPStrategy for 2 and 3.

    Raises:
        UsageError: another stage; options of another layout; offload in stage 1.
    """
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise LayoutError(
            f"stage must be 1 (optimizer state), 2 (also gradients) or 3 (also parameters), got {stage!r}. "
            "Stage 0 is layout 'ddp'."
        )
    kind = DDPStrategy if stage == 1 else FSDPStrategy
    if options is not None and not isinstance(options, kind):
        raise LayoutError(f"options must be {kind.__name__}(...) for stage {stage}, got {type(options).__name__}.")
    if stage == 1 and cpu_offload:
        raise LayoutError(
            "cpu_offload must be False for stage 1, whose parameters stay on the device, got True. Use stage 2 or 3."
        )
    made = options or kind()
    if isinstance(made, DDPStrategy):
        return _told("ZeROStrategy", made.but(shard_optimizer=True))
    if made.reshard_after_forward is not None or made.sharding_strategy is not None:
        raise LayoutError(f"reshard_after_forward must be left out of options, since stage {stage} decides it.")
    reshard = None if stage == 3 else False
    return _told(
        "ZeROStrategy", FSDPStrategy.but(made, reshard_after_forward=reshard, cpu_offload=cpu_offload or made.cpu_offload)
    )


def _told(name: str, made: L) -> L:
    is_now(f"{name}(...)", repr(made))
    return made
