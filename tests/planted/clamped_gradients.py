"""A hook clamps the gradient of each micro-batch."""

from __future__ import annotations

from common import Auto, ech, loader, model

module = model()
for parameter in module.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
ech.train(Auto(module=module, layout="ddp"), loader(), max_epochs=1)
