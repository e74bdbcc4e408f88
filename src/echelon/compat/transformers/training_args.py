"""`transformers.training_args`, from which programs import TrainingArguments; its other names are transformers' own."""

from __future__ import annotations

from typing import Any

from transformers import training_args

from echelon.compat.transformers.arguments import TrainingArguments

__all__ = ["TrainingArguments"]


def __getattr__(name: str) -> Any:
    return getattr(training_args, name)
