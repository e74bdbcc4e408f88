"""Files of transformers, read straight into shards: the same model as from_pretrained, of which a rank reads its own bytes."""

from __future__ import annotations

import functools
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import echelon as ech
from echelon.checkpoint import ranges
from echelon.common.errors import CheckpointOptionError, EchelonError, LayoutError
from tests.conftest import Ranks
from tests.kit import hf_units
from tests.kit.hf_units import Tuning, differing, made, on_meta
from tests.kit.models import whole
from tests.kit.refusals import refusal, refused

pytest.importorskip("transformers", reason="pip install transformers peft")
pytest.importorskip("peft", reason="pip install peft")

# PEFT asks transformers by a name that is going out of use.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.standing_ranks]

Saver = ech.DistributedCheckpointSaver


def _whole(module: nn.Module) -> dict[str, torch.Tensor]:
    named = module.named_parameters(remove_duplicate=False)
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in named}


# --- whole models


def _loaded(folder: str, kinds: list[str], layouts: list[str]) -> list[str]:
    from tests.kit.hf_models import answer

    wrong = []
    for kind in kinds:
        model = made(kind)
        saved = ech.save_pretrained(model, f"{folder}/{kind}")
        want = type(model).from_pretrained(saved)
        for layout in layouts:
            unit = on_meta(lambda model=model: type(model)(model.config), layout)
            Saver.restore(saved, unit)
            if not torch.equal(answer(unit.module, kind), answer(want, kind)):
                wrong.append(f"{kind}, {layout}: other logits")
            again = ech.save_pretrained(unit, f"{folder}/{kind} {layout}")
            if dist.get_rank():  # the files are the same for all
                continue
            if other := differing(type(model).from_pretrained(again).state_dict(), want.state_dict()):
                wrong.append(f"{kind}, {layout}: {other}")
    return wrong


# Other names in the files; other cuts; tied; an encoder and a decoder.
QUICK = ["gpt-neox", "vit", "mixtral", "llama, tied", "t5"]


@pytest.mark.full
def test_a_model_read_into_shards_is_the_one_of_from_pretrained_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    from tests.kit.hf_models import KINDS

    assert len(KINDS) == 25
    assert ranks(2, _loaded, str(tmp_path), list(KINDS), ["fsdp"], timeout_s=300) == [[], []]
    assert ranks(2, _loaded, str(tmp_path / "further"), QUICK, ["ddp"], timeout_s=300) == [[], []]
    assert ranks(2, _loaded, str(tmp_path / "experts"), ["mixtral"], ["ep=2"]) == [[], []]


def test_files_with_a_prefix_more_or_less_and_what_a_model_computes_itself(tmp_path: Path) -> None:
    """GPT-2's own files: without "transformer.", and with masks that today's class does not have."""
    from safetensors.torch import load_file, save_file

    from tests.kit.hf_models import answer

    model = made("gpt2")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    save_file(tensors, file, {"format": "pt"})
    unit = on_meta(lambda: type(model)(model.config), "none")
    report = Saver.restore(tmp_path, unit)
    assert not report.missing and not report.unexpected
    assert torch.equal(answer(unit.module, "gpt2"), answer(model, "gpt2"))
    bare = on_meta(lambda: type(model.transformer)(model.config), "none")  # a model without its head, from files of one with
    model.save_pretrained(tmp_path)
    Saver.restore(tmp_path, bare)
    assert differing(_whole(bare.module), _whole(model.transformer)) == []


def test_weights_of_another_type_are_cast_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = made("llama").bfloat16()
    model.save_pretrained(tmp_path)
    unit = on_meta(lambda: type(model)(model.config).float(), "none")
    report = Saver.restore(tmp_path, unit)
    assert differing(_whole(unit.module), _whole(model.float())) == []
    assert set(report.cast.values()) == {("bfloat16", "float32")} and "from bfloat16 to float32" in caplog.text


# --- adapters


def _adapted(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **options}))


def _base_under_an_adapter(folder: str) -> tuple[list[str], list[str], list[str], str]:
    from peft import PeftModel

    from tests.kit.hf_models import answer

    model = made("llama")
    saved = ech.save_pretrained(model, f"{folder}/base")
    options = {"modules_to_save": ["lm_head"]}
    unit = on_meta(lambda: _adapted(type(model)(model.config), **options), "fsdp")
    report = Saver.restore(saved, unit)
    assert not report.missing and not report.unexpected
    torch.manual_seed(7)
    want = _adapted(type(model).from_pretrained(saved), **options)
    unset = [n for n, t in _whole(unit.module).items() if t.isnan().any()]
    assert torch.equal(answer(unit.module, "llama"), answer(want, "llama")), "an untrained adapter changes nothing"
    base = {n: t for n, t in _whole(want).items() if "lora_A" not in n}
    wrong = differing({n: t for n, t in _whole(unit.module).items() if n in base}, base)
    ids = torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    ech.train(unit, [{"input_ids": ids, "labels": ids}] * 2, max_epochs=1)
    # Written: the adapter alone, and merged into the weights as PEFT would do it.
    adapter = ech.save_pretrained(unit, f"{folder}/adapter")
    merged = type(model).from_pretrained(ech.save_pretrained(unit, f"{folder}/merged", merged=True))
    own = PeftModel.from_pretrained(type(model).from_pretrained(saved), adapter).merge_and_unload()
    assert differing(merged.state_dict(), model.state_dict()), "nothing was trained"
    unit = on_meta(lambda: _adapted(type(model)(model.config), use_dora=True), "fsdp")
    return unset, wrong, differing(merged.state_dict(), own.state_dict()), refusal(Saver.restore, saved, unit)


@pytest.mark.full
def test_a_base_model_is_read_into_shards_under_adapters_which_are_written_alone_or_merged(ranks: Ranks, tmp_path: Path) -> None:
    for unset, wrong, merged, said in ranks(2, _base_under_an_adapter, str(tmp_path)):
        assert (unset, wrong, merged) == ([], [], [])
        assert "lora_magnitude_vector.default.weight is computed from the values of" in said
        assert "Build the model with its weights (from_pretrained), without on_meta." in said


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_adapter_on_a_model_of_another_type_has_the_values_of_a_plain_build(tmp_path: Path, dtype: torch.dtype) -> None:
    """PEFT moves an adapter to where its layer's weight says that it lies, and gives it that type."""
    model = made("llama")
    model.save_pretrained(tmp_path)
    unit = on_meta(lambda: _adapted(type(model)(model.config).to(dtype)), "none")
    Saver.restore(tmp_path, unit)
    torch.manual_seed(7)
    own = {n: t for n, t in _whole(_adapted(type(model)(model.config).to(dtype))).items() if "lora_" in n}
    assert differing({n: t for n, t in _whole(unit.module).items() if n in own}, own) == []


def test_merging_what_has_no_adapters_is_refused(tmp_path: Path) -> None:
    with refused(CheckpointOptionError):
        ech.save_pretrained(made("llama"), tmp_path / "m", merged=True)


# --- bytes


def _bytes_read(folder: str, layouts: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """By layout: what was read, what this rank holds, and what the model has."""
    import transformers as tf

    config = tf.AutoConfig.from_pretrained(folder)
    found, real = {}, os.preadv
    for name, layout in layouts.items():
        unit = on_meta(lambda: tf.AutoModelForCausalLM.from_config(config), layout)
        read = [0]

        def counting(file: int, buffers: Any, offset: int, read: list[int] = read) -> int:
            got = real(file, buffers, offset)
            read[0] += got
            return got

        ranges.os.preadv = counting
        try:
            Saver.restore(folder, unit)
        finally:
            os.preadv = real
        parts = [getattr(p, "_local_tensor", p) for p in unit.prepared.unwrapped.parameters()]
        held = sum(p.numel() for p in parts) * 2  # as many elements, of two bytes each in the files
        found[name] = read[0], held, sum(p.numel() for p in unit.prepared.unwrapped.parameters()) * 2
    return found


@pytest.mark.full
def test_a_rank_reads_its_own_bytes_and_no_others(ranks: Ranks, tmp_path: Path) -> None:
    """Files in bfloat16, a model in float32; sharded by rows, or by columns of rows."""
    import transformers as tf

    size = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    made: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**size, num_key_value_heads=4)).bfloat16()
    made.save_pretrained(tmp_path, max_shard_size="2MB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    layer = "model.layers.*"
    plan = {f"{layer}.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")} | {f"{layer}.mlp.down_proj": "rowwise"}
    layouts = {"fsdp": "fsdp", "hsdp": "hsdp", "tp": ech.Layout(tp=-1, plan=plan), "tp x fsdp": ech.Layout(tp=2, plan=plan)}
    for found in ranks(4, _bytes_read, str(tmp_path), layouts):
        for name, (read, held, all_bytes) in found.items():
            assert read == held, name
            assert read < {"fsdp": 0.26, "hsdp": 0.51, "tp": 0.58, "tp x fsdp": 0.38}[name] * all_bytes, name


# --- what is wrong with files


def _changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of model.safetensors; the data stays."""
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _index(folder: Path, weights: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))


NAME = "model.layers.1.mlp.down_proj.weight"


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: _changed(folder, change)


def _shifted(header: dict[str, Any]) -> None:
    begin, end = header[NAME]["data_offsets"]
    header[NAME]["data_offsets"] = [begin - 4, end - 4]


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "traversal": (lambda folder: _index(folder, {NAME: "../secret.safetensors"}), "points outside the folder"),
    "absolute": (lambda folder: _index(folder, {NAME: "/etc/passwd"}), "points outside the folder"),
    "no text": (lambda folder: _index(folder, {NAME: ["model.safetensors"]}), "points outside the folder"),
    "not there": (lambda folder: _index(folder, {NAME: "model-2.safetensors"}), "model-2.safetensors is missing"),
    "no index": (lambda folder: _index(folder, [NAME]), "weight_map must be an object"),
    "overlap": (_header(_shifted), "must begin at byte"),
    "other names": (_header(lambda header: header.update({"something.else": header.pop(NAME)})), r"something\.else"),
    "other shape": (_header(lambda header: header[NAME]["shape"].reverse()), r"down_proj\.weight +\(32, 16\) +\(16, 32\)"),
    "more than there is": (_header(lambda header: header[NAME].update(shape=[1 << 40, 1 << 20])), "has the bytes"),
    "long header": (
        lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}"),
        "its header must be at most",
    ),
    "deep header": (
        lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000),
        "nested too deeply",
    ),
    "cut off": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "bytes"),
    "a loop": (
        lambda folder: ((folder / "model.safetensors").unlink(), (folder / "model.safetensors").symlink_to("model.safetensors")),
        "holds no checkpoint",
    ),
}


def _refused(folder: str, cases: list[str]) -> dict[str, tuple[str, bool]]:
    """By case the error, and whether the unit was left as it was."""
    model = made("llama")
    unit = Tuning(module=made("llama", seed=3), layout="fsdp")
    before, found = _whole(unit.module), {}
    for case in cases:
        place = Path(folder) / case.replace(" ", "-")
        ech.save_pretrained(model, place)
        if ech.RankInfo().rank == 0:
            WRONG[case][0](place)
        torch.distributed.barrier()
        found[case] = refusal(Saver.restore, place, unit, kind=EchelonError), differing(_whole(unit.module), before) == []
    return found


@pytest.mark.full
def test_files_that_are_wrong_are_refused_on_every_rank_and_nothing_is_changed(ranks: Ranks, tmp_path: Path) -> None:
    import re

    found = ranks(2, _refused, str(tmp_path), list(WRONG))
    for case, (_, says) in WRONG.items():
        for told in found:
            text, untouched = told[case]
            assert re.search(says, text) and untouched, (case, text)


# --- in the stages of a pipeline: read from files, and written for from_pretrained


class Causal(Tuning):
    """The loss in the model's own precision, which transformers' is not."""

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return loss_of(self.module, data), None


def loss_of(module: nn.Module, words: torch.Tensor) -> torch.Tensor:
    logits = module(input_ids=words[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def _words() -> torch.Tensor:
    return torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def _doubled(kind: str) -> Any:
    return hf_units.made(kind).double()


def _built_again(made: Any) -> nn.Module:
    module: nn.Module = type(made)(made.config)
    return module.double()


def _saved_in_parts(folder: Path, kind: str) -> Any:
    made = _doubled(kind)
    made.save_pretrained(folder / kind, max_shard_size="10KB")
    assert len(list((folder / kind).glob("*.safetensors"))) > 1
    return made


def _held(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def _round_trip(folder: str, kinds: list[str], layout: Any) -> list[tuple[float, set[str], list[str], list[str]]]:
    found = []
    for kind in kinds:
        made = _doubled(kind)
        unit = hf_units.on_meta(functools.partial(_built_again, made), layout, Causal)
        report = Saver.restore(Path(folder) / kind, unit)
        ech.evaluate(unit, [_words()])
        ech.save_pretrained(unit, f"{folder}/{kind}, written", max_shard_size="10KB")
        with refused(LayoutError):
            cast(Any, unit.prepared.unwrapped).save_pretrained(f"{folder}/{kind}, of a stage")
        found.append((unit.eval_loss, _held(unit.prepared.unwrapped), report.missing, report.unexpected))
    return found


def _staged_adapters(folder: str, layout: Any) -> list[str]:
    """Weights of a base model under adapters, trained, and written alone and merged."""
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    made = _doubled("llama")
    unit = hf_units.on_meta(lambda: get_peft_model(type(made)(made.config), LoraConfig(**options)), layout, Causal)
    report = Saver.restore(f"{folder}/llama", unit)
    ech.train(unit, [_words()] * 2, max_epochs=1)
    name = "none" if layout == "none" else "pp"
    ech.save_pretrained(unit, f"{folder}/{name}")
    ech.save_pretrained(unit, f"{folder}/{name}-merged", merged=True)
    return [*report.missing, *report.unexpected]


def test_a_tied_weight_is_written_once_without_a_pipeline_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = _saved_in_parts(tmp_path, "llama, tied")
    ech.save_pretrained(Causal(module=made, layout="none"), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == made.state_dict().keys() - {"lm_head.weight"}


@pytest.mark.full
def test_adapters_in_stages_are_written_alone_and_merged(ranks: Ranks, tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    made = _saved_in_parts(tmp_path, "llama")
    assert ranks(2, _staged_adapters, str(tmp_path), ech.Layout(pp=2)) == [[], []]
    assert _staged_adapters(str(tmp_path), "none") == []
    staged, one = tmp_path / "pp", tmp_path / "none"
    got, want = load_file(staged / "adapter_model.safetensors"), load_file(one / "adapter_model.safetensors")
    assert got.keys() == want.keys() and len(got) == 2 * 2 * 2 + 1, "of both layers, and the head"
    assert max(float((got[n] - t).abs().max()) for n, t in want.items()) < 1e-6
    assert any(float(t.abs().max()) > 0 for n, t in got.items() if "lora_B" in n), "nothing was trained"
    config, known = (json.loads((at / "adapter_config.json").read_text()) for at in (staged, one))
    for each in (config, known):
        each["target_modules"].sort()  # a set's order
    assert config == known
    loaded = type(made).from_pretrained(f"{staged}-merged")
    own = PeftModel.from_pretrained(type(made).from_pretrained(tmp_path / "llama", dtype=torch.float32), staged)
    assert differing(loaded.state_dict(), own.merge_and_unload().state_dict()) == []


# --- what is wrong


LAST = "model.layers.1.mlp.down_proj.weight"
# In the last stage, so that the first one alone would see nothing.
WRONG_IN_A_STAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(LAST), r"layers\.1\.mlp\.down_proj\.weight +- +wanted"),
    "unexpected": (
        lambda tensors: tensors.update({LAST.replace("1", "2"): torch.zeros(2)}),
        r"layers\.2\.mlp\.down_proj\.weight +\(2,\) +-",
    ),
    "other shape": (
        lambda tensors: tensors.update({LAST: torch.zeros(32, 16)}),
        r"layers\.1\.mlp\.down_proj\.weight +\(32, 16\) +\(16, 32\)",
    ),
    "cut off": (lambda file: file.write_bytes(file.read_bytes()[:5000]), "bytes"),
}


def _refused_in_stages(folder: str) -> dict[str, tuple[str, bool]]:
    """By case the error, and whether the unit was left as it was."""
    unit = Causal(module=_doubled("llama"), layout=ech.Layout(pp=2))
    before, found = whole(unit.prepared), {}
    for case in WRONG_IN_A_STAGE:
        said = refusal(Saver.restore, Path(folder) / case, unit, kind=EchelonError)
        found[case] = said, differing(whole(unit.prepared), before) == []
    return found


@pytest.mark.full
def test_files_that_do_not_fit_one_stage_are_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made = _doubled("llama")
    for case, (change, _) in WRONG_IN_A_STAGE.items():
        made.save_pretrained(tmp_path / case)
        file = tmp_path / case / "model.safetensors"
        if case == "cut off":
            change(file)
            continue
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
    for told in ranks(2, _refused_in_stages, str(tmp_path)):
        for case, (_, says) in WRONG_IN_A_STAGE.items():
            text, untouched = told[case]
            assert re.search(says, text) and untouched, (case, text)


def _other_on_each(folder: str) -> str:
    made = _doubled("llama")
    if torch.distributed.get_rank() == 1:
        made.lm_head.bias = nn.Parameter(torch.zeros(50))
    return refusal(ech.save_pretrained, made, folder)


def test_different_models_that_are_no_stages_are_not_written(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks(2, _other_on_each, str(tmp_path / "out")):
        assert "ranks hold different weights: lm_head.bias. Build the same model on every rank" in text
    assert not (tmp_path / "out").exists()


TIED = {
    "llama": set[str](),
    "llama, tied": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight", "lm_head.weight"},
}


def _check(results: list[Any], folder: Path, made: dict[str, Any], firsts: tuple[int, int]) -> None:
    """
    Args:
        firsts: a rank of each stage.
    """
    for number, (kind, model) in enumerate(made.items()):
        with torch.no_grad():
            want = float(loss_of(model.eval(), _words()))
        for loss, _, missing, unexpected in (told[number] for told in results):
            assert loss == pytest.approx(want, abs=1e-12) and not missing and not unexpected
        one, other = (results[rank][number][1] for rank in firsts)
        assert one | other == _held(model) and one - other and other - one, "each has its own"
        assert TIED[kind] == {name for name in one & other if "lm_head" in name or "wte" in name or "embed" in name}
        written = folder / f"{kind}, written"
        again = type(model).from_pretrained(written, dtype=torch.float64)
        assert differing(again.state_dict(), model.state_dict()) == []
        told, known = (json.loads((at / "model.safetensors.index.json").read_text()) for at in (written, folder / kind))
        assert told == known, "as transformers itself wrote it"


@pytest.mark.full
@pytest.mark.parametrize("axes", [{}, {"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 2}], ids=str)
def test_a_model_is_read_into_stages_and_written_whole(ranks: Ranks, tmp_path: Path, axes: dict[str, Any]) -> None:
    made, size = {kind: _saved_in_parts(tmp_path, kind) for kind in TIED}, 4 if axes else 2
    _check(ranks(size, _round_trip, str(tmp_path), list(TIED), ech.Layout(pp=2, **axes)), tmp_path, made, (0, size // 2))
