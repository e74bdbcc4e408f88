import torch
from torch import nn
from torch.utils.data import DataLoader

import echelon as ech


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
model, optimizer, loader = ech.prepare(model, optimizer, loader, accumulate=4)

for epoch in ech.epochs(loader, 3):
    for batch in loader:
        with ech.window(model) as window:
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            window.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
with ech.evaluating(model):
    logits = model(tokens[:, :-1])
print(f"loss {nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()):.6f}")
