"""Units around models of transformers, built on the meta device or not, and what differs between two models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import echelon as ech


class Tuning(ech.AutoUnit[Any]):
    """The model's own loss, over the parameters that are not frozen."""

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, Any]:
        outputs = self.module(**data)
        return outputs.loss, outputs

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1), None


def made(kind: str, seed: int = 0) -> Any:
    """One of tests/kit/hf_models.py."""
    from tests.kit.hf_models import KINDS

    torch.manual_seed(seed)
    return KINDS[kind]()


def on_meta(make: Callable[[], nn.Module], layout: Any, unit: type[ech.AutoUnit[Any]] = Tuning) -> Any:
    """A unit around a model without values; those that it would draw are others than in the files."""
    torch.manual_seed(7)
    with ech.on_meta():
        module = make()
    return unit(module=module, layout=layout)


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    return [n for n, t in want.items() if got[n].dtype != t.dtype or not torch.equal(got[n], t)]
