"""FlattenParamsWrapper, and modules of FairScale of which nothing is here."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from echelon.common.errors import UsageError
from echelon.compat import fairscale
from echelon.compat.fairscale.absent import BELOW, INSTEAD
from echelon.compat.fairscale.nn import FlattenParamsWrapper
from echelon.compat.fairscale.nn.misc.flatten_params_wrapper import FlatParameter
from tests.kit.refusals import refused


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.second(self.first(x)))
        return out


def _updates(module: nn.Module, count: int = 3) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for i in range(count):
        optimizer.zero_grad()
        module(torch.arange(12.0).view(3, 4) * (i + 1)).square().sum().backward()
        optimizer.step()
    return {name: each.clone() for name, each in module.state_dict().items()}


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def test_a_flattened_module_trains_saves_and_loads_as_it_was() -> None:
    plain, wrapped = Tied(), FlattenParamsWrapper(Tied())
    assert [name for name, _ in wrapped.named_parameters()] == ["flat_param_0"] and wrapped.flat_param.dim() == 1
    assert wrapped.num_params_managed == 5 and len(list(wrapped.get_param_views())) == 5
    want = _updates(plain)
    assert _equal(_updates(wrapped), want)
    other = FlattenParamsWrapper(Tied())
    other.load_state_dict(want)
    assert _equal(other.state_dict(), want) and torch.equal(other.flat_param, wrapped.flat_param)
    flat = wrapped.flat_state_dict()
    assert "flat_param_0" in flat and "norm.running_mean" in flat and "first.weight" not in flat
    other = FlattenParamsWrapper(Tied())
    other.load_state_dict(flat)
    assert _equal(other.state_dict(), want)
    nested = nn.Sequential(FlattenParamsWrapper(Tied()))
    nested.load_state_dict({f"0.{key}": each for key, each in want.items()})
    assert _equal(nested.state_dict(), {f"0.{key}": each for key, each in want.items()})
    with pytest.raises(RuntimeError, match=r"first\.bias"):
        other.load_state_dict({key: each for key, each in want.items() if key != "first.bias"})


def test_unflattened_copied_pickled_and_converted() -> None:
    wrapped = FlattenParamsWrapper(Tied())
    assert not isinstance(wrapped.first.weight, nn.Parameter) and wrapped.first.weight is wrapped.second.weight
    with wrapped.unflatten_params():
        assert not wrapped.is_flattened and len(list(wrapped.parameters())) == 5
        wrapped.first.bias.data.fill_(3.0)
    assert bool((wrapped.first.bias == 3).all()) and wrapped.is_flattened
    with wrapped.unflatten_params([torch.zeros_like(wrapped.flat_param)]):
        assert not wrapped.first.bias.any()
    assert bool((wrapped.first.bias == 3).all())
    want = wrapped.state_dict()
    for each in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert _equal(each.state_dict(), want)
        with torch.no_grad():
            each.flat_param.zero_()
        assert not each.first.weight.any() and bool(wrapped.first.weight.any())
        each(torch.ones(2, 4)).sum().backward()
        assert each.flat_param.grad is not None
    assert wrapped.double().first.weight.dtype == torch.float64
    assert isinstance(FlattenParamsWrapper(nn.Sequential(nn.Linear(2, 2)))[0], nn.Linear)


def test_lists_names_and_errors() -> None:
    module = Tied()
    one, two = [module.first.weight, module.first.bias], [module.norm.weight]
    wrapped = FlattenParamsWrapper(module, [one, two], ["lower", "norm"])
    assert [name for name, _ in wrapped.named_parameters()] == [
        "flat_param_lower",
        "flat_param_norm",
        "_fpw_module.second.bias",
        "_fpw_module.norm.bias",
    ]
    assert wrapped.metadata(1) == (["_fpw_module.norm.weight"], [torch.Size([4])], [4])
    assert _equal(_updates(wrapped), _updates(Tied()))
    assert next(FlattenParamsWrapper(nn.Linear(2, 2), []).parameters()).shape == (2, 2)
    with refused(UsageError):
        _ = wrapped.flat_param
    for wrong in ([], 3, [3], [FlatParameter([nn.Parameter(torch.ones(2))])]):
        with pytest.raises(ValueError):
            FlatParameter(wrong)  # type: ignore[arg-type]
    flat = FlatParameter([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 3))])
    with refused(UsageError):
        flat.get_param_views(torch.ones(3))
    layer = nn.Linear(2, 2)
    with refused(UsageError):
        FlattenParamsWrapper(layer, [[layer.weight], [layer.bias]], ["a", "a"])
    with refused(UsageError):
        FlattenParamsWrapper(layer, [[layer.weight], [layer.weight]])
    layer.bias.requires_grad_(False)
    with refused(UsageError):
        FlattenParamsWrapper(layer)


def test_import_lines_of_what_is_not_here_work_and_uses_say_what_to_take() -> None:
    modules = [*INSTEAD, *(f"{name}.{each}" for name, below in BELOW.items() for each in below.split())]
    assert "nn.pipe.balance" in modules and "experimental.nn.data_parallel" in modules
    for module in modules:
        found = importlib.import_module(f"echelon.compat.fairscale.{module}").Something
        with pytest.raises(UsageError, match=rf"fairscale\.{module}\.Something is not part of echelon.compat. Instead: ."):
            found(1)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"echelon.compat.fairscale.{module}.nonsense")
    import echelon.compat.fairscale.nn.pipe.balance as balance

    assert balance.__name__.endswith("pipe.balance") and fairscale.__version__ == "0.4.13"
