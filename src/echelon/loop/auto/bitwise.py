"""Bit-equal training on any number of ranks: the loop's side of `parallel/gradients/fixed_order`.

Besides the order of sums, four things must not depend on the number of ranks: the size of a micro-batch (kernels add in an
order that depends on shapes), the number of threads, the random numbers of a sample, and the factor that undoes weights.
"""

from __future__ import annotations

from typing import Any

import torch

from echelon.common.errors import LoopError
from echelon.parallel.gradients.fixed_order import GradientTree, is_power_of_two
from echelon.parallel.strategy import Prepared
from echelon.world import agree, rng
from echelon.world.device import same_kernels

__all__ = ["BitEqual"]


class BitEqual:
    """Splits every global batch into `parts`, whatever the number of ranks, and adds their gradients in one order.

    Args:
        parts: a power of two divisible by the number of data-parallel ranks.
        prepared: from now on it reduces after every micro-batch, in the fixed order.
    Raises:
        UsageError: the parts cannot be divided by the ranks, or the layout has no fixed order.
    """

    def __init__(self, parts: int, prepared: Prepared[torch.nn.Module]) -> None:
        if not is_power_of_two(parts) or parts % prepared.data.size:
            raise LoopError(
                f"--parts must be a power of two divisible by the number of ranks ({prepared.data.size}), got {parts}. "
                f"Use 1, 2, 4, ... ranks, up to {parts}, or more parts: --parts N."
            )
        prepared.fix_order()
        same_kernels(parts)
        self.parts, self.accumulation = parts, parts // prepared.data.size
        self._prepared = prepared
        self._parameters = [p for p in prepared.module.parameters() if p.requires_grad]
        self._tree = GradientTree()
        self._seed: int | None = None
        self._others = ""  # digest of the RNG states of numpy and Python

    def begin(self, update: int, index: int) -> None:
        """Set the random numbers of a part, before micro-batch `index` of an update."""
        if self._seed is None:
            self._seed = torch.initial_seed()  # the script has seeded all ranks
        self._others = self._others or agree.from_rank0(rng.digest)
        part = update * self.parts + index * self._prepared.data.size + self._prepared.data.rank
        rng.at(self._seed, self._others, part)

    def add(self, *, last: bool) -> None:
        """Add a micro-batch's gradients to the sum, after its backward pass. With the `last`, the sum becomes the gradients."""
        self._tree.add(self._parameters, last=last)

    def discard(self) -> None:
        """Forget an unfinished window."""
        self._tree.clear()

    def state_dict(self) -> dict[str, Any]:
        """The seeds at the beginning; the RNG states have moved on since."""
        return {"seed": self._seed, "others": self._others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seed, self._others = state["seed"], state.get("others", "")
