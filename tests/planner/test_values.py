"""Shapes that depend on values: a plan knows whole numbers, and what is chosen by unknown ones is chosen evenly."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from echelon.common.errors import PlanError
from echelon.loop.auto.loss_scale import tell_of_scale
from echelon.planner.pretended import Chunks, NoMemory, pretended_world, without_values
from echelon.planner.stand_ins import stand_ins
from echelon.planner.trace import Trace
from echelon.world.agree import AnyRanksLater
from tests.kit.plans import Command, planned
from tests.kit.refusals import refused


def _routed(chosen: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """What code of experts, of packed sequences and of masked losses computes of whole numbers: lists, and shapes."""
    found: dict[str, Any] = {}
    counts = torch.bincount(chosen.flatten(), minlength=6)
    order = chosen.flatten().argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    found["order"] = [counts.tolist(), order.tolist(), inverse.tolist(), counts.cumsum(0).to(torch.int32).tolist()]
    rows = torch.randn(len(order), 3)
    found["parts"] = [len(part) for part in rows.split(counts.tolist())]
    hit = F.one_hot(chosen, 6).permute(2, 1, 0)
    found["hit"] = [(which.tolist(), at.tolist()) for which, at in (torch.where(each) for each in hit)]
    found["histogram"] = torch.histc(chosen.float(), bins=6, min=0, max=5).tolist()
    kept = rows.view(*mask.shape, -1)[mask]
    selected = torch.masked_select(rows, mask.view(-1, 1))
    found["kept"] = [tuple(kept.shape), int(mask.sum()), mask.nonzero().tolist(), tuple(selected.shape)]
    labels = torch.where(mask, chosen, -100)
    labels[0].add_(1)  # in a view
    labels.masked_fill_(labels > 3, 7)
    found["changed"] = [labels.tolist(), labels.unique().tolist(), labels.max().item(), (labels == 7).any().item()]
    found["repeated"] = torch.arange(6).repeat_interleave(counts).tolist()
    found["numpy"] = counts.numpy().tolist()
    return found


def test_whole_numbers_are_what_they_would_be() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, 6, (8, 2), generator=generator)
    mask = torch.rand(8, 2, generator=generator) < 0.5
    real = _routed(chosen, mask)
    with pretended_world(4) as mode, mode:
        assert _routed(chosen, mask) == real
        assert mode.read == 0  # nothing was made up


def _unknown(mode: NoMemory, *shape: int) -> torch.Tensor:
    with mode:
        return torch.randn(2**15)[: math.prod(shape)].view(shape)  # so many draws are not made


def test_what_unknown_numbers_choose_is_chosen_evenly() -> None:
    with pretended_world(4) as mode, mode:
        scores = _unknown(mode, 12, 6)
        for chosen in (scores.topk(2).indices, scores.topk(2, dim=0).indices, scores.argmax(-1), torch.multinomial(scores, 3)):
            counts = torch.bincount(chosen.flatten(), minlength=6)
            assert len(set(counts[counts > 0].tolist())) == 1
        assert scores.topk(2).indices.tolist()[:2] == [[0, 1], [2, 3]] and scores.max(0).indices.shape == (6,)
        assert sorted(scores.sort(0).indices[:, 3].tolist()) == list(range(12)) and scores.argmax().item() == 0
        assert mode.read == 0


def test_other_numbers_are_not_known() -> None:
    with pretended_world(4) as mode, mode:
        known = torch.zeros(4, dtype=torch.int64)
        known.copy_(_unknown(mode, 4))  # of values that nobody knows
        assert known.sum().item() == 1 and mode.read == 1
        with refused(PlanError):
            known.nonzero()
        with stand_ins(mode, gpus=0):
            weight = torch.nn.Linear(4, 1).weight.detach().flatten()
        for rounded in (weight.long(), _unknown(mode, 4).long(), _unknown(mode, 4).bool()):  # both come about in an empty tensor
            with refused(PlanError):
                rounded.nonzero()


def test_one_value_goes_to_as_many_elements_as_there_are() -> None:
    """`labels[~found] = 0` takes no other memory, however many were not found."""
    with pretended_world(4) as mode, mode:
        scores, labels = _unknown(mode, 6, 2), torch.arange(6)
        labels[scores[:, 0] > 0] = 0
        scores[scores > 1] = torch.zeros(())
        assert torch.where(scores.sum(-1) > 0, labels, 1).shape == (6,) and mode.read == 0


def test_a_number_from_before_the_training_is_read() -> None:
    """As of the steps that Adagrad counts from its beginning."""
    steps = torch.tensor(3.0)
    with pretended_world(4) as mode, mode:
        assert steps.item() == 3.0 and mode.read == 0


def test_what_no_shape_says_is_refused_by_its_line() -> None:
    with pretended_world(4) as mode, mode:
        rounded = _unknown(mode, 6, 2).long()
        assert torch.bincount(rounded.flatten(), minlength=5).shape == (5,)
        with refused(PlanError):
            rounded.unique(dim=0)


def _drawn(scores: torch.Tensor) -> dict[str, Any]:
    """What decides on a random draw, and what takes no more than a shape of numbers that nobody knows."""
    generator = torch.Generator().manual_seed(3)
    layers = [bool(torch.rand([], generator=generator) < 0.5) for _ in range(8)]
    masked = torch.bernoulli(torch.full(scores.shape, 0.3), generator=generator).bool()
    kept = torch.zeros_like(scores, dtype=torch.bool).index_fill_(1, torch.tensor([0, 2]), True)
    added = torch.ones(6)
    added[torch.arange(6) > 1] = -10000.0
    layers.append(bool((added > torch.tensor([0.5])).any()))
    return {
        "layers": [*layers, int((added < 0).sum())],
        "masked": scores[masked].shape,
        "kept": scores[kept].shape,
        "said": f"{masked.sum()}",
    }


def test_random_draws_and_masks_like_unknown_numbers_are_known() -> None:
    real = _drawn(torch.randn(6, 5))
    with pretended_world(4) as mode, mode:
        assert _drawn(_unknown(mode, 6, 5)) == real and mode.read == 0


def test_what_is_only_read_stays_known() -> None:
    with pretended_world(4) as mode, mode:
        rows, mask = torch.arange(4), torch.arange(6) < 2
        changed = torch.randn(8, 3).index_add_(0, rows, torch.randn(4, 3))
        changed.view(4, 6).masked_fill_(mask, 0.0)[:, mask].sum()
        dist.send(rows, 1)
        assert rows.tolist() == [0, 1, 2, 3] and changed.view(4, 6)[:, mask].shape == (4, 2) and mode.read == 0


def test_a_number_that_an_operator_on_a_list_changes_stays_known() -> None:
    """NAdam divides by 1 minus a running product, which is 1 as long as it is not known."""
    with pretended_world(4) as mode, mode:
        products = [torch.ones(()), torch.ones(())]
        torch._foreach_mul_(products, [0.5, 0.25])
        torch._foreach_add_(products, 1)
        assert [product.item() for product in products] == [1.5, 1.25] and mode.read == 0
        layer = nn.Linear(200, 200)
        optimizer = torch.optim.NAdam(layer.parameters(), foreach=True)
        for _ in range(2):
            layer(torch.ones(2, 200)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.state[layer.weight]["step"].item() == 2


def test_lists_of_numbers_are_read() -> None:
    with pretended_world(4) as mode, stand_ins(mode, gpus=0), mode:
        lengths = torch.arange(3)
        assert torch.tensor([lengths.max(), lengths[1]]).tolist() == [2, 1]


def _by_lengths(rows: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor, layer: torch.nn.GRU) -> dict[str, Any]:
    """Layers and losses of sequences whose lengths differ: shapes, and whole numbers."""
    packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
    out, state = layer(packed)
    padded, again = pad_packed_sequence(out, batch_first=True, total_length=9)
    loss = F.ctc_loss(padded.log_softmax(-1).transpose(0, 1), targets, again, lengths - 1)
    (loss + state.sum()).backward()
    weighted = torch.bincount(targets.flatten(), weights=torch.rand(targets.numel()))
    shapes = [tuple(each.shape) for each in (packed.data, out.data, state, padded, layer.weight_ih_l0.grad, weighted)]
    return {"shapes": shapes, "batch sizes": packed.batch_sizes.tolist(), "lengths": again.tolist()}


def test_lengths_are_those_of_recurrent_layers_and_of_ctc() -> None:
    lengths, targets = torch.tensor([3, 7, 5, 7]), torch.arange(4 * 6).view(4, 6) % 4 + 1
    real = _by_lengths(torch.randn(4, 8, 3), lengths, targets, torch.nn.GRU(3, 5, batch_first=True))
    with pretended_world(2) as mode, mode:
        layer = torch.nn.GRU(3, 5, batch_first=True)
        assert _by_lengths(torch.randn(4, 8, 3), lengths, targets, layer) == real and mode.read == 0


class _HasBuffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keeps: torch.Tensor
        self.register_buffer("keeps", torch.arange(8) % 4 > 0)
        self.register_buffer("unknown", torch.empty(8, dtype=torch.int64, device="meta"))


def test_small_buffers_keep_their_values() -> None:
    """C++ looks whether the window of an inverse transform overlaps, without an operator."""
    with pretended_world(2) as mode:
        layer = torch.nn.Linear(2, 2)
        layer.register_buffer("window", torch.hann_window(64))
        without_values(layer, mode)
        torch.nn.parallel.DistributedDataParallel(layer)  # broadcasts the buffers with the parameters
        with mode:
            waves = torch.stft(torch.randn(2, 640), 64, 16, window=layer.window, return_complex=True)
            assert torch.istft(waves, 64, 16, window=layer.window, length=640).shape == (2, 640) and mode.read == 0


def test_buffers_of_whole_numbers_keep_their_values() -> None:
    with pretended_world(2) as mode:
        module = _HasBuffers()
        without_values(module, mode)
        with mode:
            assert torch.randn(3, 8)[:, module.keeps].shape == (3, 6) and mode.read == 0
            with refused(PlanError):
                module.unknown.nonzero()


def test_a_number_that_autograd_saved_is_read() -> None:
    """As echelon does of a loss that is divided by the number of samples; `examples/contrastive.py` could not be planned."""
    with pretended_world(2) as mode, mode, Trace():
        tell_of_scale(torch.randn(3, requires_grad=True).sum() / 2, samples=1, weight=1.0, accumulation=1, divided=2)


def test_other_ranks_send_what_this_one_sends() -> None:
    with pretended_world(4, rank=2) as mode, mode:
        sent, got = torch.arange(8), torch.empty(8, dtype=torch.int64)
        dist.all_to_all_single(got, sent)
        assert got.tolist() == [4, 5] * 4
        gathered = torch.empty(32, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, sent)
        assert gathered.tolist() == list(range(8)) * 4
        each = [torch.empty(8, dtype=torch.int64) for _ in range(4)]
        dist.all_gather(each, sent)
        assert all(part.tolist() == list(range(8)) for part in each)
        sizes = torch.empty(2, dtype=torch.int64)
        dist.broadcast(sizes, 0)  # which fills it
        assert sizes.tolist() == [1, 1]
        most = sent.max()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        assert most.item() == 7 and mode.read == 0


DIM, HIDDEN, EXPERTS, TOKENS = 64, 128, 8, 16

MOE = f"""
import torch
import echelon as ech

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            ech.nn.MoE({DIM}, ech.nn.GroupedExperts({DIM}, {HIDDEN}, {EXPERTS}), top_k=2) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

class Fit(ech.AutoUnit):
    def compute_loss(self, state, data):
        return self.module(data[0]).square().mean(), None

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters()), None

data = torch.utils.data.TensorDataset(torch.randn(64, {TOKENS}, {DIM}))
ech.train(Fit(module=Model(), layout="fsdp"), ech.Loader(data, global_batch=8), max_updates=3)
"""

# One expert after the other, with the tokens that chose it: as it is written by hand everywhere.
BY_HAND = f"""
import torch
import echelon as ech

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear({DIM}, {EXPERTS}, bias=False)
        self.each = torch.nn.ModuleList(torch.nn.Linear({DIM}, {DIM}, bias=False) for _ in range({EXPERTS}))

    def forward(self, x):
        x = x.flatten(0, 1)
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.each):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out

model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, {TOKENS}, {DIM}), torch.arange(64 * {TOKENS}).view(64, -1) % 4 > 0)
model, optimizer, loader = ech.prepare(model, optimizer, ech.Loader(data, global_batch=8), layout="ddp")
for epoch in ech.epochs(loader, 1):
    for x, keep in loader:
        with ech.window(model) as window:
            out = model(x)
            window.backward(out[keep.flatten()].square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.full
def test_layers_of_experts_are_planned_and_divided(tmp_path: Path, echelon_command: Command) -> None:
    layouts = planned(echelon_command, tmp_path, MOE, "--gpus", "4")
    assert not any(each["why"] for each in layouts.values() if "tp" not in each["layout"]), layouts
    fsdp, divided = layouts["fsdp"], layouts["ep=4"]
    rows = 2 * TOKENS  # of a rank; each goes to two experts, through three products, and twice as many backward
    product, gate = 2 * (2 * rows) * DIM * HIDDEN, 2 * rows * DIM * EXPERTS
    assert fsdp["flops"] == 2 * (9 * product + 3 * gate) - 2 * product - gate  # the data need no gradient
    assert divided["flops"] == fsdp["flops"]  # all ranks have as many rows
    experts = 4 * 2 * 3 * EXPERTS * DIM * HIDDEN
    assert divided["by_kind"]["parameters"] == pytest.approx(experts / 4, rel=0.1)
    assert divided["by_kind"].get("gathered", 0) < experts / 4 < fsdp["by_kind"]["gathered"] + experts / 2
    # Tokens to their experts and back, and their gradients, but the data's; gates are gathered twice and reduced; a few counts.
    tokens, gate = 4 * 2 * rows * DIM, 4 * EXPERTS * DIM
    assert divided["sent"] == pytest.approx((7 * tokens + 2 * 3 * gate) * 3 / 4, rel=0.01) and divided["sent"] < fsdp["sent"]
    [stages] = planned(echelon_command, tmp_path, MOE, "--gpus", "4", "--only", "pp=2,dp_shard=2,ep=2").values()
    assert not stages["why"] and stages["by_kind"]["parameters"] == pytest.approx(experts / 4, rel=0.1)


@pytest.mark.full
def test_experts_one_by_one_and_a_masked_loss_need_no_shapes(tmp_path: Path, echelon_command: Command) -> None:
    [found] = planned(echelon_command, tmp_path, BY_HAND, "--gpus", "2", "--only", "yours").values()
    rows = 4 * TOKENS
    assert not found["why"] and found["read"] == 1, found  # the loss, to be told
    assert found["flops"] == 2 * rows * DIM * (EXPERTS * 2 + 2 * DIM * 3) - 2 * rows * 2 * DIM * DIM


# --- ranks that do not exist do what torch's do: what is private of torch has not changed

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
