"""Recurrent layers on a GPU are planned as cuDNN computes them: one operator a layer and direction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from echelon.planner.devices import device_named
from echelon.planner.pretended import pretended_world
from echelon.planner.stand_ins import stand_ins
from echelon.planner.timeline import operator_seconds
from echelon.planner.trace import Trace, Traced

STEPS, BATCH, INPUT, WIDTH = 7, 4, 3, 5
LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.5}),
    "projected lstm": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "batch_first": True}),
    "gru": (nn.GRU, {"batch_first": True, "bias": False}),
    "rnn": (nn.RNN, {"num_layers": 3, "nonlinearity": "relu"}),
}


def _shapes(layer: nn.RNNBase, rows: Any) -> list[tuple[int, ...]]:
    """The shapes of the outputs and of the gradients of a pass."""
    output, state = layer(rows)
    output = output if isinstance(output, torch.Tensor) else output.data
    states = state if isinstance(state, tuple) else (state,)
    (output.sum() + sum(each.sum() for each in states)).backward()
    grads = [weight.grad for weight in layer.parameters()]
    return [tuple(each.shape) for each in (output, *states, *grads) if each is not None]


def _rows(packed: bool, batch_first: bool) -> Any:
    rows = torch.randn(*((BATCH, STEPS) if batch_first else (STEPS, BATCH)), INPUT)
    return pack_padded_sequence(rows, torch.tensor([7, 5, 5, 2]), batch_first=batch_first) if packed else rows


def _planned(name: str, packed: bool) -> tuple[list[tuple[int, ...]], Traced, int]:
    kind, options = LAYERS[name]
    with pretended_world(2) as mode, stand_ins(mode, gpus=8), mode, Trace(1) as trace:
        layer = kind(INPUT, WIDTH, **options)
        trace.watch(layer, ())
        shapes = _shapes(layer, _rows(packed, layer.batch_first))
        trace.close()
        return shapes, trace.so_far(), sum(each.numel() for each in layer.parameters() if each.dim() == 2)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_shapes_and_arithmetic_are_those_of_the_layer(name: str, packed: bool) -> None:
    kind, options = LAYERS[name]
    shapes, traced, matrices = _planned(name, packed)
    layer = kind(INPUT, WIDTH, **options)
    assert shapes == _shapes(layer, _rows(packed, layer.batch_first))
    rows = 19 if packed else STEPS * BATCH
    inputs = layer.weight_ih_l0.numel() * (2 if layer.bidirectional else 1)  # data needs no gradient
    assert traced.flops == 2 * rows * (3 * matrices - inputs)


def test_steps_wait_for_each_other() -> None:
    _, traced, _ = _planned("lstm", packed=False)
    device = replace(device_named("h100"), least=1.0)
    times = [operator_seconds(step, device) for step in traced.steps if getattr(step, "in_turn", 1) > 1]
    assert times == [float(STEPS)] * 8, "two layers, two directions, forward and backward"
