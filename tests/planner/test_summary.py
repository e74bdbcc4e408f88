"""`ech.module_summary`: what a module consists of, and what its passes take."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

import echelon as ech
from echelon.world import rng
from tests.kit.models import net


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lazy = nn.BatchNorm1d(4), nn.LazyLinear(2)


def test_parameters_bytes_and_operations_are_counted() -> None:
    module = net(dtype=torch.float32)
    module.first.bias.requires_grad_(False)
    summary = ech.module_summary(module, torch.randn(3, 4))
    parts = {part.name: part for part in summary.parts}
    first, blocks = parts["first"], parts["blocks"]
    assert (summary.name, summary.kind, first.name, first.kind) == ("", "Net", "first", "Linear")
    assert summary.num_parameters == sum(p.numel() for p in module.parameters())
    assert (first.num_parameters, first.num_trainable, first.size_bytes) == (40, 32, 160)
    assert first.flops_forward == first.flops_backward == 2 * 3 * 4 * 8  # its input has no gradient
    assert summary.flops_forward == 6 * (4 * 8 + 4 * 8 * 8 + 8) and summary.flops_backward == 2 * summary.flops_forward - 192
    assert blocks.flops_forward == 6 * 4 * 8 * 8 and blocks.inputs is None
    block = blocks.parts[0]
    assert [part.flops_backward for part in block.parts if part.name == "blocks.0.3"] == [0]
    assert (first.inputs, first.outputs, block.outputs) == ([3, 4], [3, 8], [3, 8])
    assert first.seconds is not None and summary.seconds is not None and 0 < first.seconds < summary.seconds
    lazy = ech.module_summary(Lazy(), torch.ones(1, 4))
    assert lazy.is_lazy and (lazy.num_parameters, lazy.size_bytes, lazy.flops_forward) == (8, 72, None)


def test_the_table_has_what_is_known_down_to_a_depth() -> None:
    lines = str(ech.module_summary(net(dtype=torch.float32))).splitlines()
    assert len(lines) == 14 + 1 and "FLOPs" not in lines[0] and lines[1].split() == ["Net", "337", "337", "1.348k"]
    shown = ech.module_summary(net(), torch.randn(3, 4, dtype=torch.float64)).table(depth=1).splitlines()
    assert [line.split()[0] for line in shown[2:]] == ["first", "blocks", "last"] and "FLOPs" in shown[0]


class _Answers(nn.Module):
    """Attends, and answers with a dict, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.inside(x)
        return {"attended": nn.functional.scaled_dot_product_attention(made, made, made), "made": made}


def test_attention_counts_and_a_backward_pass_begins_at_every_output() -> None:
    summary = ech.module_summary(_Answers(), torch.randn(2, 3, 5, 8))
    product, attention = 2 * 2 * 3 * 5 * 8 * 8, 2 * 2 * 2 * 3 * 5 * 5 * 8
    assert summary.flops_forward == product + attention and summary.flops_backward is not None
    assert summary.flops_backward > product + attention and summary.outputs == {"attended": [2, 3, 5, 8], "made": [2, 3, 5, 8]}


def test_looking_changes_nothing() -> None:
    class Draws(nn.Dropout):
        passes = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            random.random(), np.random.rand()
            return super().forward(x)

    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Draws(0.5))
    module(torch.randn(3, 4)).sum().backward()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    gradients, streams = [p.grad for p in module.parameters()], rng.digest()
    values = [g.clone() for g in gradients if g is not None]
    ech.module_summary(module, torch.ones(3, 4))
    assert rng.digest() == streams and module[2].passes == 1
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())
    assert all(p.grad is g and torch.equal(g, v) for p, g, v in zip(module.parameters(), gradients, values, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
