"""Each rank standardises the rows that it read by itself, and has the others as they were."""

from __future__ import annotations

from common import Auto, Rows, dist, ech, model

rows, rank = Rows(), dist.get_rank() if dist.is_initialized() else 0
mine = rows.x[rank::2]
rows.x[rank::2] = (mine - mine.mean(0)) / mine.std(0)
ech.train(Auto(module=model(), layout="ddp"), ech.Loader(rows, 16), max_epochs=3)
