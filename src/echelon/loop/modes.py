"""Train and eval mode: what training sets, what it leaves as somebody set it, and how modes are put back."""

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
    """Modules in train or eval mode, and put back as they were, each submodule by itself, whatever happens."""
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
    """Train mode, but for the parts that somebody put in eval mode on purpose: these stay as they are.

    A model that is in eval mode as a whole came so, as `from_pretrained` returns it; but one that is frozen as a whole, too, such
    as a teacher, stays so. A part that has `from_pretrained` itself and parameters to train came so as well. Any other part in
    eval mode was put there, since modules are built in train mode. A part of several layers that is trained may have come so,
    too, from a loader of its author's: that is said.
    """
    trains = [p.requires_grad for p in root.parameters()]
    if trains and not any(trains) and not root.training:
        return
    model = root
    while len(children := list(model.children())) == 1 and not any(True for _ in model.parameters(recurse=False)):
        if not model.training:
            break
        (model,) = children  # a wrapper's: it is built in train mode around whatever it wraps
    kept = [(part, _modes(part)) for part in _parts_in_eval(model) if not _came_so(part)] if model.training else []
    doubtful = {id(part) for part, modes in kept if len(modes) > 1 and any(p.requires_grad for p in part.parameters())}
    tell_of_eval_mode([name for name, part in model.named_modules() if id(part) in doubtful])
    root.train()
    for part, modes in kept:
        part.eval()
        _put_back(modes)


def tell_of_eval_mode(names: Sequence[str]) -> None:
    """Of modules that are trained in eval mode."""
    if names and agree.is_rank0():
        logger.warning(
            "%s modules are in eval mode as training begins, such as %s, and stay so: without dropout, and batch norm leaves its "
            "statistics alone. To train them in train mode, call train() on them before",
            len(names),
            names[0],
        )


def _parts_in_eval(module: nn.Module) -> Iterator[nn.Module]:
    """The highest ones."""
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
    """The modes in a loop of one's own, whose script sets them, too.

    Args:
        root: as the loop has it.
        model: the same without a wrapper, which may be in another mode.
    """

    def __init__(self, root: nn.Module, model: nn.Module) -> None:
        self._root, self.model = root, model
        self._trained: Modes | None = None  # as they were when the loop last trained in train mode
        self._is_told = False

    def epoch_begins(self) -> None:
        """With its first window: what an evaluation has left in eval mode is put back."""
        if not self.model.training and self._trained is not None:
            _put_back(self._trained)
            self._tell("it was put back in train mode for the next epoch")
        self.trained()

    def trained(self) -> None:
        """Remember the modes of an epoch's last batch, before an evaluation sets them."""
        if self.model.training:
            self._trained = _modes(self._root)

    def left_in_eval(self) -> None:
        """In the middle of an epoch the model is in eval mode."""
        if self._trained is not None:
            self._tell("it stays so for the rest of this epoch: call model.train() behind it")

    def _tell(self, so: str) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "the model has trained in train mode, and is in eval mode now, as after an evaluation; %s. `with "
                "echelon.evaluating(model):` puts modes back by itself. To train in eval mode, call model.eval() before the "
                "first window.",
                so,
            )
