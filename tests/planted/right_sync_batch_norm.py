"""Batch norm over the global batch, beside dropout."""

from __future__ import annotations

from common import Auto, ech, loader, model, nn

layout = ech.DDPStrategy(sync_batchnorm=True)
ech.train(Auto(module=model(nn.BatchNorm1d(8), nn.Dropout(0.1)), layout=layout), loader(), max_epochs=3)
