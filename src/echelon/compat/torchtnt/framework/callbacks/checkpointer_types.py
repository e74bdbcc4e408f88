"""torchtnt.framework.callbacks.checkpointer_types."""

from dataclasses import dataclass
from typing import Any

from echelon.loop.checkpointing import options

__all__ = ["KnobOptions", "RestoreOptions"]


class RestoreOptions(options.RestoreOptions):
    """As `echelon.callbacks.RestoreOptions`.

    Args:
        init_optim_states: without effect: an optimizer's state is made wherever it is needed.
        ours: options that TorchTNT has not.
    """

    def __init__(
        self,
        restore_modules: bool = True,
        restore_train_progress: bool = True,
        restore_eval_progress: bool = True,
        restore_predict_progress: bool = True,
        restore_optimizers: bool = True,
        restore_lr_schedulers: bool = True,
        strict: bool = True,
        init_optim_states: bool = True,
        **ours: Any,
    ) -> None:
        super().__init__(
            restore_modules,
            restore_train_progress,
            restore_eval_progress,
            restore_predict_progress,
            restore_optimizers,
            restore_lr_schedulers,
            strict,
            **ours,
        )


@dataclass
class KnobOptions:
    """Settings of TorchTNT's storage, which is not used here: accepted, and without effect."""

    max_per_rank_io_concurrency: int | None = None
    enable_storage_optimization: bool = True
    use_collectives: bool = True
