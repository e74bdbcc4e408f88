import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
fabric.launch()
torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
if os.path.exists("state.ckpt"):
    fabric.load("state.ckpt", state)

for epoch in range(state["epoch"], 3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
    scheduler.step()
    state["epoch"] = epoch + 1
    fabric.save("state.ckpt", state)
fabric.print(f"loss {loss.item():.6f}")
