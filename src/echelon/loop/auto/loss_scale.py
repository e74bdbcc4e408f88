"""Warn of a loss that is not a mean: a sum over the samples, such a sum divided by the samples of the global batch, or a mean
divided by the accumulation. Autograd's graph shows which.

These losses are right in plain PyTorch in one process. Here, where losses are averaged over ranks and micro-batches, they train
with another step size. A loss whose graph is not clear (in compiled code, or by a user's autograd.Function) gets no warning.
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

_MEAN, _SUM = 1, 2  # torch's numbers of reductions, as graph nodes save them
_AS_IT_IS = {"ToCopyBackward0", "AliasBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "CloneBackward0"}
_TERMS = {"AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0"}
_FACTORS = {"MulBackward0", "MulBackward1", "DivBackward0"}
_LISTS = {"StackBackward0", "CatBackward0"}  # join losses, which are then added
_MOST = 256  # nodes that are looked at


def tell_of_scale(loss: torch.Tensor, samples: int, weight: Any, accumulation: int, divided: int) -> None:
    """Warn on rank 0 if the first loss of a run is not a mean over its micro-batch.

    Args:
        samples: number of samples in this micro-batch.
        weight: of this micro-batch.
        accumulation: micro-batches per update on this rank.
        divided: micro-batches per global batch, over all ranks; one batch in the script for one process.
    """
    if not agree.is_rank0():
        return
    node = _through(loss.grad_fn)
    if divided > 1 and samples > 1 and _is_sum(node, samples):
        logger.warning(
            "the loss seems to be a sum over the %s samples of a micro-batch. It must be their mean: gradients are averaged over "
            "%s micro-batches, so with a sum they are too small by that factor. Use reduction='mean', or divide by the number of "
            "samples",
            samples,
            divided,
        )
    elif divided > 1 and float(weight) != samples * divided and _is_sum_over(node, samples, samples * divided):
        logger.warning(
            "the loss seems to be a sum over the %s samples of a micro-batch, divided by the %s of the global batch. Divide by "
            "its own %s: gradients are averaged over the %s micro-batches anyway, so they are now too small by that factor",
            samples,
            samples * divided,
            samples,
            divided,
        )
    elif accumulation > 1 and _is_divided(node, accumulation):
        logger.warning(
            "the loss seems to be divided by the %s micro-batches of an update. Do not divide it: gradients are averaged over "
            "micro-batches anyway, so they are now too small by that factor",
            accumulation,
        )


def tell_of_labels(loss: torch.Tensor, samples: int, sizes: set[int]) -> None:
    """Warn on rank 0 if the first loss of a run is torch's mean over targets, and samples differ in their number of targets.

    This happens with class weights, with ignored labels, and if a batch concatenates the rows of its samples. If micro-batches
    are then weighed by samples, the mean over the ranks differs from the mean over the global batch.

    Args:
        samples: the weight of the micro-batch.
        sizes: first dimensions of the batch's tensors. A loss over the batch's rows has one of these numbers of rows.
    """
    if samples < 2 or not agree.is_rank0():
        return
    means = [node for node in _leaves(loss.grad_fn, _AS_IT_IS | _TERMS | _FACTORS) if _is_mean(node) and _has_targets(node)]
    over_labels = [node for node in means if _is_over_labels(node)] or means
    if len(over_labels) != 1 or is_split(targets := _saved(over_labels[0], "target")):
        return
    if (rows := targets.size(0)) % samples and rows in sizes:
        logger.warning(
            "the loss is a mean over %s rows, but micro-batches and ranks, which differ in rows, are weighed by their samples "
            "(here %s): training does not follow the mean over the global batch. Give the number of rows as weight: "
            "`ech.window(model, weight=len(rows))`, or a unit's weight(data)",
            rows,
            samples,
        )
    elif targets.numel() % samples == 0 and _is_over_labels(over_labels[0]):
        _tell_of_counts(over_labels[0], targets.flatten(), samples)


def _tell_of_counts(node: Any, labels: torch.Tensor, samples: int) -> None:
    of_classes, index = _saved(node, "weight"), _saved(node, "ignore_index")
    ignored = labels == (index - 2**64 if index >= 2**63 else index)  # the node saves it as an unsigned number
    counts = (~ignored).double() if of_classes is None else (~ignored) * of_classes[labels.masked_fill(ignored, 0)]
    for of_samples in (counts.view(samples, -1).sum(1), counts.view(-1, samples).sum(0)):  # samples may be in either dimension
        if torch.allclose(of_samples, of_samples[:1]):
            return
    logger.warning(
        "the loss is a mean over labels that count %.6g in all, but micro-batches and ranks, which differ in labels, are weighed "
        "by their samples (here %s): training does not follow the mean over the global batch. Give what the labels count, %s, as "
        "weight: `ech.window(model, weight=...)`, or a unit's weight(data)",
        float(counts.sum()),
        samples,
        "(labels != ignore_index).sum()" if of_classes is None else "class_weights[labels].sum()",
    )


def _has_targets(node: Any) -> bool:
    return isinstance(target := _saved(node, "target"), torch.Tensor) and target.dim() > 0


def _is_over_labels(node: Any) -> bool:
    return _saved(node, "total_weight") is not None


def _is_sum(node: Any, samples: int) -> bool:
    """Whether the loss's first term is a sum over samples, and no term is a mean or divided."""
    terms = list(_terms(node))
    return bool(terms) and _sums(terms[0], samples) and not any(_is_mean(term) or _name(term).startswith("Div") for term in terms)


def _is_sum_over(node: Any, samples: int, number: int) -> bool:
    """Whether the loss is a sum over samples, divided by `number`, and `number` is not the count of summed elements."""
    if not _is_over(node, number):
        return False
    term = next(_terms(node.next_functions[0][0]), None)
    return term is not None and _sums(term, samples) and number not in _elements(term)


def _elements(node: Any) -> list[int]:
    """Possible counts of the elements that a node sums."""
    kept = (_saved(node, name) for name in ("self", "target"))
    sizes = _saved(node, "self_sym_sizes")
    return [each.numel() for each in kept if isinstance(each, torch.Tensor)] + ([math.prod(sizes)] if sizes else [])


def _is_over(node: Any, number: int) -> bool:
    by = _saved(node, "other")
    if _name(node) != "DivBackward0" or not isinstance(by, torch.Tensor) or by.dim() or by.device.type != "cpu" or is_split(by):
        return False
    return by.item() == number


def _is_divided(node: Any, number: int) -> bool:
    """Whether the loss is a mean divided by `number`, and `number` is not the count of its terms."""
    if not _is_over(node, number):
        return False
    terms = list(_terms(node.next_functions[0][0]))
    halves = number == 2 and any(_is_square(term) for term in terms)  # half the squared error is usual
    return len(terms) != number and not halves and any(_is_mean(term) for term in terms)


def _terms(node: Any) -> Iterator[Any]:
    """The terms of a sum, from the left."""
    return _leaves(node, _AS_IT_IS | _TERMS)


def _leaves(node: Any, kinds: set[str]) -> Iterator[Any]:
    """The first nodes that are not of these kinds, on each way into the graph, from the left."""
    nodes, looked = [node], 0
    while nodes and looked < _MOST:
        node, looked = nodes.pop(), looked + 1
        if _name(node) in kinds:
            nodes += [inner for inner, _ in reversed(node.next_functions)]
        elif node is not None:
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
    """Whether the summed elements are losses, each a mean over the samples, with any factors: losses of several tasks."""
    leaves = _leaves(node, _AS_IT_IS | _TERMS | _FACTORS)
    return any(_name(each) in _LISTS or (_name(each) == "MeanBackward1" and 0 in (_saved(each, "dim") or ())) for each in leaves)


def _has_shares(node: Any) -> bool:
    """Whether it is a product with weights that add up to about 1, here or over all ranks."""
    factors = (_saved(node, name) for name in ("self", "other")) if _name(node) == "MulBackward0" else ()
    return any(
        isinstance(each, torch.Tensor)
        and not is_split(each)  # its sum is known only to all ranks together
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
    """Whether it depends on a parameter alone, like weight decay in the loss."""
    for _ in range(_MOST):
        inner = {each for each, _ in node.next_functions if each is not None}
        if len(inner) != 1:
            break
        node = inner.pop()
    return _name(node).endswith("AccumulateGrad")


def _saved(node: Any, name: str) -> Any:
    """A value that an autograd node saves for its backward pass, by its name in torch's derivatives.yaml; None if it has none."""
    return getattr(node, f"_saved_{name}", None)


def _through(node: Any) -> Any:
    while _name(node) in _AS_IT_IS:
        node = node.next_functions[0][0]
    return node


def _name(node: Any) -> str:
    return node.name() if node is not None else ""
