"""Check before training under context parallelism that the loss of a sequence is the weighted mean of the losses of its parts.

That holds only for a mean over tokens. The beginning and the end of the first batch's sequences go through `compute_loss` whole
and in parts, without gradients and dropout, with parameters as they are and with noise. Noise is needed because a new model gives
all tokens nearly the same loss, and then almost any average equals the mean.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from echelon.common.errors import ContextParallelError, UsageError
from echelon.parallel.context.batch import IGNORED, SequenceParts, beginning_at, labels_of
from echelon.parallel.context.probe import AS_IS, LEVELS, perturbed, tensors_of, undisturbed
from echelon.world import agree, rng
from echelon.world.device import map_tensors

__all__ = ["KeptOutputs", "Losses", "check_counted", "check_losses", "check_separate"]

logger = logging.getLogger(__name__)

_CHUNK = 4  # tokens
# Relative tolerance of the losses by the bytes of the dtype: for rounding, and for epsilons in a denominator.
_TOLERANCE = {8: 1e-5, 4: 1e-3}
_COARSE = 2e-2
_ROUNDED = 1e-2  # for losses of the same outputs
_OUTPUTS = -1  # used as a level: noise on the module's outputs
_LEFT_OUT = 0.4  # share of labels to ignore
_MISCOUNTED = 1e-2  # how far a part's share of the tokens with a gradient may be from its share of the weight
_APART = 1e-4  # how much a token's gradient may depend on other tokens, relative to its dependence on itself
_REMEDY = (
    "For a loss of one token of each sequence, of pooled or neighbouring tokens, a sum, or a mean for each sequence, use 'fsdp' "
    "or 'ddp'. If only the comparison is wrong, switch it off: Layout(check_context=False)."
)


@dataclass(frozen=True)
class Losses:
    """How losses and their weights are computed.

    Args:
        module: the module under test.
        whole: returns (loss, weight) of a whole batch. With `keep` the module's outputs are kept, and `part` then uses them.
        part: returns (loss, weight) of this rank's part of a batch.
        dtypes: the dtypes of the computation.
    """

    module: nn.Module
    whole: Callable[..., tuple[Any, float]]
    part: Callable[[Any], tuple[Any, float]]
    dtypes: Sequence[torch.dtype]


class KeptOutputs:
    """The module's outputs for whole sequences, with noise; each rank takes its part of them.

    So the loss is compared on its own: in 16 bits the module's rounding would hide a difference between losses.
    """

    def __init__(self, parts: SequenceParts, length: int) -> None:
        self._parts, self._length, self._outputs = parts, length, deque[Any]()

    def check(self) -> None:
        """Check the outputs after the pass over whole sequences.

        Raises:
            ValueError: the module was not called, or its outputs do not show where the sequence is.
        """
        flat = [t for outputs in self._outputs for t in tensors_of(outputs)]
        if not any(self._dim(t) for t in flat):
            raise ValueError("no outputs of tokens")

    def _dim(self, output: torch.Tensor) -> int:
        """The dim of the sequence, never the first; 0 if there is none or several candidates."""
        places = [dim for dim, size in enumerate(output.shape) if dim and size == self._length]
        return places[0] if len(places) == 1 else 0

    def keep(self, outputs: Any) -> Any:
        """Keep and return the outputs with noise, the same on all ranks."""
        generator = torch.Generator().manual_seed(len(self._outputs))

        def add(output: Any) -> Any:
            if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.dim() < 2:
                return output
            return output + torch.randn(output.shape, generator=generator).to(output)

        self._outputs.append(map_tensors(outputs, add))
        return self._outputs[-1]

    def part_of_next(self) -> Any:
        """This rank's part of the outputs of the next call of the module."""

        def cut(output: Any) -> Any:
            dim = self._dim(output) if isinstance(output, torch.Tensor) else 0
            return self._parts.cut(output, dim) if dim else output

        return map_tensors(self._outputs.popleft(), cut)


# A loss and its weight; None if it is not one number.
_Loss = tuple[float, float] | None


def check_losses(parts: SequenceParts, losses: Losses, batch: Any, dims: Mapping[str, int], length: int) -> None:
    """Compare the loss of whole sequences with those of their parts. Collective over all ranks.

    Args:
        batch: the whole batch.
        dims: the dim of the sequence by name of the tensor.
        length: the length of the sequences.
    Raises:
        UsageError: on all ranks, with both numbers.
    """
    shortest = 2 * parts.size * _CHUNK
    for short in (min(length, shortest), length):  # the code may accept only the full length
        pieces = _pieces(batch, dims, length, short)
        if all(_can_compare(parts, losses, piece, level) for level in (*LEVELS, _OUTPUTS) for piece in pieces):
            return
    if agree.is_rank0():
        logger.info(
            "context parallelism: compute_loss cannot be called on whole sequences without gradients, so its loss is not "
            "compared with that of their parts"
        )


def _pieces(batch: Any, dims: Mapping[str, int], length: int, short: int) -> list[Any]:
    """Two pieces of the batch: the beginning, and the end.

    If the batch has ignored labels, the second is the piece with the most counted labels instead, with some more of them ignored.
    """
    label_places = labels_of(batch, dims)
    if label_places is None:
        return [beginning_at(batch, dims, start, short, {}) for start in (0, length - short)]
    name, labels = label_places
    counts = (labels != IGNORED).movedim(dims[name], 0).reshape(labels.shape[dims[name]], -1).sum(1).cpu()
    starts = range(0, length - short + 1, max(1, short // 2))
    most = max(starts, key=lambda start: int(counts[start : start + short].sum()))
    fill = {}
    if int(counts.sum()) < labels.numel():
        shape = [*labels.shape]
        shape[dims[name]] = short
        fill[name] = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < _LEFT_OUT
    first = 0 if int(counts[:short].sum()) else most
    return [beginning_at(batch, dims, first, short, {}), beginning_at(batch, dims, most if fill else length - short, short, fill)]


def _can_compare(parts: SequenceParts, losses: Losses, piece: Any, level: int) -> bool:
    """Compare one piece; False if the code cannot be called with it. Collective over all ranks."""
    error: Exception | None = None
    may, draws, whole, part = 0.0, False, None, None
    try:
        may, draws, whole, part = _computed(losses, piece, level)
    except Exception as raised:
        error = raised
    refusal = error if isinstance(error, UsageError) and level != _OUTPUTS else None
    agree.fail_together(refusal, "context parallelism, in the first batch,")
    failed, differs = agree.any_ranks([error is not None, draws])
    if failed:
        return level != AS_IS  # with noise the code may reject the values
    if differs:
        return True  # the losses use different random numbers and cannot be compared
    mays, wholes, part_losses = zip(*agree.gather([may, whole, part], parts.group), strict=True)
    agree.raise_on_all(_difference(wholes[0], part_losses, max(mays)), ContextParallelError)
    return True


def _computed(losses: Losses, piece: Any, level: int) -> tuple[float, bool, _Loss, _Loss]:
    """The tolerance, whether the code draws random numbers, and the losses of the whole piece and of this rank's part."""
    may, keep = _TOLERANCE.get(min(dtype.itemsize for dtype in losses.dtypes), _COARSE), level == _OUTPUTS
    with undisturbed(losses.module), torch.no_grad(), perturbed(losses.module, AS_IS if keep else level):
        before = rng.states()
        loss, weight = losses.whole(piece, keep=keep)
        whole = _numbers(loss, weight)
        if keep and whole is not None:
            may = _TOLERANCE.get(loss.dtype.itemsize, _ROUNDED)
        draws = not _are_same(before, rng.states())
        return may, draws, whole, _numbers(*losses.part(piece))


def _numbers(loss: Any, weight: float) -> _Loss:
    is_one = isinstance(loss, torch.Tensor) and loss.numel() == 1 and math.isfinite(weight)
    return (float(loss), weight) if is_one else None


def _are_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return all(_are_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_are_same, a, b))
    return bool(np.array_equal(a, b))


def _difference(whole: _Loss, part_losses: Sequence[_Loss], may: float) -> str | None:
    """How the losses of the parts of a sequence differ from that of the whole; None if they do not."""
    parts = [each for each in part_losses if each is not None]
    if whole is None or len(parts) < len(part_losses):
        return None
    (loss, weight), counted = whole, [(one, of) for one, of in parts if of]
    total = sum(of for _, of in counted)
    if not weight or not total or not math.isfinite(loss):  # a part alone may be nan (0 / 0); that is a difference
        return None
    mean = sum(one * of for one, of in counted) / weight
    size = max(abs(loss), sum(abs(one) * of for one, of in counted) / weight)
    if abs(mean - loss) <= may * size:
        return None
    shares = " + ".join(f"{of / weight:.3g} x {one:.6g}" for one, of in counted)
    return (
        f"context parallelism over {len(parts)} ranks would change the loss: compute_loss gives {loss:.6g} for whole sequences "
        f"of the first batch, and {mean:.6g} for their parts, {shares}, each times its share of the weight. It must be a mean "
        "over tokens, of each by itself, and weight() must count the tokens of this mean: by default it counts rows, times the "
        f"share of their labels that are not {IGNORED}. {_REMEDY}"
    )


def check_separate(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> int | None:
    """Check that a loss is a sum of terms of single tokens of the outputs (B, T, ...). Collective over all ranks.

    It checks derivatives only: the mixed second derivative of two tokens must be zero, and more than one token of each sequence
    must have a gradient.

    Returns:
        how many tokens have a gradient; None if that is not known.
    Raises:
        UsageError: on all ranks: it is not.
    """
    tie, only = 0.0, None
    loss = loss.view_as(loss)  # one that the model has returned would run the hooks of its outputs, which unshard its parameters
    grads = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True) if outputs else ()
    has = [grad.flatten(2).ne(0).any(2) if grad.dim() > 2 else grad.ne(0) for grad in grads if grad is not None]
    with contextlib.suppress(RuntimeError):  # no second derivative
        tie, only = _tie(loss, outputs), _only_token(has)
    answers = agree.gather([tie, only])
    what = None
    if max(tie for tie, _ in answers) > _APART:
        what = "its gradient for a token depends on other tokens"
    elif answers[0][1] is not None and all(only == answers[0][1] for _, only in answers):
        what = f"only token {answers[0][1]} of each part has a gradient"
    if what is not None:
        raise ContextParallelError(
            f"context parallelism would change the loss: it must be a mean over tokens, of each by itself, and {what}. {_REMEDY}"
        )
    vanish = any(grad is not None and grad.dtype is torch.float16 for grad in grads)
    return None if vanish or not has else max(int(each.sum()) for each in has)


def check_counted(parts: SequenceParts, tokens: int | None, share: float | torch.Tensor | None) -> None:
    """Check that the parts of a sequence weigh as many tokens as their loss is a mean over. Collective over all ranks.

    Args:
        tokens: how many tokens of this rank's part have a gradient; None if that is not known.
        share: this part's share of the labels that are not ignored, by which it weighs; None if the code has said its weight.
    Raises:
        UsageError: on all ranks: they weigh something else.
    """
    answers = agree.gather(None if tokens is None or share is None else [tokens, float(share)], parts.group)
    counts, shares = zip(*(each or [0, 0.0] for each in answers), strict=True)
    total, problem = sum(counts), None
    far = max(abs(count - of * total) for count, of in zip(counts, shares, strict=True)) > _MISCOUNTED * total
    if far and None not in answers:
        problem = (
            "context parallelism would change the loss: it must be a mean over tokens, of which a part has as many as it weighs. "
            f"Of the parts of the first batch {' + '.join(map(str, counts))} tokens have a gradient, and they weigh "
            f"{' + '.join(f'{of:.3g}' for of in shares)}, by their labels that are not {IGNORED}. Give the number of tokens in "
            "the mean: echelon.window(model, weight=...)."
        )
    agree.raise_on_all(problem, ContextParallelError)


def _tie(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> float:
    """How much the gradients of odd tokens change with the even tokens, relative to the total change of gradients."""
    greatest = 0.0
    for output in outputs:
        (grad,) = torch.autograd.grad(loss, output, create_graph=True, allow_unused=True)
        if grad is None or not grad.requires_grad:
            continue
        one = torch.zeros_like(output)
        one[:, ::2] = output.detach()[:, ::2].sign() + 0.5  # not constant: a softmax does not change along a constant
        (second,) = torch.autograd.grad(grad, output, one, retain_graph=True, allow_unused=True)
        if second is None or not bool(norm := second.double().norm()):
            continue
        greatest = max(greatest, float(second[:, 1::2].double().norm() / norm))
    return greatest if math.isfinite(greatest) else 0.0


def _only_token(has: Sequence[torch.Tensor]) -> int | None:
    """The place of the only token with a gradient, if it is the same in every row."""
    count = None
    for each in has:
        if each.shape[1] < 3:
            continue
        places = each.any(0).nonzero().flatten().tolist()
        if len(places) != 1 or not bool(each[:, places[0]].all()):
            return None
        count = places[0]
    return count
