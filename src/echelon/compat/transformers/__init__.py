"""`transformers`: its Trainers and their arguments, over echelon's unit and loop. Every other name is transformers' own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.common.errors import UsageError

if TYPE_CHECKING:
    from echelon.compat.transformers.trainer import Trainer
    from echelon.compat.transformers.trainer_seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from echelon.compat.transformers.training_args import TrainingArguments

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise UsageError("echelon.compat.transformers needs transformers, version 5 or later: pip install transformers.") from None
if int(transformers.__version__.partition(".")[0]) < 5:
    raise UsageError(f"echelon.compat.transformers needs transformers 5 or later, got {transformers.__version__}. Update it.")

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]

_HOMES = {
    "Trainer": "trainer",
    "TrainingArguments": "training_args",
    "Seq2SeqTrainer": "trainer_seq2seq",
    "Seq2SeqTrainingArguments": "trainer_seq2seq",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return getattr(transformers, name)
