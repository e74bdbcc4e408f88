"""Experts of other authors under `ep`: the numbers of one process, whatever is inside of them; what is no such sum is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import ExpertsError
from echelon.parallel.experts.distribute import check_experts
from tests.conftest import Ranks
from tests.kit.models import batch, plain_training, seeded, whole
from tests.kit.refusals import refusal, refused
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks

WIDTH, EXPERTS = 6, 4


class Loop(nn.Module):
    """One expert after the other, gates before ups, as in Mixtral. An expert without tokens has no gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 10, WIDTH) * 0.4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 5) * 0.4)

    def inner(self, x: torch.Tensor, number: Any) -> torch.Tensor:
        gate, up = (x @ self.gate_up[number].T).chunk(2, -1)
        return (nn.functional.silu(gate) * up) @ self.down[number].T

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        chosen = nn.functional.one_hot(top_k_index, self.num_experts + 1).permute(2, 1, 0)
        for number in (chosen.sum((-1, -2)) > 0).nonzero().flatten():
            place, token = torch.where(chosen[number])
            out.index_add_(0, token, self.inner(hidden[token], number) * top_k_weights[token, place, None])
        return out


class Interleaved(Loop):
    """Every second row a gate, biases of one dim, the weight of an expert the other way round, as in gpt-oss; called by names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 10) * 0.4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 10))
        self.scale = nn.Parameter(torch.randn(EXPERTS))

    def inner(self, x: torch.Tensor, number: Any) -> torch.Tensor:
        both = x @ self.gate_up[number] + self.bias[number]
        return (both[..., ::2].clamp(max=1) * both[..., 1::2].sigmoid()) @ self.down[number].T * self.scale[number]


class AtOnce(nn.Module):
    """All chosen experts of all tokens in one product; how many there are is in its weights alone, and in `n_routed_experts`."""

    def __init__(self) -> None:
        super().__init__()
        self.n_routed_experts = EXPERTS
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.4)

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("nkof,nf->nko", self.w[indices], x).tanh()
        return (each * weights[..., None]).sum(1)


class Weighted(Loop):
    """Weighs what goes into an expert, and not what comes out."""

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        rows = zip(hidden, top_k_index, top_k_weights, strict=True)
        return torch.stack([sum(self.inner(x * w, i) for i, w in zip(chosen, ws, strict=True)) for x, chosen, ws in rows])


class Dropping(Loop):
    """Has room for a few tokens in each expert, and leaves out the others."""

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        room = nn.functional.one_hot(top_k_index[:, 0], EXPERTS + 1).cumsum(0).gather(1, top_k_index) <= len(hidden) // 2
        return super().forward(hidden, top_k_index, top_k_weights * room)


class Normed(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)


class Called(Loop):
    """Its forward was replaced on the instance, whoever did it."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.forward


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        if isinstance(self.experts, Interleaved):
            return x + self.experts(x, top_k_weights=weights, top_k_index=chosen)
        return x + self.experts(x, chosen, weights)


def _model(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(kind()) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 1)).double()


UPDATES = 10


def _windows(ranks: int) -> list[list[Any]]:
    return [[batch(3 + (update + rank) % 3, 10 * update + rank) for rank in range(ranks)] for update in range(UPDATES)]


def _far(make: Callable[[], nn.Module], layout: Any, samples: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """How parameters differ from plain PyTorch's, after updates of AdamW with clipping."""
    unit = Regression(module=make(), layout=layout, optimizer="AdamW", lr=0.02, clip_grad_norm=0.3, **options)
    ech.train(unit, [window[unit.prepared.data.rank] for window in _windows(samples)], max_epochs=1)
    want, _, _ = plain_training(_windows(samples), clip=0.3, optimizer="AdamW", lr=0.02, module=make())
    return {name: (value - want[name]).abs() for name, value in whole(unit.module).items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "size", "layout", "samples", "options"),
    [
        (Loop, 2, "ep=2", 2, {}),
        (Interleaved, 2, "ep=2", 2, {"activation_checkpoint_params": "blocks"}),
        (AtOnce, 2, "ep=2", 2, {}),
        (AtOnce, 4, "dp_replicate=2,dp_shard=2,ep=2", 4, {}),
        (Interleaved, 4, "ep=2", 4, {}),
        (Loop, 4, "pp=2,dp_shard=2,ep=2", 2, {}),
    ],
)
def test_ten_updates_are_those_of_plain_pytorch(
    ranks: Ranks, kind: Any, size: int, layout: str, samples: int, options: dict[str, Any]
) -> None:
    for far in ranks(size, _far, partial(_model, kind), layout, samples, options):
        assert max(float(each.max()) for each in far.values()) < 1e-11


class OneSided(nn.Module):
    """All tokens go to the experts of the first rank: the second computes none, and the backward pass meets all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(4, WIDTH), Loop(), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        chosen = torch.zeros(len(x), 1, dtype=torch.long)
        return self.last(self.experts(x, chosen, torch.ones(len(x), 1, dtype=x.dtype)))


@pytest.mark.full
def test_a_rank_whose_experts_have_no_tokens_computes_nothing_and_waits_for_nobody(ranks: Ranks) -> None:
    for far in ranks(2, _far, partial(seeded, OneSided), "ep=2", 2, {}):
        assert max(float(each.max()) for each in far.values()) < 1e-11
        assert not far["experts.down"][2:].any()


@pytest.mark.parametrize(
    ("kind", "ep", "said"),
    [
        (Loop, 3, "ep 3 does not divide the 4 experts of Sequential.1.experts. Use an ep that divides 4."),
        (Weighted, 2, "whose 1.experts, a Weighted, cannot be divided: its forward(tokens, experts, weights) does not give"),
        (Dropping, 2, "whose 1.experts, a Dropping, cannot be divided: its forward(tokens, experts, weights) does not give"),
        (Normed, 2, r"whose 1.experts, a Normed, cannot be divided: its norm.weight is (6,), not a stack of 4 experts"),
        (Called, 2, "whose 1.experts, a Called, cannot be divided: its forward was replaced on the instance"),
    ],
)
def test_what_is_no_sum_over_stacked_experts_is_refused(kind: Any, ep: int, said: str) -> None:
    assert said in refusal(check_experts, _model(kind), ep)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of transformers, which peft asks for it
def test_adapters_on_parameters_of_experts_are_refused_by_name() -> None:
    import peft
    import transformers as tf

    size = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 16)
    config = tf.MixtralConfig(**size, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
    options: Any = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    module = peft.get_peft_model(tf.MixtralForCausalLM(config), peft.LoraConfig(r=2, **options))
    with refused(ExpertsError):
        check_experts(module, 2)


def test_modules_with_three_inputs_are_no_experts() -> None:
    """An attention that takes queries, keys and values, with as many features everywhere."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return q + k + v

    with refused(ExpertsError):
        check_experts(nn.Sequential(Attention()), 2)


# --- transformers

_LABELS = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (16, 8), generator=torch.Generator().manual_seed(0))]


def _hf(name: str, layout: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    from tests.kit.hf_models import KINDS

    torch.manual_seed(0)
    model = KINDS[name]()
    if "ep" not in str(layout):
        model = model.double()
        model.set_experts_implementation("eager")  # transformers' grouped product takes no float64
    unit = Regression(module=model, layout=layout, clip_grad_norm=1.0, loss=lambda m, data: m(**data, use_cache=False).loss)
    ech.train(unit, ech.Loader(_LABELS, 8, shuffle=False), max_epochs=3)
    return whole(unit.module), unit.norms


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "size", "layout"), [("mixtral", 2, "ep=2"), ("qwen3-moe", 4, "cp=2,ep=2"), ("mixtral", 4, "tp=2,ep=2")]
)
def test_experts_of_transformers_train_as_one_process_does_in_float64(ranks: Ranks, name: str, size: int, layout: str) -> None:
    """In their own grouped products, float32."""
    want, norms = ranks(1, _hf, name, None)[0]
    for got, mine in ranks(size, _hf, name, layout):
        assert mine == pytest.approx(norms, rel=1e-5)
        assert max(float((value - want[n]).abs().max()) for n, value in got.items()) < 1e-6
