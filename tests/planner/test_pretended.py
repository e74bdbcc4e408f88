"""Ranks that do not exist do what torch's do: what is private of torch has not changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param

from echelon.common.errors import PlanError
from echelon.planner.pretended import Chunks, pretended_world, without_values
from echelon.planner.trace import Trace
from echelon.world.agree import AnyRanksLater
from tests.kit.refusals import refused

Ranks = Callable[..., list[Any]]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _gradient_storages(model: nn.Module, mode: contextlib.AbstractContextManager[Any]) -> list[int]:
    """Bytes of the storages in which gradients lie after passes that are reduced, and after some that are not."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    found = []
    with mode:
        for _ in range(2):
            with wrapped.no_sync():
                wrapped(torch.randn(2, 4)).sum().backward()
            found += [p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None]
            wrapped(torch.randn(2, 4)).sum().backward()
            found += [p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None]
            wrapped.zero_grad()
    return found


def _really() -> list[int]:
    return _gradient_storages(_model(), contextlib.nullcontext())


def test_gradients_lie_in_buckets_as_torchs_reducer_has_them(ranks: Ranks) -> None:
    real = ranks(2, _really)
    with pretended_world(2) as mode:
        model = _model()
        without_values(model, mode)
        assert [_gradient_storages(model, mode)] * 2 == real


def test_parts_of_a_parameter_are_those_of_fully_shard() -> None:
    for rows, number in ((7, 3), (8, 4), (2, 4), (9, 9)):
        tensor = torch.arange(rows * 2.0).view(rows, 2)
        real = _fsdp_param._chunk_with_empty(tensor, number, dim=0)
        ours = Chunks(tensor, number, 0)
        assert all(torch.equal(real[i], ours[i]) for i in range(number))


def test_values_are_made_up_and_nothing_else_is_left_changed() -> None:
    before = (nn.Module._apply, torch.distributed.Reducer, _fsdp_param._chunk_with_empty)
    with pretended_world(64, 3) as mode:
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (3, 64)
        with mode:
            values = torch.randn(2**15)[:4]  # of so many draws none is known
        assert values.sum().item() == 1.0 and (values > 0).all() and not values.isnan().any() and mode.read == 3
        assert values.tolist() == [1.0] * 4
    assert (nn.Module._apply, torch.distributed.Reducer, _fsdp_param._chunk_with_empty) == before
    assert not torch.distributed.is_initialized()


def test_views_of_a_copied_module_are_no_memory_of_their_own() -> None:
    """The copy's tensors were those of a copied mode, so that each of them was booked twice (nn.TransformerEncoder copies)."""
    with pretended_world(2) as mode:
        module = _model()
        without_values(module, mode)
        for each in (module, copy.deepcopy(module)):
            weight = each[0].weight
            with mode:
                assert weight.t().untyped_storage() is weight.untyped_storage()
                assert f"{torch.arange(3).max()}" == "2"


def test_data_may_be_a_tensor_that_has_memory() -> None:
    """As where a constructor draws a weight and puts it into a layer: `self.conv.weight.data = q`."""
    q = torch.linalg.qr(torch.randn(4, 4))[0].t()
    with pretended_world(2) as mode:
        layer = nn.Linear(4, 4)
        without_values(layer, mode)
        layer.weight.data = q
        assert layer.weight.stride() == q.stride()
        with mode:
            assert layer(torch.randn(2, 4)).shape == (2, 4)


def test_what_ranks_are_asked_for_later_is_what_this_one_says() -> None:
    """A tensor without values would be read as 1: as if some rank had raised."""
    with pretended_world(4) as mode, mode:
        later = AnyRanksLater()
        assert later(False) == [False]
        assert later(False, True) == [False, False]
        assert (later.last(), later.last()) == (2, 0)


def test_sparse_tensors_are_refused() -> None:
    """torch's fake ones have no elements: a plan would count nothing."""
    with pretended_world(2) as mode, refused(PlanError):
        bag = nn.EmbeddingBag(64, 4, sparse=True, mode="sum")
        without_values(bag, mode)
        with mode, Trace(1):
            bag(torch.arange(6).view(2, 3)).sum().backward()
