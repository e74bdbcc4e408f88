"""Tensor parallelism: single layers are split over ranks that work on the same samples.

Communication: among the tensor-parallel ranks, an all-reduce of activations after every "rowwise" layer, and an all-reduce of the
gradient of each input of "colwise" layers (see `layers`); over the data-parallel ranks that of `fully_shard`. All parameters,
also whole ones, are under `fully_shard`, if necessary over groups of one rank, so that state, optimizers and clipping meet one
kind of parameter. DistributedDataParallel would lose split parameters from the state dict.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.common.errors import TensorParallelError
from echelon.hf.layers import with_adapters
from echelon.parallel.axes import Axis, axes_of
from echelon.parallel.names import class_name, matching, plain_name, plain_names, tied_names
from echelon.parallel.shards import is_split, local
from echelon.parallel.tensor.layers import (
    PartOfSequence,
    has_own_weights,
    install,
    is_transposed,
    shared_axis,
    split_dims,
    split_features,
    split_outputs,
)
from echelon.parallel.tensor.plans import ALIASES, STYLES, Plan, plan_of
from echelon.parallel.tensor.sequence import check_sequence, split_sequence
from echelon.world import agree
from echelon.world.init import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Chosen", "check_same_loss", "check_tensor", "check_whole_layers", "split_layers"]

logger = logging.getLogger(__name__)

_HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head")
_TIED = (
    "tensor-parallel plan: {0} and {1} are one tied parameter, but would be split differently. An nn.Embedding as 'rowwise' and "
    "an nn.Linear as 'colwise' or 'colwise_gather' are split alike."
)


@dataclass(frozen=True)
class Chosen:
    """A checked plan, as `check_tensor` returns it.

    Args:
        plan: as it was given or found.
        styles: by name of the submodule, each submodule once.
        blocks: the blocks with a split sequence; empty without sequence parallelism.
    """

    plan: Plan
    styles: Mapping[str, Any]
    blocks: Sequence[str] = ()

    def report(self, world: World) -> None:
        """Log on rank 0 which plan was found, unless it was given."""
        if world.rank == 0 and not self.plan.given:
            logger.info("tensor parallelism %s", self.plan.text)

    def of_stages(self, module: nn.Module) -> Chosen:
        """The plan without the layers of other ranks' pipeline stages, which have no parameters here."""

        def is_here(name: str) -> bool:
            return any(True for _ in module.get_submodule(name).parameters())

        styles = {name: style for name, style in self.styles.items() if is_here(name)}
        return replace(self, styles=styles, blocks=[name for name in self.blocks if is_here(name)])


def check_tensor(module: nn.Module, plan: Mapping[str, Any] | None, tp_size: int, *, sequence_parallel: bool = False) -> Chosen:
    """Check whether a module's layers can be split over `tp_size` ranks. Not collective; changes nothing.

    Args:
        plan: None for the module's own plan, transformers', or an inferred one.
    Raises:
        UsageError: they cannot; names the layer and the numbers.
    """
    resolved = plan_of(module, plan, tp_size)
    styles = with_adapters(module, _by_name(module, resolved))
    chosen = Chosen(resolved, styles)
    if sequence_parallel:
        chosen = replace(chosen, blocks=check_sequence(module, styles))
    _check(module, styles, tp_size)
    if tp_size > 1:
        _check_tied(module, styles)
        _refuse_scalars(module)
    return chosen


def split_layers(module: nn.Module, chosen: Chosen, tp_mesh: DeviceMesh) -> None:
    """Split a module's layers in place over a 1-D mesh. Its values must be the same on all ranks. No communication."""
    axis = axes_of(tp_mesh)[0]
    tied = tied_names(module.named_parameters(remove_duplicate=False))
    sequence = PartOfSequence(axis) if chosen.blocks else None
    for name, style in chosen.styles.items():
        layer = module.get_submodule(name)
        if isinstance(style, str):
            inside = any(name.startswith(f"{block}.") for block in chosen.blocks)
            install(layer, style, tp_mesh, axis, sequence if inside else None)
        else:
            from torch.distributed.tensor.parallel import parallelize_module

            parallelize_module(layer, tp_mesh, style, src_data_rank=None)
    split_features(module, axis)
    if sequence is not None:
        split_sequence(module, chosen.blocks, chosen.styles, sequence)
    _tie(module, tied)


def _by_name(module: nn.Module, plan: Plan) -> dict[str, Any]:
    """The plan's styles by name of the layers that each pattern matches. A layer with several names has its first."""
    first: dict[nn.Module, str] = {}
    found_all = module.named_modules(remove_duplicate=False)
    names = {plain: first.setdefault(m, name) for name, m in found_all if (plain := plain_name(name))}
    styles: dict[str, Any] = {}
    for pattern, style in plan.styles.items():
        matches = list(dict.fromkeys(names[name] for name in matching(plain_name(pattern), names)))
        if not matches:
            raise TensorParallelError(
                f"the tensor-parallel plan has {pattern!r}, which matches no submodule of {type(module).__name__}."
            )
        if isinstance(style, str):
            style = ALIASES.get(style, style)
            if style not in STYLES:
                raise TensorParallelError(
                    f"a style of the tensor-parallel plan must be {', '.join(map(repr, STYLES))} or one of torch's "
                    f"ParallelStyle objects, got {style!r} for {pattern!r}."
                )
        for name in matches:
            styles.pop(name, None)  # the last matching pattern wins
            styles[name] = style
    return styles


def _check(module: nn.Module, styles: Mapping[str, Any], size: int) -> None:
    for name, style in styles.items():
        layer, kind = module.get_submodule(name), type(module).__name__
        if style == "summed":
            continue
        can = isinstance(layer, (nn.Linear, nn.Embedding)) or is_transposed(layer)
        if isinstance(style, str) and not can:
            raise TensorParallelError(
                f"tensor-parallel plan: {kind}.{name} is a {type(layer).__name__}; {style!r} splits nn.Linear and nn.Embedding. "
                "Name the layers inside it, or give a ParallelStyle of torch."
            )
        _refuse_kind(module, name, style)
        simple = _in_words(style)
        if simple is None:
            continue
        if not has_own_weights(layer):
            raise TensorParallelError(
                f"tensor-parallel plan: the weight or bias of {kind}.{name} is computed from other parameters, as by "
                "weight_norm, another parametrization or pruning, and cannot be split. Leave this layer out of the plan."
            )
        dim = split_dims(layer, simple)["weight"]
        weight = layer.weight
        if isinstance(weight, torch.Tensor) and weight.shape[dim] % size:
            raise TensorParallelError(
                f"tensor parallelism over {size} ranks does not divide dimension {dim} of {kind}.{name}.weight "
                f"{tuple(weight.shape)}. Use a size that divides {weight.shape[dim]}, or leave this layer out of the plan."
            )
        if simple in ("colwise", "rowwise"):
            _check_heads(module, name, size)


def _in_words(style: Any) -> str | None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if isinstance(style, str):
        return style if style != "summed" else None
    return "colwise" if isinstance(style, ColwiseParallel) else "rowwise" if isinstance(style, RowwiseParallel) else None


def _refuse_kind(module: nn.Module, name: str, style: Any) -> None:
    layer, kind = module.get_submodule(name), type(module).__name__
    parent = module.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        raise TensorParallelError(
            f"tensor-parallel plan: {kind}.{name} is a part of torch's MultiheadAttention, which reads its weight directly "
            "and has the other weights in one parameter. Write attention with three Linear layers and "
            "scaled_dot_product_attention."
        )
    if isinstance(layer, nn.Embedding) and isinstance(style, str):
        odd = [n for n in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(layer, n)]
        if odd or style == "rowwise_split":
            problem = f"has {odd[0]}" if odd else f"cannot be {style!r}"
            raise TensorParallelError(
                f"tensor-parallel plan: {kind}.{name} is an Embedding that {problem}. Leave it out of the plan."
            )


def _check_tied(module: nn.Module, styles: Mapping[str, Any]) -> None:
    """Refuse a tied parameter that the plan would split in two ways."""
    if any(not isinstance(style, str) for style in styles.values()):
        return  # `_tie` checks it after the split
    for group in tied_names(module.named_parameters(remove_duplicate=False)):
        how = {}
        for name in group:
            holder, _, attribute = name.rpartition(".")
            layer = module.get_submodule(holder)
            own = [n for n in styles if module.get_submodule(n) is layer]
            how[name] = split_dims(layer, styles[own[0]]).get(attribute) if own else None
        if len(set(how.values())) > 1:
            raise TensorParallelError(_TIED.format(*group))


def _refuse_scalars(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and parameter.requires_grad:
            raise TensorParallelError(
                f"{type(module).__name__}.{name} is a scalar. Where it is used decides whether each rank that shares layers "
                "has its whole gradient or a part, and tensor parallelism cannot know that. Make it a tensor of one element "
                "for each feature, freeze it, or use layout 'fsdp'."
            )


def _check_heads(module: nn.Module, name: str, size: int) -> None:
    """Refuse a size that divides the features but not the heads: a rank would hold half a head."""
    name = name.removesuffix(".base_layer")
    parent = module.get_submodule(name.rpartition(".")[0])
    holders: list[tuple[Any, str]] = [(parent, "")]
    if hasattr(parent, "head_dim") or "attention" in type(parent).__name__.lower():
        holders.append((getattr(parent, "config", None), "config"))
    for holder, of in holders:
        for attribute in _HEADS:
            heads = getattr(holder, attribute, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads % size:
                where = ".".join(filter(None, (type(module).__name__, name.rpartition(".")[0], of, attribute)))
                raise TensorParallelError(
                    f"tensor parallelism over {size} ranks does not divide {where} = {heads}. Use a size that divides the number "
                    f"of heads, or leave {name} out of the plan."
                )


def _tie(module: nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters again: splitting has made a new parameter for each name."""
    for first, *others in tied:
        parameter = module.get_parameter(first)
        for name in others:
            other = module.get_parameter(name)
            if getattr(parameter, "placements", None) != getattr(other, "placements", None):
                raise TensorParallelError(_TIED.format(first, name))
            holder, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(holder), attribute, parameter)


# Checks that ranks that share layers have equal gradients of whole parameters. They find a layer that the plan forgot.
#
# A whole layer between split ones, such as a norm of each head, works on this rank's part of the features. Its gradient is then
# partial, too, and the ranks' copies of the layer would silently drift apart.

# Relative tolerances: kernels may sum in another order on each rank, while partial gradients differ completely.
_SAME = 0.01
_SAME_LOSS = {torch.float32: 1e-4, torch.float64: 1e-4}  # for other dtypes 0.02, a few roundings
_NOISE = 1e-6  # relative to the norm of all gradients: a smaller one is zero up to rounding


def check_same_loss(module: nn.Module, loss: torch.Tensor) -> None:
    """Compare the losses of ranks that share layers: a loss of partial outputs can have equal gradients. Collective over them.

    Raises:
        UsageError: the losses differ; raised on all of these ranks.
    """
    axis, parts = shared_axis(module), split_outputs(module)
    if axis is None or not parts or not agree.is_joined():
        return
    value = loss.detach().double()
    bounds = torch.stack([value, -value])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=axis.group)
    largest, least = float(bounds[0]), -float(bounds[1])
    if not largest - least > _SAME_LOSS.get(loss.dtype, 0.02) * max(abs(largest), abs(least)):  # nan counts as equal
        return
    raise TensorParallelError(
        f"tensor parallelism: the loss of the first update differs between the {axis.size} ranks that share layers: it is "
        f"{least:.6g} to {largest:.6g}. Each rank computes it from its part of the outputs of a layer that is 'colwise' in the "
        f"plan, such as {class_name(module)}.{parts[-1]}. The layer that reads these outputs must be 'rowwise'; or give "
        "this layer the style 'colwise_gather'."
    )


def check_whole_layers(module: nn.Module) -> None:
    """Compare the gradient norms of whole parameters after gradients are reduced. Collective over the ranks that share layers.

    Raises:
        UsageError: a gradient differs; raised on all of these ranks.
    """
    axis = shared_axis(module)
    if axis is None:
        return
    # Chosen by the module's form, which is the same on these ranks; whether a parameter has a gradient may differ.
    whole = [(name, p) for name, p in plain_names(module) if not _is_shared(p, axis)]
    if not whole:
        return
    norms = torch.stack([_norm(p) for _, p in whole])
    bounds = torch.stack([norms, -norms])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=axis.group)
    largest, least = bounds[0], -bounds[1]
    differs = (largest - least > _SAME * largest) & (largest > _NOISE * largest.norm())
    if not bool(differs.any()):  # nan counts as equal
        return
    number = int(differs.nonzero()[0])
    raise TensorParallelError(
        f"tensor parallelism: the gradient of {class_name(module)}.{whole[number][0]} differs between the {axis.size} ranks "
        f"that share layers: its norm is {float(least[number]):.3g} to {float(largest[number]):.3g}. The layer works on a part "
        'of the features or of the sequence. Give it the style "summed" in the plan, or split the layers around it differently.'
    )


def _norm(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    norm: torch.Tensor = local(parameter.grad).detach().double().norm()
    return norm


def _is_shared(parameter: torch.Tensor, axis: Axis) -> bool:
    """Whether the parameter is split over this axis."""
    if not is_split(parameter):
        return False
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    split = axes_of(mesh, [i for i, placement in enumerate(placements) if not placement.is_replicate()])
    return any(each.ranks == axis.ranks for each in split)
