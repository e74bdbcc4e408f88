"""Every rank reads as if it were the first."""

from __future__ import annotations

from common import Auto, ech, loader, model

ech.train(Auto(module=model(), layout="ddp"), loader(options=ech.data.LoaderOptions(dp=(0, 1))), max_epochs=3)
