"""Files of transformers, read straight into shards: the same model as from_pretrained, of which a rank reads its own bytes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.checkpoint import ranges
from echelon.common.errors import CheckpointOptionError, EchelonError
from tests.conftest import Ranks
from tests.kit.hf_units import Tuning, differing, made, on_meta
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
    from tests.kit.hf_kinds import answer

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
            if other := differing(type(model).from_pretrained(again).state_dict(), want.state_dict()):
                wrong.append(f"{kind}, {layout}: {other}")
    return wrong


# Other names in the files; other cuts; tied; an encoder and a decoder.
QUICK = ["gpt-neox", "vit", "mixtral", "llama, tied", "t5"]


@pytest.mark.full
def test_a_model_read_into_shards_is_the_one_of_from_pretrained_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    from tests.kit.hf_kinds import KINDS

    assert len(KINDS) == 25
    assert ranks(2, _loaded, str(tmp_path), list(KINDS), ["fsdp"], timeout_s=300) == [[], []]
    assert ranks(2, _loaded, str(tmp_path / "further"), QUICK, ["ddp", "hsdp", "zero1"], timeout_s=300) == [[], []]


def test_files_with_a_prefix_more_or_less_and_what_a_model_computes_itself(tmp_path: Path) -> None:
    """GPT-2's own files: without "transformer.", and with masks that today's class does not have."""
    from safetensors.torch import load_file, save_file

    from tests.kit.hf_kinds import answer

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

    from tests.kit.hf_kinds import answer

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
        for name, (read, held, whole) in found.items():
            assert read == held, name
            assert read < {"fsdp": 0.26, "hsdp": 0.51, "tp": 0.58, "tp x fsdp": 0.38}[name] * whole, name


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
