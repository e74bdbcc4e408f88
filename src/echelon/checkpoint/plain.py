"""Nested states as JSON and tensors: what a state_dict may hold, written without pickle and read without running code."""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch

from echelon.checkpoint.header import OTHERS, SIZES
from echelon.checkpoint.strict import DEPTH
from echelon.common.errors import CheckpointError

__all__ = ["decode", "dtype_of", "encode"]

_TAG = "~"
_PAIRS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MANY: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
# The factories that a defaultdict may have.
_FACTORIES: dict[Any, str] = {None: "None"} | {each: each.__name__ for each in (bool, int, float, str, list, tuple, dict, set)}
_BY_NAME = {name: factory for factory, name in _FACTORIES.items()}
_ALLOWED = "tensors, arrays, numbers, strings, bytes, None, and lists, tuples, sets and dicts of these"


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str = "", depth: int = 0) -> Any:
    """Encode a value as JSON; its tensors are added to `tensors`, under new names.

    Args:
        depth: of the JSON around the value.
    Raises:
        CheckpointError: a part of it needs pickle or is nested too deeply; the text says where.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > DEPTH - 4:  # one value is encoded as up to four nested lists and objects
        raise CheckpointError(f"{where.lstrip('.')[:60]}... is nested too deeply, or contains itself")
    if type(value) is list:
        return [encode(v, tensors, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if type(value) is dict and all(type(k) is str and k != _TAG for k in value):
        return {k: encode(v, tensors, f"{where}.{k}", depth + 1) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        if str(value.dtype) not in SIZES or value.layout != torch.strided:
            raise CheckpointError(f"{where.lstrip('.')} is a tensor of type {value.dtype}, {value.layout}, which is not saved")
        name = str(len(tensors))
        tensors[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
        return {_TAG: "tensor", "v": name, "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        name = str(len(tensors))
        tensors[name] = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {_TAG: kind, "v": name, "dtype": value.dtype.str, "shape": list(value.shape)}
    pairs = _PAIRS.get(type(value))
    if pairs is not None:
        inside = depth + 3
        items = [[encode(k, tensors, where, inside), encode(v, tensors, f"{where}[{k!r}]", inside)] for k, v in value.items()]
        return {_TAG: pairs, "v": items}
    many = _MANY.get(type(value))
    if many is not None:
        return {_TAG: many, "v": [encode(v, tensors, f"{where}[...]", depth + 2) for v in value]}
    if type(value) is deque:
        return {_TAG: "deque", "v": [encode(v, tensors, f"{where}[...]", depth + 2) for v in value], "maxlen": value.maxlen}
    if type(value) is defaultdict and value.default_factory in _FACTORIES:
        inner = encode(dict(value), tensors, where, depth + 1)
        return {_TAG: "defaultdict", "v": inner, "factory": _FACTORIES[value.default_factory]}
    if type(value) in (bytes, bytearray):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {_TAG: "complex", "v": [value.real, value.imag]}
    if isinstance(value, torch.device) or (isinstance(value, torch.dtype) and str(value) in SIZES.keys() | OTHERS):
        return {_TAG: type(value).__name__, "v": str(value).removeprefix("torch.")}
    raise CheckpointError(f"{where.lstrip('.')} is a {type(value).__qualname__}; a state_dict may hold {_ALLOWED}")


def decode(value: Any, tensors: Any) -> Any:
    """Decode a value that `structure.state_of` has checked. `tensors(name, dtype, shape)` gives its tensors."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {k: decode(v, tensors) for k, v in value.items()}
    kind, inner = value[_TAG], value["v"]
    if kind == "tensor":
        return tensors(inner, dtype_of(value["dtype"]), value["shape"]).clone()
    if kind in ("array", "number"):
        data, dtype = tensors(inner, None, None).numpy().tobytes(), np.dtype(value["dtype"])
        count = int(np.prod(value["shape"], dtype=np.int64))
        array = np.frombuffer(data, dtype=dtype, count=count).reshape(value["shape"]).copy()
        return array if kind == "array" else array[()]
    if kind in ("dict", "ordered", "counter"):
        made = {"dict": dict, "ordered": OrderedDict, "counter": Counter}[kind]()
        for key, item in inner:
            made[decode(key, tensors)] = decode(item, tensors)
        return made
    if kind in ("tuple", "set", "frozenset", "size"):
        make: Any = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}[kind]
        return make(decode(v, tensors) for v in inner)
    if kind == "deque":
        return deque((decode(v, tensors) for v in inner), value["maxlen"])
    if kind == "defaultdict":
        return defaultdict(_BY_NAME[value["factory"]], decode(inner, tensors))
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "complex":
        return complex(*inner)
    if kind == "dtype":
        return dtype_of(inner)
    if kind == "device":
        return torch.device(inner)
    raise CheckpointError(f"a state holds a {kind!r}, which this echelon does not know. Update echelon.")


def dtype_of(name: str) -> torch.dtype:
    """A torch type by its name, "torch.float32" or "float32"."""
    dtype = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a tensor has dtype {name!r}, which this torch does not have. Update torch.")
    return dtype
