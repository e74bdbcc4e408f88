"""A loss that is no mean, as far as autograd's graph of it shows: a sum over the samples, also divided by those of the global
batch, or a mean divided by the accumulation.

Both are right in plain PyTorch in one process, and train with another step size here, where losses are averaged over ranks and
micro-batches. What the graph does not show for certain (a loss in compiled code, or of an autograd.Function of the user's) is
taken as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from echelon.parallel.shards import is_split
from echelon.world import agree

__all__ = ["tell_of_labels", "tell_of_scale"]

logger = logging.getLogger(__name__)

_MEAN, _SUM = 1, 2  # of torch's reductions, as nodes save them
_AS_IT_IS = {"ToCopyBackward0", "AliasBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "CloneBackward0"}
_TERMS = {"AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0"}
_FACTORS = {"MulBackward0", "MulBackward1", "DivBackward0"}
_LISTS = {"StackBackward0", "CatBackward0"}  # of losses, which are added
_MOST = 64  # terms


def tell_of_scale(loss: torch.Tensor, samples: int, weight: Any, accumulation: int, divided: int) -> None:
    """Warn of the first loss of a run, on rank 0, if it is no mean over its micro-batch.

    Args:
        samples: of this micro-batch.
        weight: of this micro-batch.
        accumulation: micro-batches of an update on this rank.
        divided: into how many micro-batches, over all ranks, the batch of the script as it was is divided.
    """
    if not agree.is_rank0():
        return
    node = _through(loss.grad_fn)
    if divided > 1 and samples > 1 and _is_sum(node, samples):
        logger.warning(
            "the loss seems to be a sum over the %s samples of a micro-batch. It must be their mean: gradients are the mean over "
            "%s micro-batches, so that those of a sum come out as many times too small. Take reduction='mean', or divide by the "
            "samples",
            samples,
            divided,
        )
    elif divided > 1 and float(weight) != samples * divided and _is_sum_over(node, samples, samples * divided):
        logger.warning(
            "the loss seems to be a sum over the %s samples of a micro-batch, divided by the %s of the global batch. Divide by "
            "its own %s: the mean over the %s micro-batches is taken anyway, so that gradients come out as many times too small",
            samples,
            samples * divided,
            samples,
            divided,
        )
    elif accumulation > 1 and _is_divided(node, accumulation):
        logger.warning(
            "the loss seems to be divided by the %s micro-batches of an update. Leave that out: the mean over them is taken "
            "anyway, so that gradients come out as many times too small",
            accumulation,
        )


def tell_of_labels(loss: torch.Tensor, samples: int, sizes: set[int]) -> None:
    """Warn of the first loss of a run, on rank 0, if it is torch's mean over targets of which samples have more or fewer.

    So it is with weights of classes, with labels that are ignored, and where a batch has the rows of all its samples end to end.
    Where samples weigh alike, the mean over the ranks is another one than that of the global batch.

    Args:
        samples: that the micro-batch weighs.
        sizes: the first dimensions of what is in the batch, among which the rows of a loss are if they are the batch's.
    """
    if samples < 2 or not agree.is_rank0():
        return
    means = _means_with_targets(loss)
    over_labels = [node for node in means if _is_over_labels(node)] or means
    if len(over_labels) != 1 or is_split(targets := _saved(over_labels[0], "target")):
        return
    if (rows := targets.size(0)) % samples and rows in sizes:
        logger.warning(
            "the loss is a mean over %s rows, but weighs its %s samples among micro-batches and ranks, which have more and fewer "
            "rows: it trains on another mean than that over the global batch. Give the rows as weight: `ech.window(model, "
            "weight=len(rows))`, or a unit's weight(data)",
            rows,
            samples,
        )
    elif targets.numel() % samples == 0 and _is_over_labels(over_labels[0]):
        _tell_of_counts(over_labels[0], targets.flatten(), samples)


def _tell_of_counts(node: Any, labels: torch.Tensor, samples: int) -> None:
    of_classes, index = _saved(node, "weight"), _saved(node, "ignore_index")
    ignored = labels == (index - 2**64 if index >= 2**63 else index)  # which is saved without its sign
    counts = (~ignored).double() if of_classes is None else (~ignored) * of_classes[labels.masked_fill(ignored, 0)]
    for of_samples in (counts.view(samples, -1).sum(1), counts.view(-1, samples).sum(0)):  # whichever dimension they are in
        if torch.allclose(of_samples, of_samples[:1]):
            return
    logger.warning(
        "the loss is a mean over labels that count %.6g in all, but weighs its %s samples among micro-batches and ranks, which "
        "have more and fewer of these: it trains on another mean than that over the global batch. Give what it counts, %s, as "
        "weight: `ech.window(model, weight=...)`, or a unit's weight(data)",
        float(counts.sum()),
        samples,
        "(labels != ignore_index).sum()" if of_classes is None else "class_weights[labels].sum()",
    )


def _means_with_targets(loss: torch.Tensor) -> list[Any]:
    """The nodes of torch's mean losses with a target that are added up in it, with whatever factors."""
    made: list[Any] = []
    left: list[Any] = [loss.grad_fn]
    looked = 0
    while left and looked < _MOST:
        node, looked = left.pop(), looked + 1
        target = _saved(node, "target")
        if isinstance(target, torch.Tensor) and target.dim():
            made += [node] if _is_mean(node) else []
        elif _name(node) in _AS_IT_IS | _TERMS | _FACTORS:
            left += [inner for inner, _ in node.next_functions]
    return made


def _is_over_labels(node: Any) -> bool:
    return _saved(node, "total_weight") is not None


def _is_sum(node: Any, samples: int) -> bool:
    """Whether the first of its terms is a sum over samples, and none shows that it is a mean."""
    terms = list(_terms(node, _MOST))
    return bool(terms) and _sums(terms[0], samples) and not any(_is_mean(term) or _name(term).startswith("Div") for term in terms)


def _is_sum_over(node: Any, samples: int, number: int) -> bool:
    """Whether it is a sum over samples, divided by this very number, which is not that of what is summed up."""
    if not _is_over(node, number):
        return False
    term = next(_terms(_through(node.next_functions[0][0]), _MOST), None)
    return term is not None and _sums(term, samples) and number not in _elements(term)


def _elements(node: Any) -> list[int]:
    """How many numbers a sum may be of."""
    kept = (_saved(node, name) for name in ("self", "target"))
    sizes = _saved(node, "self_sym_sizes")
    return [each.numel() for each in kept if isinstance(each, torch.Tensor)] + ([math.prod(sizes)] if sizes else [])


def _is_over(node: Any, number: int) -> bool:
    by = _saved(node, "other")
    if _name(node) != "DivBackward0" or not isinstance(by, torch.Tensor) or by.dim() or by.device.type != "cpu" or is_split(by):
        return False
    return by.item() == number


def _is_divided(node: Any, number: int) -> bool:
    """Whether it is a mean loss over this very number, which is not that of the losses in it."""
    if not _is_over(node, number):
        return False
    terms = list(_terms(_through(node.next_functions[0][0]), _MOST))
    halves = number == 2 and any(_is_square(term) for term in terms)  # as half the squared error
    return len(terms) != number and not halves and any(_is_mean(term) for term in terms)


def _terms(node: Any, most: int) -> Iterator[Any]:
    """What is added up in it, from the left; at most so many."""
    terms, left = [node], 0
    while terms and left < most:
        node = _through(terms.pop())
        if _name(node) in _TERMS:
            terms.extend(inner for inner, _ in reversed(node.next_functions) if inner is not None)
        else:
            left += 1
            yield node


def _sums(node: Any, samples: int) -> bool:
    if _saved(node, "reduction") == _SUM:
        return True
    if _name(node) not in ("SumBackward0", "SumBackward1"):
        return False
    sizes = _saved(node, "self_sym_sizes")
    inner = _through(node.next_functions[0][0])
    is_mean = _is_of_means(inner) or _has_shares(inner) or _is_of_parameter(inner)
    return bool(sizes) and sizes[0] % samples == 0 and not is_mean


def _is_of_means(node: Any) -> bool:
    """Whether what is summed up are losses already, each a mean over the samples, with whatever factors: as those of tasks."""
    nodes, looked = [node], 0
    while nodes and looked < _MOST:
        node, looked = _through(nodes.pop()), looked + 1
        dims = _saved(node, "dim") or ()
        if _name(node) in _LISTS or (_name(node) == "MeanBackward1" and 0 in dims):
            return True
        if _name(node) in _TERMS | _FACTORS:
            nodes += [inner for inner, _ in node.next_functions if inner is not None]
    return False


def _has_shares(node: Any) -> bool:
    """Whether it is a product with weights that add up to about 1, also those divided by what they are on all ranks."""
    factors = (_saved(node, name) for name in ("self", "other")) if _name(node) == "MulBackward0" else ()
    return any(
        isinstance(each, torch.Tensor)
        and not is_split(each)  # of which only all ranks together know the sum
        and each.dim() > 0
        and float(each.detach().abs().sum()) < math.sqrt(each.numel())
        for each in factors
    )


def _is_mean(node: Any) -> bool:
    return _saved(node, "reduction") == _MEAN or _name(node).startswith("Mean")


def _is_square(node: Any) -> bool:
    inner = node.next_functions[0][0] if node.next_functions else None
    return _name(node).startswith("Mse") or _name(inner).startswith("Pow")


def _is_of_parameter(node: Any) -> bool:
    """Whether it follows from a parameter alone, as weight decay in the loss does."""
    for _ in range(_MOST):
        inner = {each for each, _ in node.next_functions if each is not None}
        if len(inner) != 1:
            break
        node = inner.pop()
    return _name(node).endswith("AccumulateGrad")


def _saved(node: Any, name: str) -> Any:
    """What a node of autograd's keeps for its backward pass, by its name in torch's derivatives.yaml; None if it keeps none."""
    return getattr(node, f"_saved_{name}", None)


def _through(node: Any) -> Any:
    while _name(node) in _AS_IT_IS:
        node = node.next_functions[0][0]
    return node


def _name(node: Any) -> str:
    return node.name() if node is not None else ""
