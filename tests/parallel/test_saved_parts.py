"""torch.save of what has a rank's part only: one warning by name, with what to do; nothing of what is whole."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import Net, batch, largest_difference, net, whole
from tests.kit.own_loops import told
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


def _saved(layout: str) -> dict[str, list[str]]:
    def heard() -> list[str]:
        return [text.split(".")[0] for text in texts if "is being pickled" in text]

    with told() as texts:
        unit = Regression(layout=layout, optimizer="AdamW")
        ech.train(unit, [batch(4, 0)], max_epochs=1)
        module: Any = unit.prepared.module
        best = copy.deepcopy(module.state_dict())
        module.load_state_dict(best)
        unit.optimizer.load_state_dict(copy.deepcopy(copy.copy(unit.optimizer.state_dict())))
        torch.save(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), io.BytesIO())
        found = {"read": heard()}
        for _ in range(2):
            torch.save({"model": best, "epoch": 1}, io.BytesIO())
            torch.save({"model": module.state_dict(), "epoch": 1}, io.BytesIO())
        found["module"] = heard()[len(found["read"]) :]
        torch.save(unit.optimizer.state_dict(), io.BytesIO())
        return found | {"all": heard()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "module", "every"),
    [("ddp", [], []), ("zero1", [], ["AdamW"]), ("fsdp", ["Net"], ["Net", "AdamW"]), ("tp", ["Net"], ["Net", "AdamW"])],
)
def test_what_holds_a_part_says_so_once_when_it_is_pickled(
    ranks: Ranks, layout: str, module: list[str], every: list[str]
) -> None:
    for found in ranks(2, _saved, layout):
        assert found == {"read": [], "module": module, "all": every}


def _read(layout: str) -> bool:
    unit = Regression(layout=layout)
    file = io.BytesIO()
    torch.save(unit.prepared.module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    return type(state).__name__ == "OrderedDict" and hasattr(state, "_metadata") and "__reduce_ex__" not in vars(state)


def test_what_is_pickled_is_what_it_was(ranks: Ranks) -> None:
    assert ranks(2, _read, "fsdp") == [True, True]


# --- whole tensors are given to what is split

SPLIT_TWICE = ech.Layout(dp_shard=2, tp=2, plan=Net.tp_plan)


def _given(layout: Any) -> dict[str, torch.Tensor]:
    model, data = net(), torch.utils.data.TensorDataset(*batch(16, 0))
    pretrained = {name: value + 0.1 for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # whose constructor makes its state
    loader = torch.utils.data.DataLoader(data, 8)
    model, optimizer, loader = ech.prepare(model, optimizer, loader, layout=layout)
    model.load_state_dict(pretrained)
    for x, y in loader:
        with ech.window(model) as window:
            window.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


@pytest.mark.full
def test_what_is_split_along_two_axes_takes_whole_weights_and_states(ranks: Ranks) -> None:
    """It was refused, where an axis alone was taken."""
    for given in ranks(4, _given, SPLIT_TWICE):
        assert largest_difference(given, _given("none")) < 1e-12
