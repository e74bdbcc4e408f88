import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16)
held_out = DataLoader(TensorDataset(x, y), batch_size=32)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)

for epoch in range(3):
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = total = 0
    for inputs, labels in held_out:
        with torch.no_grad():
            predicted = model(inputs).argmax(1)
        predicted, labels = accelerator.gather_for_metrics((predicted, labels))
        right, total = right + (predicted == labels).sum().item(), total + len(labels)
    accelerator.print(f"epoch {epoch}  accuracy {right / total:.6f}")
