"""Attention for a part of a sequence: this rank's queries, all ranks' keys and values.

Communication: before each attention, one all-gather of its keys and values over the context-parallel ranks; after its backward
pass, one reduce-scatter of their gradients. With grouped queries both are small compared with the attention itself.
A `torch.overrides.TorchFunctionMode` replaces `scaled_dot_product_attention`, however it is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.overrides import TorchFunctionMode

from echelon.common.errors import ContextParallelError, UsageError
from echelon.parallel.context.batch import SequenceParts

__all__ = ["SplitAttention", "attend", "current", "over", "positions", "whole_sequence"]


# Whether the current pass works on parts of sequences, and on which. Attention, masks and positions ask for it.

# Innermost last; None stands for whole sequences. Not thread-local: a GPU's backward pass runs in a thread of its own, and
# recomputes forward passes there.
_active: list[SequenceParts | None] = []


def current() -> SequenceParts | None:
    """This rank's part of the sequences of the current pass; None if they are whole."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def over(parts: SequenceParts | None) -> Iterator[None]:
    """Context of passes over `parts`, or over whole sequences if None."""
    _active.append(parts)
    try:
        yield
    finally:
        _active.pop()


def positions(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The positions of the tokens of `x` in their sequence. Without context parallelism this is `torch.arange(x.shape[dim])`.

    With context parallelism a rank has an early and a late chunk of each sequence. Call it in the module's forward.

    Args:
        x: this rank's tokens, or values computed from them.
        dim: the dim of the sequence.
    Returns:
        int64 of shape (x.shape[dim],), on the device of x.
    """
    length, parts = x.shape[dim], current()
    if parts is None:
        return torch.arange(length, device=x.device)
    parts.chunk_of_part(length, "echelon.nn.positions")
    return parts.positions(length, x.device)


def whole_sequence(x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The whole sequence in order, gathered from all context-parallel ranks; `x` itself without context parallelism.

    Use it for the keys' side of a mask, where this rank's tokens are the queries: `documents[:, :, None] ==
    echelon.nn.whole_sequence(documents)[:, None, :]`. Gradients go back to the ranks. Collective over them, in a forward pass.
    """
    parts = current()
    if parts is None:
        return x
    parts.chunk_of_part(x.shape[dim], "echelon.nn.whole_sequence")
    return parts.whole(x, dim)


_SPLIT, _LOSS = F.scaled_dot_product_attention, F.cross_entropy
_SLICE = torch.Tensor.__getitem__
_BACKWARD = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_SPECIAL = frozenset({_LOSS, _SLICE, *_BACKWARD})

# Other functions that compute attention, by the name that the mode sees, with their names for messages.
_OTHERS = {
    "multi_head_attention_forward": "nn.MultiheadAttention",
    "flex_attention": "flex_attention",
    "_native_multi_head_attention": "the fast path of nn.MultiheadAttention",
    "_transformer_encoder_layer_fwd": "the fast path of nn.TransformerEncoderLayer",
    "_varlen_attn": "varlen_attn",
    "_varlen_attn.default": "varlen_attn",
    "_flash_attn_varlen_forward": "flash_attn_varlen_func",
    "_flash_attn_forward": "flash_attn_func",
}
# The names of all functions that the mode handles. Most of the thousands of calls in a step return after this one lookup.
_NAMES = frozenset({_SPLIT.__name__, *(each.__name__ for each in _SPECIAL), *_OTHERS})


class SplitAttention(TorchFunctionMode):
    """Torch function mode in which attention sees all ranks' keys and values while a part is `current`. For one thread.

    Args:
        of_targets: called with the number of targets of a cross-entropy, or of elements in a slice of 2-D int64 values.
        aside: context of a backward pass. torch disables the mode during a backward pass, which may recompute modules.
        attends: computes attention: `attend`, or a function that calls it.
    """

    def __init__(
        self,
        of_targets: Callable[[int], None] = lambda targets: None,
        aside: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        attends: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._of_targets, self._aside, self._attend = of_targets, aside, attends or attend

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _NAMES:
            return func(*args, **(kwargs or {}))
        parts = current()
        if func is _SPLIT and parts is not None:
            return self._attend(parts, *args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # the checks below are only for the first pass and for uncompiled passes
            return func(*args, **(kwargs or {}))
        if func in _SPECIAL and parts is not None:
            return self._run(func, args, kwargs or {})
        if (other := _OTHERS.get(getattr(func, "__name__", ""))) is not None and parts is not None:
            raise ContextParallelError(
                f"context parallelism over {parts.size} ranks cannot split {other}: each rank would attend to its own part of "
                "the sequence only. Compute attention with torch.nn.functional.scaled_dot_product_attention, or train without cp."
            )
        return func(*args, **(kwargs or {}))

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func in _BACKWARD:
            with self._aside():
                return func(*args, **kwargs)
        made = func(*args, **kwargs)
        targets = made if func is _SLICE else args[1] if len(args) > 1 else kwargs["target"]
        if targets.dtype is torch.int64 and (func is _LOSS or args[0].dim() == 2):
            self._of_targets(targets.numel())
        return made


def attend(
    parts: SequenceParts,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` for this rank's part of the sequence. Collective over the ranks of the sequence.

    Args:
        query, key, value: (..., H, T, D), the tokens of this rank's part.
        attn_mask: over all keys: its last dim is the length of the whole sequence. Its rows are this rank's queries, all queries,
            or one row for all. A mask with one row may also cover this rank's keys only (a padding mask).
    Raises:
        UsageError: the mask has another shape and does not cover the other ranks' keys, or a part has another length.
    """
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    length, chunk = query.shape[-2], parts.chunk_of_part(query.shape[-2], "scaled_dot_product_attention")
    parts.chunk_of_part(key.shape[-2], "the keys of scaled_dot_product_attention")
    if isinstance(attn_mask, CausalBias):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (length, length):
            raise _wrong_mask((attn_mask.seq_len_q, attn_mask.seq_len_kv), length, parts.size)
        attn_mask, is_causal = None, True
    if is_causal and key.shape[-2] != length:
        raise ContextParallelError(
            f"context parallelism: causal attention must have as many keys as queries, got {key.shape[-2]} keys and {length} "
            "queries in this rank's part."
        )
    mask = None if attn_mask is None else _rows(parts, attn_mask, length, key.shape[-2])
    keys, values = _gathered(parts, key, value)
    if not is_causal:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, **options)
    if mask is not None:
        raise ContextParallelError("scaled_dot_product_attention must have attn_mask or is_causal=True, got both.")
    made = []
    for part, (_, last) in zip(query.split(chunk, -2), parts.bounds(chunk), strict=True):
        made.append(_causal(part, keys.narrow(-2, 0, last), values.narrow(-2, 0, last), options))
    return torch.cat(made, -2)


def _causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Causal attention of queries whose own keys are the last of `keys`."""
    if query.shape[-2] == keys.shape[-2]:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, **options)
    rows, columns = query.shape[-2], keys.shape[-2]
    bias: Any
    if query.device.type == "cpu" or query.dtype is torch.float64:  # torch expands a CausalBias to a mask in these cases, which
        bias = query.new_ones(rows, columns, dtype=torch.bool).tril(columns - rows)  # fails under a TorchDispatchMode (2.13)
    else:
        bias = causal_lower_right(rows, columns)  # kernels recognise it and need no mask in memory
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, **options)


def _gathered(parts: SequenceParts, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' keys and values, in one all-gather if their shapes and dtypes are equal."""
    if key.shape == value.shape and key.dtype == value.dtype:
        keys, values = parts.whole(torch.stack([key, value]), -2).unbind()
        return keys, values
    return parts.whole(key, -2), parts.whole(value, -2)


def _rows(parts: SequenceParts, mask: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """The rows of a mask for this rank's queries, over all keys."""
    rows, columns, whole = mask.shape[-2] if mask.dim() > 1 else 1, mask.shape[-1], keys * parts.size
    if rows == queries > 1 and mask.stride(-2) == 0 and columns == keys:  # one expanded row
        mask, rows = mask.narrow(-2, 0, 1), 1
    if columns == keys and rows == 1:
        return parts.whole(mask, -1)
    if columns not in (1, whole) or rows not in (1, queries, queries * parts.size):
        raise _wrong_mask((rows, columns), queries, parts.size)
    return parts.cut(mask, -2, "attn_mask") if rows == queries * parts.size else mask


def _wrong_mask(shape: tuple[int, int], length: int, size: int) -> UsageError:
    return ContextParallelError(
        f"context parallelism: an attention mask must be over all {length * size} keys of the sequence, or one row for all "
        f"queries, got {shape[0]} x {shape[1]} where this rank has {length} of the tokens. For a causal mask use is_causal=True. "
        "For another mask, compute the keys' side with echelon.nn.whole_sequence: documents[:, :, None] == "
        "echelon.nn.whole_sequence(documents)[:, None, :], and positions with echelon.nn.positions(x). If you cannot change the "
        "code, train without cp."
    )
