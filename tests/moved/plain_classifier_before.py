import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :3].sum(1) > 0).long()
train = DataLoader(TensorDataset(x[:448], y[:448]), batch_size=32)
held_out = DataLoader(TensorDataset(x[448:], y[448:]), batch_size=32)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(3):
    model.train()
    for inputs, labels in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, labels in held_out:
            right += (model(inputs).argmax(1) == labels).sum().item()
    accuracy = right / 64
    print(f"epoch {epoch}  accuracy {accuracy:.6f}")
