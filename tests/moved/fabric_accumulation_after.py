import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech

torch.manual_seed(0)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = ech.prepare(model, optimizer, loader, accumulate=4)

for epoch in ech.epochs(loader, 3):
    for inputs, labels in loader:
        with ech.window(model) as window:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            window.backward(loss)
            window.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
with ech.evaluating(model):
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
print(f"loss {loss.item():.6f}")
