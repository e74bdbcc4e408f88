"""How operators behave while a script is proved: they compute in float64, or draw the same numbers for a sample in any batch.

**Wide.** `logits.float()` and `softmax(..., dtype=torch.float32)` mean "in full precision"; in a float64 model they would be
its narrowest part, and float64 could decide nothing. The same holds for a model and batches in half precision, and for the
bfloat16 products of Muon and its like, which each sharding sums up in another order. So casts to fewer digits in the script's own
code become casts to float64; in an optimizer, casts to half precision do. Random operators take other numbers from an RNG for
float64 than for float32, which would change all that follows: initial values, noise, the order of a shuffle. So they draw in
float32, and the result is widened.

**Constant draws.** With dropout, noise and sampled steps, a forward pass over a whole batch draws other numbers than passes over
its parts, so that the two cannot be compared. Here each operator draws one row of numbers along the last dimension and repeats it
along all others; if its first dimension is the samples of the batch, it draws one row for each, from a seed of the sample's own.
A sample's numbers depend neither on its batch, nor on the rank, nor on earlier draws. Samples differ, so that a mean over drawn
numbers, or the count of a drawn mask, still differs between the parts of a batch. The RNG states do not change. In simulation
this is known as common random numbers.

torch 2.13 has no public name for TorchDispatchMode. The public TorchFunctionMode does not suffice: it is off in a backward pass,
in which checkpointed blocks run their forward pass again, which would then compute in another type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.prover.micro import NotDivisible, Samples, widened

__all__ = ["ConstantDraws", "tensor_first", "without_narrow_casts"]

_SINGLE, _HALF = (torch.float32,), (torch.bfloat16, torch.float16)
_IN_PLACE = ("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "bernoulli_")
_FROM_CHANCES = ("bernoulli", "multinomial")
_FACTORIES = ("rand", "randn", "rand_like", "randn_like")
_FROM_SHAPES = (*_IN_PLACE, *_FACTORIES, "randint", "randint_like", "random_")
_SEED = 20_261_126
_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")  # of attention and recurrent layers, whose draws cannot be replaced: it is set to 0
# Drawn by rejection, from parameters in a tensor. With fewer dimensions than these, there is one draw for all samples.
_FROM_VALUES = {"_standard_gamma": 1, "_sample_dirichlet": 2, "binomial": 1, "poisson": 1}


@contextlib.contextmanager
def without_narrow_casts() -> Iterator[None]:
    """Turn this thread's casts to fewer digits into casts to float64. Optimizers keep float32: fused kernels count steps so."""
    mode = _Wide()
    handles = [register_optimizer_step_pre_hook(mode.rest), register_optimizer_step_post_hook(mode.go_on)]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


class _Wide(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rests = False

    def rest(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(p.dtype in _HALF for group in optimizer.param_groups for p in group["params"]):
            return  # its states are of the parameters' own type
        self._rests = True
        for state in optimizer.state.values():  # states may exist before the first step
            state.update({k: v.double() for k, v in state.items() if isinstance(v, torch.Tensor) and v.dtype in _HALF})

    def go_on(self, *_: Any) -> None:
        self._rests = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tensor_first(func, args), kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _drawn(func, args, kwargs)
        dtype = kwargs.get("dtype")
        # In an optimizer, new tensors in half precision count, too: it combines them with cast ones.
        if dtype in _HALF if self._rests else dtype in (*_SINGLE, *_HALF) and _is_cast(args, dtype):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def tensor_first(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch 2.13 hands a wrapped number to a dispatch mode as a plain number, which the operator does not take: wrap it again."""
    if args and isinstance(args[0], (int, float, complex)) and func._schema.arguments[0].type.kind() == "TensorType":
        return torch.tensor(args[0]), *args[1:]
    return args


def _drawn(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Draws from shapes and probabilities alone are made in float32, then widened. Other operators compute with their draws."""
    name = func._schema.name.removeprefix("aten::")
    if name in _IN_PLACE and args[0].dtype is torch.float64:
        return args[0].copy_(func(torch.empty_like(args[0], dtype=torch.float32), *args[1:], **kwargs))
    if name in _FROM_CHANCES and args[0].dtype is torch.float64:
        drawn = func(args[0].float(), *args[1:], **kwargs)
        return drawn.double() if drawn.is_floating_point() else drawn
    if name in _FACTORIES and _type_of(args, kwargs) is torch.float64:
        return func(*args, **{**kwargs, "dtype": torch.float32}).double()
    return func(*args, **kwargs)


def _type_of(args: Any, kwargs: dict[str, Any]) -> torch.dtype:
    like = args[0].dtype if isinstance(args[0], torch.Tensor) else torch.get_default_dtype()
    dtype: torch.dtype = kwargs.get("dtype") or like
    return dtype


def _is_cast(args: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor is cast. New tensors keep the requested type: a file's values, for example, are loaded into them."""
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype is not dtype


class ConstantDraws(TorchDispatchMode):
    """Random operators draw the same for a sample in any batch. The mode slows every operator: enter it only where it is needed.

    Attributes:
        unknown: an operator whose draws could not be made constant, if there was one.
        by_sample: each sample has its own numbers; otherwise all have the same.
        alike: operators, with numbers of dimensions, that even so give all samples the same numbers.
        kinds: of each draw: operator, number of dimensions, whether each sample had its own row.
        shapes: operator and shape of draws without a row for each sample, except dropout.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: str | None = None
        self.by_sample, self.alike = False, frozenset[tuple[str, int]]()
        self.kinds: set[tuple[str, int, bool]] = set()
        self.shapes: set[tuple[str, tuple[int, ...]]] = set()
        self._seeds: list[int] = []  # one for each sample of the batch

    def begin(self, data: Any) -> None:
        """Draw for the samples of this batch from now on."""
        self._seeds = []
        if self.by_sample:
            with contextlib.suppress(NotDivisible):
                samples = Samples(widened(data, torch.float64))  # the same checksums in every precision
                self._seeds = [_SEED + each for each in samples.checksums()]

    def end(self) -> None:
        """Draw for no batch from now on."""
        self._seeds = []

    def rows(self, name: str, shape: torch.Size, device: torch.device, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A row of `draw` for each sample, or one for all samples, to be expanded to `shape`."""
        name = name.removeprefix("aten::")
        each = len(shape) > 0 and shape[0] == len(self._seeds) and (name, len(shape)) not in self.alike
        if self._seeds:
            self.kinds.add((name, len(shape), each))
        if not each:
            if self._seeds and "dropout" not in name:
                self.shapes.add((name, tuple(shape)))
            row: torch.Tensor = _seeded(draw, device)
            return row
        drawn = torch.stack([_seeded(draw, device, seed) for seed in self._seeds])
        return drawn.view(len(drawn), *[1] * (len(shape) - 2), *shape[1:][-1:])

    @property
    def samples(self) -> int:
        return len(self._seeds)

    def uniform(self, name: str, like: torch.Tensor) -> torch.Tensor:
        shape, device = like.shape, like.device
        return self.rows(name, shape, device, lambda: torch.rand(_row_of(shape), dtype=torch.float32, device=device)).expand(
            shape
        )

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
            return special(self, named)
        known = {a.name for a in func._schema.arguments}
        for dropout in _DROPOUT_ARGUMENTS:
            if dropout in known:
                return func(**{**named, dropout: 0.0})
        tensors = _tensors(named)
        is_plain = all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in tensors)
        if "out" in named or not is_plain or name not in (*_FROM_SHAPES, *_FROM_VALUES):
            self.unknown = str(func)
            return func(*args, **options)
        if name in _FROM_VALUES:
            if any(each.dim() >= _FROM_VALUES[name] for each in tensors):
                self.unknown = str(func)
            return _seeded(lambda: func(**{**named, "generator": None}), _device(named))
        return _one_row(self, func, named)


def _one_row(draws: ConstantDraws, func: Any, named: dict[str, Any]) -> Any:
    """An operator whose numbers depend on a shape alone: it draws a row, which is repeated."""
    changes = func._schema.name.endswith("_")
    like = named.get("self")
    shape = torch.Size(like.shape if like is not None else named["size"])
    if "generator" in named:
        named = {**named, "generator": None}
    dtype = (None if changes else named.get("dtype")) or (like.dtype if like is not None else None)
    dtype = dtype or (torch.int64 if "randint" in func._schema.name else torch.get_default_dtype())
    drawn_in = torch.float32 if dtype.is_floating_point else dtype  # so that all floating-point types get the same numbers
    if like is not None:
        named = {**named, "self": torch.empty(_row_of(shape), dtype=drawn_in, device=like.device)}
        named.pop("memory_format", None)
    else:
        named = {**named, "size": _row_of(shape)}
    if not changes and "dtype" in {a.name for a in func._schema.arguments}:
        named["dtype"] = drawn_in
    row = draws.rows(func._schema.name, shape, _device(named), lambda: func(**named))
    if like is not None and changes:
        return like.copy_(row.expand(shape))
    return row.to(dtype).expand(shape).clone(memory_format=torch.contiguous_format)


def _row_of(shape: torch.Size) -> torch.Size:
    """The shape of a row: the last dimension; a single number if there is only one dimension."""
    return shape[-1:] if len(shape) > 1 else torch.Size()


def _seeded(draw: Callable[[], Any], device: torch.device, seed: int = _SEED) -> Any:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        generators = [torch.default_generator]  # torch.manual_seed looks at every device, for a third of a millisecond
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        for generator in generators:
            generator.manual_seed(seed)
        return draw()


def _device(named: Mapping[str, Any]) -> torch.device:
    tensor = next(iter(_tensors(named)), None)
    return tensor.device if tensor is not None else torch.device(named.get("device") or "cpu")


def _tensors(named: Mapping[str, Any]) -> list[torch.Tensor]:
    return [each for each in named.values() if isinstance(each, torch.Tensor)]


# --- operators whose numbers depend on more than a shape


def _dropout(draws: ConstantDraws, named: dict[str, Any]) -> Any:
    given, p = named["input"], named["p"]
    if named.get("train") is False:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    mask = draws.uniform("dropout", given) >= p
    return given * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _bernoulli(draws: ConstantDraws, named: dict[str, Any]) -> Any:
    given = named["self"]
    chance = named.get("p", given)
    return (draws.uniform("bernoulli", given) < chance).to(given.dtype)


def _bernoulli_in_place(draws: ConstantDraws, named: dict[str, Any]) -> Any:
    return named["self"].copy_(draws.uniform("dropout", named["self"]) < named.get("p", 0.5))


def _normal(draws: ConstantDraws, named: dict[str, Any]) -> Any:
    mean, std = named.get("mean", 0.0), named.get("std", 1.0)
    like = mean if isinstance(mean, torch.Tensor) else std
    like = mean + std if isinstance(mean, torch.Tensor) and isinstance(std, torch.Tensor) else like
    if not isinstance(like, torch.Tensor):
        like = torch.empty(named["size"], dtype=named.get("dtype"), device=named.get("device"))
    shape, device = like.shape, like.device
    row = draws.rows("normal", shape, device, lambda: torch.randn(_row_of(shape), dtype=torch.float32, device=device))
    return mean + std * row.to(like.dtype).expand(shape)


def _permutation(draws: ConstantDraws, named: dict[str, Any]) -> Any:
    """No permutation: one of a whole batch would pair other samples than one of its parts."""
    return torch.arange(named["n"], dtype=named.get("dtype") or torch.int64, device=named.get("device"))


def _multinomial(draws: ConstantDraws, named: dict[str, Any]) -> Any:
    chances, count = named["self"], named["num_samples"]
    if named.get("replacement"):
        shape = (*chances.shape[:-1], count)
        one = shape if chances.dim() > 1 or count == draws.samples else (1, count)
        marks = draws.uniform("multinomial", chances.new_empty(one)).reshape(shape)
        sums = chances.double().cumsum(-1)
        return torch.searchsorted(sums, marks * sums[..., -1:]).clamp_(max=chances.shape[-1] - 1)
    return (draws.uniform("multinomial", chances).log() / chances.double()).topk(count).indices  # Efraimidis and Spirakis 2006


_SPECIAL: dict[str, Callable[[ConstantDraws, dict[str, Any]], Any]] = {
    "native_dropout": _dropout,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "normal": _normal,
    "randperm": _permutation,
    "multinomial": _multinomial,
}
