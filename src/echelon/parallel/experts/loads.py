"""The loads of experts: their tokens are counted over the whole update and all ranks, used for balancing, and reported.

A layer counts in its backward pass, once for each micro-batch. So recomputed activations do not count twice, and evaluations do
not count. A micro-batch of weight 0 (padding, while other ranks have more batches) does not count either.

Communication: after each update one all-reduce per group for all layers together, of (experts + 3) float64 numbers per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import ExpertsError
from echelon.parallel.experts.moe import Added, Router
from echelon.world.agree import is_joined

__all__ = ["Routers", "auxiliary_loss", "balance_experts", "expert_loads", "routers_of"]


def auxiliary_loss(module: nn.Module) -> torch.Tensor:
    """The auxiliary loss of the latest forward pass: the sum over all layers with `balance="auxiliary"`.

    Call it once after each forward pass, in `compute_loss`: `loss + echelon.nn.auxiliary_loss(self.module)`. It is a mean over
    the micro-batch's tokens (those that a mask counts) and gets the same weight as the loss. So it is exact for any division into
    micro-batches if `weight` counts these tokens, or rows with equally many tokens. Without gradients it is 0.

    Raises:
        UsageError: no layer of the module has an auxiliary loss.
    """
    seen = [router.seen for router in routers_of(module).values() if router.balance == "auxiliary"]
    if not seen:
        raise ExpertsError(
            f"auxiliary_loss: {type(module).__name__} must have an echelon.nn.MoE with balance='auxiliary', got none. Leave it "
            "out."
        )
    made = [Added.apply(each.auxiliary, each) for each in seen if each.auxiliary is not None]  # type: ignore[no-untyped-call]
    for each in seen:
        each.auxiliary = None
    first = next(module.parameters())
    return torch.stack(made).sum() if made else torch.zeros((), device=first.device)


def expert_loads(module: nn.Module) -> dict[str, torch.Tensor]:
    """By layer, each expert's share of the choices in the latest update, over all ranks: (num_experts,).

    Even loads are 1/num_experts each. Layers without an update yet are left out.
    """
    return {
        name: (choices / choices.sum()).cpu()
        for name, router in routers_of(module).items()
        if router.seen.latest is not None and (choices := router.seen.latest[:-2]).sum() > 0
    }


def balance_experts(module: nn.Module) -> None:
    """Balance the experts of a module after an update, by the loads of all ranks. Collective over the default group, if any.

    AutoUnit and loops with `echelon.prepare` do this themselves. In a `train_step` of your own call it after `optimizer.step()`.
    """
    Routers(module, [dist.group.WORLD] if is_joined() else []).end_window(updated=True)


def routers_of(module: nn.Module) -> dict[str, Router]:
    """The routers of a module, by the name of their layer."""
    return {
        name.removesuffix(".router") if name != "router" else "": part
        for name, part in module.named_modules()
        if isinstance(part, Router)
    }


class Routers:
    """All routers of a module, as one of `Prepared.listeners`: they get the weight of each micro-batch and act after each update.

    Args:
        groups: the groups over which loads are summed: ranks with other samples, and pipeline stages with other routers.
    """

    def __init__(self, module: nn.Module, groups: Sequence[dist.ProcessGroup | None]) -> None:
        self._routers, self._groups = routers_of(module), list(groups)
        self._measures: dict[str, Any] = {}

    def begin_forward(self, weight: Any) -> None:
        for router in self._routers.values():
            router.seen.counts = weight

    def discard(self) -> None:
        for router in self._routers.values():
            router.seen.forget()

    def end_window(self, *, updated: bool) -> None:
        """Balance the experts by the update's loads. Collective if the module has routers.

        Raises:
            UsageError: on all ranks: a layer's auxiliary loss was not added to the loss.
        """
        if not updated:
            self.discard()
        elif self._routers:
            self._balance()

    @torch.no_grad()
    def _balance(self) -> None:
        rows = []
        for router in self._routers.values():
            device = router.gate.weight.device
            size = router.num_experts + 2
            counted = router.seen.counted if router.seen.counted is not None else torch.zeros(size, dtype=torch.float64)
            rows.append(torch.cat([counted, counted.new_full((1,), _lacks_loss(router))]).to(device))
        flat = torch.cat(rows)
        for group in self._groups:
            dist.all_reduce(flat, group=group)
        parts = flat.split([len(row) for row in rows])
        for (name, router), total in zip(self._routers.items(), parts, strict=True):
            if router.balance == "auxiliary" and total[-1]:
                raise ExpertsError(
                    f"{name or 'MoE'}: balance='auxiliary' must be in the loss of every rank, but on a rank no backward pass has "
                    "reached it. Return loss + echelon.nn.auxiliary_loss(self.module) from compute_loss, or use "
                    "balance='loss_free'."
                )
            router.seen.forget()
            router.seen.latest = total[:-1]
            _balance(router, total[:-3])
        self._measures = _measures([part[:-1] for part in parts])

    def measures(self) -> dict[str, Any]:
        return self._measures


def _lacks_loss(router: Router) -> bool:
    """Whether this rank's losses of the update lack the router's auxiliary loss. Other ranks' may have it: the sum tells all."""
    trained = router.gate.weight.requires_grad and router.seen.counted is not None
    return router.balance == "auxiliary" and trained and not router.seen.was_added


def _balance(router: Router, choices: torch.Tensor) -> None:
    if not any(True for _ in router.buffers(recurse=False)):
        return  # the buffers are in another pipeline stage
    if router.expert_bias is not None:
        # An update without tokens has equal counts, so the biases stay.
        router.expert_bias += router.bias_update_rate * torch.sign(choices.mean() - choices).to(router.expert_bias.dtype)
    if router.load is not None:
        total = choices.sum()
        router.load.copy_(torch.where(total > 0, choices / total.clamp(min=1), router.load.double()))


def _measures(parts: Sequence[torch.Tensor]) -> dict[str, Any]:
    uneven = [part[:-2].max() / part[:-2].mean().clamp(min=1e-300) for part in parts]
    entropies = [part[-2] / part[-1].clamp(min=1) for part in parts]
    return {"expert_load_max": torch.stack(uneven).max(), "router_entropy": torch.stack(entropies).mean()}
