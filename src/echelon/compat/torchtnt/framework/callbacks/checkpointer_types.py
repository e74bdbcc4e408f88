"""torchtnt.framework.callbacks.checkpointer_types."""

from dataclasses import dataclass

from echelon.loop.checkpointing.options import RestoreOptions

__all__ = ["KnobOptions", "RestoreOptions"]


@dataclass
class KnobOptions:
    """Settings of TorchTNT's storage, which is not used here: accepted, and without effect."""

    max_per_rank_io_concurrency: int | None = None
    enable_storage_optimization: bool = True
    use_collectives: bool = True
