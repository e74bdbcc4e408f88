"""Context parallelism for models of transformers, whose forward computes positions, masks and next-token labels itself.

There they would be computed from the local tokens, and be silently wrong on every rank. So the model's forward gets positions and
shifted labels of the whole sequence, and a function of this module makes the masks. transformers calls it through its public
registries (`AttentionInterface`, `AttentionMaskInterface`). Without an active context everything is as with "sdpa".
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from echelon.common.errors import ContextParallelError
from echelon.hf.layers import layer_drop

__all__ = ["Parts", "adapt", "with_shifted_labels"]

_NAME = "echelon_context"
_IGNORED = -100


class Parts(Protocol):
    """How sequences are cut over ranks: the part of `SequenceParts` (`parallel/context/batch.py`) that is used here."""

    @property
    def size(self) -> int: ...
    def chunk_of_part(self, length: int, name: str) -> int: ...
    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor: ...
    def positions(self, length: int, device: torch.device) -> torch.Tensor: ...
    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor: ...


Current = Callable[[], Parts | None]
Replace = Callable[[nn.Module, str, str, Any], Any]


def adapt(module: nn.Module, current: Current, replace: Replace) -> bool:
    """Prepare the models of transformers in the module. Returns whether one of them shifts its labels.

    Args:
        current: returns this rank's part of the sequences of the current pass; None if they are whole.
        replace: replaces a module's forward.
    Raises:
        UsageError: a model does not compute attention by "sdpa", leaves out layers at random, or takes no positions.
    """
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    inside: set[nn.Module] = set()
    shifts = False
    for model in (m for m in module.modules() if isinstance(m, PreTrainedModel)):
        if model not in inside:
            inside.update(model.modules())
            shifts |= _adapt_one(model, current, replace)
    return shifts


def _adapt_one(model: Any, current: Current, replace: Replace) -> bool:
    kind, config = type(model).__name__, model.config
    names = inspect.signature(model.forward).parameters
    if "position_ids" not in names:
        raise ContextParallelError(
            f"context parallelism: {kind}.forward takes no position_ids, so it cannot get the positions of a rank's tokens in "
            "their sequence. Train it without cp."
        )
    used = config._attn_implementation
    if used not in ("sdpa", _NAME):
        can = getattr(model, "_supports_sdpa", False)
        what = "Make the model with attn_implementation='sdpa'" if can else "It does not support 'sdpa': train it without cp"
        raise ContextParallelError(
            f"context parallelism: {kind} must compute attention by scaled_dot_product_attention, got "
            f"attn_implementation={used!r}. {what}."
        )
    _refuse_looks_at_length(model)
    _refuse_other_losses(kind, names, config, {})
    if (left_out := layer_drop(model)) is not None:
        name, often = left_out
        raise ContextParallelError(
            f"context parallelism: {kind} leaves out layers at random ({name}={often}), and ranks that share a sequence would "
            f"leave out different ones. Set {name}=0."
        )
    _register(current)
    model.set_attn_implementation(_NAME)
    from transformers.loss.loss_utils import ForCausalLMLoss

    shifts = "labels" in names and getattr(model, "loss_function", None) is ForCausalLMLoss
    replace(model, "forward", "context", _Filled(model, tuple(names), shifts, current))
    return shifts


def _refuse_looks_at_length(model: Any) -> None:
    """Refuse code that depends on the number of local tokens. The probe misses it: it matters only for long sequences."""
    for name, part in model.named_modules():
        if getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True):
            raise ContextParallelError(
                f"context parallelism: {type(model).__name__}.{name} scales attention by positions that it counts from a rank's "
                "first token (attn_temperature_tuning). Set attn_temperature_tuning=False, or train it without cp."
            )
        types = getattr(part, "rope_type", None)
        for each in types.values() if isinstance(types, Mapping) else (types,):
            if isinstance(each, str) and ("dynamic" in each or each == "longrope"):
                raise ContextParallelError(
                    f"context parallelism: the rotary frequencies of {type(model).__name__} must not depend on the length of the "
                    f"sequence, since a rank sees only a part of it, got rope_type={each!r} in {name}. Give its configuration "
                    "another rope_type in rope_parameters, such as 'default', 'linear' or 'yarn', or train it without cp."
                )


def _refuse_other_losses(kind: str, names: Iterable[str], config: Any, given: Mapping[str, Any]) -> None:
    """Refuse losses that are not means over tokens: they differ from the mean of their parts."""
    if "start_positions" in names:
        raise ContextParallelError(
            f"context parallelism: the loss of {kind} compares all tokens of a sequence with one another, but a rank has only a "
            "part of them. Train it without cp."
        )
    routers = given.get("output_router_logits")
    routers = getattr(config, "output_router_logits", False) if routers is None else routers
    if routers and getattr(config, "router_aux_loss_coef", 0):
        raise ContextParallelError(
            f"context parallelism: the loss of {kind} has a part for the load of its experts (output_router_logits=True), which "
            "is not a mean over tokens: the parts of a sequence would give another loss. Set output_router_logits=False, or "
            "train it without cp."
        )


def with_shifted_labels(batch: Any) -> Any:
    """Add the shifted labels of a causal model's loss, (B, T), to a whole batch, before it is cut."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or "shift_labels" in batch:
        return batch
    made: Any = dict(batch) if type(batch) is dict else batch.copy()
    made["shift_labels"] = _shifted(labels)
    return made


def _shifted(labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


class _Filled:
    """The `forward` of a model. On parts it passes positions, masks and shifted labels of the whole sequence."""

    def __init__(self, model: Any, names: tuple[str, ...], shifts: bool, current: Current) -> None:
        self._current = current
        self._forward, self._names, self._shifts = model.forward, names, shifts
        self.__wrapped__ = model.forward  # for inspect.signature
        self._kind, self._config = type(model).__name__, model.config
        self._causal = any(getattr(part, "is_causal", False) for part in model.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts = self._current()
        if parts is None:
            return self._forward(*args, **kwargs)
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        _refuse_other_losses(self._kind, (), self._config, given)
        return self._forward(**self._fill(parts, given))

    def _fill(self, parts: Parts, given: dict[str, Any]) -> dict[str, Any]:
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if tokens is None:
            return given
        rows, length = tokens.shape[:2]
        parts.chunk_of_part(length, self._kind)
        mask, where = given.get("attention_mask"), given.get("position_ids")
        if where is None:
            given["position_ids"] = parts.positions(length, tokens.device)[None]
        elif mask is None and self._sees_documents(given) and (documents := self._documents(parts, where)) is not None:
            mask = given["attention_mask"] = self._mask_of_documents(parts, documents, rows)
        if mask is None:  # else transformers would take the gap between the two chunks for the start of a new document
            given["attention_mask"] = torch.ones(rows, length, dtype=torch.bool, device=tokens.device)
        if self._shifts and given.get("labels") is not None and given.get("shift_labels") is None:
            given["shift_labels"] = parts.cut(_shifted(parts.whole(given["labels"], 1)), 1)
        return given

    def _sees_documents(self, given: Mapping[str, Any]) -> bool:
        """Whether transformers would detect documents by their positions. It does not if it fills a cache of keys and values."""
        cached = given.get("use_cache")
        cached = getattr(self._config, "use_cache", False) if cached is None else cached
        return self._causal and not cached and given.get("past_key_values") is None

    def _documents(self, parts: Parts, where: torch.Tensor) -> torch.Tensor | None:
        """The document number of each token, (B, T); None if no row's positions begin again."""
        if where.dim() != 2:
            raise ContextParallelError(
                f"context parallelism: position_ids must have shape (rows, length), got {tuple(where.shape)}."
            )
        whole = parts.whole(where, 1)
        begins = whole[:, 1:] != whole[:, :-1] + 1
        return nn.functional.pad(begins.cumsum(1), (1, 0)) if begins.any() else None

    def _mask_of_documents(self, parts: Parts, documents: torch.Tensor, rows: int) -> torch.Tensor:
        """(B, 1, local T, T): causal, within documents."""
        if (window := getattr(self._config, "sliding_window", None)) is not None:
            raise ContextParallelError(
                f"context parallelism: {self._kind} has a sliding window of {window} and was given packed documents "
                "(position_ids that begin again). Give one document per row."
            )
        positions = parts.positions(documents.shape[1] // parts.size, documents.device)
        every = torch.arange(documents.shape[1], device=documents.device)
        seen = (documents[:, positions, None] == documents[:, None, :]) & (positions[:, None] >= every)
        return seen[:, None].expand(rows, -1, -1, -1)


def _register(current: Current) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    if _NAME not in AttentionMaskInterface().valid_keys():
        AttentionInterface.register(_NAME, AttentionInterface()["sdpa"])
        AttentionMaskInterface.register(_NAME, _Mask(AttentionMaskInterface()["sdpa"], current))


class _Mask:
    """Makes masks for transformers: this rank's queries over all keys. Without an active context as "sdpa" does."""

    def __init__(self, usual: Callable[..., Any], current: Current) -> None:
        self._usual, self._current = usual, current

    def __call__(self, *args: Any, **given: Any) -> torch.Tensor | None:
        parts = self._current()
        made: torch.Tensor | None = self._usual(*args, **given) if parts is None else self._of_part(parts, *args, **given)
        return made

    def _of_part(
        self,
        parts: Parts,
        batch_size: int,
        q_length: int,
        kv_length: int,
        *args: Any,
        mask_function: Callable[..., Any],
        attention_mask: torch.Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        device: torch.device | str = "cpu",
        **more: Any,
    ) -> torch.Tensor | None:
        if q_length != kv_length or more.get("use_vmap"):
            raise ContextParallelError(
                f"context parallelism: a mask of {q_length} queries and {kv_length} keys"
                f"{', from a custom mask function,' if more.get('use_vmap') else ''} is not supported with cp. Train "
                "this model without cp."
            )
        length = kv_length * parts.size
        whole = None if attention_mask is None else parts.whole(attention_mask, 1)
        skips = (allow_is_causal_skip or allow_is_bidirectional_skip) and (local_size is None or length < local_size)
        if skips and (whole is None or bool(whole.all())):
            return None
        where = torch.device(device)
        rows, positions = torch.arange(batch_size, device=where), parts.positions(q_length, where)
        every = torch.arange(length, device=where)
        seen = mask_function(rows[:, None, None, None], rows[:1, None, None], positions[:, None], every)
        if whole is not None:
            seen = seen & whole[:, None, None, :]
        return seen.expand(batch_size, 1, q_length, length)  # type: ignore[no-any-return]
