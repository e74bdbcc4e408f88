"""Evaluation and prediction: the outputs of all ranks as arrays, in the dataset's order."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import trainer_pt_utils as theirs
from transformers import trainer_utils

from echelon.compat.collect import collect
from echelon.compat.trainer.launched import in_order
from echelon.compat.trainer.rank import shared
from echelon.compat.transformers.absent import Part
from echelon.compat.transformers.batches import places_of
from echelon.compat.transformers.unit import set_mode
from echelon.loop.run import evaluate
from echelon.loop.samples import rows

__all__ = ["Evaluating"]


class Outputs:
    """Outputs of one pass over a loader, on this rank.

    Args:
        keeps: False only counts the samples.
    """

    def __init__(self, *, keeps: bool) -> None:
        self.keeps = keeps
        self._batches: list[list[Any]] = []
        self._rows: list[int] = []
        self.samples = 0

    def add(self, data: Any, logits: Any, labels: Any, given: int | None) -> None:
        count = rows(data, given)
        self.samples += count
        if self.keeps:
            self._batches.append([_on_host(logits), _on_host(labels)])
            self._rows.append(count)

    def together(self, data_rank: int, loader: Any) -> tuple[Any, Any, int]:
        """(predictions, labels, number of samples) of all ranks: arrays in the dataset's order, padded with -100. Collective."""
        places = places_of(loader, self._rows) or [[] for _ in self._rows]
        batches = [[*each, at] for each, at in zip(self._batches, places, strict=True)]
        outputs_of_all = collect([data_rank, self.samples, batches])
        assert outputs_of_all is not None
        parts = in_order([(rank, batches) for rank, _, batches in outputs_of_all])
        samples = {rank: samples for rank, samples, _ in outputs_of_all}  # replicas have the same
        order = np.argsort([place for *_, of_rows in parts for place in of_rows], kind="stable")
        predictions, labels = (_sorted(_joined([part[which] for part in parts]), order) for which in (0, 1))
        return predictions, labels, sum(samples.values())


def _joined(parts: list[Any]) -> Any:
    known = [part for part in parts if part is not None]
    return theirs.nested_numpify(functools.reduce(theirs.nested_concat, known)) if known else None


def _sorted(values: Any, order: Any) -> Any:
    """Arrays, in dicts and tuples, with their rows in this order; those that have other rows stay."""
    if isinstance(values, Mapping):
        return {key: _sorted(each, order) for key, each in values.items()}
    if isinstance(values, (list, tuple)):
        return tuple(_sorted(each, order) for each in values)
    return values[order] if len(order) and np.ndim(values) and len(values) == len(order) else values


def _on_host(value: Any) -> Any:
    """A value with its tensors on the CPU, in dicts and tuples; anything else is left out."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.float() if value.dtype == torch.bfloat16 else value  # numpy has no bfloat16
    if isinstance(value, Mapping):
        return {key: kept for key, each in value.items() if (kept := _on_host(each)) is not None}
    if isinstance(value, (list, tuple)):
        return tuple(kept for each in value if (kept := _on_host(each)) is not None)
    return None


def logits_of(outputs: Any, ignored: list[str], *, with_loss: bool) -> Any:
    """A model's outputs without the loss; not in a tuple if there is only one."""
    if outputs is None:
        return None
    if isinstance(outputs, Mapping):
        logits = tuple(value for name, value in outputs.items() if name not in (*ignored, "loss"))
    elif isinstance(outputs, (list, tuple)):
        logits = tuple(outputs[1:] if with_loss else outputs)
    else:
        return outputs
    return logits[0] if len(logits) == 1 else logits


class Evaluating(Part):
    """Evaluations and predictions of a Trainer."""

    generates = False  # if True, predictions come from `generate`, not from the forward pass
    control: Any
    optimizer: Any
    batch_given: Any = None  # the current batch, as the loader gave it
    _outputs: Outputs | None = None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean loss over all labels, and what `compute_metrics` computes from all outputs. Every rank must call it."""
        given = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(given, dict):
            results: dict[str, float] = {}
            for name, dataset in given.items():
                part = dataset if eval_dataset is not None else name
                results |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return results
        loader, start = self.get_eval_dataloader(eval_dataset), time.time()
        only = True if self.compute_metrics is None else None
        passed = self.evaluation_loop(loader, "Evaluation", only, ignore_keys, metric_key_prefix)
        metrics: dict[str, float] = passed.metrics | self._speed(metric_key_prefix, start, passed.num_samples)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """transformers' PredictionOutput, on every rank: arrays in the dataset's order, and metrics where there are labels."""
        loader, start = self.get_test_dataloader(test_dataset), time.time()
        passed = self.evaluation_loop(loader, "Prediction", None, ignore_keys, metric_key_prefix)
        metrics = passed.metrics | self._speed(metric_key_prefix, start, passed.num_samples)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return trainer_utils.PredictionOutput(passed.predictions, passed.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """One pass over a loader: transformers' EvalLoopOutput, over all ranks. `evaluate` and `predict` call it. Collective."""
        only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        unit, loader = self.unit(), shared(dataloader, self.data_ranks(), 1)
        self.callback_handler.eval_dataloader = loader
        ignored = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
        self._ignored = ignore_keys if ignore_keys is not None else ignored
        self._outputs = outputs = Outputs(keeps=not only)
        unit.eval_loss = math.nan
        set_mode(self.optimizer, "eval")
        try:
            evaluate(unit, loader)
        finally:
            self._outputs = None
        rank, _ = unit.data_rank_and_size or (self.args.process_index, 1)
        predictions, labels, samples = outputs.together(rank, loader)
        own: dict[str, float] = {}
        if self.compute_metrics is not None and predictions is not None and labels is not None:
            prediction = trainer_utils.EvalPrediction(predictions=predictions, label_ids=labels)
            own = dict(trainer_utils.denumpify_detensorize(self.compute_metrics(prediction)))
        prefix = f"{metric_key_prefix}_"
        metrics = {f"{prefix}loss": unit.eval_loss} if not math.isnan(unit.eval_loss) else {}
        metrics |= {name if name.startswith(prefix) else prefix + name: value for name, value in own.items()}
        return trainer_utils.EvalLoopOutput(predictions, labels, metrics, samples)

    def _speed(self, prefix: str, start: float, samples: int) -> dict[str, float]:
        steps = math.ceil(samples / (self.args.eval_batch_size * self.data_ranks()))
        speed: dict[str, float] = trainer_utils.speed_metrics(prefix, start, samples, steps)
        return speed

    def predicted(self, batch: Any, outputs: Any) -> None:
        """Called by the unit after each evaluation batch that is not padding."""
        if self._outputs is None:
            return
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        labels = self.labels_of(batch)
        logits = None
        if self._outputs.keeps:
            whole = self.unit().prepared.batches.whole_of(outputs) if self.has_labels(batch) else outputs
            logits = self.prediction_of(batch, whole, labels)
        if self.preprocess_logits_for_metrics is not None and logits is not None:
            logits = self.preprocess_logits_for_metrics(logits, labels)
        self._outputs.add(batch, logits, labels, self.samples_given)

    def prediction_of(self, batch: Any, outputs: Any, labels: Any) -> Any:
        return logits_of(outputs, self._ignored, with_loss=labels is not None)
