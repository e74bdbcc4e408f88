import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech

torch.manual_seed(0)
x = torch.randn(240, 8)
loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
model, optimizer, scheduler, loader = ech.prepare(model, optimizer, scheduler, loader, checkpoints="state")

for epoch in ech.epochs(loader, 3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        with ech.window(model) as window:
            loss = nn.functional.mse_loss(model(inputs), targets)
            window.backward(loss)
        optimizer.step()
    scheduler.step()
print(f"loss {window.loss:.6f}")
