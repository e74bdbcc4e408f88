"""torchtnt.utils.swa: averages of a module's weights, for loops of your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from echelon.common.errors import UsageError
from echelon.parallel.shards import local

__all__ = ["AveragedModel"]


class AveragedModel(swa_utils.AveragedModel):
    """torch's AveragedModel with an exponential moving average by default. `AutoUnit(swa_params=...)` has its own.

    Args:
        device: where the averages are.
        use_buffers: average buffers too; else they are copied.
        averaging_method: "ema", or "swa", which weights all alike.
        ema_decay: the weight of the average against the newest weights.
        skip_deepcopy: `model` is already a copy and becomes the average, since sharded modules cannot be copied.
        use_lit: begin with a small decay, (1 + n) / (10 + n) at the n-th update. The state has the number of updates.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | None = None,
        use_buffers: bool = False,
        averaging_method: Literal["ema", "swa"] = "ema",
        ema_decay: float = 0.999,
        skip_deepcopy: bool = False,
        use_lit: bool = False,
    ) -> None:
        if averaging_method not in ("ema", "swa"):
            raise UsageError(f"Unknown averaging method: {averaging_method}. Only ema and swa are supported.")
        if use_lit and averaging_method != "ema":
            raise UsageError("LitEMA is only supported for EMA.")
        if not skip_deepcopy and any(hasattr(p, "device_mesh") for p in model.parameters()):
            raise UsageError(
                "AveragedModel: a sharded module cannot be copied. Prepare a second module of the same shape alike, and "
                "pass that with skip_deepcopy=True; the first update copies the values."
            )
        average = _Average(averaging_method, ema_decay, use_lit)
        # torch copies its argument. A placeholder costs nothing, and the module then replaces it.
        super().__init__(nn.Identity() if skip_deepcopy else model, device, multi_avg_fn=average, use_buffers=use_buffers)
        if skip_deepcopy:
            self.module = model if device is None else model.to(device)
            self.n_averaged = self.n_averaged.to(device or next((p.device for p in model.parameters()), "cpu"))


class _Average:
    """Updates the averages of this rank's shards. A class, so that the model can still be copied and pickled."""

    def __init__(self, method: str, decay: float, lit: bool) -> None:
        self._method, self._decay, self._lit = method, decay, lit

    @torch.no_grad()
    def __call__(self, averages: Sequence[Any], newest: Sequence[Any], count: torch.Tensor | int) -> None:
        if self._method == "swa" and not newest[0].is_floating_point() and not newest[0].is_complex():
            for average, new in zip(averages, newest, strict=True):  # counts, as of batches, have no mean
                average.copy_(new)
            return
        # torch's functions over many tensors do not take sharded parameters together with whole buffers.
        self._function(count)([local(each) for each in averages], [local(each) for each in newest], count)

    def _function(self, count: torch.Tensor | int) -> Any:
        if self._method == "swa":
            return get_swa_multi_avg_fn()
        decay = self._decay
        if self._lit:
            n = int(count)
            decay = min(decay, (2 + n) / (11 + n))  # this is update n + 1
        return get_ema_multi_avg_fn(decay)
