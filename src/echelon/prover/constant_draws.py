"""Random operators that give every sample the same numbers, so that a batch can be put together from its parts.

Dropout, noise and sampled steps make a forward pass over a whole batch draw other numbers than passes over its parts, so that the
two cannot be compared. Here each operator draws one row of numbers along the last dimension, from a fixed seed, and repeats it
along all others: what a sample gets depends neither on the batch that it is in, nor on the rank, nor on how often it is asked.
The RNGs stay where they are. Known in simulation as common random numbers.

torch 2.13 has no public name for TorchDispatchMode; see `wide.py` for why a TorchFunctionMode will not do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.prover.wide import tensor_first

__all__ = ["ConstantDraws"]

_SEED = 20_261_126
_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")  # of attention, of recurrent layers: drawn where nothing else can be given


class ConstantDraws(TorchDispatchMode):
    """Random operators draw the same for every sample. Each operator costs time in it, so it is entered only where it is needed.

    Attributes:
        unknown: an operator whose draws could not be made alike, if there was one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, args = dict(kwargs or {}), tensor_first(func, args)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **options)
        name = func._schema.name.removeprefix("aten::")
        named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | options
        special = _SPECIAL.get(name)
        if special is not None:
            return special(named)
        known = {a.name for a in func._schema.arguments}
        for dropout in _DROPOUT_ARGUMENTS:
            if dropout in known:
                return func(**{**named, dropout: 0.0})
        tensors = _tensors(named)
        if "out" in named or any(type(each) not in (torch.Tensor, torch.nn.Parameter) for each in tensors):
            self.unknown = str(func)
            return func(*args, **options)
        if name in _FROM_VALUES:
            if any(each.dim() >= _FROM_VALUES[name] for each in tensors):
                self.unknown = str(func)
            return _seeded(lambda: func(**{**named, "generator": None}), _device(named))
        return _one_row(func, named)


def _one_row(func: Any, named: dict[str, Any]) -> Any:
    """An operator whose numbers depend on a shape alone: it draws a row, which is repeated."""
    changes = func._schema.name.endswith("_")
    like = named.get("self")
    shape = torch.Size(like.shape if like is not None else named["size"])
    if "generator" in named:
        named = {**named, "generator": None}
    dtype = (None if changes else named.get("dtype")) or (like.dtype if like is not None else None)
    dtype = dtype or (torch.int64 if "randint" in func._schema.name else torch.get_default_dtype())
    wide = torch.float64 if dtype.is_floating_point else dtype  # other types round the same numbers
    if like is not None:
        named = {**named, "self": torch.empty(_row_of(shape), dtype=wide, device=like.device)}
        named.pop("memory_format", None)
    else:
        named = {**named, "size": _row_of(shape)}
    if not changes and "dtype" in {a.name for a in func._schema.arguments}:
        named["dtype"] = wide
    row = _seeded(lambda: func(**named), _device(named))
    if like is not None and changes:
        return like.copy_(row.expand(shape))
    return row.to(dtype).expand(shape).clone(memory_format=torch.contiguous_format)


def _row_of(shape: torch.Size) -> torch.Size:
    """The last dimension; a single number where there is one for each sample."""
    return shape[-1:] if len(shape) > 1 else torch.Size()


def _uniform(like: torch.Tensor) -> torch.Tensor:
    row: torch.Tensor = _seeded(lambda: torch.rand(_row_of(like.shape), dtype=torch.float64, device=like.device), like.device)
    return row.expand(like.shape)


def _seeded(draw: Callable[[], Any], device: torch.device) -> Any:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_SEED)
        return draw()


def _device(named: Mapping[str, Any]) -> torch.device:
    tensor = next(iter(_tensors(named)), None)
    return tensor.device if tensor is not None else torch.device(named.get("device") or "cpu")


def _tensors(named: Mapping[str, Any]) -> list[torch.Tensor]:
    return [each for each in named.values() if isinstance(each, torch.Tensor)]


# --- operators whose numbers depend on more than a shape


def _dropout(named: dict[str, Any]) -> Any:
    given, p = named["input"], named["p"]
    if named.get("train") is False:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    mask = _uniform(given) >= p
    return given * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _fused_dropout(named: dict[str, Any]) -> Any:
    given, kept = named["self"], named["p"]
    mask = _uniform(given) < kept
    return given * mask / kept, mask.to(torch.uint8)


def _bernoulli(named: dict[str, Any]) -> Any:
    given = named["self"]
    chance = named.get("p", given)
    return (_uniform(given) < chance).to(given.dtype)


def _bernoulli_in_place(named: dict[str, Any]) -> Any:
    return named["self"].copy_(_uniform(named["self"]) < named.get("p", 0.5))


def _normal(named: dict[str, Any]) -> Any:
    mean, std = named.get("mean", 0.0), named.get("std", 1.0)
    like = mean if isinstance(mean, torch.Tensor) else std
    like = mean + std if isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor) else like
    if not isinstance(like, torch.Tensor):
        like = torch.empty(named["size"], dtype=named.get("dtype"), device=named.get("device"))
    row = _seeded(lambda: torch.randn(_row_of(like.shape), dtype=torch.float64, device=like.device), like.device)
    return mean + std * row.to(like.dtype).expand(like.shape)


def _permutation(named: dict[str, Any]) -> Any:
    """None: one of a batch's samples would put other samples together than one of its parts."""
    return torch.arange(named["n"], dtype=named.get("dtype") or torch.int64, device=named.get("device"))


def _multinomial(named: dict[str, Any]) -> Any:
    chances, count = named["self"], named["num_samples"]
    if named.get("replacement"):
        marks = _uniform(chances.new_empty(1, count)).expand(*chances.shape[:-1], count).contiguous()
        sums = chances.double().cumsum(-1)
        return torch.searchsorted(sums, marks * sums[..., -1:]).clamp_(max=chances.shape[-1] - 1)
    return (_uniform(chances).log() / chances.double()).topk(count).indices  # Efraimidis and Spirakis 2006


def _rrelu(named: dict[str, Any]) -> torch.Tensor:
    given, noise = named["self"], named["noise"]
    lower, upper = named.get("lower", 0.125), named.get("upper", 1 / 3)
    if not named.get("training"):
        return torch.nn.functional.leaky_relu(given, (lower + upper) / 2)
    slopes = (lower + (upper - lower) * _uniform(given)).to(given.dtype)
    noise.copy_(torch.where(given <= 0, slopes, 1.0))
    changed: torch.Tensor = given * noise
    return changed


def _rrelu_in_place(named: dict[str, Any]) -> torch.Tensor:
    changed: torch.Tensor = named["self"].copy_(_rrelu(named))
    return changed


_SPECIAL: dict[str, Callable[[dict[str, Any]], Any]] = {
    "native_dropout": _dropout,
    "_fused_dropout": _fused_dropout,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "normal": _normal,
    "randperm": _permutation,
    "multinomial": _multinomial,
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu_in_place,
}
# Drawn by rejection from parameters that a tensor brings: alike for all samples where there is one draw, of so few dimensions.
_FROM_VALUES = {"_standard_gamma": 1, "_sample_dirichlet": 2, "binomial": 1, "poisson": 1}
