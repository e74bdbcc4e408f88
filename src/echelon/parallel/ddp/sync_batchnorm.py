"""Batch norm over the global batch, also in host memory: torch's SyncBatchNorm refuses CPUs.

With x over all ranks and n values per channel in all:  mean = sum x / n,  var = sum (x - mean)^2 / n.  Both sums are
differentiable all-reduces, one after the other, because sum x^2 - n mean^2 loses digits.

Communication of every batch norm layer: two all-reduces of one number per channel in the forward, two in the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.parallel.over_ranks import summed
from echelon.parallel.patching import class_for_now, in_front_of, replace_class
from echelon.world.agree import is_joined

__all__ = ["HostSyncBatchNorm", "on_host", "sync_batchnorm", "synchronised_in", "without_rows"]


class HostSyncBatchNorm(nn.BatchNorm1d):
    """Batch norm with the statistics of all ranks, for tensors in host memory. Ranks may have different numbers of rows.

    Not a subclass of torch's SyncBatchNorm, which DistributedDataParallel refuses on a CPU.
    """

    process_group: dist.ProcessGroup | None = None

    def _check_input_dim(self, input: torch.Tensor) -> None: ...

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training or self.running_mean is None):
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        if not is_joined() or dist.get_world_size(self.process_group) == 1:
            return super().forward(input)
        group: Any = self.process_group or dist.group.WORLD
        over = [d for d in range(input.dim()) if d != 1]  # all but the channels
        shape = [1, -1, *[1] * (input.dim() - 2)]
        given, input = input, input.to(torch.promote_types(input.dtype, torch.float32))  # bfloat16 cannot hold a count of 1,001
        count = input.new_full((1,), input.numel() // input.shape[1])
        sums = summed(torch.cat([input.sum(over), count]), group)
        n, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        if n <= 1:  # on all ranks alike
            raise ValueError(f"batch norm needs more than one value per channel over all ranks, got input {tuple(input.shape)}")
        centred = input - mean.view(shape)
        var = summed(centred.square().sum(over), group) / n
        if self.training and self.track_running_stats:
            self._count(mean.detach(), var.detach() * (n / (n - 1)))
        out: torch.Tensor = centred * torch.rsqrt(var + self.eps).view(shape)
        out = out * self.weight.view(shape) + self.bias.view(shape) if self.affine else out
        return out.to(given.dtype)

    def _count(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        """Update the running statistics; without a momentum they are the mean over all batches so far."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean), weight)
        self.running_var.lerp_(var.to(self.running_var), weight)


def sync_batchnorm(module: nn.Module, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    """Make every batch norm layer take its statistics over all ranks."""
    if device.type != "cpu":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
        return converted
    for layer in module.modules():
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            replace_class(layer, "sync_batchnorm", HostSyncBatchNorm)
            if group is not None:
                layer.process_group = group  # type: ignore[assignment]
    return module


class _StandIn(nn.Module):
    """A synchronised batch norm on a rank without samples: it joins the all-reduces with no rows, and normalizes its padding with
    the running statistics.
    """

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training or self.running_mean is None):
            usual: torch.Tensor = super().forward(input)
            return usual
        mean, var = self.running_mean, self.running_var
        if mean is None or var is None:
            mean, var = input.new_zeros(input.shape[1]), input.new_ones(input.shape[1])
        before = mean.clone(), var.clone()  # autograd saves them, and the synchronised forward updates the originals in place
        meets = is_joined() and dist.get_world_size(getattr(self, "process_group", None)) > 1
        nothing = super().forward(input[:0]) if meets else input[:0]
        own: torch.Tensor = nn.functional.batch_norm(input, *before, self.weight, self.bias, training=False, eps=self.eps)
        nothing_of_it: torch.Tensor = nothing.sum()
        return own + nothing_of_it  # so this rank joins the all-reduces of the backward pass, too


def synchronised_in(module: nn.Module) -> list[nn.Module]:
    """The module's batch norms with the statistics of all ranks."""
    return [m for m in module.modules() if isinstance(m, (nn.SyncBatchNorm, HostSyncBatchNorm))]


@contextlib.contextmanager
def without_rows(module: nn.Module) -> Iterator[None]:
    """Context of a padding pass on a rank without samples: batch norm does not count the padding.

    Synchronised layers still join their collectives. Other layers work as in an evaluation, where one row is enough.
    """
    synchronised = synchronised_in(module)
    every = (m for m in module.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)))
    own = [m for m in every if m.training and not isinstance(m, HostSyncBatchNorm)]
    try:
        for layer in own:
            layer.training = False
        with class_for_now(synchronised, lambda kind: in_front_of(kind, _StandIn)):
            yield
    finally:
        for layer in own:
            layer.training = True


def on_host(module: nn.Module) -> None:
    """Let torch's SyncBatchNorm layers, which refuse CPUs, work on a CPU: for scripts for GPUs that are tried on a laptop."""
    for layer in module.modules():
        if type(layer) is nn.SyncBatchNorm:
            replace_class(layer, "sync_batchnorm", HostSyncBatchNorm)
