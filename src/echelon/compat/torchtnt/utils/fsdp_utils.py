"""torchtnt.utils.fsdp_utils: the older FSDP's options as strings."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed import fsdp
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.common.errors import UsageError

__all__ = ["BackwardPrefetch", "MixedPrecision", "ShardingStrategy", "StateDictType"]

_SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def _member(kind: Any) -> Any:
    def to_native(value: str) -> Any:
        if value not in kind.__members__:
            raise UsageError(f"Invalid {kind.__name__} {value!r}. Known are {', '.join(kind.__members__)}.")
        return kind[value]

    return staticmethod(to_native)


class ShardingStrategy:
    FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"
    HYBRID_SHARD, _HYBRID_SHARD_ZERO2 = "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    to_native_sharding_strategy = _member(fsdp.ShardingStrategy)


class BackwardPrefetch:
    BACKWARD_PRE, BACKWARD_POST = "BACKWARD_PRE", "BACKWARD_POST"
    to_native_backward_prefetch = _member(fsdp.BackwardPrefetch)


class StateDictType:
    FULL_STATE_DICT, LOCAL_STATE_DICT, SHARDED_STATE_DICT = "FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"
    to_native_state_dict_type = _member(fsdp.StateDictType)


@dataclass
class MixedPrecision(fsdp.MixedPrecision):
    """torch's MixedPrecision; its types may be written "fp16", "bf16", "fp32" or as torch names them."""

    param_dtype: Any = None
    reduce_dtype: Any = None
    buffer_dtype: Any = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[Any] = (_BatchNorm,)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            setattr(self, name, _dtype(getattr(self, name)))
        self._module_classes_to_ignore = tuple(map(_class, self._module_classes_to_ignore))

    def to_native_mixed_precision(self) -> fsdp.MixedPrecision:
        return fsdp.MixedPrecision(**{field.name: getattr(self, field.name) for field in fields(self)})


def _dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    dtype = _SHORT.get(value, getattr(torch, value.removeprefix("torch."), None))
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"Precision {value} not supported. Use 'fp16', 'bf16', 'fp32', or a name of torch's such as 'float16'.")
    return dtype


def _class(value: str | type) -> type:
    """A class from its full name."""
    if isinstance(value, type):
        return value
    try:
        return pkgutil.resolve_name(value)  # type: ignore[no-any-return]
    except (AttributeError, ImportError, ValueError) as error:
        raise UsageError(f"Invalid module class '{value}': {error}") from None
