"""An optimizer that keeps the covariance of a rank's own rows, and turns the gradient by it."""

from typing import Any

import torch
from torch import nn

import echelon as ech


class Turned(torch.optim.Optimizer):
    def __init__(self, layer: nn.Linear, lr: float) -> None:
        super().__init__(layer.parameters(), {"lr": lr})
        self.covariance = torch.eye(layer.in_features)
        layer.register_forward_pre_hook(self.see)

    @torch.no_grad()
    def see(self, layer: nn.Module, given: tuple[torch.Tensor]) -> None:
        x = given[0].float()
        self.covariance = 0.9 * self.covariance + 0.1 * x.T @ x / len(x)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if gradient.ndim == 2:
                gradient = gradient @ torch.linalg.inv(self.covariance).to(gradient)
            parameter.sub_(gradient, alpha=self.param_groups[0]["lr"])


torch.manual_seed(7)
x = torch.randn(96, 4)
rows = torch.utils.data.TensorDataset(x, x.sin())
model: Any = nn.Linear(4, 4)
optimizer: Any = Turned(model, lr=0.05)
model, optimizer, loader = ech.prepare(model, optimizer, ech.Loader(rows, 16))
for x, y in loader:
    with ech.window(model) as window:
        window.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
