"""torchtnt.framework.callbacks.checkpointer_types."""

from dataclasses import dataclass

from echelon.loop.checkpointing import options

__all__ = ["KnobOptions", "RestoreOptions"]


@dataclass(frozen=True)
class RestoreOptions(options.RestoreOptions):
    """As `echelon.callbacks.RestoreOptions`.

    Args:
        init_optim_states: without effect: an optimizer's state is made wherever it is needed.
    """

    init_optim_states: bool = True


@dataclass
class KnobOptions:
    """Settings of TorchTNT's storage, which is not used here: accepted, and without effect."""

    max_per_rank_io_concurrency: int | None = None
    enable_storage_optimization: bool = True
    use_collectives: bool = True
