"""Callbacks: code that acts on a run between the steps of a unit. To watch only, write a sink of events instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.common.arguments import check_hooks

if TYPE_CHECKING:
    from echelon.loop.state import State
    from echelon.loop.unit import Unit

__all__ = ["Callback"]


class Callback:
    """Override the hooks you need; one that is not overridden costs nothing.

    Hooks run on every rank, in the order of the list of callbacks, after the unit's own hook of that name. Put work for rank 0
    only inside a condition on the rank, but never a collective. A callback's attributes are not part of a checkpoint; keep state
    that a resumed run needs in the unit. A callback with `state_dict` and `load_state_dict` is saved if it is an attribute of the
    unit, too.

    Attributes:
        may_stop: whether a hook of a training step may call `state.stop()`. If so, several ranks wait for one another after each
            step, and all stop after the step that called it. With False they do not wait, and a stop comes one step later.
        saves: True if it leaves a checkpoint at the end of training.
        meets: True if some of its hooks are collective. All ranks must then have it; otherwise training is refused.
        is_of_unit: True if its hooks are written by the unit's author, such as a LightningModule's.
        meets_in_steps: True if its step hooks of an evaluation, prediction or test are collective. All ranks must then have
            equally many batches; otherwise the phase is refused at once.
    """

    may_stop = True
    saves = False
    meets = False
    is_of_unit = False
    meets_in_steps = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_hooks(cls)

    @property
    def name(self) -> str:
        """Unique among the callbacks of a run; by default the class's name."""
        return type(self).__qualname__

    def on_exception(self, state: State, unit: Unit, exc: BaseException) -> None:
        """The run ends with this exception. Other ranks may still be at work: no collective here."""

    # Evaluation, prediction and test have the same hooks as training, named after the phase; see below.

    def on_train_start(self, state: State, unit: Any) -> None:
        """Before the first epoch."""

    def on_train_epoch_start(self, state: State, unit: Any) -> None:
        """Before an epoch; not when resuming inside one."""

    def on_train_dataloader_iter_creation_start(self, state: State, unit: Any) -> None:
        """Before the loader is iterated."""

    def on_train_dataloader_iter_creation_end(self, state: State, unit: Any) -> None:
        """After the iterator was made."""

    def on_train_get_next_batch_start(self, state: State, unit: Any) -> None:
        """Before a batch is fetched; at an epoch's end without an `_end` to follow."""

    def on_train_get_next_batch_end(self, state: State, unit: Any) -> None:
        """After a batch was fetched."""

    def on_train_step_start(self, state: State, unit: Any) -> None:
        """Before the step."""

    def on_train_step_end(self, state: State, unit: Any) -> None:
        """After the step; the progress counts it already."""

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        """After a whole epoch; the progress counts it already."""

    def on_train_end(self, state: State, unit: Any) -> None:
        """After the last epoch."""

    on_eval_start = on_predict_start = on_test_start = on_train_start
    on_eval_epoch_start = on_predict_epoch_start = on_test_epoch_start = on_train_epoch_start
    on_eval_dataloader_iter_creation_start = on_train_dataloader_iter_creation_start
    on_predict_dataloader_iter_creation_start = on_test_dataloader_iter_creation_start = on_train_dataloader_iter_creation_start
    on_eval_dataloader_iter_creation_end = on_train_dataloader_iter_creation_end
    on_predict_dataloader_iter_creation_end = on_test_dataloader_iter_creation_end = on_train_dataloader_iter_creation_end
    on_eval_get_next_batch_start = on_predict_get_next_batch_start = on_test_get_next_batch_start = on_train_get_next_batch_start
    on_eval_get_next_batch_end = on_predict_get_next_batch_end = on_test_get_next_batch_end = on_train_get_next_batch_end
    on_eval_step_start = on_predict_step_start = on_test_step_start = on_train_step_start
    on_eval_step_end = on_predict_step_end = on_test_step_end = on_train_step_end
    on_eval_epoch_end = on_predict_epoch_end = on_test_epoch_end = on_train_epoch_end
    on_eval_end = on_predict_end = on_test_end = on_train_end
