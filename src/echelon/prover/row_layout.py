"""The layout of a row, in place of the one that the script gives."""

from __future__ import annotations

from typing import Any

import torch

from echelon.common.errors import ProveError
from echelon.parallel.composed import Layout
from echelon.parallel.fsdp.fsdp import FSDPStrategy
from echelon.parallel.layouts import LAYOUTS, in_words, resolve, with_options_of
from echelon.parallel.strategy import NOOPStrategy, Prepared, Strategy
from echelon.prover.matrix import Row
from echelon.prover.values import widen
from echelon.world.init import rank_info

__all__ = ["RowLayout"]


class RowLayout(Strategy):
    """The layout of a row, which for the row `yours` is the script's. It tells afterwards whether it was used: a module that a
    script wrapped by hand stays as it is.

    Attributes:
        own: the name of the script's.
        own_row: of the row that has the same layout, since a row keeps the script's options.
        is_own: it is the script's, with all its options.
    """

    def __init__(self, row: Row, dtype: torch.dtype) -> None:
        self._row, self._given = row, resolve(row.layout)
        self._layout: Strategy = self._given or NOOPStrategy()
        self.name, self.own, self.own_row = self._layout.name, "", ""
        self.used, self.is_own, self._dtype = False, True, dtype
        self._names_one = False

    def __call__(self, own: Strategy | None) -> Strategy:
        """In place of the script's own layout."""
        own = own or NOOPStrategy()
        self._names_one |= not isinstance(own, NOOPStrategy)
        # Mixed precision is left out: of layouts that are compared, only the script's own has it.
        mine = own.but(mixed_precision=None) if isinstance(own, FSDPStrategy) else own
        self._layout = self._given or (mine if self._dtype is torch.float64 else own)
        if isinstance(self._row.layout, str):
            self._layout = with_options_of(mine, self._layout)
        self.name, self.own = self._layout.name, in_words(own)
        self.own_row = _row_of(own, mine) or self.own
        self.is_own = self.is_own and self._layout == mine
        return self

    def check(self) -> None:
        """When training begins: a Trainer has given its layout to a unit that was made without one.

        Raises:
            UsageError: the script's own has none, on several ranks.
        """
        if self._given is None and self.used and not self._names_one and rank_info().world_size > 1:
            raise ProveError("the script names no layout: it is for one process.")

    def prepare(self, module: Any, world: Any, recipe: Any) -> Prepared[Any]:
        self.used = True
        if self._dtype is torch.float64:
            widen(module)  # which may be in half precision
        return self._layout.prepare(module, world, recipe)


def _row_of(own: Strategy, mine: Strategy) -> str | None:
    """The name of a layout that becomes the script's with its options; of one with mixed precision there is none."""
    if isinstance(own, Layout):
        return own.text
    return next((word for word in LAYOUTS if with_options_of(mine, LAYOUTS[word]()) == own), None)
