"""Tensor parallelism: single layers are split over ranks that work on the same samples.

Communication: within the tensor-parallel ranks, an all-reduce of activations after every "rowwise" layer, and of its
gradient before every "colwise" one; over the data-parallel ranks what `fully_shard` does. All parameters, those that tensor
parallelism leaves whole, too, are under `fully_shard`, if need be over groups of one rank: so that state, optimizers and
clipping meet one kind of parameter. DistributedDataParallel would lose the split ones from the state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.contracts.errors import UsageError, require
from echelon.contracts.numbers import whole
from echelon.parallel.fsdp import FSDPStrategy
from echelon.parallel.fsdp2 import FSDP2Strategy
from echelon.parallel.materialize import remember
from echelon.parallel.names import matching, tied_names
from echelon.parallel.prepared import Prepared
from echelon.parallel.recipe import Recipe
from echelon.parallel.strategy import Strategy
from echelon.world.init import World, ensure_group
from echelon.world.mesh import ParallelDims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["TPStrategy", "check_tensor", "equalize", "split_layers"]

# What may be written in a plan: how a layer's weight is split. The others are Hugging Face's names for the same.
STYLES = ("colwise", "rowwise", "colwise_gather")
_ALIASES = {"colwise_rep": "colwise_gather", "colwise_gather_output": "colwise_gather", "embedding_rowwise": "rowwise"}

_HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")


@dataclass(frozen=True)
class TPStrategy(Strategy):
    """Split single layers over `size` neighbouring ranks, and the data over the groups of them.

    Args:
        plan: submodule names, `*` for any part of a name between dots, to how each is split: "colwise" (its outputs; what
            follows works on this rank's part of the features), "rowwise" (its inputs, after a colwise layer; the results are
            summed up), "colwise_gather" (its outputs, put together again), or a ParallelStyle of torch. An nn.Embedding is
            split by rows with "rowwise". By default the module's own `tp_plan`, an attribute or a method.
        size: ranks that share each layer; by default all.
        dp_replicate: copies of the shards over the data-parallel ranks, as HSDPStrategy has; by default one.
        fsdp: how the data-parallel ranks share the parameters: blocks, mixed precision, offload.

    A module must not count on whole layers: attention says `view(b, t, -1, head_size)`, with -1 for its heads, and a fused
    projection has the heads as its outermost dimension.
    """

    name = "tp"

    plan: Mapping[str, str | ParallelStyle] | None = None
    size: int | None = None
    dp_replicate: int = 1
    fsdp: FSDPStrategy | FSDP2Strategy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_plan = isinstance(self.plan, Mapping) and all(isinstance(name, str) for name in self.plan)
        require(self.plan is None or is_plan, "plan", "a dict from names of layers to styles, or None", self.plan)
        require(isinstance(self.fsdp, FSDPStrategy | FSDP2Strategy | None), "fsdp", "FSDPStrategy(...) or None", self.fsdp)
        object.__setattr__(self, "dp_replicate", whole("dp_replicate", self.dp_replicate, at_least=1))
        if self.size is not None:
            object.__setattr__(self, "size", whole("size", self.size, at_least=1))

    def prepare(self, module: nn.Module, world: World, recipe: Recipe) -> Prepared[Any]:
        # Phase 1: everything that can be wrong, before the first collective.
        dims = ParallelDims.of(world.size, dp_replicate=self.dp_replicate, tp=self.size if self.size is not None else world.size)
        given = ("device_mesh", "process_group", "mesh")
        if any(getattr(self.fsdp, name, None) is not None for name in given):
            raise UsageError(
                "fsdp must have no mesh and no group of its own in TPStrategy: size and dp_replicate choose the ranks."
            )
        chosen = check_tensor(module, self.plan, dims.tp)
        # Phase 2: the same values on all ranks, then each takes its part of the layers: no communication.
        ensure_group(world.device)
        remember(module)
        equalize(module, world, from_rank0=self.fsdp is None or self.fsdp.sync_module_states)
        if dims.tp > 1:
            split_layers(module, chosen, dims.tp_mesh(world.device))
        # Phase 3: the data-parallel axes.
        fsdp = self.fsdp or FSDPStrategy()
        mesh: dict[str, Any] = {"mesh" if isinstance(fsdp, FSDP2Strategy) else "device_mesh": dims.data_mesh(world.device)}
        return replace(fsdp, sync_module_states=False, **mesh).prepare(module, world, recipe)


def check_tensor(module: nn.Module, plan: Mapping[str, Any] | None, size: int) -> dict[str, Any]:
    """How each layer is split, by its name. No collective.

    Args:
        plan: as in TPStrategy.
        size: ranks that share each layer.
    Raises:
        UsageError: there is no plan, or it does not fit.
    """
    chosen = _chosen(module, _plan_of(module, plan))
    _check(module, chosen, size)
    if size > 1:
        _refuse_scalars(module)
    return chosen


def split_layers(module: nn.Module, chosen: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Each rank of the mesh keeps its part of the layers, whose values are the same on all. No communication."""
    from torch.distributed.tensor.parallel import parallelize_module

    tied = tied_names(module.named_parameters(remove_duplicate=False))
    styles = {name: _style(module.get_submodule(name), style) for name, style in chosen.items()}
    parallelize_module(module, mesh, styles, src_data_rank=None)
    _tie(module, tied)


def _plan_of(module: nn.Module, plan: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if plan is None:
        own = getattr(module, "tp_plan", None)
        plan = own() if callable(own) else own
    if not plan:
        layers = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)][:2]
        names = [".".join("*" if part.isdigit() else part for part in name.split(".")) for name in layers]
        pairs = zip(names or ["up", "down"], ("colwise", "rowwise"), strict=False)
        example = ", ".join(f'"{name}": "{style}"' for name, style in pairs)
        raise UsageError(
            f"strategy 'tp': {type(module).__name__} has no tp_plan that says how its layers are split. Give "
            f"TPStrategy(plan=...) or the module's attribute tp_plan a dict such as {{{example}}}."
        )
    return plan


def _chosen(module: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan with every pattern replaced by the names that it matches."""
    names = [name for name, _ in module.named_modules() if name]
    chosen: dict[str, Any] = {}
    for pattern, style in plan.items():
        found = matching(pattern, names)
        if not found:
            raise UsageError(f"the tensor-parallel plan has {pattern!r}, which matches no submodule of {type(module).__name__}.")
        if isinstance(style, str):
            style = _ALIASES.get(style, style)
            if style not in STYLES:
                raise UsageError(
                    f"a style of the tensor-parallel plan must be {', '.join(map(repr, STYLES))} or one of torch's "
                    f"ParallelStyle objects, got {style!r} for {pattern!r}."
                )
        chosen.update(dict.fromkeys(found, style))
    return chosen


def _check(module: nn.Module, chosen: Mapping[str, Any], size: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for name, style in chosen.items():
        layer, kind = module.get_submodule(name), type(module).__name__
        if isinstance(style, str) and not isinstance(layer, (nn.Linear, nn.Embedding)):
            raise UsageError(
                f"tensor-parallel plan: {kind}.{name} is a {type(layer).__name__}; {style!r} splits nn.Linear and nn.Embedding. "
                "Name the layers inside it, or give a ParallelStyle of torch."
            )
        colwise = style.startswith("colwise") if isinstance(style, str) else isinstance(style, ColwiseParallel)
        rowwise = style == "rowwise" or isinstance(style, RowwiseParallel)
        if not (colwise or rowwise):
            continue
        # A Linear's weight is (outputs, inputs), an Embedding's (rows, features).
        dim = int(colwise == isinstance(layer, nn.Embedding))
        weight = layer.weight
        if isinstance(weight, torch.Tensor) and weight.shape[dim] % size:
            raise UsageError(
                f"tensor parallelism over {size} ranks does not divide dimension {dim} of {kind}.{name}.weight "
                f"{tuple(weight.shape)}. Use a size that divides {weight.shape[dim]}, or leave this layer out of the plan."
            )
        _check_heads(module, name, size)


def _refuse_scalars(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and parameter.requires_grad:
            raise UsageError(
                f"{type(module).__name__}.{name} is a scalar. Whether the ranks that share a layer have all of its gradient or a "
                "part of it depends on where it is used, which tensor parallelism cannot know. Make it a tensor of one element "
                "for each feature, freeze it, or take strategy 'fsdp'."
            )


def _check_heads(module: nn.Module, name: str, size: int) -> None:
    """Features may divide where heads do not: then a rank would hold half a head."""
    parent = module.get_submodule(name.rpartition(".")[0])
    for attribute in _HEADS:
        heads = getattr(parent, attribute, None)
        if isinstance(heads, int) and heads % size:
            where = ".".join(filter(None, (type(module).__name__, name.rpartition(".")[0], attribute)))
            raise UsageError(
                f"tensor parallelism over {size} ranks does not divide {where} = {heads}. Use a size that divides the number of "
                f"heads, or leave {name} out of the plan."
            )


def _style(layer: nn.Module, style: Any) -> ParallelStyle:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if not isinstance(style, str):
        return style  # type: ignore[no-any-return]
    if style == "rowwise":
        return RowwiseParallel(input_layouts=Replicate()) if isinstance(layer, nn.Embedding) else RowwiseParallel()
    return ColwiseParallel(output_layouts=Replicate()) if style == "colwise_gather" else ColwiseParallel()


def equalize(module: nn.Module, world: World, *, from_rank0: bool) -> None:
    """What has values goes to the device; the same on all ranks."""
    tensors = dict.fromkeys(t for t in (*module.parameters(), *module.buffers()) if not t.is_meta)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.device != world.device:
                tensor.data = tensor.data.to(world.device)
            if from_rank0 and world.size > 1:
                dist.broadcast(tensor.detach(), src=0)


def _tie(module: nn.Module, tied: list[list[str]]) -> None:
    """Splitting makes a new parameter for each name; one takes the place of all that were one before."""
    for first, *others in tied:
        parameter = module.get_parameter(first)
        for name in others:
            other = module.get_parameter(name)
            if getattr(parameter, "placements", None) != getattr(other, "placements", None):
                raise UsageError(
                    f"tensor-parallel plan: {first} and {name} are one tied parameter, but would be split differently. An "
                    "nn.Embedding as 'rowwise' and an nn.Linear as 'colwise' or 'colwise_gather' are split alike."
                )
            holder, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(holder), attribute, parameter)
