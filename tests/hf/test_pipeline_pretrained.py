"""Models of transformers in the stages of a pipeline: read from their files, and written for `from_pretrained`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import echelon as ech
from echelon.common.errors import EchelonError, LayoutError
from tests.conftest import Ranks
from tests.kit import hf_units
from tests.kit.hf_units import Tuning, differing
from tests.kit.models import whole
from tests.kit.refusals import refusal, refused

pytest.importorskip("transformers", reason="pip install transformers peft")
pytest.importorskip("peft", reason="pip install peft")

# PEFT asks transformers by a name that is going out of use.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.standing_ranks]

Saver = ech.DistributedCheckpointSaver
State = dict[str, torch.Tensor]


class Causal(Tuning):
    """The loss in the model's own precision, which transformers' is not."""

    def compute_loss(self, state: ech.State, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return loss_of(self.module, data), None


def loss_of(module: nn.Module, words: torch.Tensor) -> torch.Tensor:
    logits = module(input_ids=words[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def _words() -> torch.Tensor:
    return torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def _made(kind: str) -> Any:
    return hf_units.made(kind).double()


def _built_again(made: Any) -> nn.Module:
    module: nn.Module = type(made)(made.config)
    return module.double()


def _saved(folder: Path, kind: str) -> Any:
    made = _made(kind)
    made.save_pretrained(folder / kind, max_shard_size="10KB")
    assert len(list((folder / kind).glob("*.safetensors"))) > 1
    return made


def _held(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def _round_trip(folder: str, kinds: list[str], layout: Any) -> list[tuple[float, set[str], list[str], list[str]]]:
    found = []
    for kind in kinds:
        made = _made(kind)
        unit = hf_units.on_meta(functools.partial(_built_again, made), layout, Causal)
        report = Saver.restore(Path(folder) / kind, unit)
        ech.evaluate(unit, [_words()])
        ech.save_pretrained(unit, f"{folder}/{kind}, written", max_shard_size="10KB")
        with refused(LayoutError):
            cast(Any, unit.prepared.unwrapped).save_pretrained(f"{folder}/{kind}, of a stage")
        found.append((unit.eval_loss, _held(unit.prepared.unwrapped), report.missing, report.unexpected))
    return found


def _adapters(folder: str, layout: Any) -> list[str]:
    """Weights of a base model under adapters, trained, and written alone and merged."""
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    made = _made("llama")
    unit = hf_units.on_meta(lambda: get_peft_model(type(made)(made.config), LoraConfig(**options)), layout, Causal)
    report = Saver.restore(f"{folder}/llama", unit)
    ech.train(unit, [_words()] * 2, max_epochs=1)
    name = "none" if layout == "none" else "pp"
    ech.save_pretrained(unit, f"{folder}/{name}")
    ech.save_pretrained(unit, f"{folder}/{name}-merged", merged=True)
    return [*report.missing, *report.unexpected]


def test_a_tied_weight_is_written_once_without_a_pipeline_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    made = _saved(tmp_path, "llama, tied")
    ech.save_pretrained(Causal(module=made, layout="none"), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == made.state_dict().keys() - {"lm_head.weight"}


@pytest.mark.full
def test_adapters_in_stages_are_written_alone_and_merged(ranks: Ranks, tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    made = _saved(tmp_path, "llama")
    assert ranks(2, _adapters, str(tmp_path), ech.Layout(pp=2)) == [[], []]
    assert _adapters(str(tmp_path), "none") == []
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
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
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


def _refused(folder: str) -> dict[str, tuple[str, bool]]:
    """By case the error, and whether the unit was left as it was."""
    unit = Causal(module=_made("llama"), layout=ech.Layout(pp=2))
    before, found = whole(unit.prepared), {}
    for case in WRONG:
        said = refusal(Saver.restore, Path(folder) / case, unit, kind=EchelonError)
        found[case] = said, differing(whole(unit.prepared), before) == []
    return found


@pytest.mark.full
def test_files_that_do_not_fit_one_stage_are_refused_on_all(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made = _made("llama")
    for case, (change, _) in WRONG.items():
        made.save_pretrained(tmp_path / case)
        file = tmp_path / case / "model.safetensors"
        if case == "cut off":
            change(file)
            continue
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
    for told in ranks(2, _refused, str(tmp_path)):
        for case, (_, says) in WRONG.items():
            text, untouched = told[case]
            assert re.search(says, text) and untouched, (case, text)


def _other_on_each(folder: str) -> str:
    made = _made("llama")
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
    made, size = {kind: _saved(tmp_path, kind) for kind in TIED}, 4 if axes else 2
    _check(ranks(size, _round_trip, str(tmp_path), list(TIED), ech.Layout(pp=2, **axes)), tmp_path, made, (0, size // 2))
