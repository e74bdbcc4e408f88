"""A layer split over ranks: its parameters are DTensors, its forward works on this rank's plain tensors.

torch's own styles pass DTensors through every operation of a layer, which costs more than the operations of a small layer, and
all-reduce the gradient of an input once for each layer that reads it. Here only parameters are DTensors, and layers that read the
same tensor share one all-reduce. A layer keeps its class, name and hooks; `forward` is replaced on the instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from echelon.common.errors import TensorParallelError
from echelon.parallel.axes import Axis
from echelon.parallel.patching import replace
from echelon.parallel.tensor import collectives as traffic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "DropoutOfPart",
    "PartOfSequence",
    "exchanged",
    "first_of",
    "has_own_weights",
    "install",
    "is_transposed",
    "shared_axis",
    "split_dims",
    "split_features",
    "split_outputs",
    "with_first",
]


def is_transposed(layer: nn.Module) -> bool:
    """Whether the layer is the Conv1D of transformers: a Linear whose weight is (inputs, outputs)."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and hasattr(layer, "nx")


def has_own_weights(layer: nn.Module) -> bool:
    """Whether weight and bias are parameters. Parametrizations such as weight_norm, and pruning, compute them from others."""
    own = {name for name, _ in layer.named_parameters(recurse=False)}
    return "weight" in own and ("bias" in own or getattr(layer, "bias", None) is None)


def split_dims(layer: nn.Module, style: str) -> dict[str, int]:
    """By name of a parameter, the dim that a style splits. Parameters without an entry stay whole."""
    colwise = style.startswith("colwise")
    if isinstance(layer, nn.Embedding):  # (words, features)
        return {"weight": int(colwise)}
    if style == "summed":
        return {}
    outputs = int(is_transposed(layer))
    return {"weight": outputs, "bias": 0} if colwise else {"weight": 1 - outputs}


def shared_axis(module: nn.Module) -> Axis | None:
    """The axis over which this module's layers are split; None if no layer is split by `install`."""
    replaced = (vars(layer).get("forward") for layer in module.modules())
    return next((each.axis for each in replaced if isinstance(each, _Split)), None)


def split_outputs(module: nn.Module) -> list[str]:
    """The layers whose output is this rank's part of the features. The layers that read it must expect a part."""
    replaced = ((name, vars(layer).get("forward")) for name, layer in module.named_modules())
    return [name for name, each in replaced if isinstance(each, _Colwise) and each.style == "colwise"]


def install(layer: nn.Module, style: str, mesh: DeviceMesh, axis: Axis, sequence: PartOfSequence | None = None) -> None:
    """Split a layer's parameters over the mesh and replace its forward. No communication: all ranks have the same values.

    Args:
        mesh: the ranks that share layers, 1-D.
        axis: the same ranks.
        sequence: the split sequence around the layer, with sequence parallelism.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    own = dict(layer.named_parameters(recurse=False))  # without those of another pipeline stage, as a tied layer's bias
    for name, dim in split_dims(layer, style).items():
        if (parameter := own.get(name)) is not None:
            parts = distribute_tensor(parameter, mesh, [Shard(dim)], src_data_rank=None)
            layer.register_parameter(name, nn.Parameter(parts, requires_grad=parameter.requires_grad))
    split: Any
    if style == "summed":
        split = _Summed(layer, axis)
    elif isinstance(layer, nn.Embedding) and style == "rowwise":
        split = _Words(layer, axis)
    elif style.startswith("colwise"):
        split = _Colwise(layer, axis, style, sequence)
    else:
        split = _Rowwise(layer, axis, style == "rowwise_split", sequence)
    replace(layer, "forward", "tensor", split)


class _Split:
    """Replaces a layer's `forward`."""

    def __init__(self, layer: nn.Module, axis: Axis) -> None:
        self.layer, self.axis = layer, axis
        self._forward: Callable[..., torch.Tensor] = layer.forward
        own = "forward" not in vars(layer)
        self._is_linear = own and type(layer).forward is nn.Linear.forward
        self._is_transposed = own and is_transposed(layer)
        self._is_words = own and type(layer).forward is nn.Embedding.forward

    def _run(self, x: torch.Tensor, given: Given, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """Run the layer's own forward, with `x` as its first argument and these tensors in place of its parameters."""
        if self._is_linear:
            return F.linear(x, tensors["weight"], tensors["bias"])  # type: ignore[arg-type]
        if self._is_transposed:
            return F.linear(x, tensors["weight"].t(), tensors["bias"])  # type: ignore[union-attr]
        with exchanged(self.layer, tensors):
            args, kwargs = with_first(*given, x)
            return self._forward(*args, **kwargs)


Given = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call; the first may be a keyword argument


def first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def with_first(args: tuple[Any, ...], kwargs: dict[str, Any], first: torch.Tensor) -> Given:
    return ((first, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): first})


@contextmanager
def exchanged(layer: nn.Module, tensors: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    own: dict[str, Any] = vars(layer)["_parameters"]
    before = dict(own)
    own.update({name: tensor for name, tensor in tensors.items() if name in own})
    try:
        yield
    finally:
        own.update(before)


class _Colwise(_Split):
    """Computes this rank's part of the outputs; "colwise_gather" then gathers all parts."""

    def __init__(self, layer: nn.Module, axis: Axis, style: str, sequence: PartOfSequence | None) -> None:
        super().__init__(layer, axis)
        self.style, self._sequence = style, sequence
        self._reads_words = isinstance(layer, nn.Embedding)
        self.features: _PartOfFeatures | None = None  # with dropout before the "rowwise" layer beside it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = first_of(args, kwargs)
        # With a split sequence, the backward pass of `collect` sums the gradients.
        in_parts = self._sequence is not None and self._sequence.is_split
        x = first if self._reads_words or in_parts else entered(first, self.axis)
        bias = getattr(self.layer, "bias", None)
        out = self._run(x, (args, kwargs), {"weight": _local(self.layer.weight), "bias": None if bias is None else _local(bias)})
        if self.features is not None:
            self.features.begin(out)
        return out if self.style == "colwise" else traffic.gathered(out, self.axis, -1)


class _Rowwise(_Split):
    """Sums the ranks' products of their parts of the inputs. The bias, equal on all ranks, is added once."""

    def __init__(self, layer: nn.Module, axis: Axis, takes_part: bool, sequence: PartOfSequence | None) -> None:
        super().__init__(layer, axis)
        self.takes_part, self._sequence = takes_part, sequence
        self.features: _PartOfFeatures | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.features is not None:
            self.features.end()
        first = first_of(args, kwargs)
        x = traffic.part(first, self.axis, -1) if self.takes_part else first
        out = self._run(x, (args, kwargs), {"weight": _local(self.layer.weight), "bias": None})
        bias: Any = getattr(self.layer, "bias", None)
        if self._sequence is not None and self._sequence.is_split:
            out = self._sequence.spread(out)
            bias = None if bias is None else traffic.whole(bias, self.axis)  # its gradient comes from a part of the sequence
        else:
            out = traffic.summed(out, self.axis)
        return out if bias is None else out + bias.to(out.dtype)


class _Words(_Split):
    """An embedding whose rows are split over the ranks. A rank computes zeros for tokens it does not have; the ranks sum up."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        layer: Any = self.layer
        weight = _local(layer.weight)
        local_ids = first_of(args, kwargs) - self.axis.rank * len(weight)
        other = (local_ids < 0) | (local_ids >= len(weight))
        padding, before = None, layer.padding_idx
        if before is not None and 0 <= before - self.axis.rank * len(weight) < len(weight):
            padding = before - self.axis.rank * len(weight)
        words = local_ids.masked_fill(other, 0)
        if self._is_words:
            out = F.embedding(words, weight, padding)
        else:
            layer.padding_idx = padding
            try:
                out = self._run(words, (args, kwargs), {"weight": weight})
            finally:
                layer.padding_idx = before
        return traffic.summed(out.masked_fill(other[..., None], 0), self.axis)


class _Summed(_Split):
    """A whole layer that works on this rank's part of the features. Its gradient is summed over the ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        own = self.layer.named_parameters(recurse=False)
        with exchanged(self.layer, {name: traffic.whole(p, self.axis) for name, p in own}):
            return self._forward(*args, **kwargs)


def _local(parameter: Any) -> torch.Tensor:
    """This rank's part. The parameter is always a DTensor: torch.compile cannot check for the method."""
    part: torch.Tensor = parameter.to_local()
    return part


_ENTERED = "_echelon_entered"


def entered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`same` for the input of a colwise layer, with one all-reduce of the gradient for all layers that read the tensor."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if torch.compiler.is_compiling():
        return traffic.same(x, axis)
    known = getattr(x, _ENTERED, None)  # cached on the tensor, so that both are freed together
    if known is None or known[0] is not axis or known[1] != x._version:
        known = (axis, x._version, traffic.same(x, axis))
        setattr(x, _ENTERED, known)
    return known[2]


class _PartOfFeatures:
    """Between a "colwise" layer and the "rowwise" one beside it, features are this rank's part of that layer's outputs.

    Dropout there draws the mask of all of them on each rank, as a single process does: with a mask for its part alone, each rank
    would drop the same units of its part as the others, since they draw the same numbers.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._part: tuple[int, int] | None = None  # the dims and features of a tensor that is a part

    def begin(self, hidden: torch.Tensor) -> None:
        self._part = hidden.dim(), hidden.shape[-1]

    def end(self, *_: Any) -> None:
        self._part = None  # a compiled recomputation must leave everything as it was

    def is_part(self, tensor: torch.Tensor) -> bool:
        return self._part == (tensor.dim(), tensor.shape[-1])

    def dropout(self, hidden: torch.Tensor, p: float) -> torch.Tensor:
        shape = (*hidden.shape[:-1], hidden.shape[-1] * self._axis.size)
        return hidden * traffic.part(F.dropout(torch.ones(shape, dtype=hidden.dtype, device=hidden.device), p), self._axis, -1)


class DropoutOfPart:
    """Replaces a dropout's `forward`: where its input is a part of a tensor, it drops what a single process drops there."""

    def __init__(self, layer: nn.Dropout, part: PartOfSequence | _PartOfFeatures) -> None:
        self._layer, self._part, self._forward = layer, part, layer.forward

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if self._layer.training and self._layer.p and self._part.is_part(input):
            return self._part.dropout(input, self._layer.p)
        return self._forward(input)


def split_features(module: nn.Module, axis: Axis) -> None:
    """Have dropout beside split layers know where features are a part. The layers must be split already."""
    for parent in module.modules():
        children = list(parent.children())
        splits = [vars(child).get("forward") for child in children]
        first = [each for each in splits if isinstance(each, _Colwise) and each.style == "colwise"]
        last = [each for each in splits if isinstance(each, _Rowwise) and not each.takes_part]
        drops = [each for each in children if isinstance(each, nn.Dropout) and type(each).forward is nn.Dropout.forward]
        if not (first and last and drops):
            continue
        features = _PartOfFeatures(axis)
        for before in first:
            before.features = features
        for behind in last:
            behind.features = features
        for each in drops:
            replace(each, "forward", "tensor", DropoutOfPart(each, features))
        parent.register_forward_pre_hook(features.end)  # a recomputation may have stopped before the "rowwise" layer


# A sequence split over the ranks that share layers, and its collectives: see `sequence`.

_DIM = 1  # (batch, sequence, features)


class PartOfSequence:
    """Splits and gathers the sequence of the current forward pass.

    Attributes:
        is_split: whether this rank has a part of the sequence. A single token is whole on all ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis, self._length = axis, 0
        self.is_split = False

    @property
    def _part(self) -> int:
        return -(-self._length // self._axis.size)

    def is_part(self, tensor: Any) -> bool:
        return self.is_split and isinstance(tensor, torch.Tensor) and tensor.dim() == 3 and tensor.shape[_DIM] == self._part

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of a sequence (batch, length, features) that is whole on all ranks."""
        self._length = hidden.shape[_DIM]
        self.is_split = self._length > 1
        return traffic.part(self._filled(hidden), self._axis, _DIM) if self.is_split else hidden

    def end(self, hidden: torch.Tensor) -> torch.Tensor:
        """The whole sequence, gathered for work that every rank does in full."""
        return self._cut(traffic.gathered(hidden, self._axis, _DIM)) if self.is_part(hidden) else hidden

    def collect(self, hidden: torch.Tensor) -> torch.Tensor:
        """The whole sequence, gathered for split layers: the gradient is reduce-scattered."""
        return self._cut(traffic.collected(hidden, self._axis, _DIM)) if self.is_part(hidden) else hidden

    def spread(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequence of the sum of the ranks' tensors."""
        if hidden.dim() != 3 or hidden.shape[_DIM] != self._length:
            raise TensorParallelError(
                f"sequence_parallel: a 'rowwise' layer must return the whole sequence, (batch, {self._length}, features), got "
                f"{tuple(hidden.shape)}. Split the layers before it in the same submodule, or leave sequence_parallel out."
            )
        return traffic.spread(self._filled(hidden), self._axis, _DIM)

    def dropout(self, hidden: torch.Tensor, p: float) -> torch.Tensor:
        """Dropout with this rank's part of the mask that a single process draws for the whole sequence."""
        shape = (hidden.shape[0], self._length, *hidden.shape[2:])
        mask = F.dropout(torch.ones(shape, dtype=hidden.dtype, device=hidden.device), p)
        return hidden * traffic.part(self._filled(mask), self._axis, _DIM)

    def same(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter used on this rank's part of the sequence. Its gradient is summed over the ranks."""
        return traffic.whole(tensor, self._axis)

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        missing = self._part * self._axis.size - tensor.shape[_DIM]
        return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)) if missing else tensor

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.shape[_DIM] == self._length else tensor.narrow(_DIM, 0, self._length)
