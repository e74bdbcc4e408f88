"""Batch norm, which sees a micro-batch where one process would see the whole batch."""

from __future__ import annotations

from common import Auto, ech, loader, model, nn

ech.train(Auto(module=model(nn.BatchNorm1d(8)), layout="ddp"), loader(), max_epochs=3)
