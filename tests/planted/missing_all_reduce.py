"""Nothing reduces the gradients."""

from __future__ import annotations

from common import Own, ech, loader, model

ech.train(Own(model()), loader(), max_epochs=3)
