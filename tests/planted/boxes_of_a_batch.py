"""Detection with dropout, whose loss is a mean over the boxes of a batch: ranks with few boxes count as much as others."""

from __future__ import annotations

from right_boxes import Auto, Boxes, main


class Unweighed(Boxes):
    weight = Auto.weight


main(Unweighed)
