"""Experts: the numbers of plain PyTorch however they are divided, balance by the whole update, checkpoints, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.contracts.errors import UsageError
from tests.conftest import Ranks
from tests.models import batch, whole
from tests.units import Regression

pytestmark = pytest.mark.standing_ranks

WIDTH, EXPERTS, ROWS = 6, 4, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class PlainMoE(nn.Module):
    """What `echelon.MoE` is to compute, expert by expert and token by token. Imports nothing of echelon."""

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


def _models(k: int, balance: Any, kind: str) -> tuple[Model, Model]:
    """The same model twice: of ours, and plain."""

    def ours() -> nn.Module:
        experts: Any = [Expert() for _ in range(EXPERTS)] if kind == "modules" else ech.GroupedExperts(WIDTH, 5, EXPERTS)
        return ech.MoE(WIDTH, experts, top_k=k, balance=balance)

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
        return (loss + ech.auxiliary_loss(self.module) if balances else loss), out


# name: (top_k, balance, kind, options of the unit)
CASES: dict[str, tuple[int, Any, str, dict[str, Any]]] = {
    "sgd": (2, "loss_free", "modules", {"lr": 0.02, "clip_grad_norm": float("inf")}),
    "adamw, clipped": (2, "loss_free", "grouped", {"optimizer": "AdamW", "lr": 0.01, "clip_grad_norm": 0.3}),
    "auxiliary": (2, "auxiliary", "modules", {"clip_grad_norm": 0.3}),
    "one expert a token": (1, None, "grouped", {"lr": 0.02, "clip_grad_norm": float("inf")}),
    "frozen router": (2, "loss_free", "modules", {"clip_grad_norm": 0.3}),
    "recomputed": (2, "auxiliary", "grouped", {"clip_grad_norm": 0.3, "activation_checkpoint_params": "blocks"}),
}
UPDATES = 20


def _windows(ranks: int) -> list[list[list[Any]]]:
    """[update][micro-batch][rank]: 20 updates of two micro-batches of other sizes on each rank; the last is short."""
    seed = iter(range(10_000))
    rows = [[ROWS + (u + m + r) % 3 for r in range(4)] for u in range(UPDATES) for m in range(2)]
    micros = [[batch(n, next(seed)) for n in row[:ranks]] for row in rows[: 2 * UPDATES - 1]]
    return [micros[i : i + 2] for i in range(0, len(micros), 2)]


def _freeze(model: Model, case: str) -> Model:
    if case == "frozen router":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("gate" not in name)
    return model


def _plain(case: str, ranks: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    k, balance, kind, options = CASES[case]
    model = _freeze(_models(k, balance, kind)[1], case)
    trained = [p for p in model.parameters() if p.requires_grad]
    sgd = options.get("optimizer", "SGD") == "SGD"
    opt: Any = (
        torch.optim.SGD(trained, options.get("lr", 0.1), momentum=0.9) if sgd else torch.optim.AdamW(trained, options["lr"])
    )
    norms = []
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


def _ours(strategy: Any, case: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    k, balance, kind, options = CASES[case]
    model = _freeze(_models(k, balance, kind)[0], case)
    unit = Unit(module=model, strategy=strategy, gradient_accumulation_steps=2, **options)
    rank, size = unit.prepared.dp_rank, unit.prepared.dp_size
    ech.train(unit, [micro[rank] for window in _windows(size) for micro in window], max_epochs=1)
    got = _in_plain_names(whole(unit.module))
    for i, block in enumerate(unit.prepared.unwrapped.blocks):
        bias = block[1].router.expert_bias
        got[f"bias {i}"] = torch.zeros(EXPERTS).double() if bias is None else bias.detach().clone()
    return got, unit.norms


def _far(strategy: Any, cases: list[str], ranks: int) -> dict[str, tuple[float, float]]:
    """For each case: how far parameters and norms are from plain PyTorch's."""
    found = {}
    for case in cases:
        got, norms = _ours(strategy, case)
        want, want_norms = _plain(case, ranks)
        assert got.keys() == want.keys(), got.keys() ^ want.keys()
        assert len(norms) == UPDATES
        far = max(float((got[n] - want[n]).abs().max()) for n in want)
        found[case] = (far, max(abs(a / b - 1) for a, b in zip(norms, want_norms, strict=True)))
    return found


SETUPS: dict[str, tuple[int, Any, list[str]]] = {
    "ep on two": (2, ech.Parallel(ep=2), list(CASES)),
    "ddp on two": (2, "ddp", ["sgd", "auxiliary"]),
    "fsdp on two": (2, "fsdp", ["adamw, clipped", "recomputed"]),
    "ep two, data two": (4, ech.Parallel(ep=2), ["sgd", "adamw, clipped", "auxiliary"]),
    "ep on four": (4, ech.Parallel(ep=4), ["adamw, clipped", "one expert a token"]),
    "ep two, copies two": (4, ech.Parallel(dp_replicate=2, ep=2), ["sgd", "adamw, clipped"]),
}


def test_one_process_computes_what_plain_pytorch_does() -> None:
    for case, (far, norms) in _far(None, list(CASES), 1).items():
        assert far < 1e-11, case
        assert norms < 1e-11, case


@pytest.mark.parametrize("setup", list(SETUPS))
def test_twenty_updates_are_those_of_plain_pytorch(ranks: Ranks, setup: str) -> None:
    """With accumulation, uneven micro-batches and a short last window."""
    size, strategy, cases = SETUPS[setup]
    for found in ranks(size, _far, strategy, cases, size):
        for case, (far, norms) in found.items():
            assert far < 1e-11, (case, far)
            assert norms < 1e-11, (case, norms)
