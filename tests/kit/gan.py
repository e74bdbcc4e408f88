"""A generator and a critic with an optimizer each, for the tests of several optimizers, and the reference: plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from tests.kit.models import largest_difference, whole

SAMPLES = 25  # the last batch is short, and the ranks share it unevenly
CLIP = 0.05

Tensors = dict[str, torch.Tensor]
Pair = tuple[torch.Tensor, torch.Tensor]


def mlp(inputs: int, outputs: int, seed: int | None = None) -> nn.Sequential:
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def networks() -> Any:
    torch.manual_seed(0)
    return nn.ModuleDict({"generator": mlp(4, 2), "critic": mlp(2, 1)})


def optimizers(module: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "critic": torch.optim.SGD(module["critic"].parameters(), 0.1, momentum=0.9),
        "generator": torch.optim.Adam(module["generator"].parameters(), 1e-2),
    }


def scheduled(module: Any) -> dict[str, tuple[torch.optim.Optimizer, StepLR]]:
    return {name: (each, StepLR(each, 2, gamma=0.5)) for name, each in optimizers(module).items()}


def dataset(samples: int = SAMPLES) -> TensorDataset:
    """What is real, and noise."""
    numbers = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(samples, width, generator=numbers, dtype=torch.float64) for width in (2, 4)))


def batches(size: int = 8, epochs: int = 1) -> list[Pair]:
    return [*zip(*(tensor.split(size) for tensor in dataset().tensors), strict=True)] * epochs


def losses(module: Mapping[str, Any] | Any, batch: Pair) -> Iterator[tuple[str, torch.Tensor]]:
    """By optimizer; the generator's is computed when the critic has stepped."""
    (real, noise), critic = batch, module["critic"]
    made = module["generator"](noise)
    yield "critic", (softplus(-critic(real)) + softplus(critic(made.detach()))).mean()
    yield "generator", softplus(-critic(made)).mean()


def weights(module: Any) -> Tensors:
    """By the names of plain PyTorch."""
    return {f"{name}.{inner}": value for name in module for inner, value in whole(module[name]).items()}


def plainly(
    given: Iterable[Pair] | None = None, *, every: int = 1, after: Callable[[Any], object] = lambda module: None
) -> tuple[Tensors, list[float]]:
    """The weights, and the critic's losses; the generator steps in every so many updates."""
    module, of_critic = networks(), []
    made = scheduled(module)
    for update, batch in enumerate(batches() if given is None else given):
        for name, loss in losses(module, batch):
            if name == "critic":
                of_critic.append(float(loss.detach()))
            elif update % every:
                break
            optimizer, schedule = made[name]
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module[name].parameters(), CLIP)
            optimizer.step()
            schedule.step()
        after(module)
    return weights(module), of_critic


def plainly_accumulated(of_ranks: list[list[list[Pair]]], *, schedules: bool) -> Tensors:
    """Of each rank's micro-batches by update: the critic's gradient is that of the whole batch; the generator's meets the
    critic of before its step in all micro-batches but the last."""
    module = networks()
    made = scheduled(module)
    for update in zip(*of_ranks, strict=True):
        micro_batches = [tuple(map(torch.cat, zip(*same, strict=True))) for same in zip(*update, strict=True)]
        assert len(micro_batches) == 3
        total = sum(len(real) for real, _ in micro_batches)
        sums: dict[str, dict[Any, torch.Tensor]] = {name: {} for name in made}
        for micro_batch in micro_batches:
            for name, loss in losses(module, micro_batch):  # type: ignore[arg-type]
                of = list(module[name].parameters())
                for p, g in zip(of, torch.autograd.grad(loss, of), strict=True):
                    sums[name][p] = sums[name].get(p, 0) + g * (len(micro_batch[0]) / total)
                if micro_batch is micro_batches[-1]:
                    for p, g in sums[name].items():
                        p.grad = g
                    made[name][0].step()
                    if schedules:
                        made[name][1].step()
    return weights(module)


def temperature_losses(policy: nn.Module, log_alpha: torch.Tensor, batch: Pair) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a policy and the logarithm of its temperature, as of soft actor-critic."""
    error = (policy(batch[1]) - batch[0]).square().mean(1)
    yield "policy", (log_alpha.exp().detach() * error).mean()
    yield "alpha", (log_alpha * (error.detach() - 1)).mean()


def plain_temperature(epochs: int) -> tuple[Tensors, float]:
    policy, log_alpha = mlp(4, 2, seed=0), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    made = [torch.optim.SGD(policy.parameters(), 0.1), torch.optim.Adam([log_alpha], 0.1)]
    for batch in batches(epochs=epochs):
        for _, loss in temperature_losses(policy, log_alpha, batch):
            loss.backward()
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    return whole(policy), float(log_alpha.detach())


def assert_same(found: Iterable[Tensors], want: Tensors) -> None:
    for got in found:
        assert largest_difference(got, want) < 1e-12
