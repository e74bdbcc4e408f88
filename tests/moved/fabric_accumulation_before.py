import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
torch.manual_seed(0)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)

for epoch in range(3):
    for i, (inputs, labels) in enumerate(loader, 1):
        is_accumulating = i % 4 != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss / 4)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
model.eval()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
fabric.print(f"loss {loss.item():.6f}")
