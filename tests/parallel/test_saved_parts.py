"""torch.save of what has a rank's part only: one warning by name, with what to do; nothing of what is whole."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import echelon as ech
from tests.conftest import Ranks
from tests.kit.models import batch
from tests.kit.units import Regression

pytestmark = pytest.mark.standing_ranks


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "is being pickled" in record.getMessage():
            self.said.append(record.getMessage().split(".")[0])


def _saved(layout: str) -> dict[str, list[str]]:
    heard, found = _Heard(), {}
    logging.getLogger("echelon").addHandler(heard)
    try:
        unit = Regression(layout=layout, optimizer="AdamW")
        ech.train(unit, [batch(4, 0)], max_epochs=1)
        module: Any = unit.prepared.module
        best = copy.deepcopy(module.state_dict())
        module.load_state_dict(best)
        unit.optimizer.load_state_dict(copy.deepcopy(copy.copy(unit.optimizer.state_dict())))
        torch.save(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)), io.BytesIO())
        found["read"] = list(heard.said)
        for _ in range(2):
            torch.save({"model": best, "epoch": 1}, io.BytesIO())
            torch.save({"model": module.state_dict(), "epoch": 1}, io.BytesIO())
        found["module"] = heard.said[len(found["read"]) :]
        torch.save(unit.optimizer.state_dict(), io.BytesIO())
        found["all"] = heard.said
    finally:
        logging.getLogger("echelon").removeHandler(heard)
    return found


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
