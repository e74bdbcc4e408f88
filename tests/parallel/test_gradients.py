"""One norm over any mixture of whole and sharded gradients: torch's own over the whole tensors is the reference."""

from __future__ import annotations

import math
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from echelon.common.errors import UsageError
from echelon.parallel.gradients.clip import clip_by_norm_, clip_by_value_, pass_zeros, scale_
from echelon.parallel.gradients.unreduced_params import after_backward
from echelon.world.mesh import ParallelDims
from tests.conftest import Ranks

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")
NORM_TYPES = [1.0, 2.0, 3.0, math.inf]


def _whole(dtype: torch.dtype = torch.float64, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 6), (7,), (4, 4), (6, 3), (3, 5), (1, 2), (4,), (2, 2)]
    return [torch.randn(shape, generator=generator, dtype=dtype) * (i + 1) * size for i, shape in enumerate(shapes)]


def _mixture(grads: list[torch.Tensor]) -> list[nn.Parameter]:
    """The same gradients: whole, split over one mesh, over another, over both, over one of two; unevenly, too."""
    dims = ParallelDims.of(4, tp=2)
    root, data, tp = dims.root_mesh(CPU), dims.data_mesh(CPU), dims.tp_mesh(CPU)
    kinds: list[Any] = [
        None,
        (data, [Shard(0)]),
        (tp, [Shard(1)]),
        (root, [Shard(0), Shard(1)]),
        (root, [Shard(0), Replicate()]),
        (root, [Replicate(), Shard(0)]),
        (root, [Replicate(), Replicate()]),
        (tp, [Replicate()]),
    ]
    parameters = []
    for grad, kind in zip(grads, kinds, strict=True):
        held = grad.clone() if kind is None else distribute_tensor(grad, *kind)
        parameter = nn.Parameter(torch.zeros_like(held))
        parameter.grad = held
        parameters.append(parameter)
    return parameters


def _gathered(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    grads = [p.grad for p in parameters if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


def _clip(max_norm: float) -> list[tuple[float, list[torch.Tensor], int]]:
    found = []
    for norm_type in NORM_TYPES:
        parameters = _mixture(_whole())
        with mock.patch("torch.distributed.all_reduce", side_effect=dist.all_reduce) as sent:
            norm = clip_by_norm_(parameters, max_norm, norm_type)
        assert norm.dim() == 0 and norm.dtype == torch.float64
        found.append((float(norm), _gathered(parameters), sent.call_count))
    return found


@pytest.mark.full
@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_one_norm_for_any_mixture_in_one_message_per_axis(ranks: Ranks, max_norm: float) -> None:
    results = ranks(4, _clip, max_norm)
    for norm_type, found in zip(NORM_TYPES, zip(*results, strict=True), strict=True):
        plain = [nn.Parameter(torch.zeros_like(g)) for g in _whole()]
        for parameter, grad in zip(plain, _whole(), strict=True):
            parameter.grad = grad
        want = float(torch.nn.utils.clip_grad_norm_(plain, max_norm, norm_type))
        assert len({norm for norm, _, _ in found}) == 1  # to the bit, on every rank
        for norm, grads, messages in found:
            assert norm == pytest.approx(want, rel=1e-13) and messages == 2
            for got, parameter in zip(grads, plain, strict=True):
                assert torch.allclose(got, parameter.grad, rtol=1e-12, atol=0)


def _others() -> dict[str, Any]:
    parameters = _mixture(_whole())
    clip_by_value_(parameters, 0.7)
    scale_(parameters, 3.0)
    found: dict[str, Any] = {"values": _gathered(parameters)}
    # A kind without any gradient on one rank only must not leave the others waiting.
    parameters = _mixture(_whole())
    if dist.get_rank() in (1, 3):
        parameters[2].grad = None  # its tensor-parallel half: zeros on these ranks
    found["missing"] = float(clip_by_norm_(parameters, math.inf))
    found["large"] = float(clip_by_norm_(_mixture(_whole(torch.float32, 7e17)), math.inf))
    none = _mixture(_whole())
    for parameter in none:
        parameter.grad = None
    found["none"] = float(clip_by_norm_(none, 1.0))
    with pytest.raises(UsageError, match=r"norm_type must be above 0, .*, got 0"):
        clip_by_norm_(parameters, 1.0, 0.0)
    return found


@pytest.mark.full
def test_values_scales_missing_and_huge_gradients(ranks: Ranks) -> None:
    whole = _whole()
    half = [g.clone() for g in whole]
    half[2][:, 2:] = 0
    for found in ranks(4, _others):
        for got, grad in zip(found["values"], whole, strict=True):
            assert torch.equal(got, grad.clamp(-0.7, 0.7) * 3.0)
        assert found["missing"] == pytest.approx(float(torch.nn.utils.get_total_norm(half)), rel=1e-13)
        norm = float(torch.nn.utils.get_total_norm([g.double() for g in _whole(torch.float32, 7e17)]))
        assert found["large"] == pytest.approx(norm, rel=1e-6)  # its square is beyond float32
        assert found["none"] == 0.0


def test_where_a_device_says_so_means_over_nothing_pass_zeros() -> None:
    """Of twenty losses at different depths, one divides by weights beforehand; the other way gradients are as they were."""

    def gradient(counts: torch.Tensor, where: bool) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(4, 1, dtype=torch.float64)
        errors = layer(torch.ones(6, 4, dtype=torch.float64)).square().squeeze(1)
        loss = (errors * (counts / counts.sum())).sum()
        for power in range(1, 20):
            loss = loss + (errors.tanh() ** power * counts).sum() / counts.sum()
        pass_zeros(loss, torch.tensor(where))
        loss.backward(gradient=loss.new_tensor(0.0 if where else 0.5))
        assert layer.weight.grad is not None
        return layer.weight.grad

    assert torch.equal(gradient(torch.zeros(6, dtype=torch.float64), True), torch.zeros(1, 4, dtype=torch.float64))
    counted = torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=torch.float64)
    assert bool(gradient(counted, False).abs().min() > 0)


def test_what_is_to_run_after_a_backward_pass_runs_once_with_all_gradients_in_the_callers_thread() -> None:
    """By a private name of torch's."""
    first, last = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    said: list[tuple[bool, bool, bool]] = []

    def ended() -> None:
        said.append((first.grad is not None, last.grad is not None, threading.current_thread() is threading.main_thread()))

    # `last` is used last, so that its gradient comes first.
    last.register_post_accumulate_grad_hook(lambda _: after_backward(ended))
    for times in (1, 2):
        ((first * 2).exp() * last).sum().backward()
        assert said == [(True, True, True)] * times
