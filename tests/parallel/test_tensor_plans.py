"""Plans that nobody wrote: transformers' own and inferred ones, also with parts of the sequence, against plain PyTorch."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import echelon as ech
from echelon.common.errors import TensorParallelError
from echelon.parallel.tensor import collectives as tensor_traffic
from echelon.parallel.tensor.tensor import check_tensor
from tests.conftest import Ranks
from tests.kit.models import largest_difference, plain_training, whole
from tests.kit.refusals import answer, refusal
from tests.kit.units import Regression

pytest.importorskip("transformers", reason="pip install transformers peft")
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.standing_ranks]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CPU = torch.device("cpu")


class FusedAttention(nn.Module):
    """As many small GPTs write it: q, k and v in one layer, one after the other, and a fixed number of heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.size()
        q, k, v = (
            each.view(b, t, self.n_head, d // self.n_head).transpose(1, 2) for each in self.c_attn(x).split(self.n_embd, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, d)))


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), FusedAttention(width, heads, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Small(nn.Module):
    """A GPT with tied ends. (B, T) -> (B, T, words)"""

    def __init__(self, words: int = 50, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, 16), nn.Embedding(16, 16)
        self.h = nn.ModuleList(Block(16, 2, dropout) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(16), nn.Linear(16, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def _of_transformers(name: str) -> nn.Module:
    import transformers as tf

    from tests.kit.hf_models import KINDS, TEXT, gpt2, llama, without_dropout

    if name.startswith("gpt2"):
        model: Any = gpt2(vocab_size=51 if "51" in name else 50)
    elif name.startswith("llama"):
        model = llama(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings="tied" in name)
    elif name == "deepseek":
        sizes = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 4)
        ranks = dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        model = tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**{**TEXT, **heads, **sizes, **ranks}, first_k_dense_replace=2))
    else:
        model = KINDS[name]()
    for parent in list(model.modules()):
        for child, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):  # which compute in float32 whatever they are given
                setattr(parent, child, nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon))
    return without_dropout(model)


class Shared(Small):
    """Both blocks have one MLP, a layer of which has a third name."""

    def __init__(self) -> None:
        super().__init__()
        self.h[1].mlp = self.h[0].mlp
        self.again = self.h[0].mlp.c_fc


def _adapted(kind: str = "LoraConfig", **options: Any) -> nn.Module:
    import peft

    options = options or {"r": 2, "target_modules": ["q_proj", "o_proj", "up_proj"], "modules_to_save": ["lm_head"]}
    return peft.get_peft_model(_of_transformers("llama"), getattr(peft, kind)(**options))


def _example() -> nn.Module:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from gpt import GPT
    finally:
        sys.path.remove(str(EXAMPLES))

    class Planless(GPT):
        tp_plan: ClassVar[dict[str, str]] = {}

    return Planless(16, 2, heads=2, context=16)


def _frozen() -> nn.Module:
    module = Small()
    module.wpe.requires_grad_(False)
    module.h[0].ln_1.requires_grad_(False)
    module.h[0].attn.c_attn.requires_grad_(False)
    module.h[1].mlp.c_proj.bias.requires_grad_(False)
    return module


OWN: dict[str, Callable[[], nn.Module]] = {
    "small": Small,
    "small, frozen": _frozen,
    "examples/gpt.py": _example,
    "shared": Shared,
    "LoRA": _adapted,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (OWN[name]() if name in OWN else _of_transformers(name)).double()


UPDATES = 6  # all pairs of lengths and of targets that do not count


def windows(ranks: int) -> list[list[list[torch.Tensor]]]:
    """Token ids by update, micro-batch and data rank; some do not count: where they are negative, in the targets only."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for update in range(UPDATES):
        shape = (2, 7 + update % 2)  # lengths that two ranks do not divide, too
        micro = [[torch.randint(0, 50, shape, generator=generator) for _ in range(ranks)] for _ in range(2)]
        micro[0][0][0, : 1 + update % 3] *= -1
        found.append(micro)
    return found


def summed_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    out = module(ids.abs())
    logits = getattr(out, "logits", out)[:, :-1]
    targets = torch.where(ids > 0, ids, -100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"), int((targets >= 0).sum())


class Unit(Regression):
    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        loss, count = summed_loss(self.module, data)
        return loss / count, None

    def weight(self, data: torch.Tensor) -> int:
        return int((data[:, 1:] > 0).sum())


CLIP = 0.5
RATES = {"SGD": 0.1, "AdamW": 1e-3}


@functools.cache
def plain(name: str, kind: str, ranks: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """torch alone, one process."""

    def mean(module: nn.Module, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        loss, count = summed_loss(module, ids)
        return loss / count

    updates = [[(ids, ids) for micro in update for ids in micro] for update in windows(ranks)]
    got, _, norms = plain_training(updates, clip=CLIP, optimizer=kind, lr=RATES[kind], module=made(name), loss_of=mean)
    return got, norms


def trained(layout: Any, name: str, kind: str, **options: Any) -> tuple[Unit, int]:
    options = {"clip_grad_norm": CLIP, "accumulate": 2, **options}
    unit = Unit(module=made(name), optimizer=kind, lr=RATES[kind], layout=layout, **options)
    prepared = unit.prepared
    data = [micro[prepared.data.rank] for update in windows(prepared.data.size) for micro in update]
    ech.train(unit, data, max_epochs=1)
    return unit, prepared.data.size


def _each(layout: Any, names: list[str], **options: Any) -> tuple[int, list[tuple[dict[str, torch.Tensor], list[float]]]]:
    """How many ranks have other samples, and for each model its parameters and norms; optimizers take turns."""
    made = [trained(layout, name, ("SGD", "AdamW")[number % 2], **options) for number, name in enumerate(names)]
    return made[0][1], [(whole(unit.module), unit.norms) for unit, _ in made]


LOGITS = {"wte": "rowwise", "lm_head": "colwise_logits", "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"}
SETUPS: dict[str, tuple[int, Any]] = {
    "tp": (2, "tp"),
    "tp + sp": (2, ech.Layout(tp=-1, sequence_parallel=True)),
    "words of before": (2, ech.Layout(tp=-1, plan=LOGITS)),
    "fsdp two, tp two": (4, ech.Layout(tp=2)),
    "fsdp two, tp two + sp": (4, ech.Layout(tp=2, sequence_parallel=True)),
}
SOME = ["gpt2", "LoRA"]
OTHERS = [
    *("llama, tied", "llama, tied", "gpt2", "small", "llama", "small, frozen", "gpt2 of 51 words", "qwen2", "mistral", "qwen3"),
    *("phi3", "olmo2", "gpt-neox"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("setup", "names", "options"),
    [
        pytest.param("tp", SOME, {}, id="tp"),
        pytest.param("tp + sp", ["llama"], {}, id="tp + sp"),
        pytest.param("tp", ["deepseek"], {}, id="tp, deepseek"),
        pytest.param("words of before", ["small"], {}, id="words of before"),
        pytest.param("tp + sp", ["shared"], {}, id="tp + sp, shared"),
        pytest.param("tp", ["shared", *OTHERS, "bert", "examples/gpt.py"], {}, id="tp, others"),
        pytest.param("tp + sp", OTHERS, {}, id="tp + sp, others"),
        pytest.param("tp + sp", ["small", "llama"], {"recompute": "blocks"}, id="tp + sp, recomputed"),
        # Shards of what is split; the plans are those of two ranks.
        *(pytest.param(name, ["llama, tied", "small"], {}, id=name) for name in SETUPS if "fsdp" in name),
    ],
)
def test_plans_that_nobody_wrote_give_plain_numbers(ranks: Ranks, setup: str, names: list[str], options: dict[str, Any]) -> None:
    size, layout = SETUPS[setup]
    for of_data, found in ranks(size, _each, layout, names, **options, timeout_s=300.0):
        far = {}
        for number, (name, (got, norms)) in enumerate(zip(names, found, strict=True)):
            kind = ("SGD", "AdamW")[number % 2]
            want, wanted_norms = plain(name, kind, of_data)
            assert got.keys() == want.keys()
            of_norms = max(abs(a / b - 1) for a, b in zip(norms, wanted_norms, strict=True))
            far[f"{name}, {kind}"] = max(largest_difference(got, want), of_norms)
        assert {case: apart for case, apart in far.items() if not apart < 1e-11} == {}


# --- what is said


class Adapted(nn.Module):
    """Blocks of an MLP, and an adapter behind it, which narrows first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(2):
            mlp = nn.ModuleDict({"up": nn.Linear(4, 8), "act": nn.GELU(), "down": nn.Linear(8, 4)})
            adapter = nn.ModuleDict({"down": nn.Linear(4, 2), "act": nn.GELU(), "up": nn.Linear(2, 4)})
            self.blocks.append(nn.ModuleDict({"mlp": mlp, "adapter": adapter}))


class Between(nn.Module):
    """Blocks whose MLPs do something between their halves that is no submodule."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what
        self.mlps = nn.ModuleList(Halves(what) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


class Halves(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.fc1, self.fc2, self.what = nn.Linear(4, 8), nn.Linear(8, 4), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.what(self.fc1(x)))
        return out


def _between() -> float:
    """How far the outputs of parts are from those of the whole."""
    torch.manual_seed(0)
    module = Between(lambda h: h.softmax(-1)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    want = module(x).detach()
    unit = ech.layouts.prepare_module(module, CPU, layout="tp")
    with torch.no_grad():
        return float((unit(x) - want).abs().max())


def test_what_lies_between_the_halves_of_an_mlp_gets_all_features_unless_it_is_known(ranks: Ranks) -> None:
    """A softmax of a rank's part of the features would be another one, in silence."""
    assert all(far < 1e-12 for far in ranks(2, _between))


class Disentangled(nn.Module):
    """Attention by the names of DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.query_proj, self.key_proj, self.value_proj = (nn.Linear(8, 8) for _ in range(3))


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (
            Small,
            {
                "h.*.attn.c_attn": "colwise_gather",
                "h.*.attn.c_proj": "rowwise_split",
                "h.*.mlp.c_fc": "colwise",
                "h.*.mlp.c_proj": "rowwise",
                "wte": "rowwise",
                "lm_head": "colwise_gather",
            },
        ),
        # An adapter that narrows before it widens is no MLP: its first layer would take a part of features that are all there.
        (Adapted, {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}),
        (lambda: Between(torch.tanh), {"mlps.*.fc1": "colwise_gather", "mlps.*.fc2": "rowwise_split"}),
        (lambda: Between(nn.GELU()), {"mlps.*.fc1": "colwise", "mlps.*.fc2": "rowwise"}),
        (
            lambda: nn.ModuleList([Disentangled(), Disentangled()]),
            dict.fromkeys(("*.query_proj", "*.key_proj", "*.value_proj"), "colwise_gather"),
        ),
    ],
)
def test_an_inferred_plan_can_be_read(make: Any, plan: dict[str, str]) -> None:
    assert ech.layouts.tp_plan(make()) == plan


class Larger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.head = _of_transformers("llama, tied"), nn.Linear(16, 3)


def test_transformers_own_plan_is_taken_also_of_a_part() -> None:
    larger = ech.layouts.tp_plan(Larger())
    assert larger["text.model.layers.*.self_attn.q_proj"] == "colwise"
    assert larger["text.lm_head"] == "colwise_gather" and larger["text.model.embed_tokens"] == "rowwise"
    # Attention that transformers splits in a way of its own computes all heads.
    plan = ech.layouts.tp_plan(_of_transformers("deepseek"))
    layers = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    styles = [plan.get(f"model.layers.*.self_attn.{name}") for name in layers]
    assert styles == [None, "colwise_gather", None, "colwise_gather", "rowwise_split"]
    assert plan["model.layers.*.mlp.up_proj"] == "colwise" and plan["model.layers.*.mlp.down_proj"] == "rowwise"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


class InOneForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(2))
        for block in self.blocks:
            block.q_proj, block.out_proj = nn.Linear(8, 8), nn.Linear(8, 8)


class Normed(nn.Module):
    """Weights of which no layer has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
        self.down = nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))


KEYS: dict[str, Any] = {"target_modules": ["k_proj", "v_proj"]}
IN_ATTENTION = {"layer.self_attn.out_proj": "rowwise"}


class Classes(nn.Module):
    """In each half of the outputs there is a class for every label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Classifies(Regression):
    directly = False

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        module: Any = self.module
        out = module.last(torch.tanh(module.first(data[0]))) if self.directly else module(data[0])
        return nn.functional.cross_entropy(out, data[1]), out


def _misused(directly: bool, layouts: list[Any]) -> list[str]:
    said = []
    for layout in layouts:
        torch.manual_seed(0)
        unit = Classifies(module=Classes(), layout=layout)
        unit.directly = directly
        said.append(refusal(ech.train, unit, [(torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))], max_epochs=1))
    return said


@pytest.mark.full
def test_a_plan_that_leaves_parts_where_all_is_expected_is_refused(ranks: Ranks) -> None:
    """A head split by outputs trained with half of the classes on each rank; other slips ended in torch's words about shapes."""
    plans: list[dict[str, str]] = [{"last": "colwise"}, {"first": "colwise"}, {"last": "rowwise"}]
    found = ranks(2, _misused, False, [ech.Layout(tp=-1, plan=plan) for plan in plans])
    for _, outputs, inputs in found:
        assert "code of Classes expects all features" in outputs and "such as first, must be followed by a 'rowwise'" in outputs
        assert "code of Classes expects all features" in inputs and "'rowwise_split' takes all" in inputs
    # In stages on all ranks, of which only those of the last stage see it.
    staged = ranks(4, _misused, False, [ech.Layout(pp=2, tp=2, stages=["last"], plan=plans[0])])
    for loss, *_ in [*found, *staged]:
        assert "the loss of the first update differs between the 2 ranks" in loss and "such as Classes.last." in loss


def test_parts_of_a_sharded_module_that_are_called_directly_are_refused(ranks: Ranks) -> None:
    for said in ranks(2, _misused, True, ["fsdp"]):
        assert said[0].startswith("the loss must come from a call of Classes itself: its parameters are split over the ranks")


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of torchao, which peft imports
@pytest.mark.parametrize(
    ("make", "plan", "size", "sequence", "said"),
    [
        (Encoder, None, 2, False, "none can be inferred. layer.self_attn stays whole: torch's MultiheadAttention"),
        (Encoder, IN_ATTENTION, 2, False, "layer.self_attn.out_proj is a part of torch's MultiheadAttention"),
        (Normed, None, 2, False, "none can be inferred"),
        (Normed, {"up": "colwise"}, 2, False, "weight or bias of Normed.up is computed from other parameters"),
        (Small, {"wte": "rowwise"}, 2, False, "wte.weight and lm_head.weight are one tied parameter"),
        (Small, {"wpe": "rowwise_split"}, 2, False, "Small.wpe is an Embedding that cannot be 'rowwise_split'"),
        (InOneForward, None, 2, True, "InOneForward.blocks.0.q_proj must lie in a child of the block blocks.0"),
        (Small, {"lm_head": "colwise_gather", "wte": "rowwise"}, 2, True, "must have one ModuleList or Sequential of blocks"),
        (lambda: _of_transformers("llama"), None, 4, False, "model.layers.0.self_attn.config.num_key_value_heads = 2"),
        (lambda: _adapted("IA3Config", **KEYS, feedforward_modules=[]), None, 2, False, "k_proj has an adapter of PEFT (ia3)"),
        (lambda: _adapted("LoHaConfig", **KEYS, r=2), None, 2, False, "k_proj has an adapter of PEFT (loha)"),
        (_adapted, None, 2, True, "q_proj has an adapter of PEFT, whose first layer would take a part of the sequence"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(make: Any, plan: Any, size: int, sequence: bool, said: str) -> None:
    assert said in refusal(check_tensor, make(), plan, size, sequence_parallel=sequence, kind=TensorParallelError)


class Ordered(Small):
    """Calls its blocks in an order, and takes a mean over the sequence, whose length no loss can miss."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order = order
        self.h.append(Block(16, 2, 0.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for i in self.order:
            x = self.h[i](x)
        return x.mean(1)


def _in_order(orders: list[tuple[int, ...]]) -> list[str | float]:
    """How far from one process, or what was said."""
    found: list[str | float] = []
    for order in orders:
        one = Ordered(order).double()
        module = ech.layouts.prepare_module(Ordered(order).double(), CPU, layout=ech.Layout(tp=-1, sequence_parallel=True))
        one.load_state_dict(whole(module), strict=False)
        ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(2))
        found.append(answer(lambda module=module, one=one, ids=ids: float((module(ids) - one(ids)).abs().max())))
    return found


@pytest.mark.full
def test_blocks_in_an_order_that_leaves_the_sequence_split_are_refused(ranks: Ranks) -> None:
    fine: list[tuple[int, ...]] = [(0, 1, 2), (0, 1, 2, 0, 1, 2), (0, 1, 1, 2), (0, 2)]
    wrong = {
        (0, 0, 1, 2): "a call of h.0 between these",
        (1, 0, 2): "a call of h.1 outside of these",
        (0, 1, 2, 2): "a call of h.2 outside of these",
        (0, 1): "none of h.2 at the end",
    }
    for found in ranks(2, _in_order, [*fine, *wrong]):
        assert [far for far in found[: len(fine)] if isinstance(far, str) or far > 1e-12] == []
        for got, said in zip(found[len(fine) :], wrong.values(), strict=True):
            assert "must begin with h.0 and end with h.2" in str(got) and said in str(got)


def _forgotten() -> str:
    """Each head has a norm that the plan does not name."""
    plan = {"model.layers.*.self_attn.[qkv]_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}
    unit = Unit(module=made("qwen3"), layout=ech.Layout(tp=-1, plan=plan))
    return refusal(ech.train, unit, [micro[0] for micro in windows(1)[0]], max_epochs=1)


def test_a_norm_of_each_head_that_a_plan_forgets_is_named(ranks: Ranks) -> None:
    for said in ranks(2, _forgotten):
        assert "Qwen3ForCausalLM.model.layers.0.self_attn.q_norm.weight differs" in said and '"summed"' in said


# --- what travels


def _messages(sequence: bool) -> tuple[list[str], list[str]]:
    """The collectives of a forward and a backward pass of a block of Llama."""
    module = ech.layouts.prepare_module(made("llama"), CPU, layout=ech.Layout(tp=-1, sequence_parallel=sequence))
    sent: list[str] = []
    before: dict[str, Any] = {}
    places: dict[str, Any] = {"all_reduce": dist, "all_gather_single": tensor_traffic, "reduce_scatter_single": tensor_traffic}
    for name, place in places.items():
        before[name] = function = getattr(place, name)

        def counted(*args: Any, name: str = name, function: Any = function, **options: Any) -> Any:
            if options.get("group") is not None and args[0].dim() == 3:  # activations
                sent.append(name)
            return function(*args, **options)

        setattr(place, name, counted)
    try:
        loss, _ = summed_loss(module, windows(1)[0][0][0])
        forward = list(sent)
        loss.backward()
    finally:
        for name, function in before.items():
            setattr(places[name], name, function)
    return forward, sent[len(forward) :]


@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.full)])
def test_layers_that_read_the_same_share_one_message(ranks: Ranks, sequence: bool) -> None:
    """Of each of two blocks attention and MLP, and the embedding; the head puts logits together. Backwards q, k and v share one
    message, as do gate and up. Parts of the sequence travel as much.
    """
    block = ["all_gather_single", "reduce_scatter_single"] * 2 if sequence else ["all_reduce"] * 2
    ends = ["all_gather_single"] * (2 if sequence else 1)
    for forward, backward in ranks(2, _messages, sequence):
        assert forward == ["all_reduce", *block, *block, *ends]
        assert backward == ["all_reduce", *block, *block, *ends[1:]]


def _dropped(sequence: bool, length: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    one = Small(dropout=0.4).double()
    module = ech.layouts.prepare_module(Small(dropout=0.4).double(), CPU, layout=ech.Layout(tp=-1, sequence_parallel=sequence))
    seen: list[int] = []
    module.h[0].ln_2.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    ids = torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(5)
    got = module(ids)
    one.load_state_dict(whole(module), strict=False)
    torch.manual_seed(5)
    return got.detach(), one(ids).detach(), seen


@pytest.mark.full
@pytest.mark.parametrize(("length", "parts"), [(8, 4), (7, 4), (1, 1)])
def test_dropout_draws_one_mask_for_all_parts(ranks: Ranks, length: int, parts: int) -> None:
    for got, want, seen in ranks(2, _dropped, True, length):
        assert seen == [parts] and math.isclose(float((got - want).abs().max()), 0.0, abs_tol=1e-12)
