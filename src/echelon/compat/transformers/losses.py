"""The loss of a batch, and the batch's weight in the mean over the global batch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import trainer_pt_utils
from transformers.loss import loss_utils
from transformers.utils import can_return_loss, find_labels

from echelon.common.errors import UsageError
from echelon.compat.transformers.absent import Part
from echelon.compat.transformers.batches import without_adapters
from echelon.loop.samples import count_tokens, rows

__all__ = ["Losses", "takes"]

logger = logging.getLogger(__name__)


class Losses(Part):
    """What subclasses of a Trainer override to have a loss of their own."""

    samples_given: int | None = None  # samples that the loader put into the current batch

    def look_at_model(self) -> None:
        """Set what depends on the model: its labels, its shift of labels, how its loss is computed."""
        self.model_wrapped = self.model  # until the strategy wraps it
        config = getattr(self.model, "config", None)
        if config is not None:
            config.use_cache = self.args.use_cache
        self.label_names: list[str] = self.args.label_names
        inner = without_adapters(self.model)
        kind = type(inner)
        if self.label_names is None:
            self.label_names = find_labels(kind)
        self._returns_loss = bool(can_return_loss(kind))
        self._shifts = _is_causal(inner) and not getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        smoothing = self.args.label_smoothing_factor
        if smoothing and getattr(config, "problem_type", None) == "multi_label_classification":
            logger.warning("label_smoothing_factor has no effect: a multi-label classification has no single label to smooth")
            smoothing = 0.0
        self._smoother = trainer_pt_utils.LabelSmoother(epsilon=smoothing) if smoothing else None
        self._passes_count = takes(self.compute_loss, "num_items_in_batch")

    # --- a batch's weight

    def weight(self, inputs: Any) -> float | torch.Tensor:
        """The batch's weight in the mean over the global batch: the number of labels that are not -100, or of rows.

        A causal model does not predict a row's first label, so that label does not count. Override this method if your loss is
        another kind of mean.
        """
        if isinstance(inputs, Mapping):
            if isinstance(inputs.get("shift_labels"), torch.Tensor):
                return count_tokens(inputs["shift_labels"], next_token=False)
            if isinstance(inputs.get("labels"), torch.Tensor):
                return count_tokens(inputs["labels"], next_token=self._shifts)
        return rows(inputs, self.samples_given)

    def labels_of(self, inputs: Any) -> Any:
        """The labels in a batch; None if it has none."""
        if not self.has_labels(inputs) or not isinstance(inputs, Mapping):
            return None
        labels = tuple(inputs.get(name) for name in self.label_names)  # none for a model that has a loss without labels
        return labels[0] if len(labels) == 1 else labels

    def has_labels(self, inputs: Any) -> bool:
        """Whether a loss can be computed from a batch."""
        if not isinstance(inputs, Mapping):
            return False
        if self.label_names:
            return all(inputs.get(name) is not None for name in self.label_names)
        asked = inputs.get("return_loss")
        return bool(self._returns_loss if asked is None else asked)

    # --- its loss

    def loss_of(self, model: torch.nn.Module, inputs: Any) -> tuple[torch.Tensor, Any]:
        """(mean loss of the batch, outputs) for the unit, from `compute_loss` or a subclass's override of it."""
        given = dict(inputs) if isinstance(inputs, Mapping) else inputs  # compute_loss may remove the labels
        more: dict[str, Any] = {"num_items_in_batch": self.weight(inputs)} if self._passes_count else {}
        made = self.compute_loss(model, given, return_outputs=True, **more)
        return (made[0], made[1]) if isinstance(made, tuple) else (made, None)

    def compute_loss(
        self, model: torch.nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of a batch; override it for a loss of your own.

        Args:
            num_items_in_batch: the batch's weight. Divide a sum by it, or take a mean: both are right, since the loss is weighted
                by `weight` over all micro-batches and ranks of an update.
        """
        if not isinstance(inputs, Mapping):
            raise UsageError(f"the data_collator must give a dict that the model takes as keywords, got {type(inputs).__name__}.")
        inputs = dict(inputs)
        takes_labels = self._smoother is not None or self.compute_loss_func is not None
        labels = inputs.pop("labels", None) if takes_labels else None
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif self._smoother is not None and labels is not None:
            loss = self._smoother(outputs, labels, shift_labels=self._shifts)
        elif isinstance(outputs, Mapping) or hasattr(outputs, "loss"):
            loss = outputs["loss"] if isinstance(outputs, Mapping) and "loss" in outputs else getattr(outputs, "loss", None)
        else:
            loss = outputs[0] if isinstance(outputs, (tuple, list)) else None
        if loss is None:
            raise UsageError(
                "The model did not return a loss from the inputs, only the following keys: "
                f"{', '.join(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__}. The inputs it received are "
                f"{', '.join(inputs)}."
            )
        return (loss, outputs) if return_outputs else loss


def _is_causal(model: Any) -> bool:
    """Whether the loss is transformers' next-token loss: also `loss_function` of a model without a known `loss_type`."""
    kind = getattr(model, "loss_type", None)
    if kind in loss_utils.LOSS_MAPPING:
        return loss_utils.LOSS_MAPPING[kind] is loss_utils.ForCausalLMLoss
    forward = inspect.unwrap(type(model).forward)
    return "loss_function" in getattr(getattr(forward, "__code__", None), "co_names", ())


def takes(function: Any, name: str) -> bool:
    """Whether a function of the script's can be given this argument by name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
