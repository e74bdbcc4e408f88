"""Units over the shared model, with what they saw written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.parallel import LAYOUTS
from tests.kit.models import Batch, net

# Layouts over several ranks, each on its own share of the data.
PARALLEL = [name for name in LAYOUTS if name not in ("none", "local_sgd", "diloco")]

# In `make test` a test of one layout each has ddp, zero1 and fsdp: whole parameters, with the optimizer whole or divided, and
# shards. The others are forms of fsdp; that all train the same numbers is tests/parallel/test_equivalence.py's.
KINDS = ["ddp", "zero1", "fsdp"]
FORMS = [name for name in PARALLEL if name not in KINDS]
EACH = [pytest.param(name, marks=() if name in KINDS else pytest.mark.full) for name in PARALLEL]
# Likewise for a test of several layouts in one launch.
SEVERAL = [pytest.param(KINDS, id="kinds"), pytest.param(FORMS, id="forms", marks=pytest.mark.full)]


def under_each(names: Iterable[str], fn: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """`fn(name, *args)` for each layout, or whatever else has names: all in one launch."""
    return {name: fn(name, *args) for name in names}


class Regression(ech.AutoUnit[Batch]):
    """Least squares with SGD; remembers the norm of each update. Takes what is in UnitOptions beside the rest.

    Args:
        optimizer: its name in torch, or what makes it of the module.
        loss: of the module and a batch, in the place of least squares; it may give outputs as well.
    """

    def __init__(
        self,
        *,
        lr: float = 0.1,
        optimizer: str | Callable[[Any], Any] = "SGD",
        schedule: Any = None,
        loss: Any = None,
        **options: Any,
    ) -> None:
        options.setdefault("module", net())
        nested: dict[str, Any] = {"device": torch.device("cpu")}
        nested |= {field.name: options.pop(field.name) for field in dataclasses.fields(ech.UnitOptions) if field.name in options}
        given = options.get("options") or ech.UnitOptions()
        options["options"] = dataclasses.replace(given, **nested) if isinstance(given, ech.UnitOptions) else given
        super().__init__(**options)
        self.lr, self.kind, self.schedule, self.own_loss = lr, optimizer, schedule, loss
        self.norms: list[float] = []
        self.steps: list[int] = []

    def compute_loss(self, state: ech.State, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if self.own_loss is not None:
            made = self.own_loss(self.module, data)
            return made if isinstance(made, tuple) else (made, None)
        x, y = data
        out = self.module(x)
        return nn.functional.mse_loss(out.to(y.dtype), y), out  # torch 2.11 has no gradient of two types

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        if callable(self.kind):
            optimizer = self.kind(module)
        else:
            kind = getattr(torch.optim, self.kind)
            optimizer = kind(module.parameters(), lr=self.lr, **({"momentum": 0.9} if self.kind == "SGD" else {}))
        return optimizer, (self.schedule(optimizer) if self.schedule else None)

    def on_train_step_end(self, state: ech.State, data: Batch, step: int, results: ech.units.TrainStepResults) -> None:
        self.steps.append(step)
        if results.total_grad_norm is not None:
            self.norms.append(float(results.total_grad_norm))


class Masked(Regression):
    """A mean over chosen rows, which is 0/0, with an infinite derivative, where there are none; they are what it weighs."""

    def compute_loss(self, state: ech.State, data: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, chosen = data
        errors = (self.module(x) - y).square().mean(1)
        return (errors * chosen).sum() / chosen.sum(), errors

    def weight(self, data: Any) -> float | torch.Tensor:
        return data[2].sum()


class Own(ech.TrainUnit[Any]):
    """A step of the user's own, least squares with SGD; remembers the first number of each row that it was given."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, closure: bool = False) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        self.closure = closure
        self.seen: list[float] = []

    def train_step(self, state: ech.State, data: Batch) -> None:
        self.seen += data[0][:, 0].tolist()
        if self.closure:
            self.optimizer.step(lambda: self._computed(data))
        else:
            self._computed(data)
            self.optimizer.step()

    def _computed(self, data: Batch) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.module(data[0]), data[1])
        loss.backward()
        return loss


class Hooks(ech.Callback):
    """A callback of functions, by the hooks' names."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        vars(self).update(hooks)


class Numbers(ech.TrainUnit[Any], ech.EvalUnit[Any], ech.PredictUnit[Any], ech.units.TestUnit[Any]):
    """Its batches are numbers; each step writes its number down, and sets it as `value`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.value: Any = None

    def train_step(self, state: ech.State, data: Any) -> Any:
        self.seen.append(data)
        self.value = data
        return data

    eval_step = predict_step = test_step = train_step
