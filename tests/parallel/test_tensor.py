"""Tensor parallelism, alone and under data parallelism: the numbers of one process, the same samples, complete state, errors."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import echelon as ech
from echelon.parallel.recipe.recipe import Recipe
from echelon.world.mesh import ParallelDims
from tests.conftest import Ranks
from tests.kit.models import Net, batch, net, plain_training, seeded, whole
from tests.kit.refusals import refusal
from tests.kit.units import Hooks, Regression

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")


class _Seeing(Regression):
    """Remembers the samples it was given and the masks that dropout drew."""

    def __init__(self, **options: Any) -> None:
        super().__init__(module=net(dropout=0.5), **options)
        self.seen: list[float] = []
        self.masks: list[list[float]] = []
        self.module.blocks[0][3].register_forward_hook(
            lambda _, __, out: self.masks.append((out == 0).double().flatten().tolist())
        )

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += data[0][:, 0].tolist()
        return super().compute_loss(state, data)


def _samples(layout: Any) -> tuple[list[float], list[list[float]], tuple[int, int]]:
    ech.seed(7)
    unit = _Seeing(layout=layout)
    ech.train(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(24, 0)), 8), max_epochs=1)
    seen, masks = list(unit.seen), list(unit.masks)
    unit.module.eval()
    ech.evaluate(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(10, 5)), 4, shuffle=False))
    module = net()
    module.load_state_dict(whole(unit.module))
    x, y = batch(10, 5)
    assert unit.eval_loss == pytest.approx(float(nn.functional.mse_loss(module(x), y).detach()), rel=1e-12)
    return seen, masks, (unit.prepared.data.rank, unit.prepared.data.size)


@pytest.mark.full
def test_ranks_of_a_layer_see_the_same_samples_and_drop_the_same_units(ranks: Ranks) -> None:
    order = ech.Loader(torch.utils.data.TensorDataset(*batch(24, 0)), 8)
    whole_batches = [sorted(b[0][:, 0].tolist()) for b in order]
    found = ranks(4, _samples, ech.Layout(tp=2))
    assert [place for *_, place in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for a, b in ((0, 1), (2, 3)):
        assert found[a][0] == found[b][0] and found[a][1] == found[b][1]
    assert found[0][1] != found[2][1] and not set(found[0][0]) & set(found[2][0])
    for k, want in enumerate(whole_batches):
        assert sorted(found[0][0][4 * k : 4 * k + 4] + found[2][0][4 * k : 4 * k + 4]) == want


def _stopped() -> int:
    """Rank 1, another's replica, asks to stop in its third step."""

    def stop(state: ech.State, unit: Any) -> None:
        if dist.get_rank() == 1 and unit.train_progress.num_steps_completed == 2:
            state.stop()

    unit = Regression(layout="tp")
    ech.train(unit, [batch(4, i) for i in range(8)], max_epochs=1, callbacks=[Hooks(on_train_step_start=stop)])
    return unit.train_progress.num_steps_completed


@pytest.mark.full
def test_a_replica_can_stop_all(ranks: Ranks) -> None:
    assert ranks(2, _stopped) == [3, 3]


class Planless(Net):
    tp_plan: ClassVar[dict[str, str]] = {}


def _styles() -> float:
    """A plan of torch's own objects, one of them beside a word, with the same result."""
    plan = {"blocks.*.0": ColwiseParallel(), "blocks.0.2": RowwiseParallel(), "blocks.1.2": "rowwise"}
    module = Planless().double()
    module.load_state_dict(net().state_dict())
    unit = Regression(module=module, layout=ech.Layout(tp=-1, plan=plan))
    ech.train(unit, [batch(4, 0)], max_epochs=1)
    want, _, _ = plain_training([[batch(4, 0)]])
    got = whole(unit.module)
    split = unit.module.blocks[0][0].weight.to_local().numel() / 64
    return max(float((got[k] - want[k]).abs().max()) for k in want) + abs(split - 0.5)


@pytest.mark.full
def test_a_plan_may_hold_torch_styles(ranks: Ranks) -> None:
    assert max(ranks(2, _styles)) < 1e-12


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class OneHead(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.heads = 1


@pytest.mark.parametrize(
    ("module", "layout", "size", "message"),
    [
        (_Bare, ech.Layout(tp=-1), 2, 'a dict such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'),
        (Net, ech.Layout(tp=-1, plan={"blocks.*.7": "colwise"}), 2, "'blocks.*.7', which matches no submodule of Net"),
        (Net, ech.Layout(tp=-1, plan={"first": "columns"}), 2, "got 'columns' for 'first'"),
        (Net, ech.Layout(tp=-1, plan={"blocks.0": "colwise"}), 2, "Net.blocks.0 is a Sequential"),
        (Net, ech.Layout(tp=3), 3, r"3 ranks does not divide dimension 0 of Net.blocks.0.0.weight (8, 8)"),
        (OneHead, ech.Layout(tp=-1), 2, "does not divide OneHead.blocks.0.heads = 1"),
        (Net, ech.Layout(tp=3), 4, "to the 4 ranks that run, got tp 3. Set tp to 2 or 4"),
        (Net, ech.Layout(tp=2, dp_replicate=3), 8, "to the 8 ranks that run, got dp_replicate 3 x tp 2 = 6"),
    ],
)
def test_what_cannot_be_split_is_an_error_before_any_collective(module: Any, layout: Any, size: int, message: str) -> None:
    # There is no group here: a collective would be another error.
    assert message in refusal(layout.prepare, module(), ech.launching.World(0, size, CPU), Recipe())


@pytest.mark.parametrize(
    ("world", "sizes", "want"),
    [
        (8, {}, (1, 8, 1)),
        (8, {"dp_replicate": 2}, (2, 4, 1)),
        (8, {"dp_replicate": 2, "tp": 2}, (2, 2, 2)),
        (8, {"dp_shard": 4, "tp": 3}, "the 8 ranks that run, got dp_shard 4 x tp 3 = 12. Set tp to 2, or start 12 ranks."),
        (4, {"dp_replicate": 3}, "the 4 ranks that run, got dp_replicate 3. Set dp_replicate to 2 or 4, or start 3 ranks."),
        (2, {"tp": 0}, "tp must be at least 1, or -1 for what the other axes leave, got 0."),
        (8, {"dp_replicate": -1, "tp": 2}, (4, 1, 2)),
        (
            8,
            {"dp_replicate": -1, "tp": -1},
            "only one axis can be -1, which stands for what the others leave, got dp_replicate and tp.",
        ),
        (16, {"pp": 2, "cp": 2, "tp": 2, "ep": 4}, (1, 2, 2, 2, 2, 4)),
        (8, {"cp": 2, "ep": 3}, "got ep=3 for dp_shard 4 x cp 2 = 8. Set ep to 1 or 2 or 4 or 8."),
    ],
)
def test_the_axes_multiply_to_the_ranks(world: int, sizes: dict[str, int], want: Any) -> None:
    if isinstance(want, tuple):
        assert ParallelDims.of(world, **sizes) == ParallelDims(*want)
    else:
        assert refusal(ParallelDims.of, world, **sizes).endswith(want)


class Scaled(Net):
    """Uses its own parameter in the passes of some ranks only."""

    uses = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale if self.uses else x)


def _scaled() -> str:
    module = seeded(Scaled)
    module.uses = dist.get_rank() == 1
    unit = Regression(module=module, layout=ech.Layout(tp=2))
    return refusal(ech.train, unit, [batch(4, 0), batch(4, 1)], max_epochs=1)


def test_a_gradient_on_one_of_the_ranks_that_share_layers_is_told_on_all(ranks: Ranks) -> None:
    first, second = ranks(2, _scaled)
    assert first == second and "Scaled.scale differs between the 2 ranks" in first


class HeadScale(nn.Module):
    """One scale for all heads, of which each rank has some: its gradient is the sum of the ranks'."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))
        self.of_rank: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        weight.register_hook(lambda gradient: setattr(self, "of_rank", gradient))
        return x * weight


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(8, 4 * 256), HeadScale(), nn.Linear(4 * 256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.scale(self.up(x).unflatten(-1, (-1, 256))).flatten(-2))


def _rounded_once() -> tuple[bool, bool]:
    torch.manual_seed(0)
    plan = {"up": "colwise", "scale": "summed", "down": "rowwise"}
    module = ech.layouts.prepare_module(Heads().bfloat16(), CPU, layout=ech.Layout(tp=-1, plan=plan))
    module(torch.randn(16, 8, dtype=torch.bfloat16)).pow(2).mean().backward()
    scale: Any = module.scale
    parts = [torch.empty_like(scale.of_rank) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, scale.of_rank)
    gradient = scale.weight.grad
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    want = sum(part.float() for part in parts)
    return torch.equal(gradient, want.bfloat16()), torch.equal(gradient.float(), want)


@pytest.mark.full
def test_gradients_of_what_ranks_share_are_rounded_once(ranks: Ranks) -> None:
    """In 16 bits, a sum over the ranks would round at each of them."""
    assert ranks(4, _rounded_once) == [(True, False)] * 4


class _Dropping(nn.Module):
    """Dropout before, between and after split layers: in a sequence, and in a module with one dropout for all three places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.drop, self.act = nn.Dropout(0.4), nn.GELU()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)
        self.last = nn.Sequential(nn.Dropout(0.4), nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drop(self.fc2(self.drop(self.act(self.fc1(self.drop(x))))))
        return torch.utils.checkpoint.checkpoint(self.last, hidden, use_reentrant=False)  # which may stop before its end


def _dropped_between() -> list[float]:
    one, apart = _Dropping().double(), []
    module = ech.layouts.prepare_module(_Dropping().double(), CPU, layout=ech.Layout(tp=-1))
    x = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for seed in (5, 6):  # the second pass comes after a recomputation
        outputs = []
        for each in (module, one):
            torch.manual_seed(seed)
            outputs.append(each(x))
            outputs[-1].square().sum().backward()
        apart.append(float((outputs[0] - outputs[1]).abs().max()))
    return apart


def test_dropout_between_split_layers_drops_what_one_process_drops(ranks: Ranks) -> None:
    """Each rank drew the mask of its own part from the same numbers: pairs of units always fell together."""
    assert ranks(2, _dropped_between) == [pytest.approx([0.0, 0.0], abs=1e-12)] * 2
