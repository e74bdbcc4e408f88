import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first = 0
if os.path.isdir("state"):
    accelerator.load_state("state")
    first = torch.load("epoch.pt")["epoch"] + 1

for epoch in range(first, 3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.save_state("state")
    if accelerator.is_main_process:
        torch.save({"epoch": epoch}, "epoch.pt")
accelerator.print(f"loss {loss.item():.6f}")
