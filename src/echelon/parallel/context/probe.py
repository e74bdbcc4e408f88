"""Check before training under context parallelism that the module gives the same for the parts of a sequence as for the whole.

The beginning of the first batch goes through the module twice, whole and in parts, without gradients and dropout. The inputs and
outputs of every submodule are compared. Then again with noise on the parameters, since a parameter that is zero hides whatever
it multiplies. So an attention over a rank's own tokens only, or positions counted from a rank's first token, raise an error that
names the submodule, and do not silently train another model.
"""

from __future__ import annotations

import contextlib
import math
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from echelon.common.errors import ContextParallelError, UsageError
from echelon.parallel.context.attention import over
from echelon.parallel.context.batch import SequenceParts, named
from echelon.parallel.experts.moe import MoE
from echelon.parallel.guards.messages import SHAPES, meaning
from echelon.parallel.patching import Snapshot
from echelon.parallel.shards import is_fully_sharded, local
from echelon.world import agree, rng
from echelon.world.device import map_tensors

__all__ = ["AS_IS", "LEVELS", "perturbed", "probe", "tensors_of", "undisturbed"]

_CHUNK = 4  # tokens: even code that mixes only neighbours differs at the ends of a chunk
# Relative tolerances for the norm of a difference: layers amplify rounding. Wrong code differs by a tenth or more.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}
_COARSE = 0.2

_Seen = dict[tuple[str, int, str], list[torch.Tensor]]


def probe(
    parts: SequenceParts, kind: str, forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Compare passes over the beginning of these arguments. Collective: `fully_shard` gathers parameters for each pass.

    Args:
        kind: the name of the module's class.
        forward: the module's own forward.
        args, kwargs: its arguments for this rank's part.
    Raises:
        UsageError: on all ranks, with the first submodule that differs.
    """
    given = [value for value in tensors_of((args, kwargs)) if value.dim() > 1]
    first = next((t for t in given if not t.is_floating_point()), given[0] if given else None)
    can = first is not None and first.shape[1] % 2 == 0  # else there is nothing to cut, or attention will raise
    if not all(agree.gather(can)):
        return
    assert first is not None
    rows, length = first.shape[0], first.shape[1]
    _check_alike(parts, kind, {**{str(i): each for i, each in enumerate(args)}, **kwargs}, length)
    shortest = min(parts.size * length, 2 * parts.size * _CHUNK)
    pads = all(agree.gather(_has_padding_mask(kwargs)))
    for short in (shortest, parts.size * length):
        whole = map_tensors((args, kwargs), partial(_beginning, rows=rows, length=length, short=short, parts=parts))
        error: Exception | None = None
        own_difference: list[Any] | None = None
        try:
            own_difference = _compared(parts, forward, module, whole, short, pads=pads)
        except Exception as raised:
            error = raised
        where = f"{kind}, called on whole sequences,"
        agree.fail_together(error if isinstance(error, UsageError) else None, where)
        if differences := [each for each in agree.gather(own_difference) if each is not None]:
            _, name, side, difference = min(differences)
            raise _differs(module, kind, name, side, difference, parts.size) from error
        if not agree.any_rank(error is not None):
            return
        if short == shortest:  # a model that accepts only the full length may fail at the shorter one
            continue
        agree.fail_together(None if error is None else _could_not(module, kind, short, error), where)


def _could_not(module: nn.Module, kind: str, short: int, error: Exception) -> Exception:
    if any(each in str(error) for each in SHAPES):
        return error  # the dim that was cut may not be a sequence: `active` explains the error
    message = meaning(module, str(error))
    made = ContextParallelError(
        f"context parallelism: {kind} could not be called on whole sequences of {short} tokens, to "
        f"compare with their parts: {type(error).__name__}: {error}. Switch the comparison off if it cannot work: "
        "Layout(check_context=False)."
        if message is None
        else f"{message} torch says: {error}"
    )
    made.__cause__ = error
    return made


def _compared(parts: SequenceParts, forward: Any, module: nn.Module, whole: Any, short: int, *, pads: bool) -> list[Any] | None:
    """The first difference, with the parameters as they are and with noise."""
    first: list[Any] | None = None
    for level in LEVELS:
        for each in _with_padding(whole) if pads else [whole]:
            try:
                with perturbed(module, level, in_forward=True):
                    difference = _passes(parts, forward, module, each, short)
            except Exception as error:
                if level == AS_IS or isinstance(error, UsageError):
                    raise
                continue  # with noise the code may reject the values
            first = difference if first is None else first  # no early return: the passes are collective
    return first


def _check_alike(parts: SequenceParts, kind: str, given: dict[str, Any], length: int) -> None:
    """Check that arguments for a sequence as a whole, such as a diffusion model's time, are the same for all of its parts."""
    sums = {
        name: zlib.crc32(value.detach().double().cpu().numpy().tobytes())
        for name, value in given.items()
        if isinstance(value, torch.Tensor)
        and not (hasattr(value, "to_local") or value.is_complex())
        and _dim_of(value, length) is None
    }
    sums_of_all = agree.kinds(sums, parts.group)
    apart = next((name for name in sums if len({each.get(name) for each in sums_of_all}) > 1), None)
    # All ranks stop, also those of other sequences.
    if (unlike := agree.first_not_none(None if apart is None else [apart, list(given[apart].shape)])) is not None:
        name, shape = unlike
        raise ContextParallelError(
            f"context parallelism: {kind} must get the same {f'argument {name}' if name.isdigit() else name} on the {parts.size} "
            f"ranks of a sequence, got values that differ. It has no dimension for the sequence, being of shape {tuple(shape)}. "
            "If compute_loss draws it, or computes it from its part, let the dataset or its collate_fn do so: all ranks of a "
            "sequence get their results."
        )


def _has_padding_mask(kwargs: dict[str, Any]) -> bool:
    mask = kwargs.get("attention_mask")
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def _with_padding(whole: Any) -> list[Any]:
    """The arguments as they are, and with padding: positions may depend on padding, and code may skip a mask without any."""
    mask = whole[1]["attention_mask"]
    padded = mask.index_fill(1, torch.arange(2, device=mask.device), 0)
    return [whole, (whole[0], {**whole[1], "attention_mask": padded})]


def _passes(parts: SequenceParts, forward: Any, module: nn.Module, whole: Any, short: int) -> list[Any] | None:
    """Run both passes, and return the first difference of this rank's part."""
    part = map_tensors(whole, lambda value: _cut(value, short, parts))
    with undisturbed(module), torch.no_grad():
        with over(None), _Watch(module) as first:
            first.note(forward(*whole[0], **whole[1]))
        with _Watch(module) as second:
            second.note(forward(*part[0], **part[1]))
    return _first_difference(first.seen, second.seen, short, parts)


def _differs(module: nn.Module, root: str, name: str, side: str, difference: float, size: int) -> UsageError:
    kind = type(module.get_submodule(name)).__name__.removeprefix("FSDP")
    where = f"{root}.{name} ({kind})" if name else root
    what = "gets other inputs" if side == "in" else "gives other outputs"
    return ContextParallelError(
        f"context parallelism over {size} ranks would change the model: {where} {what} for the parts of a sequence than "
        f"for the whole; they differ by {difference:.1%} of their norm. It must compute attention by "
        "torch.nn.functional.scaled_dot_product_attention, positions by echelon.nn.positions(x) instead of torch.arange, and "
        "anything else token by token; if you cannot change the code, train without cp. If only the comparison is wrong, "
        "as with random numbers in evaluation mode, switch it off: Layout(check_context=False)."
    )


def tensors_of(data: Any) -> list[torch.Tensor]:
    """The tensors in `data`, without DTensors."""
    return [value for _, value in named(data) if not hasattr(value, "to_local")]


def _dim_of(value: Any, length: int) -> int | None:
    """The dim of the sequence in an argument; None if it has none."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.dim() > 1 and value.shape[1] == length:
        return 1
    if value.dim() > 3 and value.shape[-2] == length:
        return value.dim() - 2
    return 0 if value.dim() == 1 and value.shape[0] == length else None


def _beginning(value: Any, rows: int, length: int, short: int, parts: SequenceParts) -> Any:
    """The first `short` tokens of the first row, of an argument with `length` tokens on this rank."""
    dim = _dim_of(value, length)
    if dim is not None:
        whole = parts.whole(value.detach(), dim).narrow(dim, 0, short)
        if dim and dim == whole.dim() - 2 and whole.shape[-1] == length * parts.size:  # a mask: cut its keys as well
            whole = whole.narrow(-1, 0, short)
        value = whole
    has_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and dim != 0 and value.shape[0] == rows
    return value.narrow(0, 0, 1) if has_rows else value


def _cut(value: Any, short: int, parts: SequenceParts) -> Any:
    dim = _dim_of(value, short)
    return value if dim is None else parts.cut(value, dim)


class _Watch:
    """Records the inputs and outputs of each submodule, in the order of the calls.

    Attributes:
        seen: tensors by (name, number of the call, "in" or "out").
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack = contextlib.ExitStack()
        self.seen: _Seen = {}

    def __enter__(self) -> _Watch:
        # The experts of an MoE layer get tokens in an order of their own, so only the layer's own outputs are compared.
        sorted_within = tuple(f"{name}." for name, part in self._module.named_modules() if isinstance(part, MoE))
        for name, part in self._module.named_modules():
            if name and not name.startswith(sorted_within):
                self._stack.enter_context(part.register_forward_pre_hook(self._hook(name, "in")))
                self._stack.enter_context(part.register_forward_hook(self._hook(name, "out")))
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def note(self, outputs: Any) -> None:
        """Record the outputs of the module itself."""
        self.seen["", 0, "out"] = [t.detach() for t in tensors_of(outputs)]

    def _hook(self, name: str, side: str) -> Any:
        calls: list[int] = []

        def look(module: nn.Module, inputs: Any, *outputs: Any) -> None:
            self.seen[name, len(calls), side] = [t.detach().clone() for t in tensors_of(outputs[0] if outputs else inputs)]
            calls.append(1)

        return look


def _first_difference(whole: _Seen, part: _Seen, short: int, parts: SequenceParts) -> list[Any] | None:
    """The first call that differs: [number of the call, name, side, difference relative to the norm]."""
    for number, (key, tensors) in enumerate(whole.items()):
        for a, b in zip(tensors, part.get(key, []), strict=False):
            own_part, may = _mine(a, b, short, parts), _TOLERANCE.get(b.dtype, _COARSE if b.is_floating_point() else 0.0)
            if own_part is not None and (far := _far(own_part, b)) > may and not _are_among(whole, key, b, may):
                return [number, key[0], key[2], far]
    return None


def _are_among(whole: _Seen, key: tuple[str, int, str], part: torch.Tensor, may: float) -> bool:
    """Whether the tokens are only reordered, as experts reorder them: each occurs in some call of the whole pass."""
    name, _, side = key
    calls = (tensors for (n, _, s), tensors in whole.items() if (n, s) == (name, side))
    alike = [t.double() for tensors in calls for t in tensors if t.dim() == 2 and t.shape[1] == part.shape[-1]]
    if not name or part.dim() != 2 or not part.is_floating_point() or not alike:
        return False
    every, exact = torch.cat(alike), "donot_use_mm_for_euclid_dist"
    nearest = [torch.cdist(rows, every, compute_mode=exact).min(1).values for rows in part.double().split(64)]
    return bool(torch.cat(nearest).norm() <= may * part.double().norm())


def _mine(whole: torch.Tensor, part: torch.Tensor, short: int, parts: SequenceParts) -> torch.Tensor | None:
    """The expected value of the part; None if it is not known, as for losses, which are means over other tokens."""
    if not whole.dim() or whole.dim() != part.dim() or whole.dtype != part.dtype:
        return None
    length = short // parts.size
    if whole.shape == part.shape:
        # A result for each row, as of a classifier. A tensor without rows may be a statistic of the tokens.
        return whole if whole.dim() > 1 else None
    for dim, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)):
        if a == b:
            continue
        if (a, b) == (short, length):
            return parts.cut(whole, dim)
        # Rows and tokens flattened into one dim, as in routers. With several numbers for each token the order is unknown.
        if dim == 0 and whole.dim() > 1 and a % short == 0 and b * parts.size == a:
            return parts.cut(whole.unflatten(0, (a // short, short)), 1).flatten(0, 1)
        return None
    return None


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not (a.is_floating_point() or a.is_complex()):
        return float((a != b).double().mean())
    a, b = a.double(), b.double()
    both = torch.isfinite(a) & torch.isfinite(b)
    a, b = torch.where(both, a, 0), torch.where(both, b, 0)
    norm = float(a.norm())
    return float((a - b).norm()) / norm if norm else float(b.norm())


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Context of evaluation passes, without dropout. Restores buffers, plain attributes such as modes, and the RNG state."""
    before = Snapshot(module)
    # A compilation for these lengths and hooks would be of no use later.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
    module.eval()
    try:
        with rng.unchanged(), eager:
            yield
    finally:
        before.restore()


# Noise on parameters. Without it, parameters that are zero hide what they multiply, as new gates, projections and positions do.

# How much noise. GENTLE changes all parameters a little. STRONG changes only parameters that are zero: it gives them the size of
# learned positions relative to tokens.
AS_IS, GENTLE, STRONG = LEVELS = (0, 1, 2)


@contextlib.contextmanager
def perturbed(module: nn.Module, level: int, *, in_forward: bool = False) -> Iterator[None]:
    """Context in which parameters have noise, equal on ranks with equal values. Afterwards they are restored bit for bit.

    Shards are changed in place, without communication.

    Args:
        level: one of LEVELS.
        in_forward: the context is entered in the module's own forward, where its parameters are gathered and stay so.
    """
    if level == AS_IS:
        yield
        return
    saved: list[tuple[torch.Tensor, torch.Tensor]] = []
    sharded = [part for part in module.modules() if is_fully_sharded(part) and not (in_forward and part is module)]
    try:
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point() or parameter.is_meta:
                continue
            # By `.data`, which does not change the version: a graph may hold the parameter, and the values are restored.
            values = local(parameter.detach()).data
            if not values.numel() or (level == STRONG and bool(values.any())):
                continue
            saved.append((values, values.to("cpu", copy=True)))  # parameters may fill the device's memory
            _add(values, parameter, f"{level} {name}", _spread(parameter, level))
        yield
    finally:
        for values, before in saved:
            values.copy_(before)
        for part in sharded:  # parameters gathered meanwhile have the noise
            part.reshard()  # type: ignore[operator]


def _add(values: torch.Tensor, parameter: torch.Tensor, name: str, spread: float) -> None:
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(f"{name} {_place(parameter)}".encode()))
    noise = torch.empty(values.shape, dtype=torch.float32, device=values.device).normal_(std=spread, generator=generator)
    values.add_(noise.to(values.dtype))


def _spread(parameter: torch.Tensor, level: int) -> float:
    if level == STRONG:
        return 1.0
    return 0.3 if parameter.dim() < 2 else 0.5 / math.sqrt(max(1, parameter.shape[-1]))


def _place(parameter: torch.Tensor) -> list[tuple[str, int]]:
    """Which shard of a parameter this rank has. Ranks along axes that replicate it have the same one."""
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
    where = None if mesh is None else mesh.get_coordinate()
    if where is None:
        return []
    return [(str(each), at) for each, at in zip(placements, where, strict=True) if not each.is_replicate()]
