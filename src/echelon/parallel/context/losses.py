"""Before training under context parallelism: is the loss of a sequence the mean of those of its parts, by their weights?

Only a mean over tokens is. The beginning and the end of the first batch's sequences go through `compute_loss` whole and in parts,
without gradients and without dropout, with parameters as they are and with noise: new models give all tokens about one loss, of
which nearly everything is the mean.
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
import torch.distributed as dist
from torch import nn

from echelon.common.errors import ContextParallelError, UsageError
from echelon.parallel.context.batch import IGNORED, SequenceParts, beginning_at, labels_of
from echelon.parallel.context.probe import AS_IS, LEVELS, perturbed, tensors_of, undisturbed
from echelon.world import agree, rng
from echelon.world.device import map_tensors

__all__ = ["KeptOutputs", "Losses", "check_losses", "check_separate"]

logger = logging.getLogger(__name__)

_CHUNK = 4  # tokens
# How far the losses may be apart, by the bytes of a number: rounding, and what authors add to a denominator.
_TOLERANCE = {8: 1e-5, 4: 1e-3}
_COARSE = 2e-2
_ROUNDED = 1e-2  # of the same outputs
_OUTPUTS = -1  # in the place of a level: noise on the module's outputs
_LEFT_OUT = 0.4  # of the labels
_APART = 1e-4  # what tokens may have to do with one another, relative to what they have with themselves
_REMEDY = (
    "A loss of one token of each sequence, of pooled or neighbouring tokens, a sum, or a mean for each sequence is for 'fsdp' or "
    "'ddp'. If only the comparison is wrong, switch it off: Layout(check_context=False)."
)


@dataclass(frozen=True)
class Losses:
    """How losses are computed and weighed.

    Args:
        module: of which they are.
        whole: (loss, weight) of a whole batch; with `keep`, the part's loss is then computed of the module's outputs.
        part: the same of this rank's part of it.
        dtypes: in which is computed.
    """

    module: nn.Module
    whole: Callable[..., tuple[Any, float]]
    part: Callable[[Any], tuple[Any, float]]
    dtypes: Sequence[torch.dtype]


class KeptOutputs:
    """What the module gives for whole sequences, with noise, of which each rank takes its part.

    So the loss is compared by itself: in 16 bits the module's own rounding hides how a loss differs.
    """

    def __init__(self, parts: SequenceParts, length: int) -> None:
        self._parts, self._length, self._outputs = parts, length, deque[Any]()

    def check(self) -> None:
        """After the whole sequences.

        Raises:
            ValueError: the module was not called, or did not say where its outputs have the sequence.
        """
        flat = [t for outputs in self._outputs for t in tensors_of(outputs)]
        if not any(self._dim(t) for t in flat):
            raise ValueError("no outputs of tokens")

    def _dim(self, output: torch.Tensor) -> int:
        """Where the sequence is, never the first; 0 if nowhere, or perhaps in several places."""
        places = [dim for dim, size in enumerate(output.shape) if dim and size == self._length]
        return places[0] if len(places) == 1 else 0

    def keep(self, outputs: Any) -> Any:
        """The outputs with noise, the same on all ranks."""
        generator = torch.Generator().manual_seed(len(self._outputs))

        def add(output: Any) -> Any:
            if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.dim() < 2:
                return output
            return output + torch.randn(output.shape, generator=generator).to(output)

        self._outputs.append(map_tensors(outputs, add))
        return self._outputs[-1]

    def part_of_next(self) -> Any:
        """This rank's part of what the next call of the module gave."""

        def cut(output: Any) -> Any:
            dim = self._dim(output) if isinstance(output, torch.Tensor) else 0
            return self._parts.cut(output, dim) if dim else output

        return map_tensors(self._outputs.popleft(), cut)


@dataclass(frozen=True)
class _Told:
    """What one rank found of one piece of the batch: two losses with their weights, or none."""

    group: int  # its first rank
    may: float
    failed: bool
    refused: bool
    draws: bool
    whole: tuple[float, float] | None = None
    part: tuple[float, float] | None = None


def check_losses(parts: SequenceParts, losses: Losses, batch: Any, dims: Mapping[str, int], length: int) -> None:
    """Compare the loss of whole sequences with those of their parts. Collective over all ranks.

    Args:
        batch: whole.
        dims: where its tensors have the sequence.
        length: of the sequences.
    Raises:
        UsageError: on all ranks, with both numbers.
    """
    shortest = 2 * parts.size * _CHUNK
    for short in (min(length, shortest), length):  # code may take one length only
        pieces = _pieces(batch, dims, length, short)
        if all(_can_compare(parts, losses, piece, level) for level in (*LEVELS, _OUTPUTS) for piece in pieces):
            return
    if agree.is_rank0():
        logger.info(
            "context parallelism: compute_loss cannot be called on whole sequences without gradients, so its loss is not "
            "compared with that of their parts"
        )


def _pieces(batch: Any, dims: Mapping[str, int], length: int, short: int) -> list[Any]:
    """The beginning of the sequences; and where most labels count, some of which are ignored if a batch may have such."""
    label_places = labels_of(batch, dims)
    if label_places is None:
        return [beginning_at(batch, dims, start, short, {}) for start in (0, length - short)]
    name, labels = label_places
    counts = (labels != IGNORED).movedim(dims[name], 0).flatten(1).sum(1).cpu()
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
    """Compare one piece; False if code cannot be called so."""
    losses_here, error = _computed(parts, losses, piece, level)
    losses_of_all = [_Told(*each) for each in agree.gather(list(vars(losses_here).values()))]
    if isinstance(error, UsageError):
        raise error
    if refusing := [rank for rank, each in enumerate(losses_of_all) if each.refused]:
        raise ContextParallelError(f"context parallelism: rank {refusing[0]} refused the first batch; its log says why.")
    if any(each.failed for each in losses_of_all):
        return level != AS_IS  # code may ask for numbers that noise does not give
    if any(each.draws for each in losses_of_all):
        return True  # of other random numbers, which says nothing
    for group in sorted({each.group for each in losses_of_all}):
        _check_group([each for each in losses_of_all if each.group == group])
    return True


def _computed(parts: SequenceParts, losses: Losses, piece: Any, level: int) -> tuple[_Told, Exception | None]:
    may, group = _TOLERANCE.get(min(dtype.itemsize for dtype in losses.dtypes), _COARSE), _first_rank(parts)
    keep = level == _OUTPUTS
    try:
        with undisturbed(losses.module), torch.no_grad(), perturbed(losses.module, AS_IS if keep else level):
            before = rng.states()
            loss, weight = losses.whole(piece, keep=keep)
            whole = _numbers(loss, weight)
            if keep and whole is not None:
                may = _TOLERANCE.get(loss.dtype.itemsize, _ROUNDED)
            draws = not _are_same(before, rng.states())
            part = _numbers(*losses.part(piece))
    except Exception as error:
        return _Told(group, may, True, isinstance(error, UsageError) and not keep, False), None if keep else error
    return _Told(group, may, False, False, draws, whole, part), None


def _numbers(loss: Any, weight: float) -> tuple[float, float] | None:
    is_one = isinstance(loss, torch.Tensor) and loss.numel() == 1 and math.isfinite(weight)
    return (float(loss), weight) if is_one else None


def _first_rank(parts: SequenceParts) -> int:
    return dist.get_process_group_ranks(parts.group)[0] if dist.is_initialized() else 0


def _are_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return all(_are_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_are_same, a, b))
    return bool(np.array_equal(a, b))


def _check_group(group: list[_Told]) -> None:
    """
    Args:
        group: by the ranks of one sequence.
    """
    whole, part_losses = group[0].whole, [each.part for each in group if each.part is not None]
    if whole is None or len(part_losses) < len(group):
        return
    (loss, weight), counted = whole, [(one, of) for one, of in part_losses if of]
    total = sum(of for _, of in counted)
    if not weight or not total or not math.isfinite(loss):  # of a part alone, as in 0 / 0, it differs
        return
    mean = sum(one * of for one, of in counted) / weight
    size = max(abs(loss), sum(abs(one) * of for one, of in counted) / weight)
    if abs(mean - loss) <= max(each.may for each in group) * size:
        return
    shares = " + ".join(f"{of / weight:.3g} x {one:.6g}" for one, of in counted)
    raise ContextParallelError(
        f"context parallelism over {len(group)} ranks would change the loss: compute_loss gives {loss:.6g} for whole sequences "
        f"of the first batch, and {mean:.6g} for their parts, {shares}, each by its share of the weight. It must be a mean over "
        "tokens, of each by itself, and weight() must count what it is over: by default rows, by the share of their labels that "
        f"are not {IGNORED}. {_REMEDY}"
    )


def check_separate(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Whether a loss is a sum of what each token of the outputs (B, T, ...) gives by itself. Collective over all ranks.

    As far as derivatives tell: a second one by two tokens is zero then, and not only one token of each sequence counts.

    Raises:
        UsageError: on all ranks.
    """
    tie, only = 0.0, None
    with contextlib.suppress(RuntimeError):  # no second derivative
        tie, only = _tie(loss, outputs), _only_token(loss, outputs)
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


def _tie(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> float:
    """How much gradients of every second token change with the others, relative to how much they change with themselves."""
    greatest = 0.0
    for output in outputs:
        (grad,) = torch.autograd.grad(loss, output, create_graph=True, allow_unused=True)
        if grad is None or not grad.requires_grad:
            continue
        one = torch.zeros_like(output)
        one[:, ::2] = output.detach()[:, ::2].sign() + 0.5  # no constant: of that a softmax has no derivative
        (second,) = torch.autograd.grad(grad, output, one, retain_graph=True, allow_unused=True)
        if second is None or not bool(norm := second.double().norm()):
            continue
        greatest = max(greatest, float(second[:, 1::2].double().norm() / norm))
    return greatest if math.isfinite(greatest) else 0.0


def _only_token(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> int | None:
    """The place of the one token that has a gradient, if it is the same in each row."""
    count = None
    for output in outputs:
        (grad,) = torch.autograd.grad(loss, output, retain_graph=True, allow_unused=True)
        if grad is None or output.shape[1] < 3:
            continue
        has = grad.flatten(2).ne(0).any(2) if grad.dim() > 2 else grad.ne(0)
        places = has.any(0).nonzero().flatten().tolist()
        if len(places) != 1 or not bool(has[:, places[0]].all()):
            return None
        count = places[0]
    return count
