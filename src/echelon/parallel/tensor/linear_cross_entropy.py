"""The loss of a language model's last layer, computed in chunks of rows: the logits of a batch never exist all at once.

`cross_entropy(linear(hidden, weight), target)` keeps N x V logits three times in float32; with 8k tokens and a vocabulary of 128k
that is 12.9 GB. Here the rows are processed in chunks. For each chunk

    logits = hidden weight^T + bias        p = softmax(logits)        loss_i = -log p_i[target_i]
    d = s_i (p_i - onehot(target_i))       d_hidden_i = d weight      d_weight += d^T hidden

where s_i is the row's weight: 1/(number of rows not ignored) for a mean. For "mean" and "sum", s_i is known in the forward pass
up to one factor. So the forward pass computes the gradients while it has the logits, and the backward pass multiplies them by
this factor: no more matrix products than the usual way. The logits are recomputed instead for "none", fp16 (whose gradient scaler
must act before rounding), a second backward pass and a compiled one.

Communication: none, unless the vocabulary is split over tensor-parallel ranks. Then all-reduces of the maxima and the sums for
each chunk, and one all-reduce of the gradient of hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import TensorParallelError, UsageError, require
from echelon.common.numbers import number, whole
from echelon.parallel.axes import Axis
from echelon.parallel.shards import gathered_copy, is_fully_sharded, is_split
from echelon.parallel.tensor import collectives as traffic

__all__ = ["WordShard", "liger", "linear_cross_entropy", "unit_of"]

Reduction = Literal["mean", "sum", "none"]

# Logits of a chunk. On a GPU 512 MiB in float32, 1,024 rows with a vocabulary of 128k: enough for an efficient matrix product.
# On a CPU 64 MiB: larger chunks gain nothing (BENCHMARKS.md).
_LOGITS_AT_ONCE = {"cpu": 2**24}
_LOGITS_AT_ONCE_ELSEWHERE = 2**27


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    chunk_tokens: int | None = None,
    kernel: Literal["torch", "liger"] = "torch",
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` in a fraction of the memory.

    Collective over the tensor-parallel ranks if the weight's rows are split over them; they must have the same hidden and target.
    A weight that `fully_shard` has split is gathered as in its module's forward, which is collective as well.

    Args:
        hidden: (..., D) of floats; a DTensor is gathered.
        weight: (V, D), tied to the embedding or not; may be a DTensor.
        target: (...) of int64: token ids from 0 to V - 1, or ignore_index.
        bias: (V,), or None.
        ignore_index: target value of tokens without a loss.
        label_smoothing: from 0 to 1, the share of the target that is spread over the whole vocabulary, as in
            `torch.nn.functional.cross_entropy`.
        reduction: "mean" over the targets that are not ignored (nan if there are none), "sum", or "none": a loss per target.
        chunk_tokens: rows whose logits exist together; by default as many as take 512 MiB (64 MiB on a CPU).
        kernel: "liger" uses Liger's Triton kernel on a GPU, if `liger-kernel` is installed and the vocabulary is not split. It is
            not the default: it waits for the device in each forward pass, and rounds logits and sums to its arguments' dtypes.
    Returns:
        the loss in float32, or float64 if hidden is. Matrix products are in autocast's dtype if it is on, else in hidden's; sums
        over the vocabulary and over chunks are in float32 or wider.
    Raises:
        UsageError: shapes or dtypes do not fit together, a target is outside of the vocabulary (checked on a CPU only), or the
            kernel is not available.
    """
    _check(hidden, weight, target, bias, reduction)
    require(kernel in ("torch", "liger"), "kernel", "'torch' or 'liger'", kernel)
    number("label_smoothing", label_smoothing, "from 0 to 1", lambda part: 0 <= part <= 1)
    chunk = chunk_tokens if chunk_tokens is None else whole("chunk_tokens", chunk_tokens, at_least=1)
    with split_words(hidden, weight, target, bias) as (shard, hidden, weight, target, bias):
        rows = hidden.reshape(-1, hidden.shape[-1])
        flat = target.reshape(-1)
        _check_target(flat, shard.words, ignore_index)
        if kernel == "liger":
            options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
            return liger(rows, shard)(rows, weight, flat, bias=bias, **options)
        at_once = chunk or _rows_at_once(rows.device, max(1, len(weight)))
        how = _How(reduction, ignore_index, label_smoothing, shard, torch.is_grad_enabled(), _type_of(rows), at_once)
        loss: torch.Tensor = _LinearCrossEntropy.apply(rows, weight, bias, flat, how)  # type: ignore[no-untyped-call]
        return loss.view(target.shape) if reduction == "none" else loss


@dataclass(frozen=True)
class _How:
    """The options that are the same for all chunks.

    Args:
        trains: whether gradients are enabled.
        computes_in: the dtype of matrix products.
        chunk: rows per chunk.
    """

    reduction: Reduction
    ignore_index: int
    smoothing: float
    shard: WordShard
    trains: bool
    computes_in: torch.dtype
    chunk: int

    @property
    def sums_in(self) -> torch.dtype:
        return torch.promote_types(self.computes_in, torch.float32)

    @property
    def early(self) -> bool:
        """Whether the forward pass computes the gradients, up to a factor known only in the backward pass."""
        return (
            self.trains
            and self.reduction != "none"
            and self.computes_in is not torch.float16
            and not torch.compiler.is_compiling()
        )


class _LinearCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), bias (V,) or None, target (N,) -> the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, bias: Any, target: Any, how: _How) -> torch.Tensor:
        ctx.how, ctx.early = how, None
        ctx.save_for_backward(hidden, weight, bias, target)
        wanted = tuple(ctx.needs_input_grad[:3]) if how.early else (False, False, False)
        losses, gradients = _in_chunks(hidden, weight, bias, target, how, _factors(target, how), wanted)
        if any(wanted):
            ctx.early = gradients
        if how.reduction == "none":
            return losses
        return losses.sum() if how.reduction == "sum" else losses.sum() / (target != how.ignore_index).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise UsageError("linear_cross_entropy has no second derivatives. Use cross_entropy(linear(...)) for these.")
        early, ctx.early = ctx.early, None
        if early is not None:  # multiplied in place: nothing else refers to them, and they are as large as the weight
            for made in early:
                if made is not None:
                    made.mul_(gradient)
            return (*early, None, None)
        how: _How = ctx.how
        hidden, weight, bias, target = ctx.saved_tensors
        factors = _factors(target, how)
        # Rows that do not count get a zero gradient even if the incoming gradient is nan.
        factors = torch.where(factors == 0, torch.zeros_like(factors), factors * gradient.to(how.sums_in))
        _, gradients = _in_chunks(hidden, weight, bias, target, how, factors, tuple(ctx.needs_input_grad[:3]))
        return (*gradients, None, None)


def _factors(target: torch.Tensor, how: _How) -> torch.Tensor:
    """(N,), the factor of each row's loss in the gradients, up to the incoming gradient."""
    counts = (target != how.ignore_index).to(how.sums_in)
    return counts / counts.sum().clamp(min=1) if how.reduction == "mean" else counts  # torch's gradients of an empty mean are 0


def _in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    how: _How,
    factors: torch.Tensor,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """One pass over all rows, chunk by chunk. Collective over the shards of the vocabulary.

    Args:
        factors: (N,), the factor of each row's loss in the gradients.
        wanted: whether to compute the gradients of hidden, weight and bias.
    Returns:
        the losses (N,), 0 for ignored rows; and the gradients of hidden, weight and bias.
    """
    sums: dict[str, Any] = {"dtype": how.sums_in, "device": hidden.device}
    of_hidden = torch.empty_like(hidden) if wanted[0] else None
    of_weight = torch.zeros(weight.shape, **sums) if wanted[1] else None
    of_bias = torch.zeros(len(weight), **sums) if wanted[2] else None
    losses = torch.zeros(len(hidden), **sums)
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(how.computes_in)
        for rows in _slices(len(hidden), how.chunk):
            x = hidden[rows].to(how.computes_in)
            logits = _multiply(x, w.t(), how.sums_in)
            if bias is not None:
                logits += bias
            # Where the targets are among this rank's rows of the vocabulary: 0 for those that it does not have.
            place = target[rows, None] - how.shard.first
            own = (place >= 0) & (place < len(weight))
            place = torch.where(own, place, torch.zeros_like(place))
            loss, p = _softmax(logits, place, own, how)
            losses[rows] = torch.where(target[rows] != how.ignore_index, loss, torch.zeros_like(loss))
            del logits
            if not any(wanted):
                continue
            if how.smoothing:
                p -= how.smoothing / how.shard.words
            if len(weight):
                p.scatter_add_(1, place, own.to(p.dtype) * (how.smoothing - 1))
            if of_bias is not None:
                of_bias += (p * factors[rows, None]).sum(0)
            p = p.to(how.computes_in)
            if of_hidden is not None:
                of_hidden[rows] = _multiply(p, w, how.sums_in) * factors[rows, None]
            if of_weight is not None:  # the factors multiply hidden, whose rows are shorter than those of the logits
                _add_product(of_weight, p.t(), (x * factors[rows, None]).to(how.computes_in))
    if of_hidden is not None and how.shard.size > 1:
        dist.all_reduce(of_hidden, group=how.shard.group)
    return losses, [
        of_hidden,
        None if of_weight is None else of_weight.to(weight.dtype),
        None if of_bias is None or bias is None else of_bias.to(bias.dtype),
    ]


def _softmax(logits: torch.Tensor, place: torch.Tensor, own: torch.Tensor, how: _How) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row (n,), and the probabilities (n, V) of this rank's part of the vocabulary. Overwrites the logits.

    Args:
        place: (n, 1), the row of the target in this rank's part.
        own: (n, 1), whether this rank has the target.
    """
    if how.shard.size == 1:
        logs = torch.log_softmax(logits, 1)
        loss = -logs.gather(1, place)[:, 0]
        if how.smoothing:
            loss = (1 - how.smoothing) * loss - how.smoothing * logs.mean(1)
        return loss, logs.exp_()
    # Phase 1: the largest logit of all ranks, so that no exp overflows. A rank may have no part of the vocabulary.
    largest = logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), float("-inf"))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=how.shard.group)
    logits -= largest[:, None]
    # Phase 2: the sums of all ranks. Only one has the target's logit.
    of_target = torch.where(own, logits.gather(1, place), 0.0)[:, 0] if logits.shape[1] else logits.sum(1)
    sums = [of_target, logits.sum(1) if how.smoothing else of_target]
    logits.exp_()
    together = torch.stack([logits.sum(1), *sums])
    dist.all_reduce(together, group=how.shard.group)
    total, of_target, of_all = together
    loss = total.log() - of_target
    if how.smoothing:
        loss = (1 - how.smoothing) * loss + how.smoothing * (total.log() - of_all / how.shard.words)
    return loss, logits.div_(total[:, None])


def _multiply(a: torch.Tensor, b: torch.Tensor, result: torch.dtype) -> torch.Tensor:
    """The matrix product a b in dtype `result`, rounded only once on CUDA."""
    if a.dtype is result:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=result)
    return (a @ b).to(result)


def _add_product(into: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype is into.dtype:
        into.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into += a @ b


def _slices(rows: int, at_once: int) -> Iterator[slice]:
    """Chunks of nearly equal size, none larger than `at_once`."""
    size = -(-rows // max(1, -(-rows // at_once)))
    return (slice(first, first + size) for first in range(0, rows, max(1, size)))


def _rows_at_once(device: torch.device, words: int) -> int:
    return max(1, _LOGITS_AT_ONCE.get(device.type, _LOGITS_AT_ONCE_ELSEWHERE) // words)


def _type_of(hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _check(hidden: Any, weight: Any, target: Any, bias: Any, reduction: Any) -> None:
    require(reduction in ("mean", "sum", "none"), "reduction", "'mean', 'sum' or 'none'", reduction)
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        require(tensor.is_floating_point(), name, "of floating point", tensor.dtype)
    require(
        weight.dim() == 2, "weight", "of shape (words, features)", tuple(weight.shape), "Under fully_shard, give the parameter."
    )
    fits = hidden.dim() >= 1 and hidden.shape[-1] == weight.shape[1]
    require(fits, "hidden", f"of shape (..., {weight.shape[1]}), as the weight is {tuple(weight.shape)}", tuple(hidden.shape))
    require(target.dtype is torch.int64, "target", "of type int64", target.dtype, "Probabilities are not supported.")
    require(target.shape == hidden.shape[:-1], "target", f"of shape {tuple(hidden.shape[:-1])}", tuple(target.shape))
    if bias is not None:
        require(bias.shape == weight.shape[:1], "bias", f"of shape ({len(weight)},)", tuple(bias.shape))


def _check_target(target: torch.Tensor, words: int, ignore_index: int) -> None:
    """Check the targets, on a CPU only. Elsewhere the check would wait for the device, which fails at a wrong index itself."""
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= words))
    if wrong.any():
        raise UsageError(
            f"target must be from 0 to {words - 1}, or {ignore_index} to ignore a token, got {int(target[wrong][0])}. "
            "Is the vocabulary of the tokenizer larger than the weight?"
        )


# A weight with a row per token of the vocabulary may be split by tensor parallelism, by `fully_shard`, or both.
#
# A DTensor does not say which of them split it. A shard of `fully_shard` is gathered by its module for a forward and backward
# pass. A shard of tensor parallelism stays, and every rank works on its part of the vocabulary.

Operands = tuple["WordShard", torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class WordShard:
    """This rank's part of the vocabulary.

    Args:
        words: the size of the whole vocabulary.
        first: the first token id of this rank.
        group: the ranks over which the vocabulary is split.
        size: the number of these ranks; 1 if this rank has the whole vocabulary.
    """

    words: int
    first: int = 0
    group: dist.ProcessGroup | None = None
    size: int = 1


def liger(rows: torch.Tensor, shard: WordShard) -> Callable[..., torch.Tensor]:
    """Liger's function for the same loss.

    Raises:
        UsageError: it is not installed, or does not support these rows.
    """
    if shard.size > 1 or rows.device.type != "cuda":
        where = f"a {rows.device.type}" if shard.size == 1 else f"words that are split over {shard.size} ranks"
        raise TensorParallelError(f"kernel must be 'torch' for {where}, got 'liger'. Leave it out.")
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        raise TensorParallelError(
            f"kernel='liger' needs liger-kernel, which cannot be imported ({error}). Install it, or leave out kernel."
        ) from error
    function: Callable[..., torch.Tensor] = liger_fused_linear_cross_entropy
    return function


@contextmanager
def split_words(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[Operands]:
    """The operands of a loss as plain tensors, weight and bias with this rank's rows of the vocabulary. Collective."""
    unit = unit_of(weight) if is_split(weight) else None
    if unit is not None and torch.is_grad_enabled() and not hidden.requires_grad:
        # hidden is frozen: no gradient reaches the hooks with which `fully_shard` reduces the gradients of a unit.
        weight, bias, unit = gathered_copy(weight), gathered_copy(bias), None
    try:
        if unit is not None:
            names = {id(p): n for n, p in unit.named_parameters()}
            unit.unshard()  # type: ignore[operator]
            weight, bias = _now(unit, names, weight), _now(unit, names, bias)
        shard, weight, bias = _words_of(weight, bias)
        yield shard, _whole(hidden), weight, _whole(target), bias
    finally:
        if unit is not None and not torch.is_grad_enabled():  # with gradients, the backward pass does it
            unit.reshard()  # type: ignore[operator]


def _words_of(weight: torch.Tensor, bias: Any) -> tuple[WordShard, torch.Tensor, torch.Tensor | None]:
    words = len(weight)
    if not is_split(weight):
        return WordShard(words), weight, _whole(bias)
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = weight.device_mesh, list(weight.placements)  # type: ignore[attr-defined]
    axes = [i for i, placement in enumerate(placements) if placement == Shard(0) and mesh.size(i) > 1]
    if len(axes) > 1:
        raise TensorParallelError(f"weight must be split over one axis of ranks at most, got {placements} over {mesh}.")
    kept = [Shard(0) if i in axes else Replicate() for i in range(mesh.ndim)]
    # Every rank computes the whole gradient of its rows: it need not be summed.
    weight = weight.redistribute(placements=kept).to_local(grad_placements=kept)  # type: ignore[attr-defined]
    if not axes:
        return WordShard(words), weight, _whole(bias)
    group, rank, size = mesh.get_group(axes[0]), mesh.get_local_rank(axes[0]), mesh.size(axes[0])
    first = min(words, rank * -(-words // size))  # as torch.chunk divides
    if bias is not None:
        if is_split(bias):
            bias = bias.redistribute(placements=kept).to_local(grad_placements=kept)
        else:
            bias = traffic.whole(bias, Axis.of(group))[first : first + len(weight)]
    return WordShard(words, first, group, size), weight, bias


def _whole(tensor: Any) -> Any:
    if tensor is None or not is_split(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    whole = [Replicate()] * tensor.device_mesh.ndim
    return tensor.redistribute(placements=whole).to_local(grad_placements=whole)


# --- weights that `fully_shard` has split


def _now(unit: nn.Module, names: dict[int, str], parameter: Any) -> Any:
    """The tensor that now replaces a sharded parameter in its module."""
    name = names.get(id(parameter))
    return parameter if name is None else unit.get_parameter(name)


def unit_of(parameter: torch.Tensor) -> nn.Module | None:
    """The innermost module given to `fully_shard` that shards this parameter; None if `fully_shard` does not shard it.

    torch has no public way from a parameter to its module, nor a list of sharded modules. `_module_state_mapping` has them as
    its keys (torch 2.11 to 2.13; tests/parallel/test_linear_cross_entropy.py notices a change).
    """
    from torch.distributed._composable_state import _module_state_mapping

    units = [m for m in list(_module_state_mapping) if is_fully_sharded(m) and any(p is parameter for p in m.parameters())]
    return min(units, key=lambda module: sum(1 for _ in module.modules()), default=None)
