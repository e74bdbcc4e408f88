"""Plain batch norm beside dropout."""

from __future__ import annotations

from common import Auto, ech, loader, model, nn

ech.train(Auto(module=model(nn.BatchNorm1d(8), nn.Dropout(0.1)), layout="ddp"), loader(), max_epochs=3)
