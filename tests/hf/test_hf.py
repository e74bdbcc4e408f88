"""Models of transformers and PEFT: built on meta, trained, and given back to their own libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.common.errors import LayoutError, LoopError, RecomputeError
from echelon.parallel.meta.materialize import materialize
from tests.conftest import Ranks
from tests.kit.hf_units import Tuning, differing
from tests.kit.models import largest_difference, plain_training, seeded, whole
from tests.kit.refusals import refusal, refused

pytest.importorskip("transformers", reason="pip install transformers peft")
pytest.importorskip("peft", reason="pip install peft")

# PEFT asks transformers by a name that is going out of use.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.standing_ranks]

CPU = torch.device("cpu")


def _all(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _full(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for n, t in _all(module).items()}


def _ties(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in _all(module).items():
        names.setdefault(id(tensor), []).append(name)
    return sorted(names.values())


def _built(make: Any, *, seed: int = 0, meta: bool) -> nn.Module:
    torch.manual_seed(seed)
    if not meta:
        made: nn.Module = make()
        return made
    with ech.on_meta():
        return make()


# --- on_meta


@pytest.mark.full
def test_values_ties_and_streams_of_every_kind_of_model_are_those_of_a_plain_build() -> None:
    from tests.kit.hf_models import MODELS

    for make in MODELS:
        want = _built(make, meta=False)
        state = torch.get_rng_state()
        got = _built(make, meta=True)
        assert sum(not t.is_meta for t in _all(got).values()) <= 1, make
        assert torch.equal(torch.get_rng_state(), state), make
        materialize(got, CPU)
        assert differing(_full(got), _full(want)) == [], make
        assert _ties(got) == _ties(want), make


def _sharded_values(layouts: list[str]) -> dict[str, Any]:
    from tests.kit.hf_models import gpt2, llama, lora, speech

    found = {}
    for make in (gpt2, llama, lora, speech):
        want = _full(_built(make, seed=5, meta=False))
        for layout in layouts:
            module = _built(make, seed=5 + dist.get_rank(), meta=True)
            made = ech.layouts.prepare_module(module, CPU, layout=layout)
            plain = made.module if layout == "ddp" else made
            found[f"{make.__name__} {layout}"] = differing(_full(plain), want)
    return found


@pytest.mark.full
def test_sharded_ranks_have_the_values_of_rank_0s_plain_build(ranks: Ranks) -> None:
    for found in ranks(2, _sharded_values, ["ddp", "fsdp"]):
        assert found == {key: [] for key in found} and len(found) == 8


def test_from_pretrained_inside_on_meta_is_refused_with_what_to_do(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    from tests.kit.hf_models import gpt2

    gpt2().save_pretrained(tmp_path)
    with refused(LayoutError), ech.on_meta():
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.empty(1).device == CPU  # nothing is left of it


def test_an_adapter_loaded_inside_on_meta_has_its_values(tmp_path: Any) -> None:
    from peft import PeftModel

    from tests.kit.hf_models import gpt2, lora

    saved = _built(lora, meta=False)
    saved.save_pretrained(tmp_path)

    def loaded() -> nn.Module:
        return PeftModel.from_pretrained(gpt2(), tmp_path)

    got, want = _built(loaded, meta=True), _built(loaded, meta=False)
    materialize(got, CPU)
    assert differing(_full(got), _full(want)) == []


# --- training


class Counting(Tuning):
    """With the model's own mean loss, but in float64: transformers computes it in float32 whatever the model's type."""

    weight_unit = "tokens"

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        outputs = self.module(**data)
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), data["labels"][:, 1:].flatten())
        assert torch.allclose(loss.float(), outputs.loss.float(), equal_nan=True)
        return loss, None

    def weight(self, data: Any) -> torch.Tensor:
        return ech.count_tokens(data, next_token=True)


def _trained(module: nn.Module) -> dict[str, torch.Tensor]:
    learns = {name.removeprefix("module.") for name, p in module.named_parameters() if p.requires_grad}
    return {name: value for name, value in whole(module).items() if name in learns}


# Labels that count, by micro-batch, rank and row: two windows of two. One micro-batch has none, one has its first label alone.
_LENGTHS = [[[8, 3], [5, 5]], [[2, 7], [0, 0]], [[1, 1], [8, 8]], [[6, 4], [3, 2]]]


def _tokens(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    from transformers import BatchEncoding

    ids = torch.randint(1, 50, (len(lengths), 8), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    # A row of padding alone has a token to look at, which does not count.
    seen = mask | (torch.arange(8) == 0)
    return BatchEncoding({"input_ids": ids, "attention_mask": seen.long(), "labels": ids.masked_fill(~mask, -100)})


def _model() -> Any:
    from tests.kit.hf_models import gpt2, without_dropout

    return without_dropout(seeded(gpt2, 3))


def _micro_batches(rank: int) -> list[Any]:
    return [_tokens(micro[rank], 10 * i + rank) for i, micro in enumerate(_LENGTHS)]


def _counted(layouts: list[str]) -> list[Any]:
    found = []
    for layout in layouts:
        unit = Counting(module=_model(), layout=layout, accumulate=2)
        ech.fit(unit, _micro_batches(dist.get_rank()), _micro_batches(dist.get_rank()), max_epochs=1)
        loss = float(unit.latest_update[0])
        found.append((_trained(unit.module), loss, unit.eval_loss))
    return found


def _pair(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([data["input_ids"], data["attention_mask"]], 1), data["labels"]


def _mean(module: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = module(input_ids=x[:, 0], attention_mask=x[:, 1]).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.full
def test_updates_weighed_by_tokens_are_those_of_one_process_over_the_global_batch(ranks: Ranks) -> None:
    pairs = [[_pair(each) for each in of_ranks] for of_ranks in zip(_micro_batches(0), _micro_batches(1), strict=True)]
    module, windows = _model(), [pairs[0] + pairs[1], pairs[2] + pairs[3]]
    want, losses, _ = plain_training(windows, module=module, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss_of=_mean)
    x, y = (torch.cat(parts) for parts in zip(*windows[0], *windows[1], strict=True))
    loss, eval_loss = losses[-1], float(_mean(module, x, y).detach())
    for found in ranks(2, _counted, ["ddp", "fsdp"]):
        for trained, last, evaluated in found:
            assert largest_difference(trained, want) < 1e-12
            assert last == pytest.approx(loss, abs=1e-12) and evaluated == pytest.approx(eval_loss, abs=1e-12)


def test_tokens_are_counted_as_the_model_takes_its_mean() -> None:
    from tests.kit.hf_models import bert

    data = _tokens([8, 3], 0)
    assert float(ech.count_tokens(data, next_token=True)) == 7 + 2
    assert float(ech.count_tokens(data["labels"], next_token=False)) == 8 + 3
    module = bert().eval()
    logits = module(**{k: v for k, v in data.items() if k != "labels"}).logits
    total = nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), reduction="sum")
    mean = total.detach() / ech.count_tokens(data, next_token=False)
    assert float(mean) == pytest.approx(float(module(**data).loss.detach()), rel=1e-6)
    with refused(LoopError):
        ech.count_tokens({"input_ids": data["input_ids"]}, next_token=True)


def test_batches_and_outputs_of_transformers_are_counted_and_moved() -> None:
    from transformers import BatchEncoding
    from transformers.modeling_outputs import CausalLMOutput

    from echelon.loop.samples import rows
    from echelon.world.device import copy_data_to_device

    encoded = BatchEncoding({"input_ids": torch.ones(5, 3), "labels": torch.ones(5)})
    outputs = CausalLMOutput(loss=torch.tensor(1.0), logits=torch.ones(4, 2))
    assert rows(encoded) == 5 and rows(outputs) == 4
    for data in (encoded, outputs):
        moved = copy_data_to_device(data, torch.device("meta"))
        assert type(moved) is type(data) and all(t.is_meta for t in moved.values()) and not any(t.is_meta for t in data.values())
    assert copy_data_to_device(outputs, torch.device("meta")).logits.is_meta


def _recomputed(layout: str | None, name: str) -> Any:
    from tests.kit import hf_models

    def build(**options: Any) -> Any:
        torch.manual_seed(0)
        module: Any = hf_models.lora() if name == "lora" else getattr(hf_models, name)()
        return Tuning(module=module.double(), layout=layout, **options)

    ids = _tokens([8, 3], 1)
    data = {**ids, "decoder_attention_mask": ids["attention_mask"]} if name == "t5" else dict(ids)
    plain = build()
    plain.module.config.use_cache = plain.prepared.unwrapped.config.use_cache = False
    torch.manual_seed(1)
    ech.train(plain, [data] * 2, max_epochs=1)
    unit = build(activation_checkpoint_params=ech.layouts.ActivationCheckpointParams())
    torch.manual_seed(1)
    ech.train(unit, [data] * 2, max_epochs=1)
    model = unit.prepared.unwrapped.eval()
    with torch.no_grad():
        kept = model(**data).past_key_values
    return largest_difference(_trained(unit.module), _trained(plain.module)), model.config.use_cache, kept.get_seq_length()


def _recomputed_under(layouts: list[str]) -> list[Any]:
    return [_recomputed(layout, name) for layout in layouts for name in ("gpt2", "lora")]


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "lora", "hybrid"])
def test_recomputing_with_a_padding_mask_trains_as_without_and_evaluation_keeps_its_cache(name: str) -> None:
    apart, use_cache, kept = _recomputed(None, name)
    assert apart < 1e-12 and use_cache and kept == 8


@pytest.mark.full
def test_sharded_ranks_recompute_models_with_a_cache(ranks: Ranks) -> None:
    for found in ranks(2, _recomputed_under, ["fsdp"]):
        for apart, use_cache, kept in found:
            assert apart < 1e-12 and use_cache and kept == 8


@pytest.mark.parametrize(
    ("name", "block"), [("gpt2", "transformer.h.1"), ("hybrid", "model.layers.1"), ("hybrid", "model.layers.2")]
)
def test_recomputing_after_earlier_tokens_is_refused(name: str, block: str) -> None:
    from tests.kit import hf_models

    module = getattr(hf_models, name)()
    data = _tokens([8, 8], 0)
    with torch.no_grad():
        earlier = module(input_ids=data["input_ids"]).past_key_values
    part = module.get_submodule(block)
    ech.nn.checkpoint_wrapper(part)
    with refused(RecomputeError):
        module(input_ids=data["input_ids"], past_key_values=earlier)


# --- given back


def _exported(folder: str, layouts: list[str]) -> list[str]:
    import transformers
    from peft import PeftModel

    from tests.kit.hf_models import auto_bf16, gpt2, lora

    wrong = []
    for layout in layouts:
        plan = {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"}
        for make in (auto_bf16,) if layout == "tp" else (gpt2, auto_bf16, lora):
            given = ech.Layout(tp=2, plan={**plan, "model.layers.*.mlp.down_proj": "rowwise"}) if layout == "tp" else layout
            torch.manual_seed(0)
            unit = Tuning(module=make(), layout=given)
            ech.train(unit, [dict(_tokens([8, 3], 1))], max_epochs=1)
            out = ech.save_pretrained(unit, f"{folder}/{layout}-{make.__name__}")
            trained = _trained(unit.module)
            if make is lora:
                torch.manual_seed(0)
                loaded = PeftModel.from_pretrained(gpt2(), out, is_trainable=True)
            else:
                loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
            wrong += [f"{out} {n}" for n in differing(trained, _trained(loaded))]
    return wrong


@pytest.mark.full
def test_what_was_trained_is_loaded_by_transformers_and_peft_to_the_bit(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks(2, _exported, str(tmp_path), ["ddp", "fsdp", "zero1", "hsdp", "tp"]) == [[], []]
    for adapter in tmp_path.glob("*-lora"):  # without the base
        assert {p.name for p in adapter.iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
        assert (adapter / "adapter_model.safetensors").stat().st_size < 10_000
    assert not list(tmp_path.glob(".*"))


def _read_back(folder: str) -> tuple[list[str], str, str]:
    """Read its files into a model built on meta; then what is refused."""
    from tests.kit.hf_models import gpt2

    saved = _built(gpt2, seed=9, meta=False)
    unit = Tuning(module=_built(gpt2, meta=True), layout="fsdp")
    ech.save_pretrained(saved, folder)
    ech.DistributedCheckpointSaver.restore(folder, unit)
    found = differing(_trained(unit.module), _trained(saved))
    return found, refusal(unit.module.save_pretrained, folder), refusal(ech.save_pretrained, nn.Linear(2, 2), folder)


@pytest.mark.full
def test_a_model_built_on_meta_reads_safetensors_and_says_how_to_write_them(ranks: Ranks, tmp_path: Any) -> None:
    for other, direct, without in ranks(2, _read_back, str(tmp_path / "model")):
        assert other == []
        assert "this rank holds only a part of the weights." in direct and "echelon.save_pretrained(unit, folder)" in direct
        assert "Linear has no save_pretrained. `echelon ckpt export" in without


def _unwritable(folder: str) -> str:
    from tests.kit.hf_models import gpt2

    return refusal(ech.save_pretrained, gpt2(), f"{folder}/file/model", kind=ech.EchelonError)


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Any) -> None:
    (tmp_path / "file").touch()
    assert all("rank 0: " in text and "file" in text for text in ranks(2, _unwritable, str(tmp_path)))
