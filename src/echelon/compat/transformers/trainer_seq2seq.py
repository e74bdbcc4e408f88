"""`transformers.Seq2SeqTrainer`: a Trainer whose evaluations generate; each rank generates for its own samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from echelon.common.errors import UsageError
from echelon.compat.transformers.trainer import Trainer
from echelon.compat.transformers.training_args import TrainingArguments
from echelon.parallel.shards import is_split

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments"]


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """
    Args:
        predict_with_generate: predictions are what `model.generate` returns for the inputs.
        generation_max_length, generation_num_beams: defaults for `evaluate` and `predict`.
        generation_config: replaces the model's; an object, or where to load one from.
        sortish_sampler: refused. For batches sorted by length, return a sampler from `_get_train_sampler`.
    """

    sortish_sampler: bool = False
    predict_with_generate: bool = False
    generation_max_length: int | None = None
    generation_num_beams: int | None = None
    generation_config: Any = None


class Seq2SeqTrainer(Trainer):
    """As Trainer. With `predict_with_generate`, `evaluate` and `predict` also take options of `model.generate`.

    Raises:
        UsageError: `predict_with_generate` with parameters split between ranks, which generate different lengths.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gen_kwargs: dict[str, Any] | None = None
        self.generates = bool(getattr(self.args, "predict_with_generate", False))
        given = getattr(self.args, "generation_config", None)
        if given is not None:
            self.model.generation_config = transformers.Seq2SeqTrainer.load_generation_config(given)

    def unit(self) -> Any:
        made = super().unit()
        if self.generates and any(is_split(p) for p in self.model.parameters()):
            raise UsageError(
                f"predict_with_generate=True: strategy {self.args.strategy!r} splits parameters between ranks, which do not "
                'generate equally long. Give strategy="ddp" or "zero1", or generate after save_model(folder), in one process.'
            )
        return made

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval", **gen_kwargs: Any
    ) -> dict[str, float]:
        with self._generating(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test", **gen_kwargs: Any
    ) -> Any:
        with self._generating(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @contextmanager
    def _generating(self, given: dict[str, Any]) -> Iterator[None]:
        """Context in which `model.generate` gets these options. The datasets of a dict all get the outer call's."""
        before = self._gen_kwargs
        if before is None:
            args = self.args
            length = args.generation_max_length if given.get("max_new_tokens") is None else None
            defaults = {"max_length": length, "num_beams": args.generation_num_beams} if self.generates else {}
            self._gen_kwargs = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        try:
            yield
        finally:
            self._gen_kwargs = before

    def prediction_of(self, batch: Any, outputs: Any, labels: Any) -> Any:
        """The generated tokens, padded to the largest length that the options allow."""
        if not self.generates:
            return super().prediction_of(batch, outputs, labels)
        shape = getattr(batch.get("labels"), "shape", None) if isinstance(batch, Mapping) else None
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if "decoder_input_ids" in inputs and inputs["decoder_input_ids"].shape == shape:  # made from the labels
            inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
        options = {name: value for name, value in (self._gen_kwargs or {}).items() if value is not None}
        with torch.no_grad(), self.unit().autocast():
            made = self.model.generate(**inputs, **options)
        config = self.model.generation_config
        new = options.get("max_new_tokens", None if "max_length" in options else config.max_new_tokens)
        width = options.get("max_length") or (new + 1 if new is not None else config.max_length or 20)
        return torch.nn.functional.pad(made, (0, max(0, width - made.shape[-1])), value=self._padding())

    def _padding(self) -> int:
        for each in (self.processing_class, self.model.generation_config, self.model.config):
            for name in ("pad_token_id", "eos_token_id"):
                if isinstance(token := getattr(each, name, None), int):
                    return token
        raise UsageError("predict_with_generate=True: neither the tokenizer nor model.config has a pad_token_id. Set it.")
