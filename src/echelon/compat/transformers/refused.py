"""What transformers' Trainer has and this one has not, by name."""

from __future__ import annotations

from typing import Any

import transformers

from echelon.common import errors
from echelon.common.errors import UsageError

__all__ = ["NotHereError", "check_overrides", "not_here"]

_UNCHANGED = "`echelon run` starts the script unchanged, with transformers' own Trainer"
_INSTEAD = {
    "training_step": "override compute_loss; what comes before and after an update is a callback's",
    "prediction_step": "override compute_loss, and give preprocess_logits_for_metrics",
    "evaluation_loop": "override evaluate, or give compute_metrics",
    "get_batch_samples": "override weight(inputs), which says what a batch counts",
    "hyperparameter_search": "a script that is started with other arguments, by `echelon submit` or `echelon run`",
    "_save_checkpoint": "a callback's on_save",
    "floating_point_ops": "metrics.jsonl of a run folder has mfu",
    "is_in_train": "a callback's hooks",
}


class NotHereError(errors.NotHereError, AttributeError):
    """An attribute of transformers' Trainer that this one does not have."""


def not_here(kind: str, name: str) -> Exception:
    """The error of an attribute that is missing."""
    if name in _INSTEAD or (hasattr(transformers.Trainer, name) and not name.startswith("__")):
        return NotHereError(f"Trainer.{name} is not part of echelon.compat. Instead: {_INSTEAD.get(name, _UNCHANGED)}.")
    return AttributeError(f"{kind!r} object has no attribute {name!r}")


def check_overrides(kind: type, base: type) -> None:
    """
    Raises:
        UsageError: a subclass overrides a method of transformers' Trainer that nothing here calls.
    """
    for each in kind.__mro__[: kind.__mro__.index(base)]:
        for name in vars(each):
            theirs: Any = getattr(transformers.Trainer, name, None)
            if not callable(theirs) or name.startswith("__") or hasattr(base, name):
                continue
            raise UsageError(
                f"{each.__name__} overrides {name}, which nothing in echelon.compat calls. Instead: "
                f"{_INSTEAD.get(name, _UNCHANGED)}."
            )
