"""torchtnt.utils.optimizer: an optimizer's learning rates, and its state before its first step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from echelon.common.errors import UsageError
from echelon.loop.callbacks.learning_rate import learning_rates
from echelon.parallel.state.partition import Partition

__all__ = ["extract_lr_from_optimizer", "init_optim_state", "make_state"]


class GradientsError(UsageError, RuntimeError):
    """There are gradients where there should be none."""


def extract_lr_from_optimizer(optim: Optimizer, prefix: str) -> dict[str, float]:
    """The rate of each parameter group, as "<prefix>/<the group's name, or pg>:<its number among those of this name>"."""
    return learning_rates(optim, prefix)


def init_optim_state(optimizer: Optimizer) -> None:
    """Let an optimizer that has no state yet make the tensors of it, so that a checkpoint can be read into them in place.

    It takes a step with gradients of zero, after which parameters, gradients, options and step counts are as they were. What it
    averages is zero, since it saw neither gradients nor weight decay. echelon's own checkpoints need none of this.

    Raises:
        GradientsError, a RuntimeError: a parameter has a gradient.
    """
    if not optimizer.state and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise GradientsError(
            "Initializing the optimizer states requires that no existing gradients for parameters are found. Call "
            "optimizer.zero_grad() first."
        )
    make_state(optimizer)


def make_state(optimizer: Optimizer) -> None:
    """As `init_optim_state`; gradients that are there stay."""
    partition = Partition.of(optimizer)
    with partition.alone() if partition is not None else nullcontext():
        _make_state(Partition.behind(optimizer))


def _make_state(optimizer: Optimizer) -> None:
    if optimizer.state:
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    before = [(p, p.grad, p.detach().clone()) for p in trained]
    decays = [group.get("weight_decay") for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0  # it would be averaged along
        for p in trained:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:
        with torch.no_grad():
            for p, gradient, values in before:
                p.copy_(values)
                p.grad = gradient
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            if "weight_decay" in group:
                group["weight_decay"] = decay
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = _zero(state["step"])


def _zero(step: Any) -> Any:
    return torch.zeros_like(step) if isinstance(step, torch.Tensor) else 0
