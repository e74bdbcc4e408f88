"""Tensors as bytes, of whatever strides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import nn

import echelon as ech
from echelon.data.fingerprint import checksum
from echelon.world.tensor_bytes import flat_bytes

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)


@given(
    st.lists(st.integers(0, 3), min_size=0, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 2)), min_size=3, max_size=3),
    st.permutations([0, 1, 2]),
    st.sampled_from(TYPES),
)
def test_bytes_are_those_of_the_elements_in_order(
    sizes: list[int], cuts: list[tuple[int, int, int]], order: list[int], dtype: torch.dtype
) -> None:
    tensor = torch.arange(torch.Size(sizes).numel()).reshape(sizes).to(dtype)
    for dim, (begin, length, step) in zip(range(tensor.dim()), cuts, strict=False):
        tensor = tensor[(slice(None),) * dim + (slice(begin, begin + length, step),)]
    tensor = tensor.permute([dim for dim in order if dim < tensor.dim()])
    packed = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
    raw = flat_bytes(tensor)
    assert raw.numel() == tensor.numel() * tensor.element_size()
    assert raw.numpy().tobytes() == packed.reshape(-1).view(torch.uint8).numpy().tobytes()


def strided() -> torch.Tensor:
    """One element, which torch calls contiguous, with a stride of 2."""
    column = torch.tensor([[1.0, 2.0]])[:, 1]
    assert column.is_contiguous() and column.stride() == (2,)
    return column


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("scale", strided())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Unit(ech.AutoUnit[torch.Tensor]):
    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.module(data).square().mean(), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD(module.parameters(), lr=0.1), None


def test_a_column_of_one_row_is_saved_and_is_a_sample(tmp_path: Path) -> None:
    """The view of a column's only row failed where it was saved, and where a sample was compared."""
    assert checksum(strided()) == checksum(torch.tensor([2.0]))
    for updates in (2, 4):
        unit = Unit(module=Scaled())
        with torch.no_grad():
            unit.module.scale.fill_(2.0 * updates)
        ech.train(unit, ech.Loader([strided() for _ in range(16)], 2), max_updates=updates, checkpoints=tmp_path)
        assert unit.module.scale.item() == 4.0  # of the first run, which the second one took up
