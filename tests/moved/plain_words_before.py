import torch
from torch import nn
from torch.utils.data import DataLoader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(17, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 17)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])


torch.manual_seed(0)
tokens = (torch.arange(96 * 9).reshape(96, 9) * 5) % 17
loader = DataLoader(tokens, batch_size=8)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(3):
    for i, batch in enumerate(loader):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        (loss / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
with torch.no_grad():
    logits = model(tokens[:, :-1])
print(f"loss {nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()):.6f}")
