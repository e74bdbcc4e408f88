"""Models of transformers and PEFT: built on meta, trained, and given back to their own libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import echelon as ech
from echelon.contracts.errors import UsageError
from echelon.launcher import function
from echelon.launcher.server import ForkServer
from echelon.parallel.materialize import materialize
from tests.conftest import Ranks

pytest.importorskip("transformers", reason="pip install transformers peft")
pytest.importorskip("peft", reason="pip install peft")

# PEFT asks transformers by a name that is going out of use.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _loaded_ranks() -> Iterator[None]:
    """Ranks forked from a server that has transformers: each would need seconds to import it."""
    before, function._server = function._server, ForkServer.start((*function.SLOW_MODULES, "tests.hf_models"))
    yield
    function._server.close()
    function._server = before


def _all(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _full(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach() for n, t in _all(module).items()}


def _differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    return [n for n, t in want.items() if got[n].dtype != t.dtype or not torch.equal(got[n], t)]


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
        return make()  # type: ignore[no-any-return]


# --- on_meta


def test_values_ties_and_streams_of_every_kind_of_model_are_those_of_a_plain_build() -> None:
    from tests.hf_models import MODELS

    for make in MODELS:
        want = _built(make, meta=False)
        state = torch.get_rng_state()
        got = _built(make, meta=True)
        assert sum(not t.is_meta for t in _all(got).values()) <= 1, make
        assert torch.equal(torch.get_rng_state(), state), make
        materialize(got, CPU)
        assert _differing(_full(got), _full(want)) == [], make
        assert _ties(got) == _ties(want), make


def _sharded_values(strategies: list[str]) -> dict[str, Any]:
    from tests.hf_models import gpt2, llama, lora, speech

    found = {}
    for make in (gpt2, llama, lora, speech):
        want = _full(_built(make, seed=5, meta=False))
        for strategy in strategies:
            module = _built(make, seed=5 + dist.get_rank(), meta=True)
            made = ech.prepare_module(module, CPU, strategy=strategy)
            plain = made.module if strategy == "ddp" else made
            found[f"{make.__name__} {strategy}"] = _differing(_full(plain), want)
    return found


def test_sharded_ranks_have_the_values_of_rank_0s_plain_build(ranks: Ranks) -> None:
    for found in ranks(2, _sharded_values, ["ddp", "fsdp"]):
        assert found == {key: [] for key in found} and len(found) == 8


def test_from_pretrained_inside_on_meta_is_refused_with_what_to_do(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    from tests.hf_models import gpt2

    gpt2().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"from_pretrained inside on_meta\(\).*restore\(FOLDER"), ech.on_meta():
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.empty(1).device == CPU  # nothing is left of it


def test_an_adapter_loaded_inside_on_meta_has_its_values(tmp_path: Any) -> None:
    from peft import PeftModel

    from tests.hf_models import gpt2, lora

    saved = _built(lora, meta=False)
    saved.save_pretrained(tmp_path)

    def loaded() -> nn.Module:
        return PeftModel.from_pretrained(gpt2(), tmp_path)

    got, want = _built(loaded, meta=True), _built(loaded, meta=False)
    materialize(got, CPU)
    assert _differing(_full(got), _full(want)) == []
