"""Experts: the numbers of plain PyTorch however they are divided, balance by the whole update, checkpoints, errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import echelon as ech
from echelon.common.errors import ExpertsError, LayoutError, UsageError
from tests.conftest import Ranks
from tests.kit.models import batch, plain_training, seeded, whole
from tests.kit.own_loops import own_loop
from tests.kit.refusals import refusal, refused
from tests.kit.run_folders import recorded
from tests.kit.units import Regression, under_each

pytestmark = pytest.mark.standing_ranks

WIDTH, EXPERTS, ROWS = 6, 4, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class PlainMoE(nn.Module):
    """What `echelon.nn.MoE` is to compute, expert by expert and token by token. Imports nothing of echelon."""

    def __init__(self, experts: list[nn.Module], k: int, balance: str | None) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, len(experts), bias=False), nn.ModuleList(experts)
        self.k, self.balance = k, balance
        self.bias, self.load = torch.zeros(len(experts)).double(), torch.full((len(experts),), 1 / len(experts)).double()
        self.counts, self.aux = torch.zeros(len(experts)).double(), torch.zeros(()).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.gate(x).softmax(-1)
        out = []
        for row, shares in zip(x, p, strict=True):
            chosen = (shares.detach() + self.bias).topk(self.k).indices
            self.counts[chosen] += 1
            weights = shares[chosen] / shares[chosen].sum() if self.k > 1 else shares[chosen]
            out.append(sum(w * self.experts[int(i)](row) for w, i in zip(weights, chosen, strict=True)))
        if self.balance == "auxiliary":
            self.aux = 0.01 * len(self.experts) * (self.load @ p.mean(0))
        return torch.stack(out)

    def after_update(self) -> None:
        if self.balance == "loss_free":
            self.bias += 0.001 * torch.sign(self.counts.mean() - self.counts)
        self.load, self.counts = self.counts / self.counts.sum(), torch.zeros_like(self.counts)


class Model(nn.Module):
    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), moe()) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def _model(expert: Any = Expert, **options: Any) -> Any:
    return seeded(Model, moe=lambda: ech.nn.MoE(WIDTH, expert, **{"num_experts": EXPERTS, **options}))


def _models(k: int, balance: Any, kind: str) -> tuple[Model, Model]:
    """The same model twice: of ours, and plain."""

    def ours() -> nn.Module:
        experts: Any = [Expert() for _ in range(EXPERTS)] if kind == "modules" else ech.nn.GroupedExperts(WIDTH, 5, EXPERTS)
        return ech.nn.MoE(WIDTH, experts, top_k=k, balance=balance)

    torch.manual_seed(0)
    mine = Model(ours).double()
    plain = Model(lambda: PlainMoE([Expert() if kind == "modules" else Glu() for _ in range(EXPERTS)], k, balance)).double()
    for a, b in zip(mine.blocks, plain.blocks, strict=True):
        b[0].load_state_dict(a[0].state_dict())
        b[1].gate.load_state_dict(a[1].router.gate.state_dict())
        stacks = {n.removeprefix("each."): p for n, p in a[1].experts.named_parameters()}
        for i, expert in enumerate(b[1].experts):
            expert.load_state_dict({n: p[i] for n, p in stacks.items()})
    plain.first.load_state_dict(mine.first.state_dict())
    plain.last.load_state_dict(mine.last.state_dict())
    return mine, plain


class Glu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Parameter(torch.zeros(5, WIDTH)), nn.Parameter(torch.zeros(5, WIDTH))
        self.w2 = nn.Parameter(torch.zeros(WIDTH, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.silu(x @ self.w1.T) * (x @ self.w3.T)) @ self.w2.T


class Unit(Regression):
    """The auxiliary loss is added where there is one."""

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, out = super().compute_loss(state, data)
        balances = any(getattr(m, "balance", None) == "auxiliary" for m in self.module.modules())
        return (loss + ech.nn.auxiliary_loss(self.module) if balances else loss), out


# name: (top_k, balance, kind, options of the unit)
CASES: dict[str, tuple[int, Any, str, dict[str, Any]]] = {
    "sgd": (2, "loss_free", "modules", {"lr": 0.02, "clip_grad_norm": float("inf")}),
    "adamw, clipped": (2, "loss_free", "grouped", {"optimizer": "AdamW", "lr": 0.01, "clip_grad_norm": 0.3}),
    "auxiliary": (2, "auxiliary", "modules", {"clip_grad_norm": 0.3}),
    "one expert a token": (1, None, "grouped", {"lr": 0.02, "clip_grad_norm": float("inf")}),
    "frozen router": (2, "loss_free", "modules", {"clip_grad_norm": 0.3}),
    "recomputed": (2, "auxiliary", "grouped", {"clip_grad_norm": 0.3, "recompute": "blocks"}),
}
UPDATES = 6


def _windows(ranks: int) -> list[list[list[Any]]]:
    """[update][micro-batch][rank]: updates of two micro-batches of other sizes on each rank; the last is short."""
    seed = iter(range(10_000))
    rows = [[ROWS + (u + m + r) % 3 for r in range(4)] for u in range(UPDATES) for m in range(2)]
    micros = [[batch(n, next(seed)) for n in row[:ranks]] for row in rows[: 2 * UPDATES - 1]]
    return [micros[i : i + 2] for i in range(0, len(micros), 2)]


def _freeze(model: Model, case: str) -> Model:
    if case == "frozen router":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("gate" not in name)
    return model


@functools.cache
def _plain(case: str, ranks: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    k, balance, kind, options = CASES[case]
    model = _freeze(_models(k, balance, kind)[1], case)
    trained = [p for p in model.parameters() if p.requires_grad]
    sgd = options.get("optimizer", "SGD") == "SGD"
    lr, norms = options.get("lr", 0.1), []
    opt = torch.optim.SGD(trained, lr, momentum=0.9) if sgd else torch.optim.AdamW(trained, lr)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)  # an expert without tokens has a gradient of zeros: momentum moves it
    for window in _windows(ranks):
        x, y = (torch.cat(parts) for parts in zip(*(b for micro in window for b in micro), strict=True))
        loss = nn.functional.mse_loss(model(x), y) + sum(block[1].aux for block in model.blocks)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained, options["clip_grad_norm"])))
        opt.step()
        opt.zero_grad(set_to_none=False)
        for block in model.blocks:
            block[1].after_update()
    named = dict(model.named_parameters())
    found = {n: p.detach() for n, p in named.items() if ".experts." not in n}
    for n in {n.replace(f".experts.{i}.", ".experts.#.") for n in named if ".experts." in n for i in range(EXPERTS)}:
        if "#" in n:
            found[n] = torch.stack([named[n.replace("#", str(i))].detach() for i in range(EXPERTS)])
    found |= {f"bias {i}": block[1].bias for i, block in enumerate(model.blocks)}
    return found, norms


def _in_plain_names(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {}
    for name, value in values.items():
        name = name.replace("router.gate", "gate").replace(".experts.each.", ".experts.#.")
        made[name.replace(".experts.w", ".experts.#.w")] = value
    return made


def _ours(layout: Any, case: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    k, balance, kind, options = CASES[case]
    model = _freeze(_models(k, balance, kind)[0], case)
    unit = Unit(module=model, layout=layout, accumulate=2, **options)
    rank, size = unit.prepared.data.rank, unit.prepared.data.size
    ech.train(unit, [micro[rank] for window in _windows(size) for micro in window], max_epochs=1)
    got = _in_plain_names(whole(unit.module))
    buffers = dict(unit.prepared.unwrapped.named_buffers())
    for i, block in enumerate(unit.prepared.unwrapped.blocks):
        bias = block[1].router.expert_bias
        if bias is not None and f"blocks.{i}.1.router.expert_bias" not in buffers:
            continue  # another stage's
        got[f"bias {i}"] = torch.zeros(EXPERTS).double() if bias is None else bias.detach().clone()
    return got, unit.norms


# Each case under several layouts, each layout with a case or more.
SETUPS: dict[str, tuple[int, Any, list[str]]] = {
    "one process": (1, None, list(CASES)),
    "ep on two": (2, ech.Layout(ep=2), ["sgd", "auxiliary", "one expert a token", "frozen router", "recomputed"]),
    "ep two, data two": (4, ech.Layout(ep=2), ["adamw, clipped", "auxiliary"]),
    "ep on four": (4, ech.Layout(ep=4), ["one expert a token"]),
    "ep two, copies two": (4, ech.Layout(dp_replicate=2, ep=2), ["sgd"]),
    "ep two, tp two": (4, ech.Layout(ep=2, tp=2, plan={"first": "colwise_gather"}), ["auxiliary"]),
    "stages": (2, ech.Layout(pp=2), ["sgd", "frozen router"]),
    "ep two, pp two": (4, ech.Layout(ep=2, pp=2), ["adamw, clipped"]),
    "ddp on two": (2, "ddp", ["auxiliary"]),
    "fsdp on two": (2, "fsdp", ["recomputed"]),
}


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS)
def test_updates_are_those_of_plain_pytorch(ranks: Ranks, setup: str) -> None:
    """With accumulation, uneven micro-batches and a short last window."""
    size, layout, cases = SETUPS[setup]
    stages = getattr(layout, "pp", 1)
    of_data = size // getattr(layout, "tp", 1) // stages
    for found in ranks(size, under_each, cases, lambda case: _ours(layout, case)):
        for case, (got, norms) in found.items():
            want, want_norms = _plain(case, of_data)
            assert stages > 1 or got.keys() == want.keys(), got.keys() ^ want.keys()
            assert len(norms) == UPDATES and norms == pytest.approx(want_norms, rel=1e-11), case
            assert max(float((value - want[n]).abs().max()) for n, value in got.items()) < 1e-11, case


# --- checkpoints

DATA = torch.utils.data.TensorDataset(*batch(48, 0))


class Silent(Unit):
    """A batch without targets counts nothing, as a language model's of prompts only."""

    def weight(self, data: Any) -> float:
        return 0.0 if bool(data[1].isnan().all()) else float(len(data[0]))


def _one_counts_nothing() -> tuple[float, float]:
    mine, plain = _models(2, None, "modules")
    unit = Silent(module=mine, layout="ep=2", lr=0.02, clip_grad_norm=float("inf"))
    batches = [batch(ROWS, seed) for seed in (0, 1)]
    given = batches[0] if unit.prepared.data.rank == 0 else (batches[1][0], torch.full_like(batches[1][1], float("nan")))
    ech.train(unit, [given], max_epochs=1)
    nn.functional.mse_loss(plain(batches[0][0]), batches[0][1]).backward()
    return unit.norms[0], float(nn.utils.clip_grad_norm_(plain.parameters(), float("inf")))


def test_a_rank_whose_batch_counts_nothing_computes_for_the_others(ranks: Ranks) -> None:
    """Its own experts have others' tokens, and so gradients."""
    for norm, want in ranks(2, _one_counts_nothing):
        assert norm == pytest.approx(want, rel=1e-12)


def _run(folder: Path, layout: Any, updates: int, *, restores: bool = False, saves: bool = False) -> dict[str, torch.Tensor]:
    """All that it holds, by name, after so many updates in all, or as it is read if there are none."""
    model = seeded(Model, 7 if restores else 0, moe=lambda: ech.nn.MoE(WIDTH, ech.nn.GroupedExperts(WIDTH, 5, EXPERTS)))
    unit, loader = Unit(module=model, layout=layout, optimizer="AdamW", lr=0.05), ech.Loader(DATA, 12, seed=1)
    unit.configure()
    if restores:
        assert ech.DistributedCheckpointSaver.restore_from_latest(folder, unit, train_dataloader=loader)
    if updates:
        ech.train(unit, loader, max_updates=updates, callbacks=[ech.DistributedCheckpointSaver(folder)] if saves else [])
    found = whole(unit.module) | {n: b.detach().clone() for n, b in unit.prepared.unwrapped.named_buffers()}
    names = {p: n.removeprefix("module.") for n, p in unit.module.named_parameters()}
    for parameter, state in unit.optimizer.state.items():
        for key, value in state.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{names[parameter]} {key}"] = full.detach().clone()
    return found


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


@pytest.mark.full
@pytest.mark.parametrize(
    ("saves", "reads"),
    [
        ((2, ech.Layout(ep=2)), (2, "ddp")),
        ((2, "fsdp"), (4, ech.Layout(ep=4))),
        ((4, ech.Layout(ep=2)), (2, ech.Layout(ep=2))),
        ((2, ech.Layout(ep=2)), (2, ech.Layout(pp=2))),
    ],
    ids=["ep to ddp", "fsdp to ep", "ep with data to ep", "ep to stages"],
)
def test_a_checkpoint_reads_under_another_layout(ranks: Ranks, tmp_path: Path, saves: Any, reads: Any) -> None:
    saved = ranks(saves[0], _run, tmp_path, saves[1], 3, saves=True)[0]
    assert any(n.endswith("experts.w1 exp_avg") for n in saved)
    read = ranks(reads[0], _run, tmp_path, reads[1], 0, restores=True)
    for got in read:
        _same(got, {name: saved[name] for name in got})
    if getattr(reads[1], "pp", 1) > 1:
        assert not set(read[0]) & set(read[1]) and set(read[0]) | set(read[1]) == set(saved)
    else:
        assert all(got.keys() == saved.keys() for got in read)


def _counted_in_stages(layout: Any) -> list[float]:
    unit = Silent(module=_model(), layout=layout, accumulate=4, clip_grad_norm=float("inf"))
    found: list[float] = []
    routers = [part for part in unit.prepared.unwrapped.modules() if hasattr(part, "seen")]
    data = [batch(ROWS, seed) for seed in range(8)]
    data[3] = data[7] = data[3][0], torch.full_like(data[3][1], float("nan"))
    for window in (data[:4], data[4:]):
        ech.train(unit, window, max_epochs=1)
        found.append(float(routers[0].seen.latest[-1]))
    return found


@pytest.mark.full
def test_a_micro_batch_that_counts_nothing_does_so_in_every_stage(ranks: Ranks) -> None:
    """A stage's backward pass comes after the forward passes of other micro-batches."""
    assert ranks(2, _counted_in_stages, ech.Layout(pp=2)) == [[3 * ROWS, 3 * ROWS]] * 2


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_a_resumed_run_is_bit_equal(ranks: Ranks, tmp_path: Path, size: int) -> None:
    layout = ech.Layout(ep=2)
    through = ranks(size, _run, tmp_path, layout, 6)
    ranks(size, _run, tmp_path, layout, 3, saves=True)
    for got, want in zip(ranks(size, _run, tmp_path, layout, 6, restores=True), through, strict=True):
        _same(got, want)


# --- loads


def _loads(layout: Any) -> tuple[list[dict[str, torch.Tensor]], float, float]:
    """Loads after 12 rows, and after one more, of which a second rank has none; tokens and entropy of the latter."""
    unit = Unit(module=_model(), layout=layout)
    loader, found = ech.Loader(torch.utils.data.Subset(DATA, range(13)), 12), []
    for steps in (1, 2):
        ech.train(unit, loader, max_updates=steps)
        ech.evaluate(unit, ech.Loader(DATA, 12))
        found.append({n.removeprefix("module."): load for n, load in ech.nn.expert_loads(unit.module).items()})
    latest = next(m.seen.latest for m in unit.module.modules() if hasattr(m, "seen"))
    return found, float(latest[-1]), float(latest[-2])


@pytest.mark.full
@pytest.mark.parametrize("layout", [ech.Layout(ep=2), ech.Layout(pp=2)], ids=["ep", "pp"])
def test_loads_count_each_sample_once_on_any_number_of_ranks(ranks: Ranks, layout: Any) -> None:
    """Nothing of an evaluation, nothing of the padding that evens out the ranks; of all stages' layers on all ranks."""
    want, tokens, entropy = _loads(None)
    assert tokens == 1
    for load in want[0].values():
        assert float(load.sum()) == pytest.approx(1)
        assert torch.equal((load * 24).round().double(), load * 24)
    for got, *rest in ranks(2, _loads, layout):
        assert list(got[0]) == ["blocks.0.1", "blocks.1.1"]
        for a, b in zip(got, want, strict=True):
            _same(a, b)
        assert rest == [1, pytest.approx(entropy, rel=1e-12)]


def _biases(layout: str) -> tuple[int, torch.Tensor]:
    """Broadcasts of five updates, and what they made of the first layer's biases."""
    unit, rank = Regression(module=_model(bias_update_rate=0.5), layout=layout), dist.get_rank()
    with mock.patch("torch.distributed.broadcast", side_effect=dist.broadcast) as sent:
        ech.train(unit, [batch(6, seed=10 * step + rank) for step in range(5)], max_epochs=1)
    return sent.call_count, unit.module.blocks[0][1].router.expert_bias.clone()


@pytest.mark.full
def test_biases_are_equal_on_all_ranks_without_being_sent(ranks: Ranks) -> None:
    """They follow from sums over all ranks: a broadcast before each forward pass would be in vain."""
    first, second = ranks(2, under_each, ["ep=2", "fsdp"], _biases)
    for layout, (sent, one) in first.items():
        assert sent == 0 and one.abs().sum() > 0 and torch.equal(one, second[layout][1]), layout


def test_what_a_mask_leaves_out_is_computed_and_not_counted() -> None:
    torch.manual_seed(0)
    moe = ech.nn.MoE(WIDTH, ech.nn.GroupedExperts(WIDTH, 5, EXPERTS), balance="auxiliary").double()
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    y = moe(x, mask)
    y.sum().backward()
    assert torch.equal(y, moe(x))
    seen = moe.router.seen.counted
    assert float(seen[:-2].sum()) == 7 * 2
    assert float(seen[-1]) == 7


def test_an_auxiliary_loss_that_nobody_added_is_named() -> None:
    unit = Regression(module=_model(balance="auxiliary"))
    with refused(ExpertsError):
        ech.train(unit, [batch(4, 0)], max_epochs=1)
    with refused(ExpertsError):
        ech.nn.auxiliary_loss(nn.Linear(1, 1))


class ForgetsOnOne(Regression):
    """With the auxiliary loss on rank 0."""

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        loss, out = super().compute_loss(state, data)
        return (loss + ech.nn.auxiliary_loss(self.module) if self.prepared.data.rank == 0 else loss), out


def _forgotten_on_one(layout: str) -> str:
    unit = ForgetsOnOne(module=_model(balance="auxiliary"), layout=layout)
    return refusal(ech.train, unit, [batch(4, seed) for seed in range(3)], max_epochs=1)


def test_an_auxiliary_loss_that_one_rank_forgets_is_told_on_all(ranks: Ranks) -> None:
    first, second = ranks(2, under_each, ["ddp", "fsdp", "ep=2"], _forgotten_on_one)
    assert first == second and all("must be in the loss of every rank" in said for said in first.values())


def test_router_statistics_are_in_the_metrics(tmp_path: Path) -> None:
    with recorded(tmp_path):
        ech.train(Unit(module=_model()), [batch(4, i) for i in range(3)], max_epochs=1)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 3
    assert all(1 <= record["expert_load_max"] <= EXPERTS for record in records)
    assert all(0 < record["router_entropy"] < 1.4 for record in records)


# --- other ways to compute the same


def test_grouped_multiplications_are_those_one_by_one() -> None:
    """In float32 `grouped_mm`, in float64 one by one; also for an expert without tokens, and with an expanded gradient."""
    torch.manual_seed(0)
    fast = ech.nn.GroupedExperts(8, 16, 3)
    slow = copy.deepcopy(fast).double()
    x, counts = torch.randn(10, 8), torch.tensor([4, 0, 6])
    fast(x, counts).sum().backward()
    slow(x.double(), counts).sum().backward()
    assert torch.allclose(fast(x, counts).double(), slow(x.double(), counts), atol=1e-5)
    for a, b in zip(fast.parameters(), slow.parameters(), strict=True):
        assert torch.allclose(a.grad.double(), b.grad, atol=1e-4)
        assert not a.grad[1].any()


def _from_meta(layout: Any, kind: str, deferred: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    with ech.on_meta() if deferred else contextlib.nullcontext():
        model = Model(
            lambda: ech.nn.MoE(WIDTH, Expert if kind == "modules" else ech.nn.GroupedExperts(WIDTH, 5, EXPERTS), num_experts=4)
        )
    unit = Regression(module=model, layout=layout)
    ech.train(unit, [batch(4, 0, torch.float32)], max_epochs=1)
    return whole(unit.module)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["modules", "grouped"])
def test_a_model_built_without_memory_has_the_same_values(ranks: Ranks, kind: str) -> None:
    layout = ech.Layout(ep=2)
    plain, meta = (ranks(2, _from_meta, layout, kind, deferred) for deferred in (False, True))
    _same(plain[0], meta[0])


def _experts_are_units(precision: str | None) -> set[bool]:
    """Whether `fully_shard` gathers experts by themselves; it leaves its mark on the class of what it gathers."""
    model = Model(lambda: ech.nn.MoE(WIDTH, Expert, num_experts=EXPERTS))
    unit = Regression(module=model, layout=ech.Layout(ep=2), precision=precision)
    return {isinstance(layer.experts, FSDPModule) for layer in unit.prepared.module.modules() if isinstance(layer, ech.nn.MoE)}


def test_experts_that_no_other_rank_has_are_not_gathered(ranks: Ranks) -> None:
    """There is nothing to gather; but a unit is what computes them in another type than they are kept in."""
    assert ranks(2, _experts_are_units, None) == [{False}, {False}]
    assert ranks(2, _experts_are_units, "bf16") == [{True}, {True}]
    assert ranks(4, _experts_are_units, None)[0] == {True}  # two ranks have the same experts


@pytest.mark.full
def test_a_loop_of_ones_own_balances_too(ranks: Ranks) -> None:
    def train() -> tuple[int, int]:
        """Updates, and the layers whose loads are known."""
        updates = list[Any]()
        model = own_loop(_model(), ech.Loader(DATA, 12), lr=0.02, layout="ep=2", after=updates.append)
        return len(updates), len(ech.nn.expert_loads(model))

    assert ranks(2, train) == [(4, 2)] * 2


def test_a_step_of_ones_own_balances_by_a_call() -> None:
    """The biases of AutoUnit's, from plain PyTorch's loop and `balance_experts`."""
    batches, model, unit = [batch(6, i) for i in range(4)], _model(), Unit(module=_model(), optimizer="AdamW", lr=0.01)
    ech.train(unit, batches, max_epochs=1)
    balance: Any = lambda module, updates: ech.nn.balance_experts(module)  # noqa: E731
    plain_training([[each] for each in batches], optimizer="AdamW", lr=0.01, module=model, after=balance)
    got, want = (dict(m.named_buffers()) for m in (model, unit.module))
    assert any(b.any() for b in want.values())
    _same(got, want)


class Clipped(ech.TrainUnit[Any]):
    """A step of one's own that clips."""

    def __init__(self, module: nn.Module, clip: Any) -> None:
        super().__init__()
        self.module, self.clip, self.norms = module, clip, list[float]()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def train_step(self, state: ech.State, data: Any) -> None:
        nn.functional.mse_loss(self.module(data[0]), data[1]).backward()
        self.norms.append(float(self.clip(self.module)))
        self.optimizer.step()
        self.optimizer.zero_grad()


def _clipped(layout: str) -> list[float]:
    module: Any = ech.layouts.prepare_module(_model(), torch.device("cpu"), layout=layout)
    batches = [batch(4, i) for i in range(3)]
    with pytest.raises(LayoutError, match=r"or echelon\.layouts\.clip_grad_norm_"):
        by_torch = lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.05)  # noqa: E731
        ech.train(Clipped(module, by_torch), batches, max_epochs=1)
    module.zero_grad()
    unit = Clipped(module, lambda module: ech.layouts.clip_grad_norm_(module, 0.05))
    ech.train(unit, batches, max_epochs=1)
    return unit.norms


def test_a_step_of_ones_own_clips(ranks: Ranks) -> None:
    """torch's own function takes no tensors of several meshes, and its error names none of this."""
    plain = Clipped(_model(), lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.05))
    ech.train(plain, [batch(4, i) for i in range(3)], max_epochs=1)
    for norms in ranks(2, _clipped, "dp_shard=2,ep=2"):
        assert norms == pytest.approx(plain.norms, abs=1e-12)


def _said_of_axes(layout: str) -> int:
    module = ech.layouts.prepare_module(_model(), torch.device("cpu"), layout=layout)
    with mock.patch("echelon.parallel.axes.logger.warning") as said:
        assert ech.layouts.Prepared.of(module, ech.launching.World.current(torch.device("cpu"))).data.size == 4
    return said.call_count


def test_nothing_is_said_of_the_axes_of_experts_in_a_step_of_ones_own(ranks: Ranks) -> None:
    """That experts are reduced over fewer ranks than the rest was warned of."""
    assert ranks(4, _said_of_axes, "dp_shard=4,ep=2") == [0] * 4


# --- what cannot work


class MixtralExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, 4, 4))


MODELS: dict[str, Any] = {
    "moe": lambda: _model(num_experts=6),
    "auxiliary": lambda: _model(num_experts=6, balance="auxiliary"),
    "dense": lambda: Model(lambda: nn.Linear(WIDTH, WIDTH)),
    "foreign": lambda: nn.Sequential(nn.Linear(4, 1), MixtralExperts()),
}


REFUSED: list[tuple[str, dict[str, int], str]] = [
    ("moe", {"ep": 4}, "ep 4 does not divide the 6 experts of Model.blocks.0.1. Use an ep that divides 6."),
    ("moe", {"ep": 3}, "ep must divide dp_shard x cp, the ranks that share parameters, got ep=3"),
    ("dense", {"ep": 2}, "ep must be 1 for Model, which has no layer of experts that ep can divide, got 2."),
    ("foreign", {"ep": 2}, "must have parameters that are stacks, with one entry for each expert in the first dim"),
    ("auxiliary", {"pp": 2}, "pp must be 1 for Model, whose blocks.0.1 is an echelon.nn.MoE with balance='auxiliary', got 2"),
]


def test_what_cannot_be_divided_is_refused_on_all_ranks(ranks: Ranks) -> None:
    units = [
        lambda model=model, sizes=sizes: Regression(module=MODELS[model](), layout=ech.Layout(**sizes))
        for model, sizes, _ in REFUSED
    ]
    for found in ranks(4, lambda: [refusal(unit) for unit in units]):
        assert all(said in text for (_, _, said), text in zip(REFUSED, found, strict=True)), found


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


GROUPED = ech.nn.GroupedExperts(4, 4, 2)


@pytest.mark.parametrize(
    ("experts", "options", "said"),
    [
        ([], {}, "experts must be a list of modules, a function that makes one, or GroupedExperts"),
        (Expert, {}, "num_experts must be given with a function that makes an expert, got None"),
        ([Norm()], {}, "an expert must have no buffers, got a Norm with norm.running_mean"),
        ([nn.Tanh()], {}, "an expert must have parameters, got a Tanh"),
        (GROUPED, {"top_k": 3}, "top_k must be at most the number of experts, 2, got 3"),
        (GROUPED, {"num_experts": 3}, "num_experts must be the number of experts, 2, got 3"),
        (GROUPED, {"balance": "even"}, "balance must be 'loss_free', 'auxiliary' or None"),
        (GROUPED, {"bias_update_rate": -1}, "bias_update_rate must be a number of at least 0"),
    ],
)
def test_layers_that_make_no_sense_are_refused(experts: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ech.nn.MoE(4, experts, **options)


@pytest.mark.parametrize("other", [nn.Linear(4, 5), nn.Identity()])
def test_experts_that_differ_are_refused_by_torch(other: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=r"same class|equal size"):
        ech.nn.MoE(4, [nn.Linear(4, 4), other])
