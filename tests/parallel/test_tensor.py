"""Tensor parallelism, alone and under data parallelism: the numbers of one process, the same samples, complete state, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import echelon as ech
from echelon.common.errors import UsageError
from echelon.parallel.recipe.recipe import Recipe
from echelon.world.mesh import ParallelDims
from tests.conftest import Ranks
from tests.kit.models import Net, batch, net, plain_training, whole
from tests.kit.units import Regression
from tests.kit.windows import SHAPES, windows_of

pytestmark = pytest.mark.standing_ranks

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Attention with heads, between an embedding and an output layer that share a weight. x: (B, 4) numbers -> (B, 1)."""

    tp_plan: ClassVar[dict[str, str]] = {
        "bytes": "rowwise",
        "blocks.*.qkv": "colwise",
        "blocks.*.out": "rowwise",
        "head": "colwise_gather",
    }

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.bytes.weight
        self.blocks = nn.ModuleList(Attention(8, heads) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bytes((x.abs() * 7).long() % 16)
        for block in self.blocks:
            h = h + block(h)
        return self.head(self.norm(h)).mean((1, 2))[:, None] + self.head(self.norm(h)).square().mean((1, 2))[:, None]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, -1, 3, self.size).permute(3, 0, 2, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _tied() -> nn.Module:
    torch.manual_seed(3)
    return Tied().double()


# What test_equivalence.py and test_directions.py have not: (module, shape of the windows, options of the unit)
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "adam": (net, "uneven micro-batches", {"optimizer": "Adam", "lr": 0.01, "clip_grad_norm": float("inf")}),
    "clip by value": (net, "equal", {"clip_grad_value": 0.02, "clip_grad_norm": float("inf")}),
    "ranks with other counts": (net, "ranks with other counts", {"clip_grad_norm": float("inf")}),
    "tied, with attention": (_tied, "all at once", {"clip_grad_norm": 0.3}),
}


def _train(layout: Any, case: str) -> tuple[Any, list[float]]:
    make, shape, options = CASES[case]
    unit = Regression(module=make(), layout=layout, accumulate=2, **options)
    prepared = unit.prepared
    windows = windows_of(SHAPES[shape], prepared.dp_size)
    ech.train(unit, [micro[prepared.dp_rank] for window in windows for micro in window], max_epochs=1)
    return unit, unit.norms


def _equality(layout: Any, cases: list[str]) -> dict[str, tuple[float, float]]:
    """For each case: how far the parameters and the norms are from plain PyTorch, relatively."""
    found = {}
    for case in cases:
        make, shape, options = CASES[case]
        unit, norms = _train(layout, case)
        got = whole(unit.module)
        windows = [[b for micro in w for b in micro] for w in windows_of(SHAPES[shape], unit.prepared.dp_size)]
        ours = ("clip_grad_norm", "clip_grad_value")
        plain = {k: v for k, v in options.items() if k not in ours}
        want, _, want_norms = plain_training(
            windows, clip=options.get(ours[0]), clip_value=options.get(ours[1]), module=make(), **plain
        )
        assert got.keys() == want.keys()
        far = max(float((got[k] - want[k]).norm() / want[k].norm()) for k in want)
        found[case] = (far, max(abs(a / b - 1) for a, b in zip(norms, want_norms, strict=True)))
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "layout", "cases"),
    [
        pytest.param(2, "tp", list(CASES), id="tp on two"),
        pytest.param(4, "tp=2", ["tied, with attention"], id="tp two, fsdp two"),
        pytest.param(4, "tp=4", ["adam", "tied, with attention"], id="tp on four"),
        pytest.param(4, "dp_replicate=2,dp_shard=1,tp=2", ["clip by value"], id="tp two, copies two"),
    ],
)
def test_the_numbers_are_those_of_one_process(ranks: Ranks, size: int, layout: str, cases: list[str]) -> None:
    for found in ranks(size, _equality, layout, cases):
        # torch's clipping divides by norm + 1e-6 in both, so that even clipped runs agree.
        assert {case: far for case, far in found.items() if not max(far) < 1e-11} == {}


def _state(layout: Any) -> tuple[list[str], list[str], bool]:
    unit, _ = _train(layout, "tied, with attention")
    from echelon.parallel.state.state import states_by_name

    states = states_by_name(unit.app_state())
    module = unit.module
    return list(states["module"].state_dict()), list(states["optimizer"].state_dict()), module.head.weight is module.bytes.weight


@pytest.mark.full
def test_the_state_is_complete_and_ties_hold(ranks: Ranks) -> None:
    names = list(_tied().state_dict())
    parameters = [n for n, _ in _tied().named_parameters()]
    for module, optimizer, tied in ranks(4, _state, ech.Layout(tp=2)):
        assert sorted(module) == sorted(names) and tied
        assert sorted(k for k in optimizer if k.endswith("momentum_buffer")) == sorted(
            f"state.{n}.momentum_buffer" for n in parameters
        )


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


def _samples(layout: Any, uneven: bool) -> tuple[list[float], list[list[float]], float, list[Any], tuple[int, int]]:
    ech.seed(7)
    unit = _Seeing(layout=layout)
    data = torch.utils.data.TensorDataset(*batch(22 if uneven else 24, 0))
    loader = ech.Loader(data, 8)
    ech.train(unit, loader, max_epochs=1)
    seen, masks = list(unit.seen), list(unit.masks)
    unit.module.eval()
    ech.evaluate(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(10, 5)), 4, shuffle=False))
    return seen, masks, unit.eval_loss, list(unit.norms), (unit.prepared.dp_rank, unit.prepared.dp_size)


@pytest.mark.full
def test_ranks_of_a_layer_see_the_same_samples_and_drop_the_same_units(ranks: Ranks) -> None:
    order = ech.Loader(torch.utils.data.TensorDataset(*batch(24, 0)), 8)
    whole_batches = [sorted(b[0][:, 0].tolist()) for b in order]
    found = ranks(4, _samples, ech.Layout(tp=2), False)
    assert [place for *_, place in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for a, b in ((0, 1), (2, 3)):
        assert found[a][0] == found[b][0] and found[a][1] == found[b][1]
    assert found[0][1] != found[2][1] and not set(found[0][0]) & set(found[2][0])
    for k, want in enumerate(whole_batches):
        assert sorted(found[0][0][4 * k : 4 * k + 4] + found[2][0][4 * k : 4 * k + 4]) == want
    assert len({f[2] for f in found}) == 1


def _recorded(layout: Any, folder: Path) -> tuple[list[dict[str, Any]], float, float]:
    """The records of rank 0, the evaluation loss, and what plain PyTorch evaluates."""
    import json
    import os

    os.environ["ECHELON_RUN_DIR"] = str(folder)
    unit = Regression(layout=layout, clip_grad_norm=float("inf"))
    ech.train(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(22, 0)), 8, shuffle=False), max_epochs=1)
    ech.evaluate(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(10, 5)), 4, shuffle=False))
    dist.barrier()
    # Rank 0 wrote the file before the barrier.
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    module = net()
    module.load_state_dict(whole(unit.module))
    x, y = batch(10, 5)
    return records, unit.eval_loss, float(nn.functional.mse_loss(module(x), y).detach())


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_losses_are_counted_once(ranks: Ranks, tmp_path: Path, size: int) -> None:
    x, y = batch(22, 0)
    _, want, norms = plain_training([[(x[i : i + 8], y[i : i + 8])] for i in (0, 8, 16)])
    (tmp_path / "attempts" / "000").mkdir(parents=True)
    for records, eval_loss, want_eval in ranks(size, _recorded, ech.Layout(tp=2), tmp_path):
        training = [r for r in records if "loss" in r]
        assert [r["loss"] for r in training] == pytest.approx(want, rel=1e-6)
        assert [r["grad_norm"] for r in training] == pytest.approx(norms, rel=1e-6)
        assert eval_loss == pytest.approx(want_eval, rel=1e-12)


class _Own(ech.TrainUnit[Any]):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.seen = module, []  # type: ignore[var-annotated]
        self.optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def train_step(self, state: ech.State, data: Any) -> None:
        self.seen += data[0][:, 0].tolist()
        nn.functional.mse_loss(self.module(data[0]), data[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _own_unit() -> tuple[list[float], tuple[int, int, bool]]:
    module = ech.layouts.prepare_module(net(), ech.init_from_env(), layout=ech.Layout(tp=2))
    unit = _Own(module)
    ech.train(unit, ech.Loader(torch.utils.data.TensorDataset(*batch(16, 0)), 8), max_epochs=1)
    again = Regression(module=module).prepared  # a module that was prepared before is recognised
    return unit.seen, (again.dp_rank, again.dp_size, again.is_replica)


@pytest.mark.full
def test_ones_own_unit_gets_the_same_samples_on_the_ranks_of_a_layer(ranks: Ranks) -> None:
    found = ranks(4, _own_unit)
    assert found[0][0] == found[1][0] != found[2][0] == found[3][0]
    assert [place for _, place in found] == [(0, 2, False), (0, 2, True), (1, 2, False), (1, 2, True)]


class _Stops(Regression):
    """Rank 1, another's replica, asks to stop in its third step."""

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if dist.get_rank() == 1 and self.train_progress.num_steps_completed == 2:
            state.stop()
        return super().compute_loss(state, data)


def _stopped() -> int:
    unit = _Stops(layout="tp")
    ech.train(unit, [batch(4, i) for i in range(8)], max_epochs=1)
    return unit.train_progress.num_steps_completed


@pytest.mark.full
def test_a_replica_can_stop_all(ranks: Ranks) -> None:
    assert ranks(2, _stopped) == [3, 3]


def _save(folder: Path, layout: Any, steps: int) -> None:
    unit = Regression(layout=layout, optimizer="AdamW", lr=0.01)
    loader = ech.Loader(torch.utils.data.TensorDataset(*batch(48, 0)), 8)
    saver = ech.DistributedCheckpointSaver(folder, save_every_n_updates=steps)
    ech.train(unit, loader, max_updates=steps, callbacks=[saver])


def _resume(folder: Path, layout: Any, steps: int) -> dict[str, torch.Tensor]:
    unit = Regression(layout=layout, optimizer="AdamW", lr=0.01)
    loader = ech.Loader(torch.utils.data.TensorDataset(*batch(48, 0)), 8)
    if folder.exists():
        assert ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
    ech.train(unit, loader, max_updates=steps)
    return whole(unit.module)


LAYOUTS: dict[str, Any] = {"tp2": ech.Layout(tp=2), "tp4": ech.Layout(tp=4)}


def _save_each(folder: Path, layouts: list[str]) -> None:
    for name in layouts:
        _save(folder / name, LAYOUTS.get(name, name), 4)


def _resume_each(folder: Path, pairs: list[tuple[str, str]], want: dict[str, torch.Tensor]) -> dict[tuple[str, str], float]:
    found = {}
    for saved, layout in pairs:
        got = _resume(folder / saved, LAYOUTS.get(layout, layout), 8)
        found[saved, layout] = max(float((got[k] - want[k]).abs().max()) for k in want)
    return found


SOME = {2: [("tp2", "ddp"), ("tp2", "tp")], 1: [("tp2", "none")]}
OTHER = {4: [("tp4", "tp2"), ("tp2", "tp4"), ("fsdp", "tp2")], 2: [("tp4", "tp"), ("tp4", "ddp"), ("fsdp", "tp")]}


@pytest.mark.full
@pytest.mark.parametrize("pairs", [pytest.param(SOME, id="some"), pytest.param(OTHER, id="others")])
def test_a_checkpoint_goes_on_under_another_layout(ranks: Ranks, tmp_path: Path, pairs: dict[int, list[tuple[str, str]]]) -> None:
    ranks(4, _save_each, tmp_path, sorted({saved for each in pairs.values() for saved, _ in each}))
    want = _resume(tmp_path / "absent", "none", 8)
    for size, some in pairs.items():
        for found in ranks(size, _resume_each, tmp_path, some, want):
            assert max(found.values()) < 1e-12, (size, found)


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


@pytest.mark.parametrize(
    ("module", "layout", "size", "message"),
    [
        (_Bare, ech.Layout(tp=-1), 2, 'a dict such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'),
        (Net, ech.Layout(tp=-1, plan={"blocks.*.7": "colwise"}), 2, "'blocks.*.7', which matches no submodule of Net"),
        (Net, ech.Layout(tp=-1, plan={"first": "columns"}), 2, "got 'columns' for 'first'"),
        (Net, ech.Layout(tp=-1, plan={"blocks.0": "colwise"}), 2, "Net.blocks.0 is a Sequential"),
        (Net, ech.Layout(tp=3), 3, r"3 ranks does not divide dimension 0 of Net.blocks.0.0.weight (8, 8)"),
        (lambda: Tied(heads=1), ech.Layout(tp=-1), 2, "does not divide Tied.blocks.0.heads = 1"),
        (Net, ech.Layout(tp=3), 4, "to the 4 ranks that run, got tp 3. Set tp to 2 or 4"),
        (Net, ech.Layout(tp=2, dp_replicate=3), 8, "to the 8 ranks that run, got dp_replicate 3 x tp 2 = 6"),
    ],
)
def test_what_cannot_be_split_is_an_error_before_any_collective(module: Any, layout: Any, size: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:  # there is no group here: a collective would be another error
        layout.prepare(module(), ech.launching.World(0, size, CPU), Recipe())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("world", "sizes", "want"),
    [
        (8, {}, (1, 8, 1)),
        (8, {"dp_replicate": 2}, (2, 4, 1)),
        (8, {"dp_replicate": 2, "tp": 2}, (2, 2, 2)),
        (
            8,
            {"dp_shard": 4, "tp": 3},
            "the axes must multiply to the 8 ranks that run, got dp_shard 4 x tp 3 = 12. Set tp to 2, or start 12 ranks.",
        ),
        (
            4,
            {"dp_replicate": 3},
            "the axes must multiply to the 4 ranks that run, got dp_replicate 3. Set dp_replicate to 2 or 4, or start 3 ranks.",
        ),
        (2, {"tp": 0}, "tp must be at least 1, or -1 for what the other axes leave, got 0."),
        (8, {"dp_replicate": -1, "tp": 2}, (4, 1, 2)),
        (8, {"dp_replicate": -1, "tp": -1}, "one axis can be -1, what the others leave, got dp_replicate and tp."),
        (16, {"pp": 2, "cp": 2, "tp": 2, "ep": 4}, (1, 2, 2, 2, 2, 4)),
        (
            8,
            {"cp": 2, "ep": 3},
            "ep must divide dp_shard x cp, the ranks that share parameters, got ep=3 for dp_shard 4 x cp 2 = 8. Set ep to 1 or 2 "
            "or 4 or 8.",
        ),
    ],
)
def test_the_axes_multiply_to_the_ranks(world: int, sizes: dict[str, int], want: Any) -> None:
    if isinstance(want, tuple):
        assert ParallelDims.of(world, **sizes) == ParallelDims(*want)
        return
    with pytest.raises(UsageError) as caught:
        ParallelDims.of(world, **sizes)
    assert str(caught.value) == want


def _meshes() -> Iterator[bool]:
    dims = ParallelDims.of(4, tp=2)
    yield dims.tp_mesh(CPU).get_group() is ParallelDims.of(4, tp=2).tp_mesh(CPU).get_group()
    yield dims.data_mesh(CPU).get_group() is dims.data_mesh(CPU).get_group()
    yield dims.data_mesh(CPU).get_local_rank() == dims.dp_rank(dist.get_rank()) == dist.get_rank() // 2
    yield dims.tp_mesh(CPU).get_local_rank() == dims.tp_rank(dist.get_rank()) == dist.get_rank() % 2


def _all_meshes() -> list[bool]:
    return list(_meshes())


def test_a_layout_makes_its_groups_once(ranks: Ranks) -> None:
    assert ranks(4, _all_meshes) == [[True] * 4] * 4


class Scaled(Net):
    """Uses its own parameter in the passes of some ranks only."""

    uses = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale if self.uses else x)


def _scaled() -> str:
    torch.manual_seed(0)
    module = Scaled().double()
    module.uses = dist.get_rank() == 1
    with pytest.raises(UsageError) as caught:
        ech.train(Regression(module=module, layout=ech.Layout(tp=2)), [batch(4, 0), batch(4, 1)], max_epochs=1)
    return str(caught.value)


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
