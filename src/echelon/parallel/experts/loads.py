"""How many tokens each expert has: counted over the whole update and all ranks, then used to balance them, and shown.

A layer counts in its backward pass, once for each micro-batch, so that nothing counts twice when activations are computed
again, and evaluations do not count. A micro-batch of weight 0 (padding, where other ranks have more batches) does not, either.

Communication: one all-reduce after each update of (experts + 3) float64 numbers a layer, for all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import ExpertsError, UsageError
from echelon.parallel.experts.moe import Added, Router
from echelon.world.agree import is_joined

__all__ = ["Routers", "auxiliary_loss", "balance_experts", "expert_loads", "routers_of"]


def auxiliary_loss(module: nn.Module) -> torch.Tensor:
    """What layers with `balance="auxiliary"` add to the loss of the forward pass that was just made: a sum over the layers.

    Call it once after each forward pass, in `compute_loss`: `loss + echelon.nn.auxiliary_loss(self.module)`. It is a mean over
    the micro-batch's tokens (those that a mask counts) and is weighted as the loss is: exact for any division into micro-batches
    where `weight` counts these tokens, or rows of as many tokens each. Without gradients it is 0.

    Raises:
        UsageError: no layer of the module has one.
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
    """Each layer's share of choices by expert, (num_experts,), in the latest update over all ranks; by the layer's name.

    Even loads are 1/num_experts each. A layer that has made no update yet is left out.
    """
    return {
        name: (choices / choices.sum()).cpu()
        for name, router in routers_of(module).items()
        if router.seen.latest is not None and (choices := router.seen.latest[:-2]).sum() > 0
    }


def balance_experts(module: nn.Module) -> None:
    """Balance the experts of a module after an update, by its loads over all ranks. Collective over the default group, if any.

    AutoUnit and loops with `echelon.prepare` do so by themselves. Call it after `optimizer.step()` in a `train_step` of your own.
    """
    Routers(module, [dist.group.WORLD] if is_joined() else []).end_window(updated=True)


def routers_of(module: nn.Module) -> dict[str, Router]:
    """By the name of their layer."""
    return {
        name.removesuffix(".router") if name != "router" else "": part
        for name, part in module.named_modules()
        if isinstance(part, Router)
    }


class Routers:
    """All routers of a module, as one of `Prepared.listeners`: they are told what counts, and act after each update.

    Args:
        groups: the axes of ranks with other samples, and of stages with other routers.
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
        """Balance the experts by the update's loads. Collective, if there are any.

        Raises:
            UsageError: on all ranks: a layer's auxiliary loss is in no loss.
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
                raise _not_added(name)
            router.seen.forget()
            router.seen.latest = total[:-1]
            _balance(router, total[:-3])
        self._measures = _measures([part[:-1] for part in parts])

    def measures(self) -> dict[str, Any]:
        return self._measures


def _lacks_loss(router: Router) -> bool:
    """Whether this rank's losses of the update do not have the router's. Others' may: all are told."""
    trained = router.gate.weight.requires_grad and router.seen.counted is not None
    return router.balance == "auxiliary" and trained and not router.seen.was_added


def _not_added(name: str) -> UsageError:
    return ExpertsError(
        f"{name or 'MoE'}: balance='auxiliary' must be in the loss of every rank, and no backward pass of one has reached it. "
        "Return loss + echelon.nn.auxiliary_loss(self.module) from compute_loss, or take balance='loss_free'."
    )


def _balance(router: Router, choices: torch.Tensor) -> None:
    if not any(True for _ in router.buffers(recurse=False)):
        return  # another stage has them
    if router.expert_bias is not None:
        # An update without tokens has even loads, and moves nothing.
        router.expert_bias += router.bias_update_rate * torch.sign(choices.mean() - choices).to(router.expert_bias.dtype)
    if router.load is not None:
        total = choices.sum()
        router.load.copy_(torch.where(total > 0, choices / total.clamp(min=1), router.load.double()))


def _measures(parts: Sequence[torch.Tensor]) -> dict[str, Any]:
    uneven = [part[:-2].max() / part[:-2].mean().clamp(min=1e-300) for part in parts]
    entropies = [part[-2] / part[-1].clamp(min=1) for part in parts]
    return {"expert_load_max": torch.stack(uneven).max(), "router_entropy": torch.stack(entropies).mean()}
