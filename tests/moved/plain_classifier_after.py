import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :3].sum(1) > 0).long()
train = DataLoader(TensorDataset(x[:448], y[:448]), batch_size=32)
held_out = DataLoader(TensorDataset(x[448:], y[448:]), batch_size=32)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, train, held_out = ech.prepare(model, optimizer, train, held_out, layout="fsdp", checkpoints="checkpoints")

for epoch in ech.epochs(train, 3):
    for inputs, labels in train:
        optimizer.zero_grad()
        with ech.window(model) as window:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            window.backward(loss)
        optimizer.step()
    right = ech.Mean()
    with ech.evaluating(model):
        for inputs, labels in held_out:
            right.update((model(inputs).argmax(1) == labels).float().mean(), len(labels))
    accuracy = right.compute()
    print(f"epoch {epoch}  accuracy {accuracy:.6f}")
