"""What an AutoUnit refuses before it trains, and in which words."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from echelon.common.errors import LoopError
from echelon.loop.window import Window
from echelon.parallel.recipe.precision import Precision
from echelon.parallel.strategy import Prepared

if TYPE_CHECKING:
    from echelon.loop.state import State

__all__ = [
    "check_evaluated",
    "check_made",
    "check_own_names",
    "check_plateau",
    "check_trainable",
    "tell_of_interval",
]

logger = logging.getLogger(__name__)


def check_made(unit: str, made: Any) -> None:
    """What `configure_optimizers_and_lr_scheduler` returned, if it is not what AutoUnit asks for; Lightning's forms by name."""
    where = f"{unit}.configure_optimizers_and_lr_scheduler returned"
    if not isinstance(made, tuple) or len(made) != 2:
        keys = f" with {', '.join(map(repr, made))}" if isinstance(made, dict) else ""
        raise LoopError(
            f"{where} {type(made).__name__}{keys}. Return the pair (optimizer, scheduler or None); several optimizers, by "
            "name, are returned by configure_optimizers_and_lr_schedulers."
        )
    optimizer, scheduler = made
    for what, thing in (("optimizer", optimizer), ("scheduler", scheduler)):
        if isinstance(thing, (list, tuple)):
            raise LoopError(
                f"{where} a {type(thing).__name__} in the {what}'s place. Return the pair of one optimizer and one scheduler or "
                "None; for several optimizers write configure_optimizers_and_lr_schedulers and compute_losses."
            )
    if isinstance(scheduler, dict):
        interval = "update" if scheduler.get("interval") == "step" else "epoch"
        raise LoopError(
            f"{where} Lightning's dict for a scheduler. Write\n    return optimizer, scheduler\nthere, and among AutoUnit's "
            f"arguments options=echelon.UnitOptions(lr_interval={interval!r})."
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise LoopError(
            f"{where} a scheduler of type {type(scheduler).__name__}, which has no step(). For no scheduler return None."
        )


def check_own_names(unit: Any) -> None:
    """Attributes of a subclass that hide AutoUnit's would fail later, in words that explain nothing."""
    for name, kind in (("window", Window), ("prepared", Prepared), ("computes", Precision)):
        if not isinstance(getattr(unit, name), kind):
            raise LoopError(f"{type(unit).__name__}.{name} hides an attribute of AutoUnit. Give yours another name.")
    if not callable(unit.weight):
        raise LoopError(f"{type(unit).__name__}.weight hides a method of AutoUnit. Give your attribute another name.")


def check_trainable(unit: Any, *, together: bool, has_layout: bool) -> None:
    """
    Args:
        together: the ranks train one model, or there is one rank only.
    """
    if not unit.training:
        raise LoopError(f"{type(unit).__name__} was built with training=False, so it has no optimizer to train with.")
    if not together and not has_layout:
        raise LoopError(
            "layout must be given for several ranks; without one each would train its own model. Pass layout='ddp' or "
            "'fsdp', or a module that you wrapped yourself; layout='noop' if each rank is to train its own model."
        )


def check_plateau(state: State) -> None:
    if state.eval_state is None:
        raise LoopError(
            "ReduceLROnPlateau needs a number of evaluations, and this run has none. Give train(..., eval=loader), or override "
            "step_lr_scheduler and call self.lr_scheduler.step(metric) there."
        )


def tell_of_interval(scheduler: Any, interval: str) -> None:
    if scheduler is not None:
        other = "epoch" if interval == "update" else "update"
        logger.info(
            "%s advances after every %s, in which its lengths count. UnitOptions(lr_interval=%r) takes it after every %s",
            *(type(scheduler).__name__, interval, other, other),
        )


def check_evaluated(unit: Any) -> None:
    """After an evaluation whose loss a scheduler is to follow."""
    if not unit.has_eval_loss:
        raise LoopError(
            f"ReduceLROnPlateau needs the loss of evaluations, and this one counted none: {type(unit).__name__}.eval_step must "
            "call super().eval_step(state, data), of batches that are not empty. Or override step_lr_scheduler and call "
            "self.lr_scheduler.step(metric) there."
        )
