import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech

torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16)
held_out = DataLoader(TensorDataset(x, y), batch_size=32)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader, held_out = ech.prepare(model, optimizer, loader, held_out, accumulate=2)

for epoch in ech.epochs(loader, 3):
    for inputs, labels in loader:
        with ech.window(model) as window:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            window.backward(loss)
            window.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    right = ech.Mean()
    for inputs, labels in held_out:
        with ech.evaluating(model):
            predicted = model(inputs).argmax(1)
        right.update((predicted == labels).float().mean(), len(labels))
    print(f"epoch {epoch}  accuracy {right.compute():.6f}")
