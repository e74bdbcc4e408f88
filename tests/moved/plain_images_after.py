import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon as ech

torch.manual_seed(0)
images = torch.randn(256, 1, 8, 8)
labels = (images.mean((1, 2, 3)) > 0).long()
loader = DataLoader(TensorDataset(images, labels), batch_size=24)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
model, optimizer, scheduler, loader = ech.prepare(model, optimizer, scheduler, loader, checkpoints="checkpoints")

for epoch in ech.epochs(loader, 4):
    mean = ech.Mean()
    for x, y in loader:
        with ech.window(model) as window:
            loss = nn.functional.cross_entropy(model(x), y)
            window.backward(loss)
            window.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean.update(loss, len(x))
    scheduler.step()
    print(f"epoch {epoch}  loss {mean.compute():.6f}")
