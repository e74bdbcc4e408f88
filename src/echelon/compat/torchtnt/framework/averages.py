"""The `swa_model` of TorchTNT's AutoUnit: a module of its own, among the unit's modules."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from echelon.compat.torchtnt.utils.swa import AveragedModel
from echelon.contracts.overrides import overrides
from echelon.loop.auto.averaged import SWAParams
from echelon.loop.unit import TrainUnit
from echelon.parallel.parallelize import parallelize
from echelon.parallel.recipe.recipe import Recipe
from echelon.parallel.shards import is_split

__all__ = ["Averages"]

logger = logging.getLogger(__name__)


class Averages(AveragedModel):
    """The average of a unit's weights, split over the ranks as they are.

    It counts updates, or epochs if the learning rate changes by epoch. The count is the unit's own progress, so that a resumed
    run continues.
    """

    def __init__(self, source: nn.Module, unit: Any, params: SWAParams) -> None:
        split = any(is_split(p) for p in unit.module.parameters())
        if split:  # it cannot be copied: split a second module alike
            strategy, recipe = unit.auto_options.layout, Recipe(None, None, unit.computes)
            source = parallelize(source, strategy, unit.device, recipe, overridden=overrides().layout).module
        super().__init__(
            source,
            unit.device,
            use_buffers=params.use_buffers,
            averaging_method=params.averaging_method,
            ema_decay=params.ema_decay,
            skip_deepcopy=True,
            use_lit=params.use_lit,
        )
        self.requires_grad_(False)
        self.params = params
        self._unit = unit

    @property
    def per_epoch(self) -> bool:
        return bool(self._unit.lr_interval == "epoch")

    @property
    def _index(self) -> int:
        """The number of the update, or epoch, that was completed last, counted from 0."""
        unit = self._unit
        progress = unit.train_progress if isinstance(unit, TrainUnit) else None
        if self.per_epoch:
            return progress.num_epochs_completed - 1 if progress is not None else -1
        return int(unit.window.updates) - 1

    @property
    def begun(self) -> bool:
        """Whether the warm-up is over."""
        return self._index >= self.params.warmup_steps_or_epochs

    def step(self) -> None:
        """Called after an update."""
        if not self.per_epoch:
            self.average_if_due()

    def average_if_due(self) -> None:
        since = self._index - self.params.warmup_steps_or_epochs
        if since >= 0 and since % self.params.step_or_epoch_update_freq == 0:
            with self._unit.timed("stochastic_weight_avg_update"):
                self.update_parameters(self._unit.module)

    def warn_if_unused(self) -> None:
        """Warn at the end of training if nothing was averaged."""
        if not int(self.n_averaged):
            kind = "epochs" if self.per_epoch else "updates"
            logger.warning(
                "training ends after %s %s, before the averages of the weights began: SWAParams(warmup_steps_or_epochs=%s)",
                *(self._index + 1, kind, self.params.warmup_steps_or_epochs),
            )
