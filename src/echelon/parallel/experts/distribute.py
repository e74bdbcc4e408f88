"""Divide the experts of a module over ranks: each holds a part of every layer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from echelon.contracts.errors import UsageError
from echelon.parallel.experts.dispatch import Dispatch
from echelon.parallel.experts.moe import MoE
from echelon.parallel.experts.stacks import Experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["check_experts", "distribute_experts", "divided_experts", "moe_layers"]


def moe_layers(module: nn.Module) -> dict[str, MoE]:
    """By name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, MoE)}


def check_experts(module: nn.Module, ep: int, pp: int = 1) -> None:
    """Before any collective.

    Raises:
        UsageError: there are no experts, or `ep` ranks do not divide them; or stages of a pipeline would lose auxiliary losses.
    """
    layers = moe_layers(module)
    added = [name for name, layer in layers.items() if layer.router.balance == "auxiliary"]
    if added and pp > 1:
        raise UsageError(
            f"pp must be 1 for {type(module).__name__}, whose {added[0]} is an echelon.MoE with balance='auxiliary', got {pp}: "
            "only the last stage computes the loss, to which the losses of all stages' routers would be added. Use "
            "balance='loss_free', or give the ranks to ep, dp_shard or tp."
        )
    if ep == 1:
        return
    if not layers:
        foreign = [name for name, part in module.named_modules() if type(part).__name__.lower().endswith(("experts", "moeblock"))]
        hint = (
            f" {foreign[0]} is a {type(module.get_submodule(foreign[0])).__name__}, which has experts of its own: ep does not "
            "know how to divide these."
            if foreign
            else ""
        )
        raise UsageError(
            f"ep must be 1 for {type(module).__name__}, which has no echelon.MoE layer, got {ep}.{hint} Use echelon.MoE(...) for "
            "its experts, or give the ranks to dp_shard."
        )
    for name, layer in layers.items():
        count = layer.experts.num_experts
        if count % ep:
            where = f"{type(module).__name__}{name and '.'}{name}"
            raise UsageError(f"ep {ep} does not divide the {count} experts of {where}. Use an ep that divides {count}.")


def distribute_experts(module: nn.Module, ep_mesh: DeviceMesh, ep_data_mesh: DeviceMesh) -> None:
    """Let each rank of `ep_mesh` keep its part of every layer's experts, as DTensors. No communication.

    Call it when parameters are the same on all ranks, or on the meta device, before `fully_shard`: `sharding.shard` then shards
    experts over `ep_data_mesh`, and the rest over its own mesh.

    Args:
        ep_mesh: 1-D, the ranks that have all experts between them.
        ep_data_mesh: the ranks that have the same experts as this one: 1-D, or 2-D with copies of the shards. Both are parts of
            one mesh.
    Raises:
        UsageError: see `check_experts`.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    check_experts(module, ep_mesh.size())
    for layer in moe_layers(module).values():
        for part in layer.experts.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                mine = distribute_tensor(parameter.detach(), ep_mesh, [Shard(0)], src_data_rank=None)
                setattr(part, name, nn.Parameter(mine, requires_grad=parameter.requires_grad))
        layer.experts.dispatch = Dispatch(ep_mesh, ep_data_mesh)


def divided_experts(module: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Experts that `distribute_experts` has divided, by name; of a pipeline's stage, its own."""
    for name, part in module.named_modules():
        if isinstance(part, Experts) and part.dispatch is not None and any(True for _ in part.parameters()):
            yield name, part
