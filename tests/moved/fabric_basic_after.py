import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech

torch.manual_seed(0)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = ech.prepare(model, optimizer, loader)

for epoch in ech.epochs(loader, 3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        with ech.window(model) as window:
            loss = nn.functional.mse_loss(model(inputs), targets)
            window.backward(loss)
        optimizer.step()
print(f"loss {window.loss:.6f}")
