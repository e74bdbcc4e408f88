"""Stand-ins for recurrent layers on a GPU: one operator for all steps of a layer in a direction, as in cuDNN.

On a CPU, such a layer is an operator that counts no FLOPs, or thousands of small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

__all__ = ["recurrent_layer", "steps_of"]

_NAMES = ("echelon_planner::recurrent", "echelon_planner::recurrent_backward")

_ARGUMENTS = "Tensor gates, Tensor hidden, Tensor? cell, Tensor weight, Tensor? bias, Tensor? projection"
torch.library.define(_NAMES[0], f"({_ARGUMENTS}, int steps) -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    _NAMES[1],
    f"(Tensor grad, Tensor output, Tensor kept, {_ARGUMENTS}, int steps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_recurrent, _recurrent_backward = torch.ops.echelon_planner.recurrent, torch.ops.echelon_planner.recurrent_backward


def recurrent_layer(gates: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A stand-in for `lstm` (4 gates), `gru` (3) or `rnn_tanh` (1), with the arguments of torch's function.

    The products with the inputs of all steps are one product. The backward pass reads the gates, and the cell of an LSTM or the
    new state's recurrent half of a GRU.
    """

    def layer(input: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        is_packed = not isinstance(args[2], bool)
        sizes, args = (args[0], args[1:]) if is_packed else (None, args)
        state, weights, has_bias, layers, dropout, training, both = args[:7]
        turned = not is_packed and args[7]  # batch_first
        if torch.is_autocast_enabled("cpu"):
            to = torch.get_autocast_dtype("cpu")
            input, weights = input.to(to), [each.to(to) for each in weights]
        rows = input.transpose(0, 1).contiguous() if turned else input
        steps = len(rows if sizes is None else sizes)
        first, second = state if gates == 4 else (state, None)
        directions = 2 if both else 1
        each = len(weights) // (layers * directions)
        hidden, cells = [], []
        for number in range(layers * directions):
            if number % directions == 0:
                if number:
                    rows = F.dropout(rows, dropout, training)
                outputs: list[torch.Tensor] = []
            own = weights[number * each : (number + 1) * each]
            biases, projection = (own[2:4], own[4:]) if has_bias else ((None, None), own[2:])
            made = _recurrent(
                F.linear(rows, own[0], biases[0]),
                first[number].to(rows.dtype),
                None if second is None else second[number].to(rows.dtype),
                own[1],
                biases[1],
                projection[0] if projection else None,
                steps,
            )
            outputs.append(made[0])
            hidden.append(made[1])
            cells.append(made[2])
            if len(outputs) == directions:
                rows = torch.cat(outputs, -1) if both else outputs[0]
        output = rows.transpose(0, 1) if turned else rows
        ends = (torch.stack(hidden), torch.stack(cells)) if gates == 4 else (torch.stack(hidden),)
        return (output, *ends)

    return layer


def _shapes(gates: Any, hidden: Any, cell: Any, weight: Any, bias: Any, projection: Any, steps: int) -> tuple[torch.Tensor, ...]:
    rows, width = gates.shape[:-1], hidden.shape[-1]
    inner = width if projection is None else projection.shape[1]
    is_simple = weight.shape[0] == inner
    return (
        gates.new_empty(*rows, width),
        torch.empty_like(hidden),
        hidden.new_empty(0) if cell is None else torch.empty_like(cell),
        gates.new_empty(0) if is_simple else gates.new_empty(*rows, inner),
    )


def _gradient_shapes(grad: Any, output: Any, kept: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(0) if each is None else torch.empty_like(each) for each in args[:6])


def _keep(ctx: Any, inputs: Sequence[Any], output: Sequence[torch.Tensor]) -> None:
    *tensors, ctx.steps = inputs
    ctx.save_for_backward(output[0], output[3], *tensors)


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    made = _recurrent_backward(grad, *tensors, ctx.steps)
    return (*(None if given is None else each for given, each in zip(tensors[2:], made, strict=True)), None)


torch.library.register_fake(_NAMES[0], _shapes)
torch.library.register_fake(_NAMES[1], _gradient_shapes)
torch.library.register_autograd(_NAMES[0], _backward, setup_context=_keep)


@register_flop_formula(_recurrent, get_raw=True)
def _flops(gates: Any, hidden: Any, cell: Any, weight: Any, bias: Any, projection: Any, steps: int, **_: Any) -> int:
    rows: int = gates[..., 0].numel()
    weights: int = sum(each.numel() for each in (weight, projection) if each is not None)
    return 2 * rows * weights


@register_flop_formula(_recurrent_backward, get_raw=True)
def _backward_flops(grad: Any, output: Any, kept: Any, *args: Any, **_: Any) -> int:
    forward: int = _flops(*args)
    return 2 * forward


def steps_of(op: Any, args: Any) -> tuple[int, tuple[int, ...]]:
    """Of the layer's operators: the number of steps, which wait for each other, and the shape of a step's product
    (batch, m, n, k). Of others: 1 and ().
    """
    if op.overloadpacket not in (_recurrent, _recurrent_backward):
        return 1, ()
    hidden, weight = args[-6], args[-4]
    return args[-1], (1, hidden.shape[0], *weight.shape)
