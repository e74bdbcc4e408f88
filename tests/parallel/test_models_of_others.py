"""Models of transformers in parts of sequences and in stages: positions, masks and labels are those of the whole."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech
from echelon.parallel.names import plain_buffers
from tests.conftest import Ranks
from tests.kit.context_models import Language, plain
from tests.kit.models import largest_difference, seeded, whole
from tests.kit.own_loops import step
from tests.kit.refusals import refusal
from tests.kit.units import Regression

pytest.importorskip("transformers", reason="pip install transformers peft")
pytest.importorskip("peft", reason="pip install peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),  # torchao's, when it is compiled for the first time
    pytest.mark.standing_ranks,
]

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
        step(model, optimizer, batch, loss=lambda model, batch: model(**batch).loss)
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


# --- pipelines of models that nobody wrote for them, and of those with buffers


Named = dict[str, torch.Tensor]


def built(name: str) -> nn.Module:
    from tests.kit import hf_models

    options: dict[str, Any] = {"n_layer": 4} if name == "gpt2" else {}
    if name.startswith("llama"):
        options = {"tie_word_embeddings": name == "llama tied"}
    if name == "llama dynamic":  # longer than what it was made for
        options |= {"max_position_embeddings": 4, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    return hf_models.without_dropout(seeded(getattr(hf_models, name.split()[0]), **options))


def batches(name: str, count: int) -> list[Named]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        length = 7 if name != "llama dynamic" else (6, 9, 12, 9, 7)[number // 2]
        words = torch.randint(3, 50, (2, length), generator=generator)
        one = {"input_ids": words, "labels": words.clone()}
        if name != "t5":
            one["attention_mask"] = torch.ones_like(words)
            one["attention_mask"][1, 5:] = 0  # padding
        made.append(one)
    return made


class Causal(Regression):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(module=built(name), optimizer="AdamW", lr=1e-2, clip_grad_norm=0.5, **options)
        self.losses: list[float] = []

    def compute_loss(self, state: ech.State, data: Named) -> tuple[torch.Tensor, Any]:
        out = self.module(**data)
        return out.loss, out.logits

    def on_train_step_end(self, state: ech.State, data: Named, step: int, results: ech.units.TrainStepResults) -> None:
        if results.total_grad_norm is not None:
            self.losses.append(float(self.latest_update[0]))


def trained(name: str, layout: Any, data: list[Named]) -> tuple[dict[str, torch.Tensor], list[float]]:
    unit = Causal(name, layout=layout, accumulate=2)
    ech.train(unit, data, max_epochs=1)
    return whole(unit.prepared), unit.losses


def plainly(name: str, data: list[Named]) -> tuple[dict[str, torch.Tensor], list[float]]:
    module = built(name).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for first, second in zip(data[::2], data[1::2], strict=True):
        loss = (module(**first).loss + module(**second).loss) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {n: p.detach().clone() for n, p in module.named_parameters()}, losses


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt2", "llama tied", "llama dynamic", "bert", "t5"])
def test_models_of_transformers_run_in_stages_as_they_are(ranks: Ranks, name: str) -> None:
    data = batches(name, 10)
    want, losses = plainly(name, data)
    for schedule in ("1f1b", "zero_bubble") if name == "gpt2" else ("1f1b",):
        results = ranks(2, trained, name, ech.Layout(pp=2, schedule=schedule), data)
        got = {key: value for values, _ in results for key, value in values.items()}
        assert largest_difference(got, want) < 1e-11
        for _, told in results:
            assert told == pytest.approx(losses, rel=1e-6)  # they compute the loss in float32


class Convolutions(nn.Module):
    """Statistics in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4))
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(4))
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(x)).mean(-1))


def images(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = (torch.randn(3, 1, 8, generator=generator, dtype=torch.float64) for _ in range(count))
    return [(x, torch.randint(3, (3,), generator=generator)) for x in made]


class Classes(Regression):
    def __init__(self, on_meta: bool = False, **options: Any) -> None:
        with ech.on_meta() if on_meta else torch.device("cpu"):
            module = seeded(Convolutions)
        super().__init__(module=module, accumulate=2, **options)

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        out = self.module(data[0])
        return nn.functional.cross_entropy(out, data[1]), out


def classified(**options: Any) -> tuple[dict[str, torch.Tensor], float]:
    unit = Classes(**options)
    ech.train(unit, images(6), max_epochs=1)
    buffers = {name: buffer.clone() for name, buffer in plain_buffers(unit.prepared.module)}
    return whole(unit.prepared) | buffers, float(unit.latest_update[0])


def merged(results: list[tuple[dict[str, torch.Tensor], float]]) -> dict[str, torch.Tensor]:
    assert len({loss for _, loss in results}) == 1
    return {name: value for values, _ in results for name, value in values.items()}


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"on_meta": True}, {"activation_checkpoint_params": "blocks"}])
def test_statistics_meta_builds_and_recomputed_blocks_are_as_in_one_process(ranks: Ranks, options: dict[str, Any]) -> None:
    (want,) = ranks(1, classified, layout="none")
    for schedule in ("1f1b", "zbv") if not options else ("interleaved",):
        got = merged(ranks(2, classified, layout=ech.Layout(pp=2, schedule=schedule), **options))
        assert largest_difference(got, want[0]) < 1e-11


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_its_scaler_agrees(ranks: Ranks, precision: str) -> None:
    (want,) = ranks(1, classified, layout="none", precision=precision)
    for layout in (ech.Layout(pp=2), ech.Layout(pp=2, fsdp=ech.FSDPStrategy())):
        got = merged(ranks(2, classified, layout=layout, precision=precision))
        assert largest_difference(got, want[0]) < 2e-2


class Overflowing(Classes):
    """The first stage learns nothing; in the second update the last one's gradients overflow."""

    def __init__(self, frozen: str, **options: Any) -> None:
        super().__init__(**options)
        for name, p in self.module.named_parameters():
            p.requires_grad_(not name.startswith(frozen))

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        loss, out = super().compute_loss(state, data)
        return loss * (float("inf") if 1 < self.train_progress.num_steps_completed < 4 else 1.0), out


def _frozen_stage(frozen: str, layout: Any) -> tuple[dict[str, torch.Tensor], list[Any]]:
    unit = Overflowing(frozen, layout=layout, precision="fp16")
    seen: list[Any] = []
    unit.configure()
    unit.optimizer.register_step_post_hook(lambda *_: seen.append(None))
    ech.train(unit, images(6), max_epochs=1)
    return whole(unit.prepared), [float(unit.grad_scaler.get_scale()), len(seen)]


@pytest.mark.full
@pytest.mark.parametrize("frozen", ["stem", "head"])
def test_a_stage_without_gradients_agrees_on_the_scale(ranks: Ranks, frozen: str) -> None:
    """It has nothing to look at for an inf, and hears of the other stage's."""
    (want,) = ranks(1, _frozen_stage, frozen, "none")
    stages = ["layers.0"] if frozen == "stem" else ["head"]
    results = ranks(2, _frozen_stage, frozen, ech.Layout(pp=2, stages=stages))
    got = {name: value for values, _ in results for name, value in values.items()}
    assert [scaled for _, scaled in results] == [want[1]] * 2
    assert largest_difference(got, want[0]) < 2e-2
