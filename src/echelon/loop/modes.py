"""Train and eval mode: which modes training sets, which it keeps as the user set them, and how modes are restored."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from torch import nn

from echelon.loop.unit import Unit
from echelon.world import agree

__all__ = ["LoopModes", "begin_training", "in_mode", "tell_of_eval_mode"]

logger = logging.getLogger(__name__)

Modes = list[tuple[nn.Module, bool]]


@contextlib.contextmanager
def in_mode(inner: Unit, mode: str) -> Iterator[None]:
    """Context with the modules in train or eval mode. Afterwards each submodule's mode is restored."""
    if mode == "train" and inner.keeps_modes:
        yield
        return
    roots = inner.tracked_modules().values()
    before = [each for root in roots for each in _modes(root)]
    for root in roots:
        if mode == "train":
            begin_training(root)
        else:
            root.eval()
    try:
        yield
    finally:
        _put_back(before)


def begin_training(root: nn.Module) -> None:
    """Set train mode, except for parts that the user has put in eval mode on purpose.

    A whole model in eval mode was created so (`from_pretrained` does that) and is set to train mode, unless it is also frozen as
    a whole, such as a teacher. A part whose class has `from_pretrained` and that has trainable parameters was created so, too.
    Any other part was put in eval mode, since modules are built in train mode, and stays so. A trained part of several layers is
    doubtful, because its author's own loader may have set eval mode: it stays so, with a warning.
    """
    trains = [p.requires_grad for p in root.parameters()]
    if trains and not any(trains) and not root.training:
        return
    model = root
    while len(children := list(model.children())) == 1 and not any(True for _ in model.parameters(recurse=False)):
        if not model.training:
            break
        (model,) = children  # look into a wrapper, which is built in train mode whatever the mode of its module
    kept = [(part, _modes(part)) for part in _parts_in_eval(model) if not _came_so(part)] if model.training else []
    doubtful = {id(part) for part, modes in kept if len(modes) > 1 and any(p.requires_grad for p in part.parameters())}
    tell_of_eval_mode([name for name, part in model.named_modules() if id(part) in doubtful])
    root.train()
    for part, modes in kept:
        part.eval()
        _put_back(modes)


def tell_of_eval_mode(names: Sequence[str]) -> None:
    """Warn of modules that are trained in eval mode."""
    if names and agree.is_rank0():
        logger.warning(
            "%s modules are in eval mode as training begins, such as %s, and stay so: no dropout, and batch norm does not update "
            "its statistics. To train them in train mode, call train() on them before",
            len(names),
            names[0],
        )


def _parts_in_eval(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in eval mode whose parents are all in train mode."""
    for child in module.children():
        if child.training:
            yield from _parts_in_eval(child)
        else:
            yield child


def _came_so(part: nn.Module) -> bool:
    return hasattr(type(part), "from_pretrained") and any(p.requires_grad for p in part.parameters())


def _modes(module: nn.Module) -> Modes:
    return [(each, each.training) for each in module.modules()]


def _put_back(modes: Modes) -> None:
    for module, training in modes:
        module.training = training


class LoopModes:
    """The modes in a user's own loop, whose script also sets modes.

    Args:
        root: the model as the loop has it.
        model: the model without its wrapper, whose mode may differ.
    """

    def __init__(self, root: nn.Module, model: nn.Module) -> None:
        self._root, self.model = root, model
        self._trained: Modes | None = None  # as they were when the loop last trained in train mode
        self._is_told = False

    def epoch_begins(self) -> None:
        """At an epoch's first window: restore train mode if an evaluation has left the model in eval mode."""
        if not self.model.training and self._trained is not None:
            _put_back(self._trained)
            self._tell("it was put back in train mode for the next epoch")
        self.trained()

    def trained(self) -> None:
        """Remember the modes of an epoch's last batch, before an evaluation sets them."""
        if self.model.training:
            self._trained = _modes(self._root)

    def left_in_eval(self) -> None:
        """Called if the model is in eval mode in the middle of an epoch."""
        if self._trained is not None:
            self._tell("it stays so for the rest of this epoch: call model.train() after the evaluation")

    def _tell(self, so: str) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "the model has trained in train mode, and is in eval mode now, as after an evaluation; %s. `with "
                "echelon.evaluating(model):` restores modes by itself. To train in eval mode, call model.eval() before the "
                "first window.",
                so,
            )
