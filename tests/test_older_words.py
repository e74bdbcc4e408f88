"""Older names of arguments are translated, exactly, with a warning that says the new one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import echelon as ech
from echelon.contracts.errors import UsageError
from tests.models import batch, net

DATA = torch.utils.data.TensorDataset(*batch(8, 0))


def _trained(loader: Any, **words: Any) -> torch.Tensor:
    """The parameters of a loop of one's own after one epoch."""
    model = net()
    model, optimizer, batches = ech.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, strategy=None, **words)
    for x, y in batches:
        with ech.window(model) as window:
            window.backward(((model(x) - y) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("older", "new"),
    [("gradient_accumulation_steps", {"accumulate": 2}), ("activation_checkpoint_params", {"recompute": "blocks"})],
)
def test_prepare_translates_older_words(older: str, new: dict[str, Any]) -> None:
    ((word, value),) = new.items()
    loader = ech.Loader(DATA, 4, accumulation=new.get("accumulate", 1))
    with pytest.warns(DeprecationWarning, match=rf"prepare\({older}=\.\.\.\) is now {word}=") as seen:
        made = _trained(loader, **{older: value})
    assert [w.filename for w in seen] == [__file__]
    assert torch.equal(made, _trained(ech.Loader(DATA, 4, accumulation=new.get("accumulate", 1)), **new))


def test_prepare_refuses_two_words_for_one_thing_and_unknown_words() -> None:
    with pytest.raises(UsageError, match="Give accumulate alone"):
        _trained(ech.Loader(DATA, 4), accumulate=1, gradient_accumulation_steps=2)
    with pytest.raises(UsageError, match=r"no argument .recomputes.\. Is it recompute"):
        _trained(ech.Loader(DATA, 4), recomputes="blocks")
