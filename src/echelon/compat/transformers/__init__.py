"""`transformers`: its Trainer and TrainingArguments, over echelon's unit and loop. Every other name is transformers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from echelon.common.errors import UsageError
from echelon.compat.names import Missing

if TYPE_CHECKING:
    from echelon.compat.transformers.arguments import TrainingArguments
    from echelon.compat.transformers.trainer import Trainer

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise UsageError("echelon.compat.transformers needs transformers, version 5 or later: pip install transformers.") from None
if int(transformers.__version__.partition(".")[0]) < 5:
    raise UsageError(f"echelon.compat.transformers needs transformers 5 or later, got {transformers.__version__}. Update it.")

__all__ = ["Trainer", "TrainingArguments"]

_OTHER_TRAINERS = "; `echelon run` starts the script unchanged, with transformers' own"
_INSTEAD = {
    "Seq2SeqTrainer": f"Trainer, and model.generate for what is to be generated{_OTHER_TRAINERS}",
    "Seq2SeqTrainingArguments": f"TrainingArguments{_OTHER_TRAINERS}",
}


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from echelon.compat.transformers.trainer import Trainer

        return Trainer
    if name == "TrainingArguments":
        from echelon.compat.transformers.arguments import TrainingArguments

        return TrainingArguments
    if name in _INSTEAD:
        return Missing(f"transformers.{name} is not part of echelon.compat. Instead: {_INSTEAD[name]}")
    return getattr(transformers, name)
