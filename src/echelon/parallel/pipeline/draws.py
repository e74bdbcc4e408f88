"""Random numbers in a pipeline.

`compute_loss` and the author's forward run once in each stage. What they draw outside of the units is the same in all of them:
the noise that a model is to find goes into the first stage and is the target in the last. A unit lies in one stage, where it
draws from a stream of its own, and leaves the one outside as it was: another stage, which passes the unit over, stands at the
same place behind it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from echelon.world import rng

__all__ = ["Draws"]


class Draws:
    """The streams of passes through the stages.

    Args:
        device: what the stages compute on.
    Attributes:
        samples: which samples, and which part of them, the ranks of this pipeline compute; others draw something else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.samples = self._common = 0

    def number(self) -> int:
        """What passes may begin with. Every rank draws it, so that all have drawn as often, and takes the one of a single rank:
        one rank may have drawn more than its peers, as for a picture in its log.
        """
        state = _state()
        torch.rand((), device="cpu")
        return 0 if state is None else rng.position(state)

    @contextlib.contextmanager
    def passes(self, number: int) -> Iterator[None]:
        """Context of passes, which may leave all streams in any state.

        Args:
            number: the same on all ranks.
        """
        self._common = rng.mix(number, self.samples)
        host, python, numpys = _state(), random.getstate(), np.random.get_state()
        on_gpu = torch.cuda.get_rng_state(self._device) if self._on_gpu else None
        try:
            yield
        finally:
            self._put_back(host, on_gpu)
            random.setstate(python)
            np.random.set_state(numpys)

    def begin(self, micro_batch: int) -> None:
        """Of a pass: alike in all stages."""
        seed = rng.mix(self._common, micro_batch)
        self._seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    @contextlib.contextmanager
    def of_unit(self, number: int) -> Iterator[None]:
        """Context of a unit's call. What it draws follows from the state outside, which `torch.utils.checkpoint` puts back before
        it computes again, and from the unit's number: units of equal form do not drop alike.
        """
        outside = _state()
        if outside is None:
            yield
            return
        on_gpu = torch.cuda.get_rng_state(self._device) if self._on_gpu else None
        self._seed(rng.mix(rng.position(outside), number))
        try:
            yield
        finally:
            self._put_back(outside, on_gpu)

    def _put_back(self, host: torch.Tensor | None, on_gpu: torch.Tensor | None) -> None:
        if host is not None:
            torch.default_generator.set_state(host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, self._device)

    def _seed(self, seed: int) -> None:
        # Not torch.manual_seed, which notes the stack of its caller for a GPU that is not used, a millisecond each time.
        torch.default_generator.manual_seed(seed)
        if self._on_gpu:
            torch.cuda.manual_seed(seed)


def _state() -> torch.Tensor | None:
    """None where tensors are fake, and nothing is drawn."""
    return torch.default_generator.get_state() if type(torch.empty(())) is torch.Tensor else None
