"""Context parallelism of models of transformers: positions, masks and labels are those of the whole sequence."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech
from tests.conftest import Ranks
from tests.kit.context_models import Language, plain
from tests.kit.models import largest_difference, seeded, whole
from tests.kit.refusals import refusal

pytest.importorskip("transformers", reason="pip install transformers")

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.standing_ranks]

LENGTH = 16
_MASKED = ("bert", "modernbert")  # labels are not shifted


def _made(name: str) -> nn.Module:
    import transformers as tf

    from tests.kit.hf_models import bert, gpt2, llama, without_dropout

    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {"vocab_size": 50, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 32}
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4}
    experts["experts_implementation"] = "eager"  # the usual has no kernel for float64
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8}
    rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    tempered = {"head_dim": 4, "intermediate_size_mlp": 32, "num_local_experts": 2, "no_rope_layers": [1, 0]}
    # The class, its configuration's, and options of this.
    classes: dict[str, tuple[str, str, dict[str, Any]]] = {
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
        "windows": ("Qwen2ForCausalLM", "Qwen2Config", windows),
        "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**ends, "local_attention": 6}),
        "classifier": ("LlamaForSequenceClassification", "LlamaConfig", {"num_labels": 3}),
        "longrope": ("Phi3ForCausalLM", "Phi3Config", {"rope_parameters": rope}),
        "answers": ("LlamaForQuestionAnswering", "LlamaConfig", {}),
        "routers": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**experts, "output_router_logits": True}),
        "experts": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", experts),
        "tempered": ("Llama4ForCausalLM", "Llama4TextConfig", tempered),
        "softcapped": ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 8}),
        "eager": ("Qwen2ForCausalLM", "Qwen2Config", {"attn_implementation": "eager"}),
        "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    }

    def make() -> nn.Module:
        if name in ("llama", "gpt2", "bert"):
            return {"llama": llama, "gpt2": gpt2, "bert": bert}[name]()
        if name == "dynamic":
            return llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        model, config, options = classes[name]
        given = {**size, **more, **options}
        if name in ("modernbert", "opt"):
            del given["num_key_value_heads"]
        return getattr(tf, model)(getattr(tf, config)(**given))

    made = without_dropout(seeded(make))
    made.shifts = name not in _MASKED
    return made


def _batch(kind: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (2, LENGTH), generator=generator)
    made: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":  # on either side
        mask = torch.ones_like(ids)
        mask[0, -3:] = mask[1, :5] = 0
        made |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "prompts":  # the first rank's early chunk counts nothing, or all of one rank's part
        made["labels"][:, : LENGTH // 4 if seed % 2 else LENGTH - 4] = -100
    if kind.startswith("packed"):
        begin, where = 5 + seed % 3, torch.arange(LENGTH)
        made |= {"position_ids": torch.where(where < begin, where, where - begin).expand(2, -1).clone(), "use_cache": False}
    if kind == "packed, all attended to":  # so says a mask, and then transformers does not look at positions
        made["attention_mask"] = torch.ones_like(ids)
    if kind == "rows":
        made["labels"] = torch.randint(3, (2,), generator=generator)
    return made


def _own_loss(module: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """As transformers has it, which computes it in float32: equal numbers would be equal to seven digits only."""
    logits = module(**{name: value for name, value in batch.items() if "labels" not in name}).logits
    targets = batch["labels"] if logits.dim() < 3 or not getattr(module, "shifts", True) else batch.get("shift_labels")
    if targets is None:
        targets = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _their_loss(module: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Only what a script may pass by name: the model must shift labels over the ranks itself."""
    return module(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def _far(model: str, kind: str, options: dict[str, Any], loss: Any = _own_loss, layout: str = "cp=2") -> tuple[float, float]:
    causal = model not in _MASKED
    windows = [[_batch(kind, 2 * i), _batch(kind, 2 * i + 1)] for i in range(5)]
    options = {"accumulate": 2, "clip_grad_norm": float("inf"), **options}
    unit = Language(module=_made(model), layout=layout, by_tokens=causal, loss=loss, **options)
    ech.train(unit, [batch for window in windows for batch in window], max_epochs=1)
    want, norms, _ = plain(_made(model), windows, by_tokens=causal, loss=loss)
    trained = whole(unit.module)  # in a pipeline, of this rank's stages
    return largest_difference(trained, {name: want[name] for name in trained}), max(
        abs(a / b - 1) for a, b in zip(unit.norms, norms, strict=True)
    )


CASES = [
    ("llama", "plain", {}),
    ("llama", "padded", {"activation_checkpoint_params": "blocks"}),
    ("llama", "prompts", {}),
    ("llama", "packed", {}),
    ("llama", "packed, all attended to", {}),
    ("qwen2", "padded", {}),
    ("windows", "padded", {}),
    ("gpt2", "prompts", {}),
    ("bert", "plain", {}),
    ("modernbert", "plain", {}),
    ("experts", "padded", {}),
]


@pytest.mark.full
@pytest.mark.parametrize(("model", "kind", "options"), CASES, ids=[f"{m}-{k}" for m, k, _ in CASES])
def test_a_model_trains_like_one_process(ranks: Ranks, model: str, kind: str, options: dict[str, Any]) -> None:
    for far in ranks(2, _far, model, kind, options):
        assert max(far) < 1e-11, far


@pytest.mark.full
@pytest.mark.parametrize("model", ["llama", "gpt2", "experts"])
def test_a_model_trains_like_one_process_in_stages_too(ranks: Ranks, model: str) -> None:
    for far in ranks(4, _far, model, "plain", {}, _own_loss, "cp=2,pp=2"):
        assert max(far) < 1e-11, far


@pytest.mark.full
def test_labels_are_shifted_over_the_ranks_by_the_models_own_loss(ranks: Ranks) -> None:
    for far in ranks(2, _far, "qwen2", "prompts", {}, _their_loss):
        assert max(far) < 1e-6, far


def _own_loop(dims: dict[str, int] | None) -> float:
    windows, module = [[_batch("plain", seed)] for seed in range(2)], _made("llama")
    made, layout = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), ech.Layout(cp=2, sequence_dim=dims)
    model, optimizer, loader = ech.prepare(module, made, [batch for (batch,) in windows], layout=layout)
    for batch in loader:
        with ech.window(model) as window:
            window.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return largest_difference(whole(model), plain(_made("llama"), windows, loss=_their_loss)[0])


@pytest.mark.full
def test_a_loop_of_ones_own_takes_the_models_own_loss(ranks: Ranks) -> None:
    for dims in (None, {"input_ids": 1, "labels": 1}):
        assert max(ranks(2, _own_loop, dims)) < 1e-6, dims


REFUSED = [
    ("windows", "packed", r"Qwen2ForCausalLM has a sliding window of 5 and was given packed documents"),
    ("opt", "padded", r"OPTForCausalLM\.model\.decoder\.embed_positions .* gives other outputs"),
    ("classifier", "rows", r"LlamaForSequenceClassification gives other outputs"),
    ("eager", "plain", r"Qwen2ForCausalLM must .* by scaled_dot_product_attention, got attn_implementation='eager'\. Make"),
    ("softcapped", "plain", r"Gemma2ForCausalLM must .* got attn_implementation='eager'\. .* train it without cp\."),
    ("answers", "plain", r"the loss of LlamaForQuestionAnswering compares all tokens of a sequence .* without cp\."),
    ("routers", "plain", r"the loss of Qwen3MoeForCausalLM has a part for the load of its .* Set output_router_logits=Fal"),
    ("tempered", "plain", r"Llama4ForCausalLM\.model\.layers\.1\.self_attn scales .* Set attn_temperature_tuning=False"),
    ("dynamic", "plain", r"LlamaForCausalLM .* got rope_type='dynamic' in model\.rotary_emb\. Give .* without cp"),
    ("longrope", "plain", r"Phi3ForCausalLM .* got rope_type='longrope' in model\.rotary_emb\. Give .* without cp"),
]


def _refused(model: str, kind: str, loss: Any = _own_loss) -> str:
    def train() -> None:
        ech.train(Language(module=_made(model), layout="cp=2", loss=loss), [_batch(kind, 0)], max_epochs=1)

    return refusal(train)


@pytest.mark.full
def test_what_would_be_another_model_is_refused(ranks: Ranks) -> None:
    for found in ranks(2, lambda: [_refused(model, kind) for model, kind, _ in REFUSED], timeout_s=180):
        for (model, kind, message), said in zip(REFUSED, found, strict=True):
            assert re.search(message, said), (model, kind, said)


def _asks_routers(module: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """By an argument of each call, and not by the configuration."""
    return module(**batch, output_router_logits=True).loss


@pytest.mark.full
def test_a_loss_of_routers_is_refused_however_it_is_asked_for(ranks: Ranks) -> None:
    assert all("a part for the load of its experts" in said for said in ranks(2, _refused, "experts", "plain", _asks_routers))


def _outside() -> float:
    """Without a step under way the model is the author's."""
    unit = Language(module=_made("llama"), layout="cp=2", loss=_own_loss)
    batch = _batch("padded", 0)
    with torch.no_grad():
        return float((unit.module(**batch).logits - _made("llama")(**batch).logits).abs().max())


@pytest.mark.full
def test_generation_is_the_authors(ranks: Ranks) -> None:
    assert max(ranks(2, _outside)) < 1e-13
