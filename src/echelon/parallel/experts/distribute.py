"""Divide the experts of a module over ranks: each rank holds a part of every layer's experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from echelon.common.errors import ExpertsError
from echelon.parallel.experts.foreign import DividedForward, check_foreign, foreign_experts, num_experts
from echelon.parallel.experts.moe import MoE
from echelon.parallel.experts.stacks import Dispatch, Experts
from echelon.parallel.patching import replace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "check_experts",
    "count",
    "distribute_experts",
    "divided_experts",
    "divided_parameters",
    "moe_layers",
    "stacked_experts",
]


def moe_layers(module: nn.Module) -> dict[str, MoE]:
    """The `MoE` layers of a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, MoE)}


def stacked_experts(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold experts, by name: `experts` of each `echelon.nn.MoE`, by the layer's name, and foreign ones."""
    own: dict[str, nn.Module] = {name: layer.experts for name, layer in moe_layers(module).items()}
    return own | foreign_experts(module)


def count(experts: nn.Module) -> int:
    """The number of experts of one of `stacked_experts`, on all ranks together."""
    return experts.num_experts if isinstance(experts, Experts) else num_experts(experts)


def check_experts(module: nn.Module, ep: int, pp: int = 1) -> None:
    """Check before any collective that experts can be divided over `ep` ranks.

    Raises:
        UsageError: there are no experts, `ep` does not divide their number, or pipeline stages would lose auxiliary losses.
    """
    layers = moe_layers(module)
    added = [name for name, layer in layers.items() if layer.router.balance == "auxiliary"]
    if added and pp > 1:
        raise ExpertsError(
            f"pp must be 1 for {type(module).__name__}, whose {added[0]} is an echelon.nn.MoE with balance='auxiliary', got "
            f"{pp}: only the last stage computes the loss, to which the losses of all stages' routers would be added. Use "
            "balance='loss_free', or give the ranks to ep, dp_shard or tp."
        )
    if ep == 1:
        return
    experts = stacked_experts(module)
    if not experts:
        raise ExpertsError(
            f"ep must be 1 for {type(module).__name__}, which has no layer of experts that ep can divide, got {ep}. Use "
            "echelon.nn.MoE(...) for its experts, or give the ranks to dp_shard. Experts of other authors must have parameters "
            "that are stacks, with one entry for each expert in the first dim, and a forward(tokens, experts, weights)."
        )
    for name, part in experts.items():
        if (number := count(part)) % ep:
            where = f"{type(module).__name__}{name and '.'}{name}"
            raise ExpertsError(f"ep {ep} does not divide the {number} experts of {where}. Use an ep that divides {number}.")
    tried: dict[Any, str | None] = {}
    for name, part in foreign_experts(module).items():
        if hasattr(holder := module.get_submodule(name.rpartition(".")[0]), "parameter_name") and hasattr(holder, "lora_A"):
            raise ExpertsError(
                f"ep must be 1 for {type(module).__name__}, whose {name} has adapters of PEFT on its parameters "
                "(target_parameters), which belong to all experts and cannot be divided with them. Give the ranks to dp_shard, "
                "or train the experts without adapters."
            )
        kind = (type(part), tuple((n, tuple(p.shape)) for n, p in part.named_parameters()), "forward" in vars(part))
        if kind not in tried:
            tried[kind] = check_foreign(part)
        if (problem := tried[kind]) is not None:
            raise ExpertsError(
                f"ep must be 1 for {type(module).__name__}, whose {name}, a {type(part).__name__}, cannot be divided: {problem}. "
                "Use echelon.nn.MoE(...) for its experts, or give the ranks to dp_shard."
            )


def distribute_experts(module: nn.Module, ep_mesh: DeviceMesh, ep_data_mesh: DeviceMesh) -> None:
    """Divide every layer's experts over `ep_mesh`, as DTensors. No communication.

    Parameters must be the same on all ranks, or on the meta device. Call it after `check_experts` and before
    `FSDPStrategy.shard`, which then shards experts over `ep_data_mesh`, and the rest over its own mesh.

    Args:
        ep_mesh: 1-D, the ranks over which the experts are divided.
        ep_data_mesh: the ranks that have the same experts as this one: 1-D, or 2-D with replicas of the shards. Both are parts
            of one mesh.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    for experts in stacked_experts(module).values():
        vars(experts)["dispatch"] = dispatch = Dispatch(ep_mesh, ep_data_mesh)
        if not isinstance(experts, Experts):
            replace(experts, "forward", "experts", DividedForward(experts, dispatch))
        for part in experts.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                own_part = distribute_tensor(parameter.detach(), ep_mesh, [Shard(0)], src_data_rank=None)
                setattr(part, name, nn.Parameter(own_part, requires_grad=parameter.requires_grad))


def divided_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module, Dispatch]]:
    """The experts that `distribute_experts` has divided: name, module and ranks. In a pipeline only those of own stages."""
    for name, part in module.named_modules():
        dispatch = vars(part).get("dispatch")
        if isinstance(dispatch, Dispatch) and any(True for _ in part.parameters()):
            yield name, part, dispatch


def divided_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of the divided experts, which differ by rank."""
    return {parameter for _, experts, _ in divided_experts(module) for parameter in experts.parameters()}
