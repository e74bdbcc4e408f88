"""All-reduce by hand."""

from __future__ import annotations

from common import Averaging, ech, loader, model

ech.train(Averaging(model()), loader(), max_epochs=3)
